"A run against bands: what leaves them and when, which bug it looks like, and what is refused."

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from rlhf_nb.cli import main
from rlhf_nb.diagnose import compare as module
from rlhf_nb.diagnose.bands import (
    DATA,
    EOS,
    GAP,
    Bands,
    bands_of,
    compared_metrics,
    illnesses,
    kept,
    references,
    with_computed,
)
from rlhf_nb.diagnose.compare import (
    APPROXKL,
    CARRIES,
    ENOUGH,
    carried,
    compare,
    edges,
    first_outside,
    held_against,
    over_seeds,
    places,
    stays_inside,
    warm_up,
)
from rlhf_nb.diagnose.compare_page import carried_rows, comparison_markup, comparison_page
from rlhf_nb.gains import mean_interval
from rlhf_nb.runtime.files import strict_json
from rlhf_nb.ui.band_curves import view

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import bands as made_by
import sensitivity

RESULTS = BENCHMARKS / "results"
REFERENCE = references()["reference"]
MUSEUM = references()["museum"]


def written(log: pd.DataFrame, folder: Path, **more: object) -> Path:
    "A log as the folder of a run."
    folder.mkdir(parents=True, exist_ok=True)
    rows = log.assign(episode=64 * log["step"], **more).to_dict("records")
    (folder / "trainer_state.json").write_text(json.dumps(dict(log_history=rows)))
    return folder


def ill_of(name: str, seed: int) -> module.Comparison:
    "One seed of a bug, against bands and cases that it had no part in."
    cases = {
        case: (ill.without(seed), healthy.without(seed))
        for case, (ill, healthy) in illnesses().items()
    }
    ill, healthy = illnesses()[name]
    return held_against(ill.log_of(seed), healthy.without(seed), name, cases=cases)


# ---- Bands ----


# catches: bands.json of other results than those that are kept, or made by hand
def test_the_bands_are_made_from_the_kept_results():
    results = [json.loads((RESULTS / f"{name}.json").read_text()) for name in made_by.FILES]
    assert json.loads(DATA.read_text()) == json.loads(json.dumps(made_by.made(*results)))


# catches: a file that is not in the wheel
def test_the_bands_are_part_of_the_package():
    assert f"diagnose/{DATA.name}" in (BENCHMARKS.parent / "setup.py").read_text()


def test_edges_by_hand():
    found = edges(np.array([[1.0, 2.0, 3.0], [4.0, 4.0, 4.0], [0.0, 1.0, 10.0]]))
    assert found.center.tolist() == [2, 4, 1]
    usual = 3.0  # median of 1 and 5, half the ranges
    assert found.spread == pytest.approx([usual, 0.04, 5.0])  # where all agree: 1 % of the largest
    wider = module.WIDER
    assert found.low == pytest.approx([1 - wider * 3, 4 - wider * 0.04, -wider * 5])
    assert found.high == pytest.approx([3 + wider * 3, 4 + wider * 0.04, 10 + wider * 5])


def test_what_is_computed_from_a_log():
    log = pd.DataFrame(
        {
            "episode": [64, 128, 192],
            "val/num_eos_tokens": [64, 32, 0],
            "policy/entropy_avg": [0.5, 0.5, 0.5],
            "objective/entropy": [5.0, 4.0, 6.0],
            "tokens/response_length": [10.0, 10.0, 10.0],
        }
    )
    found = with_computed(log)
    assert found[EOS].tolist() == [1.0, 0.5, 0.0]
    assert found[GAP].tolist() == pytest.approx([0.0, 0.1, -0.1])
    assert "episode" not in compared_metrics(found) and EOS in compared_metrics(found)


# ---- When a metric has left ----


# catches: one value outside that counts, or the end of the stretch in place of its beginning
@pytest.mark.parametrize(
    "outside, patience, where",
    [("..x..", 2, None), (".xx..", 2, 1), ("x.xxx", 3, 2), ("....x", 2, None), ("x", 1, 0)],
)
def test_first_outside(outside, patience, where):
    assert first_outside(np.array([c == "x" for c in outside]), patience) == where


