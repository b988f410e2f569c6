"""The benchmarks whose figures are on a page: what they count, the work that they refuse to compare,
and that pages quote what was kept. No figure is held to a time, and the peer is not needed."""

from __future__ import annotations

import importlib
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from notebooks import NOTEBOOKS
from small_models import small_config

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import after_ppo
import common
import ppo_side
import ppo_vs_trl as bench

SIZES = bench.SMALL | dict(
    hidden=16,
    layers=1,
    heads=2,
    inner=32,
    vocab=64,
    prompts=[3, 6],
    response=8,
    batch=8,
    micro=4,
    epochs=2,
    mini_batches=2,
)
WANTED = bench.tokens(SIZES)


def update(**changes) -> dict:
    "What a side tells of an update that did all that was wanted, padding included."
    return (
        dict(
            seconds=2.0,
            update_seconds=1.0,
            steps=WANTED["steps"],
            real=WANTED["real"],
            computed=2 * WANTED["padded"],
            drawn=WANTED["response"],
            peak_mib=100.0,
        )
        | changes
    )


def results(found: dict[str, list[dict]]) -> dict:
    "As `main` would keep them."
    rate = dict(own_shapes=1e9, large=2e9)
    run = dict(name="small", threads=1, rounds=found, versions={}, rate=rate)
    run |= bench.summary(SIZES, found, rate)
    return dict(environment=common.environment(True), quick=False, runs=[run])


# catches: a mean that forgets the cut, a law that is not geometric, lengths of 0, and lengths above
# the limit
def test_lengths_follow_the_geometric_law():
    lengths = common.response_lengths(bench.SMALL | dict(mean_length=16, batch=4096, response=9999))
    assert sum(lengths) / 4096 == pytest.approx(16, rel=0.01)
    for n in (1, 10, 30):
        assert sum(x > n for x in lengths) / 4096 == pytest.approx((15 / 16) ** n, abs=0.001)
    cut = common.response_lengths(bench.SETTINGS["early"])
    assert min(cut) == 1 and max(cut) == 48 and set(common.response_lengths(bench.SMALL)) == {48}


# catches: dice that end the wrong row once finished rows have left, that give the pad token, that
# begin the next rollout late, or that go on silently when the sampler's rows are others
@pytest.mark.parametrize("leaves", [True, False])
def test_dice_give_each_rollout_the_lengths(leaves):
    dice = common.Dice(torch.multinomial, [1, 3, 3, 5], 5)
    for _ in range(3):
        alive, lengths = torch.arange(4), torch.zeros(4, dtype=torch.long)
        for t in range(1, 6):
            rows = alive if leaves else torch.arange(4)
            drawn = dice(torch.tensor([[0.4, 0.4, 0.1, 0.1]]).expand(len(rows), 4), 1)[:, 0]
            ended = rows[drawn == common.EOS]
            ended = ended[torch.isin(ended, alive)]
            assert not (drawn == common.PAD).any()
            lengths[ended] = t
            alive = alive[~torch.isin(alive, ended)]
        assert sorted(lengths.tolist()) == [
            0,
            1,
            3,
            3,
        ]  # the longest is cut off by the limit: it does not stop
        assert alive.tolist() == (lengths == 0).nonzero()[:, 0].tolist()
    assert dice.rollouts == 3 and dice.drawn == 3 * 12
    with pytest.raises(RuntimeError, match="3 rows are drawn, wanted 4"):
        dice(torch.ones(3, 4), 1)


# catches: a side that steps less often, drops tokens, learns from shorter responses, or computes
# other positions than it says
@pytest.mark.parametrize(
    ("side", "changes", "said"),
    [
        ("peer", dict(steps=1), "1 optimizer steps"),
        ("ours", dict(steps=8), "8 optimizer steps"),
        ("ours", dict(real=WANTED["real"] - 1), "real tokens"),
        ("peer", dict(real=WANTED["real"] - 16), "wanted"),
        ("ours", dict(drawn=7), "drew 7"),
        ("ours", dict(computed=10**6), "positions"),
        ("ours", dict(computed=WANTED["real"] - 20), "positions"),
        ("peer", dict(computed=WANTED["real"]), "wanted"),
    ],
)
def test_other_work_is_refused(side, changes, said):
    bench.check_equal(SIZES, dict(ours=[update()], peer=[update()]))
    with pytest.raises(AssertionError, match=said):
        bench.check_equal(
            SIZES, {"ours": [update()], "peer": [update()], side: [update(**changes)]}
        )


