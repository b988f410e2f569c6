"""How well a policy learns to guess a number from 1 to 15 in K turns, against best play.

    python benchmarks/guess_number.py --turns 4 --seeds 5        how long to 0.95 of the optimum
    python benchmarks/guess_number.py --turns 4 --imitate 300    the same, after some imitation
    python benchmarks/guess_number.py --compare --updates 150    estimators side by side
    python benchmarks/guess_number.py --quick                    does it run? seconds

A Llama of two layers of width 48 from random weights, guesses of two digits of base 4, one thread.
The rate of play is exact, over all secrets and actions at temperature 1; branches below 1e-6 count
as lost. It is computed every tenth update, off the clock. The entropy bonus falls from 0.1 to 0.005
over 200 updates (--falls), or stays 0.05 (--compare). `through` is GAE through the observations.
--imitate: first so many batches of a player who bisects four times in ten and else guesses.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from typing import Any

import common  # noqa: F401  sets the environment
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

import rlhf_nb.forward
import rlhf_nb.trainer
from rlhf_nb.environments import guess_number
from rlhf_nb.gae import gae, returns_from
from rlhf_nb.losses import value_loss
from rlhf_nb.masks import only_real, right_pad, whiten
from rlhf_nb.models import response_values
from rlhf_nb.ppo import ppo_loss
from rlhf_nb.shaping import shape_rewards
from rlhf_nb.trainer import PPOConfig, PPOTrainer

N, BASE, DIGITS, LOST = 15, 4, 2, 1e-6
LOW, HIGH, NONE = "<", ">", "?"
SETTINGS: dict[str, Any] = dict(
    learning_rate=1e-3,
    lr_scheduler_type="constant",
    per_device_train_batch_size=256,
    num_mini_batches=4,
    num_ppo_epochs=4,
    entropy_coef=0.05,
    kl_coef=0.0,
    vf_coef=0.5,
    temperature=1.0,
    response_length=DIGITS,
)
# of a single run: the bonus falls, and the value model learns faster
ALONE: dict[str, Any] = dict(lam=0.8, value_learning_rate=3e-3)
BONUS = 0.1, 0.005
# of one that has imitated: smaller steps, and the value model begins
IMITATED: dict[str, Any] = dict(
    learning_rate=3e-4, entropy_coef=3e-3, value_warmup_updates=5, lam=0.95
)
GROUPS = dict(rloo=16, grpo=16)  # games of one secret


def letters() -> PreTrainedTokenizerFast:
    "A token for each character."
    vocab = {c: i for i, c in enumerate([*"0123", LOW, HIGH, NONE, "g", "<pad>", "<eos>"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    both = dict(pad_token="<pad>", eos_token="<eos>")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **both)


@torch.no_grad()
def actions(policy: Any, nodes: list[tuple], stop: int) -> list[tuple]:
    "(ids, secrets, chance, written) after a turn of each node (ids, secrets, chance)."
    open_, done = [(ids, secrets, p, ()) for ids, secrets, p in nodes], []
    for t in range(DIGITS):
        longer = []
        for length in {len(ids) for ids, *_ in open_}:
            rows = [x for x in open_ if len(x[0]) == length]
            for i in range(0, len(rows), 4096):
                part = rows[i : i + 4096]
                logits = policy(torch.tensor([ids for ids, *_ in part])).logits[:, -1]
                for (ids, secrets, p, said), chances in zip(part, logits.double().softmax(-1)):
                    for token, q in enumerate(chances.tolist()):
                        if p * q * len(secrets) / N >= LOST:
                            ended = token == stop or t == DIGITS - 1
                            one = ([*ids, token], secrets, p * q, (*said, token))
                            (done if ended else longer).append(one)
        open_ = longer
    return done


def play_rate(policy: Any, tokenizer: Any, turns: int) -> tuple[float, float]:
    "The chance to win, over all secrets and actions; and the weight of what was left out."
    was_training = policy.training
    policy.eval()
    says = dict(zip((LOW, HIGH, NONE), tokenizer.convert_tokens_to_ids([LOW, HIGH, NONE])))
    start = tokenizer.convert_tokens_to_ids(["g"])
    nodes, won, seen = [(start, frozenset(range(1, N + 1)), 1.0)], 0.0, 0.0
    for turn in range(turns):
        following = []
        for ids, secrets, p, said in actions(policy, nodes, tokenizer.eos_token_id):
            text = "".join(tokenizer.convert_ids_to_tokens(said)).removesuffix("<eos>")
            guess = int(text, BASE) if text.isdecimal() else None
            hit = guess in secrets
            won += p * hit / N
            seen += p * (len(secrets) if turn == turns - 1 else hit) / N
            parts: dict[str, set[int]] = {}
            for secret in secrets - {guess}:
                said_back = NONE if guess is None else LOW if guess < secret else HIGH
                parts.setdefault(said_back, set()).add(secret)
            following += [([*ids, says[x]], frozenset(s), p) for x, s in parts.items()]
        nodes = following
    policy.train(was_training)
    return won, 1 - seen


def game_of(draw: random.Random, turns: int) -> tuple[str, str]:
    "What a player and the world wrote, and a 1 at each token of the player."
    secret, low, high, text, own = draw.randint(1, N), 1, N, "g", "0"
    for turn in range(turns):
        guess = (low + high) // 2 if draw.random() < 0.4 else draw.randint(low, high)
        text, own = f"{text}{guess // BASE}{guess % BASE}", own + "11"
        if guess == secret or turn == turns - 1:
            break
        text, own = text + (LOW if guess < secret else HIGH), own + "0"
        low, high = (guess + 1, high) if guess < secret else (low, guess - 1)
    return text, own


def imitate(policy: Any, tokenizer: Any, turns: int, batches: int, seed: int) -> None:
    "The policy learns what a player of middling skill writes, 64 games at a time."
    draw, optimizer = random.Random(seed), torch.optim.Adam(policy.parameters(), lr=1e-3)
    for _ in range(batches):
        games = [game_of(draw, turns) for _ in range(64)]
        read = [tokenizer.convert_tokens_to_ids([*text]) for text, _ in games]
        ids, real = right_pad(read, tokenizer.pad_token_id)
        own, _ = right_pad([[*map(int, own)] for _, own in games], 0)
        logits = policy(ids, attention_mask=real.long()).logits[:, :-1]
        of_own = ids[:, 1:].masked_fill(own[:, 1:] == 0, -100)
        torch.nn.functional.cross_entropy(logits.transpose(1, 2), of_own).backward()
        optimizer.step()
        optimizer.zero_grad()


class Through(PPOTrainer):
    "GAE over all tokens of the record, the world's too, with values that are trained on all."

    def rollout(self, batch: Any) -> Any:
        r = super().rollout(batch)
        with torch.no_grad():
            values = self.forward(self.model_wrapped, r).values
        return r.with_(values=only_real(values, r.mask))

    def advantages(self, r: Any) -> Any:
        cfg = self.objective_for(r)
        rewards, _ = shape_rewards(r.scores, r.kl, r.mask, cfg.kl_coef_of_rewards)
        raw = gae(rewards, r.values, r.mask, cfg.gamma, cfg.lam)
        white = whiten(only_real(raw, r.chosen), r.chosen)
        returns = returns_from(raw, r.values, r.mask)
        return r.with_(rewards=rewards, returns=returns, advantages=white)


def everywhere_values(*rows: Any, chosen: Any = None, **more: Any) -> Any:
    return response_values(*rows, **more)


def loss_everywhere(now: Any, r: Any, cfg: Any, **how: Any) -> Any:
    "The policy's loss on its own tokens, the value model's on all."
    loss, logged = ppo_loss(now._replace(values=None), r, cfg, **how)
    share = r.chosen.sum() / r.mask.sum()
    value = value_loss(now.values, r.values, r.returns, r.mask, cfg.cliprange_value) * share
    zero = torch.zeros(())
    return loss + cfg.vf_coef * value, logged | dict(value=value.detach(), value_clipfrac=zero)


def make(kind: str, turns: int, seed: int, folder: str, **more: Any) -> PPOTrainer:
    "A trainer on the game."
    tokenizer = letters()
    torch.manual_seed(seed)
    ids = dict(pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id)
    heads = dict(num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64)
    size = dict(hidden_size=48, intermediate_size=96, num_hidden_layers=2, bos_token_id=None)
    config = LlamaConfig(vocab_size=len(tokenizer), **size, **heads, **ids)
    through = kind == "through"
    rlhf_nb.forward.response_values = everywhere_values if through else response_values
    rlhf_nb.trainer.ppo_loss = loss_everywhere if through else ppo_loss
    settings = SETTINGS | dict(advantage_estimator="gae" if through else kind) | more
    if kind in ("rloo", "grpo", "reinforce_pp"):
        settings.pop("vf_coef")
    args = PPOConfig(
        folder,
        total_episodes=10**6,
        num_generations=GROUPS.get(kind, 1),
        seed=seed,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        num_sample_generations=0,
        **settings,
    )
    rows = [dict(prompt="g", secret=i % N + 1) for i in range(N * 64)]
    return (Through if through else PPOTrainer)(
        args,
        tokenizer,
        AutoModelForCausalLM.from_config(config),
        train_dataset=rows,
        environment_factory=guess_number(N, turns, BASE, (LOW, HIGH, "=")),
        max_turns=turns,
    )


def run(
    kind: str,
    turns: int,
    seed: int,
    updates: int,
    stop_at: float = 2.0,
    falls: int = 0,  # updates in which the entropy bonus falls; 0: it stays
    imitated: int = 0,  # batches of games, before PPO
    **more: Any,
) -> dict:
    "Train; the last rate over the optimum, the updates and seconds to it."
    best, seconds, share = min(1.0, (2**turns - 1) / N), 0.0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        trainer = make(kind, turns, seed, folder, **more)
        if imitated:
            imitate(trainer.policy, trainer.processing_class, turns, imitated, seed)
            rate, _ = play_rate(trainer.policy, trainer.processing_class, turns)
            print(f"after imitation: {rate / best:.3f}", end="  ", flush=True)
        for update in range(1, updates + 1):
            if falls:
                at = min(1, (update - 1) / falls)
                trainer.args.entropy_coef = BONUS[0] + (BONUS[1] - BONUS[0]) * at
            start = time.perf_counter()
            metrics = trainer.step()
            seconds += time.perf_counter() - start
            near = metrics["turns/return"] / best > stop_at - 0.2
            if update == updates or (update % 10 == 0 and near):
                rate, lost = play_rate(trainer.policy, trainer.processing_class, turns)
                share = rate / best
                if share >= stop_at:
                    break
    found = dict(kind=kind, turns=turns, seed=seed, share=share, updates=update, seconds=seconds)
    print(*(f"{k} {x:.3f}" if isinstance(x, float) else f"{k} {x}" for k, x in found.items()))
    print(f"  left out: {lost:.5f}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--turns", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=400)
    parser.add_argument("--falls", type=int, default=200)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--imitate", type=int, default=0, help="batches of games before PPO")
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.quick:
        given.turns, given.seeds, given.updates = [2], 1, 2
    kinds = ["gae", "through", "gae_turns", "rloo", "grpo", "reinforce_pp"]
    for turns in given.turns[-1:] if given.compare else given.turns:
        for kind in kinds if given.compare else kinds[:1]:
            limit, falls, more = (2.0, 0, {}) if given.compare else (0.95, given.falls, ALONE)
            more = more | dict(per_device_train_batch_size=given.batch)
            if given.imitate:
                falls, more = 0, more | IMITATED
            length = given.updates, limit, falls, given.imitate
            found = [run(kind, turns, seed, *length, **more) for seed in range(given.seeds)]
            shares = [x["share"] for x in found]
            spread = statistics.stdev(shares) if len(shares) > 1 else 0.0
            mean, slowest = statistics.mean(shares), max(x["seconds"] for x in found)
            print(f"== {kind}, {turns} turns: {mean:.3f} of the optimum, spread {spread:.3f}, ")
            print(f"   least {min(shares):.3f}, slowest {slowest:.0f} s", flush=True)


if __name__ == "__main__":
    main()
