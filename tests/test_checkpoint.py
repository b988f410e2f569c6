"Whole or not at all: folders under exceptions and SIGKILL, and a manifest that says what is wrong."

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_nb.checkpoint import MANIFEST, model_card, save_policy, seal, stage_folder, verify


def tree(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


def write(folder: Path, text: str = "new") -> None:
    with stage_folder(folder) as part:
        (part / "a").write_text(text)
        assert not folder.exists() or (folder / "a").read_text() != text
        (part / "sub").mkdir()
        (part / "sub" / "b").write_bytes(b"\0" * 9)


# catches: writing in place, a name that is there before its content, remains of an earlier try in
# the finished folder
def test_a_folder_appears_when_it_is_whole(tmp_path):
    folder = tmp_path / "deep" / "run"
    (tmp_path / "deep" / "run.partial").mkdir(parents=True)
    (tmp_path / "deep" / "run.partial" / "junk").write_text("of a run that was killed")
    write(folder)
    assert set(tree(folder)) == {"a", "sub/b"}
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["run"]
    (folder / "more").write_text("stays behind with the old one")
    write(folder, "newer")
    assert set(tree(folder)) == {"a", "sub/b"} and (folder / "a").read_text() == "newer"
    assert [p.name for p in folder.parent.iterdir()] == ["run"]


# catches: a name that is there before the files of a subfolder are on disk
def test_every_file_is_on_disk_before_the_folder_has_its_name(tmp_path, monkeypatch):
    folder, on_disk = tmp_path / "run", set()
    monkeypatch.setattr("os.fsync", lambda f: on_disk.add((os.fstat(f).st_ino, folder.exists())))
    write(folder)
    assert on_disk == {(p.stat().st_ino, False) for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("there", [False, True])
def test_an_exception_leaves_what_was_there(tmp_path, error, there):
    if there:
        write(tmp_path / "run", "old")
    before = tree(tmp_path / "run") if there else None
    with pytest.raises(error), stage_folder(tmp_path / "run") as part:
        (part / "a").write_text("half")
        raise error
    assert (tree(tmp_path / "run") == before) if there else not (tmp_path / "run").exists()
    write(tmp_path / "run", "next try")
    assert (tmp_path / "run" / "a").read_text() == "next try" and len(list(tmp_path.iterdir())) == 1


def write_for_ever(place: Path) -> None:
    for n in range(10**6):
        with stage_folder(place / f"checkpoint-{n}") as part:
            for name in "abcd":
                (part / name).write_bytes(bytes([n % 256]) * 300_000)
            seal(part, n=n)
        (place / "written").write_text(str(n))


# catches: a folder that bears its name before its last byte, a manifest written first
@pytest.mark.parametrize("after", [0.001, 0.004, 0.01, 0.02, 0.05, 0.1])
def test_sigkill_leaves_whole_folders(tmp_path, after):
    child = multiprocessing.get_context("fork").Process(
        target=write_for_ever, args=(tmp_path,), daemon=True
    )
    child.start()
    while child.is_alive() and not (tmp_path / "written").exists():
        time.sleep(0.001)
    time.sleep(after)
    child.kill()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    written = int((tmp_path / "written").read_text() or 0)
    folders = [p for p in tmp_path.iterdir() if p.is_dir()]
    whole = [p for p in folders if not p.name.endswith(".partial")]
    for folder in whole:
        verify(folder, n=int(folder.name.split("-")[1]))
        assert len(tree(folder)) == 5
    assert written < len(whole) and len(folders) <= len(whole) + 1


# ---- The manifest ----


@pytest.fixture
def sealed(tmp_path) -> Path:
    with stage_folder(tmp_path / "checkpoint-3") as part:
        (part / "sub").mkdir()
        (part / "weights").write_bytes(bytes(range(256)) * 4)
        (part / "sub" / "state").write_text("{}")
        seal(part, seed=0, batch_size=8)
    return tmp_path / "checkpoint-3"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[500] ^= 1
    path.write_bytes(content)


def write_manifest(text: str):
    return lambda folder: (folder / MANIFEST).write_text(text)


UNCHANGED, BROKEN = "weights is not as it was written", "damaged: manifest.json"
DAMAGES = [
    (lambda f: (f / "weights").unlink(), "damaged: weights is missing"),
    (lambda f: (f / "sub" / "state").unlink(), "damaged: sub/state is missing"),
    (lambda f: (f / "weights").write_bytes((f / "weights").read_bytes()[:-1]), UNCHANGED),
    (lambda f: flip(f / "weights"), UNCHANGED),
    (lambda f: (f / "sub" / "state").write_text(""), "sub/state is not as it was written"),
    (lambda f: (f / MANIFEST).unlink(), "has no manifest.json"),
    *((write_manifest(text), BROKEN) for text in ("", '{"run": {"seed"', "[]", "{}", "[" * 10**5)),
]


@pytest.mark.parametrize("damage, reason", DAMAGES)
def test_damage_is_named(sealed, damage, reason):
    verify(sealed, seed=0)
    damage(sealed)
    with pytest.raises(ValueError, match=reason) as error:
        verify(sealed, seed=0)
    assert "checkpoint-3" in str(error.value) and "esume from an earlier" in str(error.value)


def test_a_foreign_checkpoint_is_named(sealed):
    for run, reason in (
        (dict(seed=1), "its seed is 0, this run's is 1"),
        (dict(batch_size=16), "its batch_size is 8, this run's is 16"),
        (dict(world="x"), "its world is None"),
    ):
        with pytest.raises(ValueError, match=f"belongs to another run: {reason}"):
            verify(sealed, **run)


# ---- The policy alone ----


# catches: weights of another object, or its own in place of those gathered, a config without pad and stop, a card whose header the hub
# cannot read
def test_a_saved_policy_is_the_policy(tmp_path, tiny, tokenizer):
    policy = tiny(3)
    save_policy(
        policy,
        tokenizer,
        tmp_path,
        card=model_card("x: y", dict(kl_coef=0.05, note="a | b"), {"objective/kl": 1.23456}, "gpt"),
    )
    again, ids = AutoModelForCausalLM.from_pretrained(tmp_path), torch.arange(8)[None]
    assert torch.equal(again(ids).logits, policy(ids).logits)
    assert (again.generation_config.eos_token_id, again.generation_config.pad_token_id) == (
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
    )
    assert (
        AutoTokenizer.from_pretrained(tmp_path)("my boss sold").input_ids
        == tokenizer("my boss sold").input_ids
    )
    save_policy(policy, tokenizer, tmp_path / "gathered", state=tiny(1).state_dict())
    gathered = AutoModelForCausalLM.from_pretrained(tmp_path / "gathered")
    assert torch.equal(gathered(ids).logits, tiny(1)(ids).logits)
    card = (tmp_path / "README.md").read_text()
    assert yaml.safe_load(card.split("---")[1])["library_name"] == "transformers"
    assert "| objective/kl | 1.235 |" in card


# catches: a policy whose own generation config cannot be saved (transformers refuses a temperature
# without do_sample), set after the training
def test_a_policy_with_a_temperature_in_its_generation_config_is_saved(tmp_path, tiny, tokenizer):
    policy = tiny(0)
    policy.generation_config.temperature = 0.6
    save_policy(policy, tokenizer, tmp_path, stop_ids=[5])
    again = AutoModelForCausalLM.from_pretrained(tmp_path).generation_config
    assert (again.temperature, again.do_sample, again.eos_token_id) == (0.6, True, 5)
    now = policy.generation_config  # the model in memory is as it was
    assert now.do_sample is not True and now.eos_token_id != 5


# catches: a kill between the two renames of a replacement, after which the next write deletes the
# only whole folder
def test_a_replacement_that_was_killed_halfway_loses_nothing(tmp_path):
    old = tmp_path / "good.old.partial"
    old.mkdir()
    (old / "weights").write_text("of before")
    with pytest.raises(RuntimeError), stage_folder(tmp_path / "good"):
        raise RuntimeError("the next write fails too")
    assert (tmp_path / "good" / "weights").read_text() == "of before"
    assert [p.name for p in tmp_path.iterdir()] == ["good"]
