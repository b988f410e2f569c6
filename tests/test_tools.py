"Environments of trl's kind, worlds by name on the command line, and tasks of reasoning-gym."

from __future__ import annotations

import json
import re

import pytest
import torch
from small_models import small_model
from small_runs import QUIET, RUN

from rlhf_nb.cli.demo_run import STARTING_MODEL
from rlhf_nb.cli.environments import load_environment
from rlhf_nb.cli.ppo import ppo_command, ppo_parser, trainer_of
from rlhf_nb.cli.sft import sft_command
from rlhf_nb.masks import right_pad
from rlhf_nb.playing import Player
from rlhf_nb.rollout import Sample
from rlhf_nb.sampling import Sampling
from rlhf_nb.trainer import PPOConfig, PPOTrainer
from rlhf_nb.training import tasks
from rlhf_nb.training.model_loading import train_bpe_tokenizer
from rlhf_nb.training.prompts import as_batch
from rlhf_nb.training.tools import ToolEnvironment

REFUSED = (
    ("<tool_call>", "[TOOL_CALLS]", "Hermes form alone"),
    ("{% if tools %}", "{% if false %}", "does not show the tools"),
    ("| tojson }}\n</tool_call>", "}}\n</tool_call>", "Hermes form alone"),
)
QWEN = (  # tools in the first turn, calls as JSON between tags, observations in a user's turn
    "{% if tools %}<eos>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<eos>\n{% endif %}"
    "{% for m in messages %}[{{ 'user' if m.role == 'tool' else m.role }}]\n"
    "{% if m.role == 'tool' %}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% else %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ {'name': c.function.name, "
    "'arguments': c.function.arguments} | tojson }}\n</tool_call>{% endfor %}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
ASKED = [dict(role="user", content="count")]


class Counter:
    "As trl's users write one."

    def reset(self, start: int = 0, **row) -> str:
        self.count, self.row = start, row
        return " now"

    def add(self, n: int) -> int:
        """Add to the count.

        Args:
            n: what is added"""
        self.count += n
        return self.count

    def get_reward(self) -> float:
        return self.count / 10


def double(x: int) -> int:
    """Twice a number.

    Args:
        x: the number"""
    return 2 * x


def qwen():
    tokenizer = train_bpe_tokenizer([QWEN] * 9, 300)
    tokenizer.chat_template = QWEN
    return tokenizer


def hermes(name: str, **arguments) -> str:
    return f"<tool_call>\n{json.dumps(dict(name=name, arguments=arguments))}\n</tool_call>"


class Scripted:
    "An engine that writes what a list has for each turn, and keeps what it read."

    def __init__(self, tokenizer, turns: list[str]):
        self.tokenizer, self.turns, self.read = tokenizer, iter(turns), []

    def generate(self, prompt_ids, prompt_mask, settings):
        self.read.append(self.tokenizer.decode(prompt_ids[0][prompt_mask[0].bool()]))
        ids = self.tokenizer(next(self.turns))["input_ids"] + [settings.stop_ids[0]]
        ids, mask = right_pad([ids] * len(prompt_ids), settings.pad_id)
        return Sample(ids, mask.bool(), torch.ones(len(ids), dtype=torch.bool)), None


def played(turns, factory=Counter, prompt=ASKED, tools=(), max_turns=8, **row):
    "Fields of the rollout, the batch, and what the engine read."
    tokenizer = qwen()
    settings = Sampling(400, tokenizer.pad_token_id, (tokenizer.eos_token_id,))
    player = Player(factory, tokenizer, settings, max_turns, tools=tools)
    engine = Scripted(tokenizer, turns)
    begun, drawn = player(engine, as_batch([dict(prompt=prompt, **row)], tokenizer), [0])
    return drawn, begun, engine.read


# catches: schemas that do not reach the prompt, a private method as a tool, reset without its row,
# calls of which one is dropped, get_reward left out, a wrapper handed to reward functions
def test_an_environment_of_trl_runs_unchanged():
    turns = [hermes("add", n=2) + "and" + hermes("add", n=3), "done"]
    drawn, begun, read = played(turns, start=5, other="x")
    assert re.findall(r'"name": "(\w+)"', read[0]) == ["add"] and "what is added" in read[0]
    assert read[0].endswith("[user]\ncount now<eos>\n[assistant]\n") and begun["prompt"][0] in read
    answer = "[user]\n<tool_response>\n7\n10\n</tool_response><eos>\n[assistant]\n"
    assert read[1].endswith("<eos>\n" + answer) and read[1].startswith(read[0] + turns[0])
    assert drawn["stop_reason"] == ["terminated"] and drawn["turn_rewards"].tolist() == [[0, 1]]
    assert drawn["environments"][0].row == dict(prompt=ASKED, other="x")
    assert begun["settings"][0]["tools"][0]["function"]["name"] == "add"  # as judges render it
    assert drawn["columns"]["info/calls"] == [2] and drawn["columns"]["info/call_errors"] == [0]


# catches: a reward that is lost where the episode is cut off
def test_get_reward_is_paid_at_max_turns():
    drawn, _, _ = played([hermes("add", n=4)] * 2, max_turns=2)
    paid, why = drawn["turn_rewards"][0].tolist(), drawn["stop_reason"]
    assert paid == pytest.approx([0, 0.8]) and why == ["max_turns"]


# catches: an exception that ends the run, an error that says nothing, a call that is open at the end
# of a turn taken for none, a call in thoughts taken for one
@pytest.mark.parametrize(
    "turn, said",
    [
        ("<tool_call>{'name': add}</tool_call>", "JSONDecodeError"),
        ("<tool_call>{", "JSONDecodeError"),
        ('<tool_call>["add"]</tool_call>', "write <tool_call>"),
        ('<tool_call>{"name": "add", "arguments": 3}</tool_call>', "write <tool_call>"),
        (hermes("reset"), "no tool 'reset': there are add"),
        (hermes("add", m=1), "missing a required argument: 'n'"),
        (hermes("add", n="two"), "unsupported operand"),
        (f"<think>{hermes('add', n=9)}</think>" + hermes("add", n=1), "1\n</tool_response>"),
    ],
)
def test_a_wrong_call_is_an_observation(turn, said):
    drawn, _, read = played([turn, "done"])
    assert said in read[1].split("<tool_response>\n")[-1] and drawn["stop_reason"] == ["terminated"]
    failed = "error" not in said and "1\n" not in said
    assert drawn["columns"]["info/call_errors"] == [float(failed)]


# catches: functions that are not shown or not called, with and without an environment beside them
@pytest.mark.parametrize("factory", [Counter, lambda: None])
def test_tools_beside_and_instead_of_an_environment(factory):
    _, _, read = played([hermes("double", x=21), "done"], factory, tools=[double])
    assert "Twice a number" in read[0] and "\n42\n</tool_response>" in read[1]
    _, _, read = played([hermes("double", x=21), "done"], factory, "count: ", tools=[double])
    assert read[0].startswith("count: ") and read[1].endswith("<eos>42")  # text stays as it is


# catches: a template of another family that is taken, one without tools, an undescribed tool
@pytest.mark.parametrize("old, new, message", REFUSED)
def test_other_forms_are_refused_by_name(old, new, message):
    tokenizer = qwen()
    settings = Sampling(4, tokenizer.pad_token_id, (tokenizer.eos_token_id,))
    for always in (QWEN, QWEN.replace("{% if tools %}", "{% if 'a' in tools or true %}")):
        tokenizer.chat_template = always  # Hermes 3 cannot do without tools
        Player(Counter, tokenizer, settings, 2).try_frame(ASKED, {})
    tokenizer.chat_template = QWEN.replace(old, new)
    with pytest.raises(ValueError, match=message):
        Player(Counter, tokenizer, settings, 2).try_frame(ASKED, {})
    with pytest.raises(ValueError, match="<lambda> cannot be a tool"):
        ToolEnvironment(None, [lambda x: x])


def ppo(tmp_path, score_clip=None, **given):
    tokenizer = qwen()
    model = small_model("llama", vocab_size=len(tokenizer), max_position_embeddings=512)
    args = PPOConfig(str(tmp_path), score_clip=score_clip, **RUN | QUIET)
    rows = [dict(prompt=ASKED, start=i) for i in range(8)]
    trainer = PPOTrainer(args, tokenizer, model, train_dataset=rows, **given)
    assert args.max_turns == 8  # the settings that were given may serve another trainer
    return trainer


# catches: reward functions without the environments, which are the user's own objects; a run that
# nothing pays; tools beside an environment that reads text itself
def test_reward_functions_get_the_environments(tmp_path):
    seen = []

    def of_worlds(prompts, responses, environments, **columns):
        seen.extend(environments)
        return [float(world.count) for world in environments]

    trainer = ppo(tmp_path, environment_factory=Counter, reward_model=of_worlds, max_turns=2)
    r = trainer.score(trainer.rollout(trainer.next_batch()))
    assert all(type(world) is Counter for world in seen) and len(seen) == 8
    paid = torch.tensor([1.1 * world.count for world in seen])  # the function, and get_reward
    assert torch.allclose(r.raw_scores.nan_to_num(0).reshape(8, -1).sum(1), paid)
    assert trainer.evaluate(trainer.train_dataset)["eval_score"] >= 0 and len(seen) > 8
    assert ppo(tmp_path, tools=[double], reward_model=lambda p, r, **k: [0.0] * len(r)).step()
    with pytest.raises(ValueError, match="no get_reward"):
        ppo(tmp_path, environment_factory=type("Bare", (Counter,), dict(get_reward=property())))
    with pytest.raises(ValueError, match="leave out tools"):
        ppo(tmp_path, environment_factory=load_environment("walk"), tools=[double])
    with pytest.raises(ValueError, match="score_clip"):
        ppo(tmp_path, environment_factory=Counter, score_clip=1.0)


# catches: settings that are dropped, names that are taken without a word
def test_environments_by_name(tmp_path):
    world = load_environment("guess_number:n=3,turns=2")()
    assert (world.n, world.turns, load_environment("walk")().size) == (3, 2, 3)
    (tmp_path / "mine.py").write_text("class Env:\n    def reset(self): ...\n")
    assert load_environment(f"{tmp_path}/mine.py:Env")().reset() is None
    for name, message in {
        "guess_numbr": "one of guess_number, walk. Did you mean guess_number",
        "guess_number:m=3": "has the settings n, turns, base",
        "guess_number:n=some": "n is 'some': give a whole number",
        "walk:3": "'3' is no setting",
        f"{tmp_path}/mine.py:Other": "has no function Other",
    }.items():
        with pytest.raises(ValueError, match=message):
            load_environment(name)


# catches: a recipe that does not run, an environment that does not reach the trainer
def test_the_recipe_of_guess_number_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config = ["--config", "guess_number.yaml", "--use_cpu", "--report_to", "none"]
    sft_command([*config, "--max_steps", "40"])
    ppo_command([*config, "--total_episodes", "256"])
    log = json.loads((tmp_path / "runs/guess_number/ppo/trainer_state.json").read_text())
    last = next(x for x in log["log_history"] if "turns/return" in x)
    assert 3 < last["turns/per_episode"] <= 4 and 0.05 < last["turns/info/won"] < 0.6
    assert last["turns/terminated"] == 1 and last["turns/tokens"] == 1  # a word is a turn


# catches: scores of another question, settings that are dropped, a missing package without its name
def test_tasks_of_reasoning_gym(tmp_path, monkeypatch):
    with monkeypatch.context() as without:
        without.setitem(__import__("sys").modules, "reasoning_gym", None)
        with pytest.raises(ValueError, match=r"pip install 'rlhf_nb\[tasks\]'"):
            tasks.task_rows("spell_backward", seed=7)
    pytest.importorskip("reasoning_gym")
    rows = tasks.task_rows("spell_backward", size=6, test=3, max_word_len=4)
    assert (len(rows["train"]), len(rows["test"])) == (6, 3)
    test = rows["test"].to_dict()
    words = [prompt.split()[-1] for prompt in test["prompt"]]
    assert max(map(len, words)) <= 4
    good = [f"so <answer>{word[::-1]}</answer>" for word in words[:2]] + [words[2][::-1]]
    assert tasks.task_points(test["prompt"], good, **test | dict(prompt=0)) == [1, 1, 1]
    assert max(tasks.task_points(test["prompt"], [*"xyz"], **test | dict(prompt=0))) < 1
    with pytest.raises(ValueError, match="no such task.*Did you mean spell_backward"):
        tasks.task_rows("spel_backward")
    with pytest.raises(ValueError, match="foo.*Its settings are .*max_word_len"):
        tasks.task_rows("spell_backward", foo=1)
    monkeypatch.chdir(tmp_path)
    name = "reasoning_gym:spell_backward:size=9"
    words = ["--dataset_name", name, "--model_name_or_path", str(STARTING_MODEL), "--use_cpu"]
    trainer = trainer_of(*ppo_parser().settings(words))
    assert [*trainer.judges.functions] == ["task_points"] and len(trainer.train_dataset) == 9
    sft_command(
        [*words[:2], "--from_scratch", "--output_dir", "sft", "--max_steps", "1", *words[4:]]
    )
    said = tasks.task_rows("spell_backward", size=1, chat=True)["train"][0]["completion"]
    assert said[0]["role"] == "assistant" and (tmp_path / "sft/config.json").is_file()
