"""`rlhf-nb demo` as people meet it: a process, its exit code, its files, Ctrl-C; and what its
trainers are given."""

import csv
import inspect
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import forks
import psutil
import pytest
from datasets import Dataset, DatasetDict, load_from_disk
from rich.console import Console
from safetensors.torch import load_file

from rlhf_nb import cli, replay
from rlhf_nb.checkpoint import stage_folder
from rlhf_nb.cli import demo_stages
from rlhf_nb.cli.demo import demo, demo_command
from rlhf_nb.cli.demo_run import STARTING_MODEL, DemoRun, DemoSettings
from rlhf_nb.rollout import Rollout
from rlhf_nb.training.metrics import SEEDS
from rlhf_nb.training.model_loading import load_policy, load_tokenizer, tiny_policy
from rlhf_nb.world import mini_tldr

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import quick_demo

TINY = dict(
    posts=320,
    sample_pairs=40,
    fact_pairs=60,
    edit_pairs=240,
    episodes=48,
    batch=16,
    eval_posts=40,
    validation_posts=20,
    evaluations=1,
    save_steps=1,
    threads=1,
)
PROMISED = """settings.json metrics.jsonl results.json rollouts.html completions/sft.csv completions/ppo.csv pairs/dataset_dict.json
sft/model.safetensors sft/config.json sft/tokenizer.json reward/model.safetensors reward/config.json reward/tokenizer.json reward/report.json
ppo/model.safetensors ppo/config.json ppo/tokenizer.json ppo/generation_config.json ppo/README.md ppo/rollouts/update-00000.safetensors ppo/rollouts/update-00002.safetensors""".split()


def words(folder: Path, **changes) -> list[str]:
    "What one would type."
    return [
        "demo",
        "--output_dir",
        str(folder),
        *(word for name, value in (TINY | changes).items() for word in (f"--{name}", str(value))),
    ]