# catches: refusing work that nobody reads being left out: padding, and the last token of a row
def test_padding_and_last_tokens_may_be_left_out():
    less = WANTED["real"] - 2 * 8
    ours = [update(computed=WANTED["real"]), update(real=less, computed=less)]
    bench.check_equal(SIZES, dict(ours=ours, peer=[update()]))


# catches: a count that forgets the value model, the backward pass, the epochs or a matrix, that
# puts the head on prompts, or work that is left out
@pytest.mark.parametrize("everywhere", [True, False])
def test_necessary_flops_are_those_that_torch_counts(everywhere):
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import LlamaModel

    from rlhf_nb.base.last_layer import read_at

    torch.manual_seed(0)
    s = SIZES | dict(prompts=[6, 6])  # nothing is padded
    config = small_config("llama", vocab_size=64, attn_implementation="eager")
    bodies = [LlamaModel(config) for _ in range(2)]
    heads = [torch.nn.Linear(16, n, bias=False) for n in (64, 1)]
    long = 14 if everywhere else 13  # after the last token nothing is chosen
    read = torch.arange(8 * long).view(8, long)[:, 5:13].flatten()
    for body in bodies:
        with read_at(body, read):
            pass  # looks at the body once, outside of the count
    with FlopCounterMode(display=False) as counter:
        for _ in range(s["epochs"]):
            for body, head in zip(bodies, heads):
                with read_at(body, None if everywhere else read):
                    states = body(torch.randint(64, (8, long)), use_cache=False).last_hidden_state
                head(states[:, 5:13]).sum().backward()
    # eager attention computes the masked half too, and every query
    whole, causal = 4 * 16 * long**2, 4 * 16 * long * (long + 1) / 2
    if not everywhere:
        causal -= 4 * 16 * sum(range(6))
    assert bench.necessary_flops(s, everywhere) == pytest.approx(
        counter.get_total_flops() - 3 * s["epochs"] * 2 * 8 * (whole - causal), rel=0.01
    )


# catches: ratios upside down, medians over the wrong side, and shares that leave out the time
def test_summary():
    found = dict(
        ours=[update(seconds=x) for x in (1.0, 2.0, 9.0)],
        peer=[update(seconds=x, update_seconds=3.0) for x in (4.0, 6.0, 9.0)],
        peer_no_gc=[update(seconds=3.0)] * 3,
    )
    kept = results(found)
    run = kept["runs"][0]
    assert run["episodes_per_second"]["ours"] == 4.0
    assert run["times_faster"] == dict(peer=3.0, peer_no_gc=1.5)
    assert run["times_faster_in_update"]["peer"] == 3.0
    assert run["share_of_rate"]["peer"]["own_shapes"] == pytest.approx(
        bench.necessary_flops(SIZES) / 3e9
    )
    json.dumps(kept)


# catches: an update's time that takes in the rollout, or leaves out the first forward pass
def test_the_update_begins_with_the_first_forward_that_learns(monkeypatch):
    # it would stay for all tests
    monkeypatch.setattr(ppo_side, "register_optimizer_step_post_hook", lambda hook: None)
    model = torch.nn.Sequential(torch.nn.Embedding(8, 2))
    model.get_input_embeddings = lambda: model[0]
    counts = ppo_side.Counts(model, "cpu")
    clock = iter((0.0, 20.0, 27.0, 30.0))
    ids = torch.ones(2, 3, dtype=torch.long)
    counts.now = lambda: next(clock)
    counts.begin()
    with torch.no_grad():
        model(ids)  # the rollout's: neither timed nor counted
    model(ids)
    model(ids)  # a forward of the second epoch, behind the first one's backward
    counts.stepped()
    told = counts.told()
    assert told["update_seconds"] == 7.0 and told["seconds"] == 30.0 and counts.computed == 12