# catches: bands that are stretched over a warm-up of another length, or cut at the end
def test_places_by_share():
    assert places(5, 9).tolist() == [0, 2, 4, 6, 8]
    assert places(6, 6, (2, 2)).tolist() == [0, 1, 2, 3, 4, 5]
    assert places(10, 4, (4, 2)).tolist()[:5] == pytest.approx([0, 1 / 3, 2 / 3, 1, 2])
    assert places(10, 4, (4, 2))[-1] == 3 and places(1, 10).tolist() == [0]
    assert warm_up(np.array([0.0, 0.0, 0.1])) == 2 and warm_up(np.zeros(3)) == 0


def rising(seed: int, updates: int = 10) -> pd.DataFrame:
    "A made log."
    noise = np.random.default_rng(seed).normal(0, 0.1, updates)
    return pd.DataFrame({"step": range(1, updates + 1), "objective/kl": np.arange(updates) + noise})


# catches: an update that is counted from 0, a metric that is missed from below, nan that is inside
@pytest.mark.parametrize("value", [50.0, -50.0, float("nan"), float("inf")])
def test_a_metric_leaves_at_its_update(value):
    bands, log = bands_of([rising(seed) for seed in range(5)]), rising(9)
    assert held_against(log, bands, cases={}).outside == []
    log.loc[4:, "objective/kl"] = value
    (line,) = held_against(log, bands, cases={}).outside
    assert line.metric == "objective/kl" and line.update == 5


# catches: a run of another length that is compared update by update, and leaves what it is inside
def test_another_length_is_aligned_by_share():
    bands = bands_of([rising(seed) for seed in range(5)])
    long = rising(9, 40).assign(**{"objective/kl": np.linspace(0, 9, 40)})
    found = held_against(long, bands, cases={})
    assert found.by_share and found.outside == [] and "by the share" in found.aligned
    wrong = held_against(long, bands, cases={}, by_share=False)
    assert [line.metric for line in wrong.outside] == ["objective/kl"]


# catches: a band without a width, which everything leaves
def test_one_other_run_is_no_band():
    found = held_against(rising(9) * 100, bands_of([rising(0)]))
    assert found.outside == [] and "makes no band" in found.verdict and found.suspects == ()


# ---- Healthy runs and illnesses ----


# catches: bands so narrow that the recipe's own seeds leave them
@pytest.mark.parametrize("name", ["reference", "quick", "short"])
def test_a_healthy_run_stays_inside(name):
    bands = references()[name]
    left = stays_inside(bands)
    assert len(left) >= 5
    assert sum(map(len, left.values())) <= 0.05 * len(bands.values) * len(left), left


def nearest_bug(bands: Bands, seed: int) -> float:
    "The largest likeness of a healthy seed to a bug that has not seen it, left or not."
    cases = illnesses()
    if bands.name == "museum":
        cases = {name: tuple(x.without(seed) for x in pair) for name, pair in cases.items()}
    log, others = with_computed(bands.log_of(seed)), bands.without(seed)
    band = {m: edges(x) for m, x in others.values.items()}
    run = {m: module.deviations(log[m].to_numpy(float), band[m]) for m in band}
    share = np.arange(len(log)) / (bands.updates - 1)
    return module.ranked(run, share, cases)[0].likeness


# catches: a likeness from which bugs are named that healthy runs have too
def test_healthy_runs_are_like_no_bug():
    near = [nearest_bug(b, seed) for b in references().values() for seed in b.seeds]
    assert len(near) == 29 and sum(x >= module.ALIKE for x in near) <= 1
    assert sum(x >= 0.4 for x in near) >= 5  # the wrong program: a likeness that many have


# the wrong program of the test above: the bare range of the other seeds
@pytest.mark.parametrize("name", ["reference", "quick", "short"])
def test_a_bare_range_is_too_narrow(monkeypatch, name):
    monkeypatch.setattr(module, "WIDER", 0.0)
    bands = references()[name]
    left = stays_inside(bands)
    assert sum(map(len, left.values())) > 0.05 * len(bands.values) * len(left)


# catches: three runs that are taken for a norm, without a word
def test_few_runs_are_narrow_bands():
    short = references()["short"]
    for count in range(1, 6):
        bands = short
        for seed in short.seeds[: len(short.seeds) - count]:
            bands = bands.without(seed)
        told = held_against(short.log_of(short.seeds[0]), bands).aligned
        assert ("are narrow" in told) == (2 <= count < ENOUGH)


