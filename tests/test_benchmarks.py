"The comparison with the published trainer: what it counts, what it refuses, and the form of what it writes. The peer is not needed."
from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import ppo_side
import ppo_vs_trl as bench

SIZES = bench.SMALL | dict(hidden=16, layers=1, heads=2, inner=32, vocab=64, prompts=[3, 6], response=8, batch=8, micro=4, epochs=2, mini_batches=2)
WANTED = bench.tokens(SIZES)


def update(**changes) -> dict:
    "What a side tells of an update that did all that was wanted, padding included."
    return dict(seconds=2.0, update_seconds=1.0, steps=WANTED["steps"], real=WANTED["real"], computed=2 * WANTED["padded"],
                drawn=WANTED["response"], peak_mib=100.0) | changes


def results(found: dict[str, list[dict]]) -> dict:
    "As `main` would keep them."
    rate = dict(own_shapes=1e9, large=2e9)
    run = dict(name="small", threads=1, rounds=found, versions={}, rate=rate, **bench.summary(SIZES, found, rate))
    return dict(environment=bench.environment(True), quick=False, runs=[run])


# catches: a mean that forgets the cut, a law that is not geometric, lengths of 0, and lengths above the limit
def test_lengths_follow_the_geometric_law():
    lengths = bench.response_lengths(bench.SMALL | dict(mean_length=16, batch=4096, response=10_000))
    assert sum(lengths) / 4096 == pytest.approx(16, rel=0.01)
    for n in (1, 10, 30): assert sum(x > n for x in lengths) / 4096 == pytest.approx((15 / 16) ** n, abs=0.001)
    cut = bench.response_lengths(bench.SETTINGS["early"])
    assert min(cut) == 1 and max(cut) == 48 and set(bench.response_lengths(bench.SMALL)) == {48}


# catches: dice that end the wrong row once finished rows have left, that give the pad token, or that begin the next rollout late
@pytest.mark.parametrize("leaves", [True, False])
def test_dice_give_each_rollout_the_lengths(leaves):
    dice = ppo_side.Dice([1, 3, 3, 5], 5)
    for _ in range(3):
        alive, lengths = torch.arange(4), torch.zeros(4, dtype=torch.long)
        for t in range(1, 6):
            rows = alive if leaves else torch.arange(4)
            drawn = dice(torch.tensor([[0.4, 0.4, 0.1, 0.1]]).expand(len(rows), 4), 1)[:, 0]
            ended = rows[drawn == ppo_side.EOS]
            ended = ended[torch.isin(ended, alive)]
            assert not (drawn == ppo_side.PAD).any()
            lengths[ended] = t
            alive = alive[~torch.isin(alive, ended)]
        assert sorted(lengths.tolist()) == [0, 1, 3, 3]  # the longest is cut off by the limit: it does not stop
        assert alive.tolist() == (lengths == 0).nonzero()[:, 0].tolist()
    assert dice.rollouts == 3 and dice.drawn == 3 * 12


# catches: dice that go on silently when the sampler's rows are not those that they take them for
def test_dice_refuse_rows_that_they_do_not_know():
    dice = ppo_side.Dice([1, 3, 3, 5], 5)
    with pytest.raises(RuntimeError, match="3 rows are drawn, wanted 4"): dice(torch.ones(3, 4), 1)


# catches: a side that steps less often, drops tokens, learns from shorter responses, or computes other positions than it says
@pytest.mark.parametrize(("side", "changes", "said"), [
    ("peer", dict(steps=1), "1 optimizer steps"), ("ours", dict(steps=8), "8 optimizer steps"),
    ("ours", dict(real=WANTED["real"] - 1), "real tokens"), ("peer", dict(real=WANTED["real"] - 16), "wanted"),
    ("ours", dict(drawn=7), "drew 7"), ("ours", dict(computed=10**6), "positions"), ("ours", dict(computed=WANTED["real"] - 20), "positions"),
    ("peer", dict(computed=WANTED["real"]), "wanted"),
])
def test_other_work_is_refused(side, changes, said):
    bench.check_equal(SIZES, dict(ours=[update()], peer=[update()]))
    with pytest.raises(AssertionError, match=said): bench.check_equal(SIZES, {"ours": [update()], "peer": [update()], side: [update(**changes)]})


# catches: refusing work that nobody reads being left out: padding, and the last token of a row
def test_padding_and_last_tokens_may_be_left_out():
    less = WANTED["real"] - 2 * 8
    bench.check_equal(SIZES, dict(ours=[update(computed=WANTED["real"]), update(real=less, computed=less)], peer=[update()]))