def start(folder: Path, **changes) -> subprocess.Popen:
    program = [sys.executable, "-c", "import sys; from rlhf_nb.cli import main; sys.exit(main())"]
    out, err = open(f"{folder}.out", "w+"), open(f"{folder}.err", "w+")
    return subprocess.Popen(
        [*program, *words(folder, **changes)],
        stdout=out,
        stderr=err,
        env=os.environ | dict(COLUMNS="100"),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # a job in the background of a script would not hear it


def finish(child: subprocess.Popen, folder: Path) -> tuple[int, str, str, object]:
    "Exit code, what it said, and what it used of the machine."
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    said = (Path(f"{folder}.{name}").read_text() for name in ("out", "err"))
    return child.returncode, *said, used


def models(folder: Path) -> dict[str, bytes]:
    return {
        name: (folder / name / "model.safetensors").read_bytes()
        for name in ("sft", "reward", "ppo")
    }


def logs(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def tree(folder: Path) -> dict[str, tuple[int, float]]:
    return {
        str(p.relative_to(folder)): (p.stat().st_size, p.stat().st_mtime) for p in folder.rglob("*")
    }


PROGRAM = """
import atexit, os, resource, sys
from rlhf_nb.cli import main
os.dup2(os.open("errors", os.O_WRONLY | os.O_CREAT), 2)
peak = lambda: str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
atexit.register(lambda: open("memory", "w").write(peak()))
sys.exit(main())
"""


def forked(folder: Path, **changes) -> tuple[int, str, str, int]:
    "The same without the imports: exit code, both streams, and the bytes of memory it took."
    beside = folder.parent
    (beside / "program.py").write_text(PROGRAM)
    done = forks.run("program.py", *words(folder, **changes), folder=beside, COLUMNS="100")
    memory = int((beside / "memory").read_text()) * (1 if sys.platform == "darwin" else 1024)
    return done.returncode, done.stdout, (beside / "errors").read_text(), memory


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    "A finished run."
    folder = tmp_path_factory.mktemp("demo") / "run"
    code, out, err, memory = forked(folder)
    assert code == 0, err[-2000:]
    return folder, out, err, memory


def test_a_run_leaves_what_is_promised(run):
    folder, out, err, memory = run
    assert not [name for name in PROMISED if not (folder / name).is_file()]
    assert err == "" and not list(folder.glob("*.partial"))
    assert memory < 2 * 2**30
    page = (folder / "rollouts.html").read_text()
    assert page.index("posts won</p>") < page.index('id="app"')
    assert not (folder / "report.html").exists()
    assert len(list(csv.reader(open(folder / "completions" / "ppo.csv")))) == 1 + TINY["eval_posts"]
    assert len(out.splitlines()) < 80
    end = out.splitlines()[-3:]
    assert end[0].startswith("All stages: ") and "What to do next" in end[0]
    assert end[1] == f"  open {folder / 'rollouts.html'}" and end[2] == f"  rlhf-nb plot {folder}"
    assert "3 of 40 test posts, near-greedy" in out and "model response" not in out
    assert "Sampled, temperature 1: " in out and out.count("Bad form: ") == 2
    assert [len(Rollout.load(x)) for x in (folder / "ppo" / "rollouts").iterdir()] == [16, 16, 16]


def test_the_numbers_are_kept(run):
    folder = run[0]
    done = {log["stage"]: log["seconds"] for log in logs(folder) if log.get("event") == "done"}
    assert list(done)[:6] == ["world", "sft", "pairs", "reward", "ppo", "judge"]
    assert [log["objective/kl"] for log in logs(folder) if "objective/kl" in log]
    assert [log for log in logs(folder) if "gold/win_rate" in log]
    results = json.loads((folder / "results.json").read_text())
    verdict = results["verdict"]
    rates = {(row["model"], row["temperature"]): row["win_rate"] for row in verdict}
    assert [row["temperature"] for row in results["paired"]] == [0.01, 1.0]
    for row in results["paired"]:
        t = row["temperature"]
        assert row["difference"] == pytest.approx(rates["ppo", t] - rates["sft", t])
        assert -1 <= row["low"] < row["difference"] < row["high"] <= 1 and row["posts"] == 40
    assert list(rates) == [("sft", 0.01), ("sft", 1.0), ("ppo", 0.01), ("ppo", 1.0)]
    for row in verdict:
        assert 0 <= row["low"] <= row["win_rate"] <= row["high"] <= 1 and row["posts"] == 40


# catches: stages done again in silence, a folder of other settings written over
def test_a_second_call_uses_what_is_finished(run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    folder, before, trained = run[0], models(run[0]), ("sft", "pairs", "reward", "ppo")
    files = lambda: {k: x for k, x in tree(folder).items() if k.split("/")[0] in trained}
    lines = lambda: [log for log in logs(folder) if log["stage"] in trained]
    kept, logged = files(), lines()
    code, (out, err) = cli.main(words(folder)), capsys.readouterr()
    assert code == 0 and err == ""
    assert all(re.search(rf"^{name} .*reused", out, re.M) for name in trained)
    assert models(folder) == before and files() == kept and lines() == logged  # nothing was trained
    done = sorted(log["stage"] for log in logs(folder) if log.get("event") == "done")
    assert done == sorted(["world", *trained, "judge"])  # and nothing counts twice


@pytest.mark.parametrize(
    "changes, named",
    [
        (dict(seed=1), "--seed 0"),
        (dict(kl_coef=0), "--kl_coef 0.05"),
        (dict(posts=330), "--posts 320"),
    ],
)
def test_other_settings_in_the_same_folder_are_refused(run, capsys, changes, named):
    before = tree(run[0])
    assert cli.main(words(run[0], **changes)) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and named in said and "--fresh" in said and tree(run[0]) == before


# ---- Ctrl-C ----


# catches: a half stage that is reused, a stage that is random in how it was reached, seconds of
# silence after Ctrl-C
@pytest.mark.slow
def test_an_interrupted_run_goes_on(run, tmp_path):
    folder = tmp_path / "run"
    child = start(folder)
    metrics, patience = folder / "metrics.jsonl", time.time() + 300
    while not (metrics.exists() and '"stage": "reward"' in metrics.read_text()):
        assert child.poll() is None and time.time() < patience
        time.sleep(0.02)
    before = psutil.Process(child.pid).cpu_times()
    child.send_signal(signal.SIGINT)
    code, _, err, used = finish(child, folder)
    # of its own time: others may keep the processors busy
    assert used.ru_utime + used.ru_stime - before.user - before.system < 5 and code == 130
    assert len(err.strip().splitlines()) == 1 and "the same command goes on" in err
    there = [name for name in ("sft", "pairs", "reward", "ppo") if (folder / name).exists()]
    assert there == ["sft", "pairs"]
    code, out, err, _ = finish(start(folder), folder)
    assert code == 0 and out.count("reused") == 2
    assert not [name for name in PROMISED if not (folder / name).is_file()]
    assert not list(folder.glob("*.partial"))
    assert models(folder) == models(run[0])
    steps = [
        (log["stage"], log["step"])
        for log in logs(folder)
        if "step" in log and "gold/reward" not in log and "train_loss" not in log
    ]
    assert len(steps) == len(set(steps))  # what the interrupted stage had written is gone


# catches: a demo whose updates cannot be done again, or give other numbers than it logged
def test_an_update_of_the_demo_is_replayed(run):
    done = replay(run[0], 1, learning_rate=1e-4)
    assert done.same and done.now["lr"] < done.was["lr"]
    assert len([*(run[0] / "ppo").glob("checkpoint-*")]) == 4  # one before the first update


# catches: a metrics file whose last line was cut off by a kill, and that stops the run that would
# repair it
def test_half_a_line_of_metrics_is_left_out(tmp_path):
    made = DemoRun(DemoSettings(str(tmp_path)), Console(quiet=True))
    made.log("sft", step=1)
    with open(tmp_path / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"stage": "sft", "st')
    assert [log["step"] for log in made.logs()] == [1]
    with made.stage("sft", ""):
        made.log("sft", step=2)
    assert [log.get("step") for log in made.logs()] == [2, None]


def interrupt(*args, **kwargs):
    raise KeyboardInterrupt


# catches: a judge that draws from the trainer's random numbers, moves its weights, or leaves
# dropout on
def test_the_judge_that_looks_on_changes_nothing(run, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    shutil.copytree(run[0], folder)
    for name in ("ppo", "completions"):
        shutil.rmtree(folder / name)
    monkeypatch.setattr(demo_stages.GoldCallback, "look", lambda self, step: None)
    monkeypatch.setattr(demo_stages, "judge_stage", interrupt)  # by then PPO is done
    assert cli.main(words(folder)) == 130
    assert (folder / "ppo" / "model.safetensors").read_bytes() == models(run[0])["ppo"]
    assert not [log for log in logs(folder) if "gold/win_rate" in log]


@pytest.mark.parametrize(
    "stage", ["sft_stage", "pairs_stage", "reward_stage", "ppo_stage", "judge_stage"]
)
def test_ctrl_c_in_any_stage_leaves_no_half_one(run, tmp_path, monkeypatch, capsys, stage):
    folder, name = tmp_path / "run", stage.removesuffix("_stage")
    shutil.copytree(run[0], folder)
    if name != "judge":
        shutil.rmtree(folder / name)

    def half(run, *rest):
        if name == "judge":
            raise KeyboardInterrupt
        with stage_folder(run.folder / name) as part:
            (part / "model.safetensors").write_text("half")
            raise KeyboardInterrupt

    monkeypatch.setattr(demo_stages, stage, half)
    assert cli.main(words(folder)) == 130 and (name == "judge" or not (folder / name).exists())
    assert "the same command goes on" in capsys.readouterr().err


# ---- What cannot be ----


def one_line(capsys, arguments: list[str]) -> str:
    try:
        code = cli.main(arguments)
    except SystemExit as stop:
        code = stop.code
    said = capsys.readouterr()
    assert (code, said.err.count("\n"), said.out) == (2, 1, "")
    assert said.err.startswith("rlhf-nb") and "Traceback" not in said.err
    return said.err


@pytest.mark.parametrize(
    "more, said",
    [
        (["--seed", "x"], "--seed: invalid int value: 'x'"),
        (["--seed", "-1"], "--seed is -1"),
        (["--seed", "1.5"], "--seed"),
        (["--kl_coef", "-1"], "--kl_coef is -1.0: give a finite number"),
        (["--kl_coef", "nan"], "--kl_coef is nan"),
        (["--kl_coeff", "1"], "Did you mean --kl_coef?"),
        (["--kl"], "unrecognized"),
        (["extra"], "unrecognized"),
        (["--posts", "0"], "--posts is 0"),
        (["--batch", "33"], "--batch is 33: give an even number"),
        (["--episodes", "4"], "no larger than --episodes"),
        (["--threads", "-1"], "--threads is -1"),
        (["--starting_model", "nowhere"], "there is no such folder: give one that rlhf-nb sft"),
        (["--temperature", "0"], "--temperature is 0"),
        (["--output_dir"], "expected one argument"),
    ],
)
def test_bad_words_get_one_line(tmp_path, capsys, more, said):
    assert said in one_line(capsys, [*words(tmp_path / "run"), *more])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [["dem"], ["--fresh"]])
def test_no_command_gets_one_line(capsys, arguments):
    one_line(capsys, arguments)


def test_a_folder_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    assert str(tmp_path / "file") in one_line(capsys, words(tmp_path / "file" / "run"))
    assert (tmp_path / "file").read_text() == "mine"
    assert str(tmp_path / "file") in one_line(capsys, words(tmp_path / "file"))
    if sys.platform == "linux":
        assert "/proc" in one_line(capsys, words(Path("/proc/nowhere")))
    if os.geteuid() != 0:
        (tmp_path / "closed").mkdir(0o500)
        assert "closed" in one_line(capsys, words(tmp_path / "closed"))


def test_a_process_says_the_same(tmp_path):
    code, out, err, _ = forked(tmp_path / "run", kl_coef=-1)
    assert (code, out, err.count("\n")) == (2, "", 1) and "--kl_coef is -1.0" in err
    assert not (tmp_path / "run").exists()


# ---- Folders of others ----


def spread(folder: Path) -> dict[str, str]:
    "What other commands leave in runs/, where they write by default."
    for name in ("sft", "reward", "ppo"):
        (folder / name).mkdir(parents=True)
        (folder / name / "model.safetensors").write_text(f"days of work on {name}")
    return contents(folder)


def contents(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}


# catches: `--fresh` that deletes what other commands wrote, a demo that takes it for its own stages
@pytest.mark.parametrize("fresh", [["--fresh"], []])
def test_what_no_demo_wrote_is_left_alone(tmp_path, capsys, fresh):
    before = spread(tmp_path / "runs")
    said = one_line(capsys, [*words(tmp_path / "runs"), *fresh])
    assert "sft, reward, ppo, which no demo wrote" in said and contents(tmp_path / "runs") == before
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "results.json").write_text("mine")
    said = one_line(capsys, [*words(tmp_path / "notes"), *fresh])
    assert "results.json, which no demo wrote" in said


# catches: KeyError for a run of `rlhf-nb ppo` in a demo's folder; a broken file that is not named
@pytest.mark.parametrize(
    "name, text, more, named",
    [
        *[("metrics.jsonl", '{"step": 1}', x, "no demo wrote: move it") for x in ([], ["--fresh"])],
        ("settings.json", "{", [], "settings.json is damaged ("),
    ],
)
def test_another_run_in_a_demos_folder_is_named(tmp_path, capsys, name, text, more, named):
    (tmp_path / "demo.json").write_text('{"demo": "1"}')
    (tmp_path / name).write_text(text)
    said = one_line(capsys, [*words(tmp_path), *more])
    assert name in said and named in said and (tmp_path / name).read_text() == text


# catches: one mark for the whole folder, under which anything is deleted; a deletion in silence
def test_fresh_deletes_what_bears_its_mark_and_prints_it(tmp_path):
    settings, text = DemoSettings(str(tmp_path / "run")), io.StringIO()
    made = DemoRun(settings, Console(quiet=True))
    for stage in ("sft", "pairs"):
        with made.stage_folder(stage) as folder:
            (folder / "model.safetensors").write_text(stage)
            (folder / "checkpoint-1").mkdir()
            (folder / "checkpoint-1" / "manifest.json").write_text("{}")  # of --save_steps
    (made.folder / "mine.txt").write_text("mine")
    (made.folder / "sft" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="sft/notes.txt was not written by the run"):
        DemoRun(settings, Console(quiet=True), fresh=True)
    assert (made.folder / "pairs" / "model.safetensors").is_file()
    (made.folder / "sft" / "notes.txt").unlink()
    DemoRun(settings, Console(file=text, width=400), fresh=True)
    assert "--fresh: deletes sft, pairs, settings.json in" in text.getvalue()
    names = sorted(p.name for p in made.folder.iterdir())
    assert names == ["demo.json", "mine.txt", "settings.json"]
    other = DemoRun(DemoSettings(str(tmp_path / "other")), Console(quiet=True))
    with other.stage_folder("ppo") as folder:
        (folder / "model.safetensors").write_text("of another demo")
    shutil.copytree(other.folder / "ppo", made.folder / "ppo")
    DemoRun(settings, Console(quiet=True))  # a stage that was copied here is used
    with pytest.raises(ValueError, match="ppo was not written by the run in"):
        DemoRun(settings, Console(quiet=True), fresh=True)


# ---- A model that is there already ----


# catches: a kept model that some word of the world is unknown to, or that is not the one of its
# script: another size, another tokenizer, weights in half precision
def test_the_kept_model_reads_the_world():
    tokenizer, policy = load_tokenizer(str(STARTING_MODEL)), load_policy(str(STARTING_MODEL))
    world = mini_tldr(7, 2_000, 10, 200)
    for part in ("train", "test"):
        for prompt, completion in zip(world[part]["prompt"], world[part]["completion"]):
            assert tokenizer.unk_token_id not in tokenizer(prompt + completion)["input_ids"]
    fresh = tiny_policy(tokenizer, 0)
    kinds = lambda model: {k: (v.shape, v.dtype) for k, v in model.state_dict().items()}
    assert kinds(policy) == kinds(fresh)
    assert sum(path.stat().st_size for path in STARTING_MODEL.iterdir()) < 2_000_000


# catches: a quick run that trains its own SFT model all the same, or does not say that it did not
@pytest.mark.parametrize(
    "start, said",
    [
        ("kept", "no training: the fine-tuned model that comes with the package"),
        pytest.param(
            str(STARTING_MODEL),
            f"no training: the model in {STARTING_MODEL}",
            marks=pytest.mark.slow,  # the same model by its path
        ),
    ],
)
def test_a_run_from_a_model_says_so(start, said, tmp_path):
    text = io.StringIO()
    fewer = dict(fact_pairs=24, edit_pairs=96, episodes=16, eval_posts=16, validation_posts=8)
    settings = {k: v for k, v in (TINY | fewer).items() if k != "threads"}
    made = DemoSettings(str(tmp_path / "run"), starting_model=start, **settings)
    results = demo(made, console=Console(file=text, width=400, force_terminal=False))
    assert f"sft  {said}" in text.getvalue()
    assert {row["model"] for row in results["verdict"]} == {"sft", "ppo"}
    weights = load_file(tmp_path / "run" / "sft" / "model.safetensors")
    kept = load_file(STARTING_MODEL / "model.safetensors")
    assert weights.keys() == kept.keys() and all(weights[k].equal(kept[k]) for k in kept)


# catches: settings that were typed and are replaced by those of --quick, as they are the usual ones
def test_quick_keeps_what_was_typed(monkeypatch):
    seen: list[DemoSettings] = []
    monkeypatch.setattr("rlhf_nb.cli.demo.demo", lambda settings, fresh: seen.append(settings))
    demo_command("--quick --kl_coef 0.05 --posts=24000 --threads 0".split())
    assert (seen[0].kl_coef, seen[0].posts) == (0.05, 24_000)
    assert (seen[0].batch, seen[0].temperature, seen[0].starting_model) == (128, 1.0, "kept")


# catches: kept results that miss a seed, or claim what their rows do not say
def test_quick_runs_gain():
    runs = json.loads((quick_demo.HERE / "results" / "quick_demo.json").read_text())["runs"]
    assert [one["seed"] for one in runs] == [0, 1, 2, 3, 4]
    for one in runs:
        assert one["holds"] == quick_demo.verdict(one["rows"]) and all(one["holds"].values())
    rows = [row for one in runs for row in one["rows"] if row["temperature"] < 1]
    wins = [100 * row["win_rate"] for row in rows if row["model"] == "ppo"]
    assert f"{min(wins):.1f} to {max(wins):.1f} % in five quick runs" in SEEDS["quick"]
    worse = json.loads(json.dumps(runs[0]["rows"]))
    next(r for r in worse if r["model"] == "ppo" and r["temperature"] == 1)["malformed"] = 0.03
    assert quick_demo.verdict(worse) == dict(gain=True, apart=True, sampled=True, form=False)


# ---- Starting over, and what the trainers are given ----

JUDGED = {"facts", "shown", "kind", "gold_chosen", "gold_rejected"}


def columns_of(value) -> set[str]:
    if isinstance(value, DatasetDict):
        return set().union(*map(columns_of, value.values()))
    return set(value.column_names) if isinstance(value, Dataset) else set()


# catches: a trainer that is handed gold scores or facts along with the text; --fresh that keeps a
# stage
@pytest.mark.slow
def test_fresh_starts_over_and_trainers_see_text_alone(run, tmp_path, monkeypatch, capsys):
    folder, given = tmp_path / "run", {}
    shutil.copytree(run[0], folder)
    (folder / "mine.txt").write_text("not of the run")
    (folder / "sft" / "model.safetensors").write_bytes(b"spoilt")
    inits = {
        name: getattr(demo_stages, name).__init__
        for name in ("SFTTrainer", "RewardTrainer", "PPOTrainer")
    }
    for name in inits:

        def watch(self, *args, original=inits[name], name=name, **kwargs):
            bound = inspect.signature(original).bind(self, *args, **kwargs).arguments
            given[name] = {
                key: columns_of(value) for key, value in bound.items() if columns_of(value)
            }
            original(self, *args, **kwargs)

        monkeypatch.setattr(getattr(demo_stages, name), "__init__", watch)
    assert cli.main([*words(folder), "--fresh"]) == 0
    assert "reused" not in capsys.readouterr().out and (folder / "mine.txt").exists()
    assert models(folder) == models(run[0])
    assert given == dict(
        SFTTrainer=dict(train_dataset={"prompt", "completion"}),
        RewardTrainer=dict(train_dataset={"prompt", "chosen", "rejected"}),
        PPOTrainer=dict(train_dataset={"prompt"}),
    )
    there = columns_of(load_from_disk(str(folder / "pairs"))) | columns_of(mini_tldr(0, 1, 1, 1))
    assert there >= JUDGED  # what there would be to see