# catches: a value model that is asked to be good before it learned, the first learning update
# held to the range of the later ones, and rows that hold whatever is logged
def test_what_must_hold_in_any_run():
    every = [
        row
        for bands in references().values()
        for seed in bands.seeds
        for row in carried(bands.log_of(seed))
    ]
    assert len(every) > 100 and sum(not row["holds"] for row in every) <= 0.01 * len(every)
    log = pd.DataFrame(
        {
            APPROXKL: [0.0, 0.01, 0.01],
            "val/explained_variance": [-5.0, 0.1, 0.2],
            "policy/clipfrac_avg": [0.0, 0.24, 0.2],
            "objective/kl": [0.0, 9.0, 11.0],
            "step": [1, 2, 3],
        }
    )
    assert all(row["holds"] for row in carried(log))
    outside = {
        "val/explained_variance": [-5.0, -0.1, -0.2],
        "policy/clipfrac_avg": [0.0, 0.26, 0.16],
        "objective/kl": [0.0, 11.0, 11.0],
    }
    for metric, values in outside.items():
        wrong = [row for row in carried(log.assign(**{metric: values})) if not row["holds"]]
        assert [row["what"] for row in wrong] == [f"{metric}, once the policy learns"]
        assert wrong[0]["measured"] == "outside in 2 of 2 updates"


# catches: a likeness that does not tell the bugs apart, or that saw the seed before
def test_most_bugs_are_named_on_a_seed_that_made_no_band():
    named = {
        name: sum(name in [s.name for s in ill_of(name, seed).suspects] for seed in ill.seeds)
        for name, (ill, _) in illnesses().items()
    }
    assert sum(times == 3 for times in named.values()) >= 9, named


# catches: no more than "something is wrong": every bug has to leave some band
def test_every_bug_leaves_a_band():
    for name, (ill, _) in illnesses().items():
        for seed in ill.seeds:
            assert ill_of(name, seed).outside, (name, seed)


# catches: profiles that are shuffled among the bugs, or a sign that is lost
def test_a_wrong_likeness_names_fewer(monkeypatch):
    real = module.deviations
    monkeypatch.setattr(module, "deviations", lambda x, band: np.abs(real(x, band)) * 0 + 1)
    names = list(illnesses())
    named = [name in [s.name for s in ill_of(name, 0).suspects] for name in names]
    assert sum(named) <= 3  # the first three in their order, at most


# catches: metrics that are no norm for another recipe, and count nevertheless
def test_another_recipe_counts_only_what_carries_over(tmp_path):
    log = REFERENCE.log_of(REFERENCE.seeds[0]).assign(**{"objective/raw_scores": 1e6})
    foreign = compare(written(log, tmp_path / "a"))
    assert not foreign.norm and {x.metric for x in foreign.lines if x.counts} <= {*CARRIES}
    assert "objective/raw_scores" not in [line.metric for line in foreign.outside]
    own = written(log, tmp_path / "b")
    settings = json.loads(DATA.read_text())["references"]["reference"]["settings"]
    (own / "settings.json").write_text(json.dumps(settings | dict(seed=7)))
    assert "objective/raw_scores" in [line.metric for line in compare(own).outside]


# catches: the bands of another recipe than the run's own, where there are some of its own
@pytest.mark.parametrize("name", ["reference", "quick", "short"])
def test_a_run_is_held_against_its_own_recipe(tmp_path, name):
    bands = references()[name]
    run = written(bands.log_of(bands.seeds[0]), tmp_path / "run")
    assert compare(run).against == "reference"  # nothing says which recipe it is
    settings = kept()["references"][name]["settings"]
    (run / "settings.json").write_text(json.dumps(settings | dict(seed=7)))
    found = compare(run)
    assert found.against == name and found.norm and not found.by_share
    assert found.outside == []  # its own seed is in the bands
    assert compare(run, reference="museum").against == "museum"


# ---- Logs as runs leave them ----


def state(log: pd.DataFrame, path: Path, **more: object) -> Path:
    "A trainer_state.json, of a log with episodes of 64 an update."
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = log.assign(episode=64 * log["step"]).to_dict("records")
    path.write_text(json.dumps(dict(log_history=rows, **more)))
    return path.parent


