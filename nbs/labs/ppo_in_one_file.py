"""PPO on a language model in one file: what the course teaches, without a trainer.

    python ppo_in_one_file.py                       forty updates on the mini world, minutes
    python ppo_in_one_file.py --policy runs/mini_tldr/sft --reward_model runs/mini_tldr/reward

It imports tensors-in, tensors-out functions and nothing else of rlhf_nb; the page of each is named
beside its import. Copy it and change what you like: your prompts and your reward go into `posts_of`
and `score`. What PPOTrainer has beyond: adapters, many GPUs, packing, mini-batches in parts,
checkpoints, dashboards. Its first three updates are the trainer's (a test in float64: to 1e-12).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import rlhf_nb
from rlhf_nb.fast_logprobs import response_logprobs  # 05, 36
from rlhf_nb.gae import gae, returns_from  # 10
from rlhf_nb.kl import estimate_kl  # 08
from rlhf_nb.losses import explained_variance, policy_loss, value_loss  # 11
from rlhf_nb.masks import left_pad, masked_mean, whiten  # 02
from rlhf_nb.models import (  # 04
    copy_frozen,
    response_values,
    scorer_from,
    sequence_scores,
    zero_head,
)
from rlhf_nb.ppo import mini_batches  # 12
from rlhf_nb.rollout import sample  # 07
from rlhf_nb.sampling import Sampling  # 39
from rlhf_nb.shaping import penalize_missing_eos, shape_rewards  # 09
from rlhf_nb.tldr import gold_judge  # 03
from rlhf_nb.world import mini_tldr  # 03

STARTING_MODEL = Path(rlhf_nb.__file__).parent / "cli" / "starting_model"  # it imitates summaries


def arguments() -> argparse.ArgumentParser:
    "Every setting has the name that PPOConfig gives it."
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--policy", default=str(STARTING_MODEL), help="folder of a causal language model")
    add("--reward_model", help="folder of a classifier with one label; else the world's own rule")
    add("--output_dir", help="where the policy is saved at the end")
    add("--updates", type=int, default=40)
    add("--batch_size", type=int, default=64, help="prompts of an update")
    add("--num_ppo_epochs", type=int, default=4)
    add("--num_mini_batches", type=int, default=2)
    add("--learning_rate", type=float, default=6e-4)
    add("--value_learning_rate", type=float, default=3e-3)
    add("--max_grad_norm", type=float, default=1.0)
    add("--response_length", type=int, default=32)
    add("--temperature", type=float, default=0.7)
    add("--missing_eos_penalty", type=float, default=1.0)
    add("--kl_coef", type=float, default=0.05)
    add("--gamma", type=float, default=1.0)
    add("--lam", type=float, default=0.95)
    add("--cliprange", type=float, default=0.2)
    add("--cliprange_value", type=float, default=1.0)
    add("--vf_coef", type=float, default=1.0)
    add("--seed", type=int, default=0)
    return parser


class PPO:
    "Four models, an optimizer, and one update in three steps."

    def __init__(self, args: argparse.Namespace, tokenizer: Any, policy: Any, reward_model: Any):
        # the policy moves; the reference is its copy that does not; the value model has the
        # policy's body (the trainer starts from the reward model's, where there is one)
        self.args, self.tokenizer, self.policy = args, tokenizer, policy.train()
        self.reference, self.reward_model = copy_frozen(policy), reward_model
        self.value = zero_head(scorer_from(policy)).train()
        groups = [
            dict(params=[*self.policy.parameters()], lr=args.learning_rate),
            dict(params=[*self.value.parameters()], lr=args.value_learning_rate),
        ]
        self.weights = [weight for group in groups for weight in group["params"]]
        self.optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
        self.how = Sampling(
            args.response_length,
            tokenizer.pad_token_id,
            [tokenizer.eos_token_id],
            args.temperature,
        )

    def logprobs(self, model: Any, rows: tuple) -> torch.Tensor:  # [B, T]
        "Of what was drawn, at the temperature at which it was drawn."
        return response_logprobs(model, *rows, temperature=self.args.temperature).logprobs

    @torch.no_grad()
    def rollout(self, prompts: list[str]) -> dict[str, Any]:
        "The policy writes; the three other models read every token of it."
        ids = [self.tokenizer(prompt)["input_ids"] for prompt in prompts]
        prompt_ids, prompt_mask = left_pad(ids, self.tokenizer.pad_token_id)
        drawn = sample(self.policy, prompt_ids, prompt_mask, self.how)
        width = int(drawn.mask.sum(1).max())  # columns behind the longest response hold nothing
        mask = drawn.mask[:, :width]  # true up to the stop token, which counts
        rows = prompt_ids, prompt_mask, drawn.response_ids[:, :width], mask
        old, reference = self.logprobs(self.policy, rows), self.logprobs(self.reference, rows)
        values = response_values(self.value, *rows)[:, :-1]  # V in front of each token
        return dict(
            rows=rows,
            mask=mask,
            stopped=drawn.stopped,
            texts=self.tokenizer.batch_decode(rows[2], skip_special_tokens=True),
            logprobs=old,
            values=values,
            kl=estimate_kl(old, reference),  # zero where both are: on padding
        )

    def advantages(self, r: dict[str, Any], scores: torch.Tensor) -> None:  # [B]
        "From one score for each response to a signal for every token."
        args, mask = self.args, r["mask"]
        r["scores"] = penalize_missing_eos(scores, r["stopped"], args.missing_eos_penalty)
        rewards, _ = shape_rewards(r["scores"], r["kl"], mask, args.kl_coef)
        advantages = gae(rewards, r["values"], mask, args.gamma, args.lam)
        r["returns"] = returns_from(advantages, r["values"], mask)  # before they are whitened
        r["advantages"] = whiten(advantages, mask)

    def update(self, r: dict[str, Any], seed: int) -> dict[str, float]:
        "Several epochs over the same responses, in mini-batches; a step after each."
        args, norms = self.args, []
        batches = mini_batches(len(r["mask"]), args.num_ppo_epochs, args.num_mini_batches, seed)
        for part in batches:
            rows, mask = tuple(x[part] for x in r["rows"]), r["mask"][part]
            old, advantages = r["logprobs"][part], r["advantages"][part]
            new = self.logprobs(self.policy, rows)
            loss = policy_loss(new, old, advantages, mask, args.cliprange)
            now, targets = response_values(self.value, *rows)[:, :-1], r["returns"][part]
            moved = value_loss(now, r["values"][part], targets, mask, args.cliprange_value)
            loss = (loss + args.vf_coef * moved) / mask.sum()  # a mean over tokens
            self.optimizer.zero_grad()
            loss.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(self.weights, args.max_grad_norm))
            self.optimizer.step()
        ratio = (new - old).exp()  # of the last mini-batch
        return {
            "score": r["scores"].mean().item(),
            "KL": r["kl"].sum(1).mean().item(),
            "tokens": r["mask"].sum(1).float().mean().item(),
            "stopped": r["stopped"].float().mean().item(),
            "clipped": masked_mean((ratio - 1).abs() > args.cliprange, mask).item(),
            "explained": float(explained_variance(r["values"], r["returns"], r["mask"])),
            "grad norm": (sum(norms) / len(norms)).item(),
        }


def posts_of(updates: int, batch_size: int) -> list[list[dict]]:
    "The rows of each update: their `prompt`, and what `score` needs to know."
    posts = mini_tldr(train=updates * batch_size, validation=1, test=1)["train"].to_list()
    return [posts[i : i + batch_size] for i in range(0, len(posts), batch_size)]


@torch.no_grad()
def score(ppo: PPO, batch: list[dict], r: dict[str, Any]) -> torch.Tensor:  # [B]
    "What the reward model says of prompt and response; else the rule that made the world."
    if ppo.reward_model is None:
        judged = zip(r["texts"], batch)  # the missing stop is charged apart
        return torch.tensor([gold_judge(x, json.loads(y["facts"])).gold for x, y in judged])
    prompt_ids, prompt_mask, response_ids, mask = r["rows"]
    ids, real = torch.cat([prompt_ids, response_ids], 1), torch.cat([prompt_mask, mask], 1)
    return sequence_scores(ppo.reward_model, ids, real)


def main(words: list[str] | None = None) -> list[dict[str, float]]:
    "The whole run; a line for each update."
    args, lines = arguments().parse_args(words), []
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # models this small are slower on more
    tokenizer = AutoTokenizer.from_pretrained(args.policy)
    policy = AutoModelForCausalLM.from_pretrained(args.policy, dtype=torch.float32)
    judge = args.reward_model and AutoModelForSequenceClassification.from_pretrained(
        args.reward_model, dtype=torch.float32
    )
    ppo = PPO(args, tokenizer, policy, copy_frozen(judge) if judge else None)
    for i, batch in enumerate(posts_of(args.updates, args.batch_size)):
        r = ppo.rollout([row["prompt"] for row in batch])
        ppo.advantages(r, score(ppo, batch, r))
        lines.append(ppo.update(r, seed=args.seed * 1_000_003 + i))
        told = "  ".join(f"{name} {x:.3f}" for name, x in lines[-1].items())
        print(f"update {i + 1:3}  {told}", flush=True)
    print(f"\n{batch[0]['prompt']}\n{r['texts'][0]}")
    if args.output_dir:
        policy.save_pretrained(args.output_dir)
        tokenizer.save_pretrained(args.output_dir)
    return lines


if __name__ == "__main__":
    main()