# catches: a count that forgets the value model, the backward pass, the epochs or a matrix, or that puts the head on prompts
def test_necessary_flops_are_those_that_torch_counts():
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import LlamaConfig, LlamaModel
    torch.manual_seed(0)
    s = SIZES | dict(prompts=[6, 6])  # nothing is padded
    config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, attn_implementation="eager")
    bodies, heads = [LlamaModel(config) for _ in range(2)], [torch.nn.Linear(16, n, bias=False) for n in (64, 1)]
    with FlopCounterMode(display=False) as counter:
        for _ in range(s["epochs"]):
            for body, head in zip(bodies, heads):
                head(body(torch.randint(64, (8, 14)), use_cache=False).last_hidden_state[:, 5:-1]).sum().backward()
    whole, causal = 4 * 16 * 14**2, 4 * 16 * 14 * 15 / 2  # eager attention computes the masked half too
    over = 3 * s["epochs"] * 2 * 8 * (whole - causal)
    assert bench.necessary_flops(s) == pytest.approx(counter.get_total_flops() - over, rel=0.01)


# catches: ratios upside down, medians over the wrong side, and shares that leave out the time
def test_summary_and_table():
    found = dict(ours=[update(seconds=x) for x in (1.0, 2.0, 9.0)], peer=[update(seconds=x, update_seconds=3.0) for x in (4.0, 6.0, 9.0)],
                 peer_no_gc=[update(seconds=3.0)] * 3)
    kept = results(found)
    run = kept["runs"][0]
    assert run["episodes_per_second"]["ours"] == 4.0 and run["times_faster"] == dict(peer=3.0, peer_no_gc=1.5)
    assert run["times_faster_in_update"]["peer"] == 3.0
    assert run["share_of_rate"]["peer"]["own_shapes"] == pytest.approx(bench.necessary_flops(SIZES) / 3e9)
    json.dumps(kept)
    from rich.console import Console
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(bench.table(kept))
    shown = console.export_text()
    assert all(word in shown for word in ("busy machine", "trl, gc off", "3.00", "1.50", "1.8", "75 %"))


# catches: a plot that needs the peer, or that is not written
@pytest.mark.parametrize("sides", [("ours",), ("ours", "peer", "peer_no_gc")])
def test_plot(tmp_path, sides):
    bench.plot(results({side: [update()] for side in sides}), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


# catches: medians of fewer than five, micro-batches that do not divide, a quick run that takes the long way
def test_arguments(capsys):
    assert bench.arguments([]).settings == ["small", "early", "tiny"] and bench.arguments([]).threads == [1, 2] and bench.arguments([]).rounds >= 5
    quick = bench.arguments(["--quick"])
    assert (quick.settings, quick.threads) == (["tiny"], [1]) and quick.rounds < 5
    for words, said in ((["--rounds", "3"], "--rounds is 3"), (["--micro", "24"], "divisor"), (["--threads", "0"], "positive")):
        with pytest.raises(SystemExit): bench.arguments(words)
        assert said in capsys.readouterr().err


# catches: a peer's environment of other versions being used, and a failed installation that is taken for a good one
def test_peer_environment_is_used_only_where_it_is_the_pinned_one(tmp_path, monkeypatch):
    from types import SimpleNamespace
    ran = []
    monkeypatch.setattr(bench.subprocess, "run", lambda words, **_: ran.append(words) or SimpleNamespace(returncode=len(ran) > 2))
    folder = tmp_path / "venv"
    folder.mkdir()
    (folder / "installed.txt").write_text("trl==1.11.0")
    assert bench.peer_python(folder, lambda text: None) == folder / "bin" / "python"
    assert len(ran) == 2 and "trl==1.12.0" in ran[1]
    bench.peer_python(folder)
    assert len(ran) == 2
    with pytest.raises(SystemExit, match="--no_peer"): bench.peer_python(tmp_path / "other", lambda text: None)
    assert not (tmp_path / "other" / "installed.txt").exists()


# catches: our trainer taking other steps or tokens than the peer is held to; hooks that no longer see it; a sampler that the dice miss
@pytest.mark.parametrize("mean", [None, 4])
def test_our_side_does_the_work_that_is_asked(tmp_path, mean):
    s = SIZES | dict(mean_length=mean)
    bench.write_models(s, tmp_path)
    with bench.Side("ours", sys.executable, tmp_path, 1) as side:
        rates = side.ask(rate=[bench.shapes(s), [[64, 64, 64]]], seconds=0.01)["rate"]
        updates = [side.ask(gc=True) for _ in range(3)]
    bench.check_equal(s, dict(ours=updates))
    assert all(x > 0 for x in rates) and all(u["update_seconds"] < u["seconds"] for u in updates)


# catches: waiting for ever on a side that died, and hiding why it did
def test_a_side_that_ends_early_says_why(tmp_path):
    (tmp_path / "setting.json").write_text("{")
    with pytest.raises(SystemExit, match="JSONDecodeError"): bench.Side("ours", sys.executable, tmp_path, 1)