# catches: our trainer taking other steps or tokens than the peer is held to; hooks that no longer
# see it; a sampler that the dice miss
@pytest.mark.slow  # a process of its own, as for the peer
def test_our_side_does_the_work_that_is_asked(tmp_path):
    s = SIZES | dict(mean_length=4)
    bench.write_models(s, tmp_path)
    with bench.Side("ours", sys.executable, tmp_path, 1) as side:
        rates = side.ask(rate=[bench.shapes(s), [[64, 64, 64]]], seconds=0.01)["rate"]
        updates = [side.ask(gc=True) for _ in range(3)]
    bench.check_equal(s, dict(ours=updates))
    assert all(x > 0 for x in rates) and all(u["update_seconds"] < u["seconds"] for u in updates)


# catches: a name of the package that a benchmark imports and that is not there any more
def test_every_benchmark_can_be_imported():
    for path in sorted(BENCHMARKS.glob("*.py")):
        importlib.import_module(path.stem)


# ---- Figures on pages ----


def kept(name: str) -> dict:
    return json.loads((BENCHMARKS / "results" / f"{name}.json").read_text())


def text_of(page: str) -> str:
    cells = json.loads(NOTEBOOKS[page].read_text(encoding="utf-8"))["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells)


# catches: a figure on a page that its benchmark's file does not give
def test_pages_quote_the_kept_figures():
    speed = {r["name"]: r for r in kept("ppo_vs_trl")["runs"] if r["threads"] == 1}
    results = text_of("results")
    for name, row in (("small", "(small)"), ("early", "stop early"), ("tiny", "(tiny)")):
        (line,) = [x for x in results.splitlines() if row in x.split(" | ")[0] and "off:" in x]
        times, wanted = speed[name]["times_faster"], bench.TARGETS[name]
        figures = [float(x) for x in re.findall(r"\d\.\d+|\d(?=;)", line)]
        assert figures == [round(times[x], 2) for x in ("peer", "peer_no_gc")] + [*wanted.values()]
    shares = [
        round(100 * speed[x]["peak_mib"]["ours"] / speed[x]["peak_mib"]["peer"])
        for x in ("small", "early")
    ]
    assert "Memory is {} and {} % of the peer's".format(*shares) in results

    stopped = sorted(one["eval_stopped"] for one in kept("healthy_run").values())
    assert len(stopped) == 5 and stopped[1:] == [1] * 4
    said = re.search(r"those of one stop on (\d+) % of 64 posts", text_of("47_metrics"))
    assert int(said[1]) == round(100 * stopped[0])

    judging = text_of("64_frontier")
    shown = judging.split('RUN = """')[1].split('"""')[0].strip().splitlines()
    updates = kept("frontier_few_labels_seed12")["updates"]
    rows = [[float(x) for x in line.split()] for line in shown[1:]]
    names = shown[0].split()
    digits = [len(x.partition(".")[2]) for x in shown[1].split()]
    for row, update in zip(rows, updates, strict=True):
        assert row == [pytest.approx(update[k], abs=0.51 * 10**-n) for k, n in zip(names, digits)]
    table = re.findall(r"\| 3\d, .*? \| ([\d.]+) %, ([\d.]+) % \|", judging)
    runs = kept("healthy_ranges_fresh_alarms")["alarms"].values()
    gold = {(f"{100 * x['best_gold']:.1f}", f"{100 * x['last_gold']:.1f}") for x in runs}
    assert set(table) == gold and len(table) == 8


# catches: a table of the page that is not what the job prints, a sentence with another figure
def test_the_gpu_tables_are_what_the_job_prints():
    sys.path.insert(0, str(BENCHMARKS / "gpu"))
    job, page, figures = importlib.import_module("job"), text_of("results"), kept("gpu")
    for part in job.table(figures).split("\n\n"):
        assert part in page
    gains = [x["gain"]["mean"] for x in figures["real"].values()]
    middle = sum(gains) / 3
    spread = (sum((x - middle) ** 2 for x in gains) / 2 / 3) ** 0.5 * 4.3027  # Student's t, 2 df
    shown = f"gain is {middle:.2f} (95 % interval over seeds {middle - spread:.2f} to"
    assert f"{shown} {middle + spread:.2f})" in page
    right = figures["right"]
    assert max(x["largest_log_ratio"] for n, x in right.items() if n[:5] == "ratio") < 2e-6
    assert right["killed_and_resumed"]["equal"] and right["sampler_torch.float32"]["differ"] == 0


# catches: a job that ends early, a step that measures nothing on a CPU
@pytest.mark.weekly
def test_the_job_for_a_gpu_runs_on_a_cpu(tmp_path):
    words = ["--output", str(tmp_path), "--cpu", "--only", "card", "right", "--seconds", "600"]
    subprocess.run([sys.executable, str(BENCHMARKS / "gpu" / "job.py"), *words], check=True)
    right = json.loads((tmp_path / "right.json").read_text())
    assert len(right) > 10 and not [name for name, x in right.items() if "error" in x]
    assert right["killed_and_resumed"]["equal"]


# ---- PPO and its successors ----


# catches: a method whose settings the trainer refuses, a rate that is not the best of the tuning
# seed, runs that are not kept, figures that are missing from the results
@pytest.mark.weekly
def test_after_ppo_runs_and_resumes(tmp_path):
    kept = tmp_path / "after_ppo.json"
    words = ["--size", "tiny", "--seeds", "41", "--runs", str(tmp_path / "runs")]
    words += ["--methods", "GRPO", "DPO", "--output", str(kept)]
    run = [sys.executable, str(BENCHMARKS / "after_ppo.py"), *words]
    first = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    assert first.count("GRPO_40") == first.count("DPO_40") == 3 and first.count("GRPO_41") == 2
    found = json.loads(kept.read_text())
    for method, rate in found["rates"].items():
        tried = {
            x["rate"]: x["validation"]["win_rate"] for x in found["tuning"] if x["method"] == method
        }
        assert tuple(tried) == after_ppo.TRIED[method] and tried[rate] == max(tried.values())
    assert [(x["method"], x["seed"]) for x in found["runs"]] == [("GRPO", 41), ("DPO", 41)]
    for one in found["runs"]:
        assert one["rate"] == found["rates"][one["method"]] and one["trace"][-1]["share"] == 1
        assert one["seconds"] > 0 and one["memory"] > 0 and one["trained"] < one["weights"]
        assert one["test"]["sampled"]["kl"] >= 0 and len(one["test"]["texts"]) == 3
    [longer] = found["long"]
    assert longer["episodes"] == 32
    assert len(longer["log"]["kl"]) == 4 > len(found["runs"][0]["log"]["kl"])
    of_n = found["best_of_n"][0]["of_n"]
    assert [x["kl"] for x in of_n] == sorted(x["kl"] for x in of_n) and of_n[0]["kl"] == 0
    assert all(x["kl"] <= x["bound"] + 1e-6 for x in of_n) and kept.with_suffix(".png").is_file()
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout == ""


# catches: a KL of the best of n that is not that of the counts; by hand for four equally likely
# answers and n = 2: the best has 1 - (3/4)^2 = 7/16
def test_the_kl_of_a_pool():
    assert after_ppo.pool_kl([0.1, 0.1, 0.1], 5) == 0
    of_two = [k / 16 for k in (1, 3, 5, 7)]
    by_hand = sum(q * math.log(q / 0.25) for q in of_two)
    assert after_ppo.pool_kl([1.0, 2.0, 3.0, 4.0], 2) == pytest.approx(by_hand)
    assert after_ppo.pool_kl([1.0, 2.0, 3.0, 4.0], 256) == pytest.approx(math.log(4))
