"""The lab on your own data: every command of its four questions is run on tiny files, and files that no
run can use are refused with one message, before a model is loaded."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from itertools import pairwise
from pathlib import Path

import pandas as pd
import pytest
from loopback import Endpoint
from notebooks import NOTEBOOKS

from rlhf_nb import cli
from rlhf_nb.cli import judge, ppo, reward, sft
from rlhf_nb.cli.models import load_run_tokenizer
from rlhf_nb.models import scorer_from
from rlhf_nb.training.model_loading import load_policy, tiny_policy, train_tokenizer

PAGE = json.loads(NOTEBOOKS["24_your_own"].read_text(encoding="utf-8"))
# a block for each question, and in it a comment above each command
QUESTIONS = re.findall(r"```sh\n(.*?)```", "".join(PAGE["cells"][3]["source"]), re.DOTALL)
BRANCHES = [
    branch.replace(" \\\n   ", "").split("\n")[:2]
    for question in QUESTIONS
    for branch in question.split("\n\n")
]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)
FAST = dict(  # what makes a command small enough for a test
    sft="--max_steps 2 --per_device_train_batch_size 4 --use_cpu --disable_tqdm",
    reward="--max_steps 2 --per_device_train_batch_size 4 --use_cpu --disable_tqdm",
    ppo="--total_episodes 16 --per_device_train_batch_size 8 --response_length 4 "
    "--num_ppo_epochs 1 --num_sample_generations 0 --use_cpu --disable_tqdm",
    judge="--response_length 4 --use_cpu",
)
FAST_SFT_SIZE = "--hidden_size 16 --num_hidden_layers 1 --num_attention_heads 2"
REWARD = "def score(prompts, responses, **columns):\n    return [r.count('the') + 0.0 for r in responses]"


def write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")


def run(line: str) -> int:
    "The exit code of a command line."
    try:
        return cli.main(shlex.split(line)[1:])
    except SystemExit as stop:
        return int(stop.code or 0)


def typed(command: str, url: str = "") -> str:
    "The command as it is run here: real names in place of the capitals, and small numbers."
    words = command.replace(" MODEL", " model").replace("CHAT_MODEL", "chat_model")
    words = words.replace(" NAME", " some-judge").replace(" URL", f" {url}")
    size = FAST_SFT_SIZE if "--from_scratch" in words else ""
    return f"{words} {FAST.get(words.split()[1], '')} {size}"


def leaves(command: str) -> str:
    "What it writes; empty: nothing."
    words = dict(pairwise(command.split()))
    if "view" in words:
        return f"{words['view']}/rollouts.html"
    if folder := words.get("--output_dir"):
        return f"{folder}/{'rollouts' if folder == 'runs/ppo' else 'model.safetensors'}"
    return f"{words.get('--output', '')}{'.svg' * ('plot' in words)}"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    "Files and models of everybody's kind, and a finished run."
    folder = tmp_path_factory.mktemp("own")
    lines = [f"Return the value {i} of a list ." for i in range(24)]
    rows = [dict(prompt=f"get value {i} :", completion=" " + line) for i, line in enumerate(lines)]
    write_rows(folder / "data.jsonl", rows)
    write_rows(folder / "test.jsonl", rows[:6])
    talk = lambda row: [dict(role="user", content=row["prompt"])]
    write_rows(folder / "chat.jsonl", [dict(prompt=talk(row)) for row in rows])
    pair = lambda i: dict(chosen=rows[i]["completion"], rejected=rows[i - 1]["completion"])
    pairs = [dict(prompt=rows[i]["prompt"]) | pair(i) for i in range(24)]
    write_rows(folder / "pairs.jsonl", pairs)
    write_rows(folder / "kept_pairs.jsonl", pairs[:12])
    (folder / "reward.py").write_text(REWARD)
    tokenizer = train_tokenizer([*(r["prompt"] + r["completion"] for r in rows), "user assistant"])
    small = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    models = {name: tiny_policy(tokenizer, 0, **small) for name in ("model", "chat_model")}
    models |= {"runs/sft": tiny_policy(tokenizer, 1, **small)}
    for name, model in {**models, "runs/reward": scorer_from(models["model"], 2)}.items():
        tokenizer.chat_template = TEMPLATE if name == "chat_model" else None
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    before = Path.cwd()
    os.chdir(folder)
    try:
        for end in ("--output_dir runs/judge", "score --save_rollouts --output_dir runs/ppo"):
            assert run(typed(next(x for _, x in BRANCHES if x.endswith(end)))) == 0
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def place(made, tmp_path, monkeypatch):
    "A copy of them to work in."
    shutil.copytree(made, tmp_path / "own")
    monkeypatch.chdir(tmp_path / "own")
    return tmp_path / "own"


# ---- The page's commands ----


# catches: a command that is shown and does not run, or does not leave what the next one reads; an
# adapter that is saved beside the base model although it was to be merged
@pytest.mark.parametrize("command", [x for _, x in BRANCHES], ids=[x for x, _ in BRANCHES])
def test_every_branch_runs(place, command, capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    if "--output_dir" in command:  # whatever is there comes from another branch
        shutil.rmtree(command.split("--output_dir ")[1].split()[0], ignore_errors=True)
    left = leaves(command)
    assert not left or not Path(left).exists()
    with Endpoint(lambda text: "1") as endpoint:
        code = run(typed(command, endpoint.url))
    shown = capsys.readouterr()
    assert code == 0, shown.err
    if left:
        assert Path(left).exists()
    else:
        assert "planned and not run" in shown.out
    if "--save_merged" in command:
        assert not Path("runs/merged/adapter_config.json").exists()
        merged, start = load_policy("runs/merged"), load_policy("runs/sft")
        assert merged.num_parameters() == start.num_parameters()


# catches: a start from a chat model that later commands cannot go on from
@pytest.mark.slow
def test_a_chat_model_goes_down_the_same_tree(place, monkeypatch):
    lines = Path("chat.jsonl").read_text(encoding="utf-8").splitlines()
    Path("test.jsonl").write_text("\n".join(lines[:6]), encoding="utf-8")
    new = {"runs/sft": "chat_model", "data.jsonl": "chat.jsonl", "runs/ppo": "runs/chat"}
    commands = [command for _, command in BRANCHES]
    find = lambda text: next(x for x in commands if text in x)
    shutil.rmtree("runs")
    for command in (*map(find, ("kept_pairs", "CHAT_MODEL", "runs/rloo")), *commands[-3:]):
        line = typed(command)
        for before, after in new.items():
            line = line.replace(before, after)
        assert run(line) == 0, line


# catches: a block that is not read as commands, of which no test would then know
def test_the_page_has_its_questions_and_commands():
    assert len(QUESTIONS) == 4 and len(BRANCHES) == 15
    assert all(a.startswith("# ") and x.startswith("rlhf-nb ") for a, x in BRANCHES)


# ---- Files that no run can use ----

GOOD = dict(prompt="get value 1 :", completion=" Return it .")
NO_ROWS = "the file has no rows. Give at least one, with a prompt."
BAD_FILES = {
    "empty.jsonl": ("", NO_ROWS),
    "head.csv": ("prompt,completion\n", NO_ROWS),
    "empty.parquet": ("", NO_ROWS),
    "rows.txt": ("get value\n", "ends in .txt is not read. Convert it to one of .json, .jsonl"),
    "rows.jsonl": ("prompt,completion\na,b\n", "rows.jsonl, line 1 is not JSON"),
    "rows.parquet": ("prompt\n", "write it again, for example with pandas' to_parquet"),
    "open.csv": ('prompt,completion\n"a,1\nb,2\n', "quote fields that hold commas"),
    "latin.csv": (
        b"prompt,completion\nGr\xfc\xdfe,a\n",
        "latin.csv, line 2: the text is not UTF-8.",
    ),
    "latin.jsonl": (b'{"prompt": "Gr\xfc\xdfe"}\n', "iconv -f latin1 -t utf-8 bad/latin.jsonl >"),
}
BAD_COLUMNS = {
    "table.csv": (json.dumps(GOOD) + "\n" + json.dumps(GOOD), 'has the columns {"prompt"'),
    "names.csv": ("question,answer\na,b\n", "has the columns question, answer, and this needs"),
    "both.csv": ('prompt;completion\n"a, b";"c, d"\ne;f\n', "columns are separated by ';'"),
    "case.jsonl": (json.dumps(dict(Prompt="a")), "rename them in the file. Did you mean Prompt?"),
}
BAD_PROMPTS = {
    "none.csv": ("prompt,completion\na,b\n,c\n", "prompt 1 is None: give text, or turns"),
    "number.csv": ("prompt,completion\n1,b\n", "prompt 0 is 1: give text"),
    "blank.jsonl": (json.dumps(dict(prompt="")), "prompt 0 is empty: remove the row."),
    "turns.jsonl": (json.dumps(dict(prompt=[dict(role="user")])), "has the turn {'role': 'user'"),
}


def no_model(*args, **more):
    raise AssertionError("a model or a tokenizer was loaded")


@pytest.fixture
def refused(made, monkeypatch, capfd):
    """Runs a command that must fail before anything is loaded, and leave all as it was; returns its
    one message. A file that it is given is in bad/."""
    monkeypatch.chdir(made)
    for module in (ppo, sft, reward, judge):
        for name in "load_policy scorers load_run_tokenizer load_reward_model load_judge".split():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, no_model)
    there = sorted(os.listdir())

    def refuse(line: str) -> str:
        code, shown = run(line), capfd.readouterr()
        assert code == 2 and len(shown.err.splitlines()) == 1, shown.err
        assert sorted({*os.listdir()} - {"bad"}) == there
        return shown.err

    yield refuse
    shutil.rmtree("bad")


COMMANDS = dict(
    ppo="ppo --model_name_or_path model --reward_model_path runs/reward --output_dir run",
    sft="sft --model_name_or_path model --output_dir run",
    reward="reward --model_name_or_path model --output_dir run",
    judge="judge --model_name_or_path model --judge_model runs/judge",
)


def told(refused, command: str, name: str, text: str | bytes, more: str = "") -> str:
    "What a command says of a file with this in it."
    Path("bad").mkdir(exist_ok=True)
    Path("bad", name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return refused(f"rlhf-nb {COMMANDS[command]} {more} --dataset_name bad/{name} {FAST[command]}")


def tried_with(command: str, files: dict) -> dict:
    "`ppo` reads every file, and each of the others the last: all commands read by one function."
    return files if command == "ppo" else dict([[*files.items()][-1]])


# catches: a message of a library, a second line of its log, a model that is loaded first
@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_that_cannot_be_used_is_named(refused, command):
    for name, (text, said) in tried_with(command, BAD_FILES).items():
        assert said in told(refused, command, name, text), name
    for name, (text, said) in tried_with(command, BAD_COLUMNS).items():
        message = told(refused, command, name, text)
        assert "columns" in message and (command != "ppo" or said in message), name


@pytest.mark.parametrize("command", ["ppo", "judge"])
def test_a_prompt_that_is_none_is_named(refused, command):
    more = "--opponent_name_or_path model" if command == "judge" else ""
    for name, (text, said) in BAD_PROMPTS.items():
        assert said in told(refused, command, name, text, more), name


# catches: a conversation that is refused only when all models are loaded
@pytest.mark.parametrize("command", COMMANDS)
def test_conversations_need_a_template(refused, command, monkeypatch):
    module = dict(ppo=ppo, sft=sft, reward=reward, judge=judge)[command]
    monkeypatch.setattr(module, "load_run_tokenizer", load_run_tokenizer)
    says = lambda role: [dict(role=role, content="hello")]
    row = dict(prompt=says("user"), completion=says("assistant"))
    if command == "reward":
        row = dict(chosen=says("assistant"), rejected=says("assistant"))
    Path("bad").mkdir()
    write_rows(Path("bad/talk.jsonl"), [row] * 8)
    message = refused(f"rlhf-nb {COMMANDS[command]} --dataset_name bad/talk.jsonl {FAST[command]}")
    assert "holds conversations, and the tokenizer has no chat template: give text, or" in message
    flag = "--chat_template_path" if command in ("sft", "reward") else "--tokenizer_name_or_path"
    assert flag in message


@pytest.mark.parametrize("column", ["prompt", "completion"])
def test_a_tokenizer_is_not_made_of_what_is_no_text(refused, column):
    Path("bad").mkdir()
    talk = [dict(role="user", content="hello")]
    write_rows(Path("bad/talk.jsonl"), [GOOD | {column: talk}])
    assert f"the {column} of row 0 is [{{'content': 'hello'" in refused(
        f"rlhf-nb sft --dataset_name bad/talk.jsonl --from_scratch --output_dir run {FAST['sft']}"
    )


# catches: a batch that no whole group fits, prompts that do not fill one batch, an end of the data
# that is too short for its mini-batches
@pytest.mark.parametrize(
    "prompts, more, said",
    [
        (24, "--num_generations 3", "num_generations is 3: per_device_train_batch_size x"),
        (1, "--num_generations 4", "the data set has 1 prompts and one update takes 2"),
        (3, "--num_generations 2 --num_mini_batches 4 --dataloader_drop_last no "
         "--gradient_accumulation_steps 2", "the data set has 3 prompts and one update takes 8"),
        (9, "--num_generations 2 --num_mini_batches 4 --dataloader_drop_last no "
         "--gradient_accumulation_steps 2", "the last batch of the data set has 2 responses"),
    ],
)  # fmt: skip
def test_groups_that_do_not_come_out_even(refused, prompts, more, said):
    Path("bad").mkdir()
    write_rows(Path("bad/rows.jsonl"), [GOOD] * prompts)
    message = refused(
        f"rlhf-nb {COMMANDS['ppo']} --dataset_name bad/rows.jsonl {FAST['ppo']} {more}"
    )
    assert said in message and ("take a " in message or "lower" in message)


# catches: a group that the end of the file cuts in two
def test_the_last_prompts_of_a_file_have_whole_groups(place):
    from rlhf_nb.rollout import Rollout

    write_rows(Path("five.jsonl"), [dict(prompt=f"get value {i} :") for i in range(5)])
    line = (
        "rlhf-nb ppo --dataset_name five.jsonl --model_name_or_path runs/sft --reward_function "
        "reward.py:score --advantage_estimator rloo --num_generations 4 --dataloader_drop_last no "
        f"--save_rollouts --output_dir five {FAST['ppo']} --total_episodes 20"
    )
    assert run(line) == 0
    sizes = []
    for path in sorted(Path("five/rollouts").iterdir()):
        prompts = pd.Series(Rollout.load(path).prompts)
        sizes.append(len(prompts))
        assert set(prompts.value_counts()) == {4}
    assert sizes == [8, 8, 4]


# catches: verdicts whose winner becomes the rejected answer, ties that are kept, columns that
# `rlhf-nb reward` does not read
def test_the_page_makes_pairs_of_verdicts(place):
    cells = json.loads(NOTEBOOKS["24_your_own"].read_text(encoding="utf-8"))["cells"]
    (source,) = [s for c in cells if "labelled.jsonl" in (s := "".join(c["source"]))]
    verdicts = {"query": ["a :", "b :", "c :"], "model response": [" Return", " the", " of"]}
    verdicts |= {"compared with": [" value", " list", " a"], "verdict": [1.0, 0.0, 0.5]}
    pd.DataFrame(verdicts).to_csv(place / "wins.csv", index=False)
    exec(source, dict(pd=pd, place=place))
    assert pd.read_json("labelled.jsonl", lines=True).to_dict("records") == [
        dict(prompt="a :", chosen=" Return", rejected=" value"),
        dict(prompt="b :", chosen=" list", rejected=" the"),
    ]
    more = "--model_name_or_path model --output_dir labelled"
    assert run(f"rlhf-nb reward --dataset_name labelled.jsonl {more} {FAST['reward']}") == 0