# catches: the first half of a healthy run laid over the whole of others
def test_an_unfinished_run_is_as_far_as_it_is(tmp_path):
    short = references()["short"]
    others = [state(short.log_of(s), tmp_path / str(s) / "trainer_state.json") for s in short.seeds]
    log = short.log_of(short.seeds[0])
    for planned, rows in ((10, 5), (40, 20)):
        long = log.loc[np.repeat(log.index, planned // 10)].assign(step=np.arange(1, planned + 1))
        run = state(long[:rows], tmp_path / "run" / "trainer_state.json", max_steps=planned)
        found = compare(run, others)
        assert found.outside == [] and found.aligned.startswith(f"{rows} of {planned} updates")
        assert found.as_json()["ends"][0]["run"] == pytest.approx(
            float(long[found.lines[0].metric].iloc[rows - max(1, rows // 10) : rows].mean()),
            abs=1e-4,
        )
    (run / "trainer_state.json").unlink()  # a demo's: its settings tell
    rows = [row | dict(episode=64 * row["step"]) for row in log[:5].to_dict("records")]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "settings.json").write_text(json.dumps(dict(episodes=640, batch=64)))
    assert compare(run, others).planned == 10


# catches: a mean over two updates taken for that of one, rows taken for updates
def test_a_log_of_every_second_update(tmp_path):
    log = pd.DataFrame({"step": [2, 4, 6, 8], "val/num_eos_tokens": 64.0, "objective/kl": 0.5})
    run = state(log, tmp_path / "run" / "trainer_state.json", max_steps=8)
    found = compare(run)
    assert found.updates == 8 and found.log[EOS].tolist() == [1, 1, 1, 1]


SETTINGS = ["step", "lr", "objective/kl_coef"]


def every(log: pd.DataFrame, k: int) -> pd.DataFrame:
    "A log as it is with logging_steps=k: means, but for counters and settings."
    rows = [log[i : i + k] for i in range(0, len(log), k)]
    means = pd.DataFrame([row.mean() for row in rows])
    own = [name for name in SETTINGS if name in log]
    return means.assign(**{name: [row[name].iloc[-1] for row in rows] for name in own})


HEALTHY = next(seed for seed, left in stays_inside(REFERENCE).items() if not left)


# catches: rows that are taken for updates, of the run or of the others, means of many updates
# held to the range of single ones, and settings that are averaged
@pytest.mark.parametrize(
    "ours, theirs", [(1, [1]), (3, [3]), (1, [3]), (3, [1]), (1, [1, 3]), (4, [2, 1, 4]), (5, [5])]
)
def test_however_often_they_logged(tmp_path, ours, theirs):
    seeds = [seed for seed in REFERENCE.seeds if seed != HEALTHY]
    others = [
        state(
            every(REFERENCE.log_of(seed), theirs[i % len(theirs)]),
            tmp_path / str(seed) / "trainer_state.json",
        )
        for i, seed in enumerate(seeds)
    ]
    log, path = REFERENCE.log_of(HEALTHY), tmp_path / "run" / "trainer_state.json"
    found = compare(state(every(log, ours), path, max_steps=24), others)
    assert found.outside == [] and not found.by_share and found.bands.updates == 24
    assert ("a mean over" in found.aligned) == (max(ours, *theirs) > 1)
    log.loc[12:, "objective/kl"] += 50
    (line, *_) = compare(state(every(log, ours), path, max_steps=24), others).outside
    assert line.metric == "objective/kl" and 13 <= line.update < 13 + max(ours, *theirs)


# catches: a mean of two means whose rows are not of as many updates, a NaN that a sum hides
def test_bands_of_runs_that_logged_at_other_updates():
    values = np.array([1.0, 5.0, 2.0, 8.0, 4.0, 7.0, 0.0, 3.0, 6.0, 9.0])
    log = pd.DataFrame({"step": range(1, 11), "objective/kl": values, "lr": values})
    two = log.assign(step=[1, 3, 4, 6, 7, 9, 10, 12, 14, 15])  # rows of one to two updates
    found = bands_of([two, log.assign(step=np.arange(1, 11) * 1.5 // 1)[1::2]])
    assert found.steps.tolist() == [3, 6, 9, 12, 15] and found.updates == 15 and found.width == 3
    kl, lr = found.values["objective/kl"], found.values["lr"]
    assert kl[:, 0].tolist() == pytest.approx([11 / 3, 6, 6, 2, 7])
    assert kl[:, 1].tolist() == lr[:, 0].tolist() == [5, 8, 7, 3, 9]
    two.loc[0, "objective/kl"] = np.nan
    assert np.isnan(bands_of([two, two[1::2]]).values["objective/kl"]).tolist() == [
        [True, False],
        *[[False, False]] * 4,
    ]
    with pytest.raises(ValueError, match="2 updates in common.* every 1 and 7 .*--logging_steps"):
        bands_of([every(rising(0, 20), 7)[:2], rising(1, 20)])


# catches: a row of 10 updates laid on the last of them, where the run is shorter than the others
@pytest.mark.parametrize("ours", [1, 5, 10])
@pytest.mark.parametrize("theirs", [1, 10])
def test_rows_by_the_share_of_the_run(ours, theirs):
    def steep(updates: int, seed: int = 0) -> pd.DataFrame:
        share = np.linspace(0, 1, updates)
        kl = 10 * share**2 + np.random.default_rng(seed).normal(0, 0.05, updates)
        return pd.DataFrame({"step": range(1, updates + 1), "objective/kl": kl, "lr": 1 - share})

    bands = bands_of([every(steep(120, seed), theirs) for seed in range(1, 7)])
    found = held_against(every(steep(40), ours), bands, cases={})
    assert found.by_share and found.outside == []
    wrong = every(steep(40).assign(**{"objective/kl": 5.0}), ours)
    assert held_against(wrong, bands, cases={}).outside


# catches: the first row of a log taken for the first update
def test_the_first_update_only_where_it_was_logged_alone():
    log = rising(0, 40).assign(**{"val/ratio": 1.0}).abs()
    alone, mean, late = (carried(x)[:2] for x in (log, every(log, 10), log[4:]))
    assert [row["holds"] for row in alone] == [bool(log["objective/kl"][0] <= 0.01), True]
    for row in (*mean, *late):
        assert row["holds"] is None and "--logging_steps 1" in row["measured"]
    assert [row[-1] for row in carried_rows(every(log, 10))[:2]] == ["–", "–"]


# catches: a run that is inside of its own range, a seed that counts twice
def test_the_run_is_not_among_the_others(tmp_path):
    runs = [written(rising(seed), tmp_path / f"s{seed}") for seed in range(4)]
    again = tmp_path / "s0" / ".." / "s1"
    (tmp_path / "link").symlink_to(runs[0])
    found = compare(runs[0], [*runs, again, tmp_path / "link"])
    assert len(found.bands.seeds) == 3
    assert found.left_out == tuple(map(str, (runs[0], again, tmp_path / "link")))
    assert "Left out, as the run itself or given twice" in found.aligned
    assert json.loads(strict_json(found.as_json()))["left_out"] == list(found.left_out)
    assert "Left out" not in compare(runs[0], runs[1:]).aligned
    with pytest.raises(ValueError, match="s0 itself.*other seeds"):
        compare(runs[0], [runs[0], tmp_path / "link"])


# catches: updates that are dropped because they are ill
def test_a_run_that_turned_to_nan(tmp_path):
    short = references()["short"]
    log = short.log_of(short.seeds[0])
    own = [name for name in log if name.startswith(("objective/kl", "policy/", "loss/"))]
    own.remove("objective/kl_coef")
    log.loc[4:, own] = np.nan
    others = [state(short.log_of(s), tmp_path / str(s) / "trainer_state.json") for s in short.seeds]
    for rows in (slice(0, None), slice(4, None)):
        found = compare(state(log[rows], tmp_path / "run" / "trainer_state.json"), others)
        left = {line.metric: line.update for line in found.outside}
        assert {left.get(name) for name in own} == {5} and found.updates == 10
        told = json.loads(strict_json(found.as_json()))
        assert {one["value"] for one in told["lines"] if one["metric"] in own} == {None}


# catches: the log of before a run was resumed; a folder that somebody named checkpoint-best
def test_the_log_that_went_furthest(tmp_path):
    log = references()["short"].log_of(300)
    run = state(log[:4], tmp_path / "trainer_state.json", max_steps=4)
    state(log[:3], run / "checkpoint-3" / "trainer_state.json", max_steps=4)
    state(log[:2], run / "checkpoint-best" / "trainer_state.json", max_steps=4)
    assert compare(run).updates == 4
    state(log[:9], run / "checkpoint-9" / "trainer_state.json", max_steps=10)
    assert compare(run).updates == 9 and compare(run).planned == 10


# catches: bands of a point, in which everything is inside; the wrong folder in an error
def test_others_that_make_no_band(tmp_path):
    log = references()["short"].log_of(300)
    run, two = (
        state(log[:n], tmp_path / str(n) / "trainer_state.json", max_steps=n) for n in (10, 2)
    )
    with pytest.raises(ValueError, match=rf"{two} logged 2 updates.* runs of 3 or more"):
        compare(run, [two, two])
    sft = state(log[["step"]].assign(loss=1.0), tmp_path / "sft" / "trainer_state.json")
    with pytest.raises(ValueError, match=rf"{sft} logged none of the metrics of {run}"):
        compare(run, [run, sft])


# catches: a run that is told to give others where it has none to be held against
def test_a_log_of_what_is_no_norm(tmp_path):
    log = pd.DataFrame({"step": [1, 2, 3], "objective/kl": [0.0, 0.1, 0.2]})
    told = compare(state(log, tmp_path / "trainer_state.json")).verdict
    assert "no metric that means the same in another recipe" in told


# ---- The command ----


def test_the_command_writes_a_page_and_json(tmp_path, capsys):
    run = written(MUSEUM.log_of(0), tmp_path / "run")
    assert main(["compare", str(run), "--with", "museum"]) == 0
    printed = capsys.readouterr().out
    assert "Bands of a small world are no norm" in printed
    page = (run / "compare.html").read_text()
    assert page.count("<figure>") == len(MUSEUM.values) and "<script" not in page
    assert main(["compare", str(run), "--with", "museum", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["against"] == "museum" and found["updates"] == 10 and found["carries"]


def test_others_are_the_bands(tmp_path):
    runs = [written(rising(seed), tmp_path / str(seed)) for seed in range(5)]
    found = compare(runs[0], runs[1:])
    assert found.against == "others" and len(found.bands.seeds) == 4 and found.outside == []
    assert module.ends(found)[0]["runs"] == 4


@pytest.mark.parametrize(
    "words, says",
    [
        (["compare", "EMPTY"], "--logging_steps 1"),
        (["compare", "nowhere"], "is no folder"),
        (["compare", "DAMAGED"], "line 2 is not JSON"),
        (["compare", "BROKEN"], "trainer_state.json is damaged"),
        (["compare", "RUN", "--with", "referense"], "Did you mean"),
        (["compare", "RUN", "RUN", "--with", "museum"], "give the one or the other"),
        (["compare", "SFT"], "none of the metrics"),
        (["compare", "CUT"], "CUT/settings.json is damaged"),
        (["compare", "LIST"], "LIST/settings.json is damaged (it holds a list"),
        (["compare", "MANY"], "MANY/trainer_state.json: max_steps is 'many'"),
        (["compare", "RUN", "RUN"], "RUN itself"),
        (["compare"], "RUN"),
    ],
)
def test_bad_input_is_named(words, says, tmp_path, capsys):
    for name in ("EMPTY", "DAMAGED", "BROKEN"):
        (tmp_path / name).mkdir()
    (tmp_path / "DAMAGED" / "metrics.jsonl").write_text('{"step": 1}\n{"step"\n{"step": 3}\n')
    (tmp_path / "BROKEN" / "trainer_state.json").write_text("{")
    for name in ("RUN", "CUT", "LIST", "MANY"):
        written(MUSEUM.log_of(0), tmp_path / name)
    (tmp_path / "CUT" / "settings.json").write_text("{")
    (tmp_path / "LIST" / "settings.json").write_text("[1]")
    state(MUSEUM.log_of(0), tmp_path / "MANY" / "trainer_state.json", max_steps="many")
    written(pd.DataFrame(dict(step=[1, 2], loss=[3.0, 2.0])), tmp_path / "SFT")
    words = [str(tmp_path / word) if word.isupper() else word for word in words]
    try:
        code = main(words)
    except SystemExit as stop:
        code = stop.code
    assert code == 2 and says in capsys.readouterr().err


# catches: a curve or a median outside of the picture, or a huge band that flattens both
def test_what_a_picture_shows():
    line, median = [(1, 0.0), (2, 1.0)], [(1, 0.0), (2, 3.0)]
    low, high = [(1, -100.0), (2, 2.5)], [(1, 0.5), (2, 3.5)]
    assert view(line, low, median, high) == (-3.0, 3.5)
    assert view(line, median, median, median) == (0.0, 3.0)


# catches: a name that closes an attribute or a tag of the page
def test_a_hostile_metric_is_escaped():
    name = '"><script>alert(1)</script>'
    logs = [rising(seed).assign(**{name: 1.0 + seed}) for seed in range(4)]
    found = held_against(logs[0], bands_of(logs[1:]), "<b>run</b>", cases={})
    for page in (comparison_page(found), comparison_markup(found)):
        assert "<script" not in page and "<b>run" not in page


# ---- The benchmark ----


def test_the_plan_of_the_sensitivity_runs():
    jobs = sensitivity.plan()
    assert len(jobs) >= 90 and len({job.name for job in jobs}) == len(jobs)
    for setting, values in sensitivity.VALUES.items():
        assert 3 <= len(values) <= 5 and sensitivity.RECIPE[setting] in values
    assert len([job for job in jobs if not job.setting]) >= 5
    some = [job.seed for job in jobs if job.setting]
    assert some == sorted(some)  # the whole picture of a seed before the next


# catches: runs that are kept and were not planned, or lack what the page reads
def test_the_kept_sensitivity_runs():
    found = json.loads((RESULTS / "sensitivity.json").read_text())
    planned = {(job.setting, job.value, job.seed) for job in sensitivity.plan()}
    runs = {(run["setting"], run["value"], run["seed"]) for run in found["runs"]}
    assert runs <= planned and len(runs) == len(found["runs"])
    assert {"torch", "machine", "commit"} <= set(found["environment"]) and found["command"]
    for run in found["runs"]:
        assert [row["temperature"] for row in run["verdict"]] == [0.01, 1.0]
        assert all(row["posts"] == 400 for row in run["verdict"])


# catches: "not whitened" that is whitened, or that leaves the padding in
def test_advantages_that_are_not_whitened(ppo):
    import torch

    trainer = ppo(total_episodes=8)
    rollout = trainer.score(trainer.rollout(next(iter(trainer.get_train_dataloader()))))
    whitened = trainer.advantages(rollout)
    trainer.__class__ = type("Plain", (sensitivity.NotWhitened,), {})
    plain = trainer.advantages(rollout)
    raw = (whitened.returns - whitened.values)[whitened.mask]
    torch.testing.assert_close(plain.advantages[plain.mask], raw)
    torch.testing.assert_close(
        whitened.advantages[whitened.mask], (raw - raw.mean()) / raw.std(), atol=0.3, rtol=0.2
    )
    assert not plain.advantages[~plain.mask].any()


def test_bands_without_a_seed():
    bands = Bands("made", (3, 5), {"x": np.array([[1.0, 2.0], [3.0, 4.0]])})
    assert bands.without(3).values["x"].tolist() == [[2], [4]] and bands.updates == 2
    assert bands.log_of(5)["x"].tolist() == [2, 4] and bands.log_of(5)["step"].tolist() == [1, 2]


# catches: an interval over runs that is not the one of the page on gains
def test_the_interval_over_runs_is_that_of_gains():
    frame = pd.DataFrame([[0.2, 0.5, 0.4], [1.0, 3.0, 2.5]], index=["a", "b"])
    for name, row in over_seeds(frame).iterrows():
        one = mean_interval(frame.loc[name])
        assert row[["mean", "low", "high"]].tolist() == pytest.approx(
            [one.value, one.low, one.high], rel=1e-9
        )
