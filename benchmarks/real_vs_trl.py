"""One PPO update of SmolLM2-135M-Instruct, against the last published PPO trainer (trl 1.12.0).

    python benchmarks/real_vs_trl.py                     full training, adapters, a shared trunk
    python benchmarks/real_vs_trl.py --settings adapters --rounds 5
    python benchmarks/real_vs_trl.py --quick             one round: does it run?

The model of `make real`; the peer's environment and what is counted are those of ppo_vs_trl.py.
Eight everyday requests in chat form, answers of at most 64 tokens that dice end where the untouched
model's ended, two epochs, two threads, float32. Reward is a classifier on the first ten layers; the
other models have SmolLM2's weights, and a [PAD] row, which the peer needs to learn to stop.

- full: everything is trained on both sides.
- adapters: LoRA of rank 16 on the last 12 of 30 layers, of policy and value model, on both sides.
- trunk: ours with the value head on the policy's states; the peer, which has none, as `adapters`.

In each round each side is started, does one update that is not counted and one that is, and ends.
Medians of rounds, and of the rounds' own ratios; memory is the largest resident set.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import common
from common import medians, times_ours
from ppo_vs_trl import PEER_VENV, PINS, Side, check_equal, peer_python

LORA = dict(r=16, lora_alpha=16, target_modules=r".*layers\.(1[89]|2\d)\..*_proj")
SETTINGS: dict[str, dict] = dict(
    full={}, adapters=dict(adapters=LORA), trunk=dict(adapters=LORA, trunk=True)
)
WANTED = dict(full=1.3, adapters=2.0, trunk=2.0)  # times as fast as the peer
MEMORY = dict(full=1.0, adapters=1.0, trunk=0.5)  # of the peer's
BATCH, RESPONSE = 8, 64


def write_models(folder: Path) -> dict:
    "Policy with tokenizer, reward and value model as folders; what both sides are asked to do."
    import torch

    from rlhf_nb.base.encoding import encode_prompts, prompt_text
    from rlhf_nb.masks import left_pad
    from rlhf_nb.models import scorer_from
    from rlhf_nb.real import everyday_requests
    from rlhf_nb.rollout import sample
    from rlhf_nb.sampling import Sampling
    from rlhf_nb.training.model_loading import load_policy, load_tokenizer

    policy, tokenizer = load_policy("smollm2"), load_tokenizer("smollm2")
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    policy.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    for config in (policy.config, policy.generation_config):
        config.pad_token_id = tokenizer.pad_token_id
    requests = everyday_requests()["test"]["prompt"][:: 150 // BATCH][:BATCH]
    ids = encode_prompts([prompt_text(x, tokenizer) for x in requests], tokenizer)
    torch.manual_seed(0)
    stop = tokenizer.eos_token_id
    how = Sampling(RESPONSE, tokenizer.pad_token_id, (stop,), 1.0)
    lengths = sample(policy, *left_pad(ids, tokenizer.pad_token_id), how).mask.sum(1).tolist()
    value = scorer_from(policy, 1)
    policy.save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")
    value.save_pretrained(folder / "value")
    layers = policy.config.num_hidden_layers
    policy.model.layers, policy.config.num_hidden_layers = policy.model.layers[:10], 10
    scorer_from(policy, 2).save_pretrained(folder / "reward")
    return dict(
        hidden=policy.config.hidden_size,
        inner=policy.config.intermediate_size,
        layers=layers,
        vocab=len(tokenizer),
        prompt_ids=ids,
        lengths=lengths,
        mean_length=sum(lengths) / len(lengths),
        response=RESPONSE,
        batch=BATCH,
        micro=BATCH,
        epochs=2,
        mini_batches=1,
        pad=tokenizer.pad_token_id,
        eos=stop,
    )


def measure(s: dict, folder: Path, pythons: dict[str, Path], threads: int, rounds: int) -> dict:
    "Alternating rounds of one setting."
    (folder / "setting.json").write_text(json.dumps(s))
    found: dict[str, list[dict]] = {name: [] for name in pythons}
    for _ in range(rounds):
        for name, python in pythons.items():
            with Side(name, python, folder, threads) as side:
                side.ask(gc=True)
                found[name].append(side.ask(gc=True))
    check_equal(s, found)
    ratio = lambda what: times_ours(found, what)["peer"]
    return dict(
        seconds=medians(found, "seconds"),
        update_seconds=medians(found, "update_seconds"),
        peak_mib=medians(found, "peak_mib"),
        times_faster=ratio("seconds"),
        times_faster_in_update=ratio("update_seconds"),
        memory_of_the_peer=1 / ratio("peak_mib"),
        rounds=found,
    )


def main() -> None:
    parser = common.parser_of(__doc__, "real_vs_trl", threads=2, rounds=5)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=[*SETTINGS])
    parser.add_argument("--peer_venv", type=Path, default=PEER_VENV)
    asked = common.parse(parser, None)
    pythons = dict(ours=Path(sys.executable), peer=peer_python(asked.peer_venv))
    made = common.environment(asked.under_load) | dict(peer=PINS)
    results: dict = dict(environment=made, runs={})
    if asked.output.is_file():
        results["runs"] = json.loads(asked.output.read_text())["runs"]
    with tempfile.TemporaryDirectory() as place:
        s = write_models(Path(place))
        print("tokens of the answers:", s["lengths"], flush=True)
        for name in asked.settings:
            rounds = 1 if asked.quick else asked.rounds
            x = measure(s | SETTINGS[name], Path(place), pythons, asked.threads, rounds)
            results["runs"][name] = dict(x, threads=asked.threads, lengths=s["lengths"])
            times, memory = x["times_faster"], x["memory_of_the_peer"]
            print(
                f"{name}: {x['seconds']['ours']:.1f} s against {x['seconds']['peer']:.1f} s, "
                f"{times:.2f} times (wanted {WANTED[name]}); {x['peak_mib']['ours']:.0f} MiB "
                f"against {x['peak_mib']['peer']:.0f}, {memory:.0%} (wanted {MEMORY[name]:.0%})",
                flush=True,
            )
            if not asked.quick:
                asked.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
