"""The box that says how to make a run again: its command gives the same settings, and it names
neither folders nor people."""

import json
import random
import shlex
import subprocess
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from rlhf_nb.cli.demo import demo_parser
from rlhf_nb.cli.demo_made import commit_of
from rlhf_nb.cli.demo_run import QUICK, DemoSettings, Run, command_of, with_quick
from rlhf_nb.ui.report import made_of, reproduce_section

MADE = dict(
    command="rlhf-nb demo --seed 3",
    versions=dict(rlhf_nb="0.1.0", torch="2.0"),
    commit="0123456789ab",
    machine="A CPU, 2 CPUs, Linux",
    threads=2,
    date="2026-01-02 03:04 UTC",
)


def settings_of(command):
    "What the command line makes of a command."
    program, demo, *words = shlex.split(command)
    assert (program, demo) == ("rlhf-nb", "demo")
    settings, options = demo_parser().settings(words)
    return with_quick(settings) if options.quick else settings


# catches: a command that leaves out a setting, or whose --quick turns one back
def test_the_command_has_the_settings():
    rng, usual = random.Random(0), asdict(DemoSettings())
    assert command_of(DemoSettings()) == "rlhf-nb demo"
    quick = with_quick(DemoSettings("elsewhere", 4))
    assert command_of(quick) == "rlhf-nb demo --quick --seed 4"
    assert command_of(quick, 1).endswith("--threads 1")
    for _ in range(200):
        start = replace(DemoSettings(), **QUICK) if rng.random() < 0.5 else DemoSettings()
        names = rng.sample(sorted(usual), rng.randrange(4))
        changes = {k: rng.choice([usual[k], QUICK.get(k, usual[k]), 12]) for k in names}
        if isinstance(changes.get("starting_model"), int):
            changes["starting_model"] = "a folder/with blanks"
        changes["output_dir"] = usual["output_dir"]
        made = replace(start, **changes)
        assert settings_of(command_of(made)) == made


# catches: a commit of another repository around the one that the package is installed into
def test_the_commit_is_of_the_checkout(tmp_path):
    package = tmp_path / "rlhf_nb"
    package.mkdir()
    (package / "x.py").write_text("1")
    assert commit_of(package) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@y"]
    run = lambda *words: subprocess.run([*git, *words], check=True, capture_output=True, text=True)
    run("init")
    assert commit_of(package) is None  # nothing was committed yet
    run("add", ".")
    run("commit", "-m", "first")
    head = run("rev-parse", "HEAD").stdout.strip()
    commit = commit_of(package)
    assert commit and head.startswith(commit)
    (package / "x.py").write_text("2")
    assert commit_of(package) == f"{commit}, with local changes"
    inside = package / "env" / "rlhf_nb"
    inside.mkdir(parents=True)
    assert commit_of(inside) is None


def test_it_names_no_folder(tmp_path):
    text = json.dumps(Run(DemoSettings(str(tmp_path))).made())
    assert str(tmp_path) not in text and str(Path.home()) + "/" not in text


def seal(folder, stage, **made):
    (folder / stage).mkdir(parents=True)
    (folder / stage / "manifest.json").write_text(json.dumps(dict(run=made, files={})))


# catches: the machine of the last call shown for a policy that was trained on another
def test_stages_that_were_made_otherwise_are_named(tmp_path):
    assert "no record" in reproduce_section(made_of(tmp_path, {}), [])
    seal(tmp_path, "sft", made=MADE | dict(date="2025-01-01 00:00 UTC", threads=1))
    seal(tmp_path, "pairs", demo="of an older version")
    seal(tmp_path, "ppo", made=MADE)
    later = MADE | dict(date="2026-02-03 04:05 UTC")
    made = made_of(tmp_path, dict(made=later))
    assert list(made) == ["sft", "ppo", "judge"]
    done = [dict(stage="sft", event="done", seconds=s) for s in (99.0, 60.0)]
    page = reproduce_section(made, [*done, dict(stage="ppo", event="done", seconds=65.0)])
    for text in ("rlhf-nb demo --seed 3", "torch 2.0", "0123456789ab", "2 CPUs", "03:04 UTC"):
        assert text in page
    assert "2 min 5 s for all stages" in page and "04:05" not in page
    assert "sft (2025-01-01 00:00 UTC: other threads)" in page and "judge (" not in page
    del made["sft"]
    assert "Made otherwise" not in reproduce_section(made, [])


@pytest.mark.parametrize("name", ["command", "machine", "date"])
def test_hostile_records_are_text(name):
    page = reproduce_section(dict(ppo=MADE | {name: "<script>\u202e\x00</code>"}), [])
    assert "<script>" not in page and "\u202e" not in page and "\x00" not in page
    assert "installed package" in reproduce_section(dict(ppo=MADE | dict(commit=None)), [])
