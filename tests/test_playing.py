"""Play, proven: the ids that were drawn are the ids that every later turn and the update see, with
any model, engine and chat template; environments that misbehave; runs that are killed."""

from __future__ import annotations

import copy
import math
import os
import re
import sys
import time
from itertools import pairwise, product
from typing import Any, ClassVar

import pytest
import torch
from forks import processes
from marks import slow_but
from ppo_fixtures import PROMPTS
from test_families import tiny
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rlhf_nb.base.encoding import encode_prompts, prompt_text
from rlhf_nb.base.frames import Frame, observation_frame
from rlhf_nb.forward import Forward, PolicyAndValue
from rlhf_nb.masks import right_pad
from rlhf_nb.playing import Player
from rlhf_nb.rollout import Rollout, Sample
from rlhf_nb.sampling import Sampling, goes_on
from rlhf_nb.training import engines
from rlhf_nb.training.engines import CachedEngine
from rlhf_nb.training.prompts import as_batch

BRACKETS = (
    "{% for m in messages %}{{ '(' ~ m.content ~ ')' if m.role == 'user' else '[' ~ m.content ~ ']'"
    " }}{% endfor %}{% if add_generation_prompt %}[{% endif %}"
)


@pytest.fixture(scope="module")
def signs() -> PreTrainedTokenizerFast:
    "40 tokens: <pad>, <eos>, and one for each sign."
    words = ["<pad>", "<eos>", *"()[]abcdefghijklmnopqrstuvwxyz01234567"]
    inner = Tokenizer(models.WordLevel({x: i for i, x in enumerate(words)}, unk_token="<pad>"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
    tokenizer.chat_template = BRACKETS
    return tokenizer


class Told:
    "Answers differ in length with what was said, and so do episodes."

    def reset(self, prompt: Any, seed: int) -> str:
        self.turns, self.most = 0, 2 + len(str(prompt)) % 3
        return "xyz"[: seed % 3]

    def step(self, action: str) -> tuple:
        self.turns += 1
        said = "hello world"[: 1 + sum(map(ord, action)) % 7].replace(" ", "0")
        return said, 0.5 * self.turns, self.turns == self.most, False, dict(turns=self.turns)


class Anew:
    "Another engine: it reads everything again for each turn."

    inner = CachedEngine()

    def sync(self, model):
        self.inner.sync(model)

    def generate(self, *given):
        sample = self.inner.generate(*given)[0]
        return sample, torch.zeros(sample.mask.shape)


STOPS = (1, 5, *range(6, 40, 3))


@torch.no_grad()
def alone(model, tokenizer, prompt: list[int], frame: tuple, world: Told) -> tuple[list, list]:
    "Ids and log-probs of an episode by itself, without padding, mask, positions or cache."
    ids, logprobs = [*prompt], list[float]()
    while True:
        drawn = list[int]()
        while len(drawn) < 5 and not {*drawn[-1:]} & {*STOPS}:
            logits = model(input_ids=torch.tensor([ids + drawn]), use_cache=False).logits[0, -1]
            drawn.append(int(logits.argmax()))
            logprobs.append(logits.log_softmax(-1)[drawn[-1]].item())
        ids += drawn
        said, _, ended, *_ = world.step(tokenizer.decode(drawn[: -1 if drawn[-1] in STOPS else 5]))
        if ended:
            return ids[len(prompt) :], logprobs
        mark = "" if drawn[-1] == 5 else frame[0]
        ids += tokenizer(mark + frame[1] + said + frame[2])["input_ids"]


GOES_ON = "llama gpt_neox gpt2 qwen2 qwen3 olmo2 phi stablelm granite opt bloom falcon".split()
AGAIN = "mistral gemma2 phi3 mamba jamba lfm2 qwen3_next gpt_neo mpt llama4_text".split()
TEXTS = ["a", "tell0me", "bcd", "qrstu", "abcdefghi", "z"]


def play_all(tokenizer, model, prompts: list, again: bool = False) -> Rollout:
    "Greedy."
    engine = Anew() if again else CachedEngine(rows=4)
    engine.sync(model)
    settings = Sampling(5, 0, STOPS, temperature=1e-6)
    player = Player(Told, tokenizer, settings, max_turns=5, positions=64)
    begun, drawn = player(engine, as_batch(prompts, tokenizer), range(len(prompts)))
    return Rollout(begun["prompt_ids"], begun["prompt_mask"], **drawn)


# catches: holes that shorter rows leave in a cache and that a window, a recurrent state or a bias
# by distance counts; positions that they move; a last token that is read twice or never
@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("family", slow_but("llama bloom mistral jamba".split(), GOES_ON + AGAIN))
def test_turns_go_on_as_if_all_were_read_again(signs, family, chat):
    model = tiny(family)
    prompts = [[dict(role="user", content=x)] for x in TEXTS] if chat else TEXTS
    assert goes_on(model) is (family in GOES_ON)
    r, again = (play_all(signs, model, prompts, x) for x in (False, True))
    assert torch.equal(r.response_ids, again.response_ids)
    forward, pair = Forward(rows=6), PolicyAndValue(model, None)
    with torch.no_grad():
        (old,) = forward.over(r, lambda part: (forward(pair, part).logprobs,))
    for i, prompt in enumerate(prompts):
        world = Told()
        world.reset(prompt, i)
        ids = r.prompt_ids[i][r.prompt_mask[i].bool()].tolist()
        frame = ("]", "(", ")[") if chat else ("", "", "")
        wanted, logprobs = alone(model, signs, ids, frame, world)
        assert r.response_ids[i][r.mask[i]].tolist() == wanted
        assert old[i][r.chosen[i]].tolist() == pytest.approx(logprobs, abs=2e-4)
    assert len(set(r.chosen.sum(1).tolist())) > 2, "all rows are of one length"
    with torch.no_grad():
        for part in forward.split(r, torch.arange(6), 2):
            new = forward(pair, r.select(part), "look").logprobs
            assert ((new - old[part]).exp()[r.chosen[part]] - 1).abs().max() < 1e-6


# catches: nothing by itself; it says that the test above can fail
@pytest.mark.parametrize("family", ["mistral", "jamba"])
def test_a_model_that_cannot_go_on_would_write_otherwise(signs, family, monkeypatch):
    monkeypatch.setattr(engines, "goes_on", lambda model: True)
    wrong, right = (play_all(signs, tiny(family), TEXTS, x).response_ids for x in (False, True))
    assert wrong.tolist() != right.tolist()


# catches: a blank that a tokenizer puts in front of a text that begins
def test_an_observation_goes_on_behind_the_stop_token():
    inner = Tokenizer(models.WordLevel({"<e>": 0, "low": 1, "\u2581low": 2}, unk_token="<e>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<e>")
    read = [Frame("<e>", "<e>").encode("low", tokenizer, stop) for stop in (0, None)]
    assert read == [[1, 0], [0, 1, 0]] and tokenizer("low")["input_ids"] == [2]


# ---- Templates: the shapes of published ones, written anew ----

TEXT, ROLE, TRIMMED = "{{ m.content }}", "{{ m.role }}", "{{ m.content | trim }}"
AFTER_THOUGHT = (
    "{{ m.content.split('</think>')[-1].lstrip('\n') if m.role == 'assistant' else m.content }}"
)
IM, OPENS, END = "<|im_start|>{{ m.role }}\n%s<|im_end|>\n", "<|im_start|>assistant\n", "<|im_end|>"
TOOLS = "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
DEFAULT = "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
HEAD = "<|start_header_id|>%s<|end_header_id|>\n\n"
SYSTEM_IN = (
    "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
)
BY_ROLE = (
    "{%% if m.role == 'system' %%}%s{%% elif m.role == 'user' %%}%s{%% elif m.role == 'assistant' %%}"
    "%s{%% else %%}{{ raise_exception('no %%s' %% m.role) }}{%% endif %%}"
)
REFUSES = "{{ raise_exception('no system') }}"
CHAT = {  # a turn, what opens an answer, what stands in front of all, the stop token
    "chatml": (IM % TEXT, OPENS, TOOLS, END),
    "smollm": (IM % TEXT, OPENS, DEFAULT, END),
    "qwen3": (IM % AFTER_THOUGHT, OPENS, TOOLS, END),
    "llama3": (HEAD % ROLE + TRIMMED + "<|eot_id|>", HEAD % "assistant", "<|bos|>", "<|eot_id|>"),
    "mistral": (
        BY_ROLE % ("", f"[INST] {SYSTEM_IN}{TEXT} [/INST]", f" {TRIMMED}</s>"),
        "",
        "<s>",
        "</s>",
    ),
    "gemma": (
        BY_ROLE % (REFUSES, "<turn>user\n", "<turn>model\n") + TRIMMED + "<end_of_turn>\n",
        "<turn>model\n",
        "<bos>",
        "<end_of_turn>",
    ),
    "phi3": (f"<|{ROLE}|>\n{TEXT}<|end|>\n", "<|assistant|>\n", "", "<|end|>"),
    "r1": (
        BY_ROLE % (TEXT, f"<|User|>{TEXT}", f"<|Assistant|>{AFTER_THOUGHT}<|eos|>"),
        "<|Assistant|><think>\n",
        "<|bos|>",
        "<|eos|>",
    ),
    "zephyr": (f"<|{ROLE}|>\n{TEXT}</s>\n", "<|assistant|>\n", "", "</s>"),
    "command": (f"<|START|><|{ROLE}|>{TEXT}<|END|>", "<|START|><|assistant|>", "<BOS>", "<|END|>"),
    "vicuna": (
        BY_ROLE % (TEXT + " ", f"USER: {TEXT}", f" ASSISTANT: {TEXT}</s>"),
        " ASSISTANT:",
        "<s>",
        "</s>",
    ),
    "granite": (
        f"<|role|>{ROLE}<|/role|>{TEXT}<|end_of_text|>\n",
        "<|role|>assistant<|/role|>",
        "",
        "<|end_of_text|>",
    ),
}


def written(turn: str, opens: str, front: str = "", stop: str = "") -> str:
    "A template."
    opened = "{% if add_generation_prompt %}" + opens + "{% endif %}"
    return front + "{% for m in messages %}" + turn + "{% endfor %}" + opened


USER = [dict(role="user", content="Guess a number.")]
SYSTEM = [dict(role="system", content="You play\n\ngames.")]
TOOL = dict(type="function", function=dict(name="add", parameters={}))
TALKS: dict[str, tuple[list, dict, list[str], list[str]]] = {  # prompt, settings, said, observed
    "plain": (USER, {}, ["five", "it's 7"], ["low", "too high!"]),
    "system": (SYSTEM + USER, {}, ["five", "7"], ["low", "high"]),
    "a word of the frame": ([dict(role="system", content="user"), *USER], {}, ["5"] * 2, ["a"] * 2),
    "tools": (USER, dict(tools=[TOOL]), ["five", "7"], ["low", "high"]),
    "blank lines": (USER, {}, ["a\n\n\nb", "c\n\nd"], ["e\n\n\n\nf", "g\n h"]),
    "thoughts": (USER, {}, ["<think>\nhm\n</think>\n\n5"] * 2, ["low", "high"]),
    "ends in blanks": (USER, {}, ["\n a \n\n", "b  "], ["\nlow\n\n", " high "]),
}
REFUSED = {*product(("gemma", "mistral"), ("system", "a word of the frame"))}
REWRITTEN = {("qwen3", "thoughts")} | {("r1", kind) for kind in TALKS}
TRIMS = ("llama3", "mistral", "gemma", "qwen3", "r1")
WORDS = r"'s|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def reader(name: str, pieces: bool) -> PreTrainedTokenizerFast:
    "A tokenizer with that template: of bytes, or of pieces with a mark for each blank."
    template, stop = written(*CHAT[name]), CHAT[name][-1]
    inner = Tokenizer(models.BPE())
    if pieces:
        lines = pre_tokenizers.Split("\n", "isolated")
        blanks = pre_tokenizers.Metaspace(prepend_scheme="first")
        inner.pre_tokenizer = pre_tokenizers.Sequence([lines, blanks])
        inner.decoder = decoders.Metaspace(prepend_scheme="first")
    else:
        words = pre_tokenizers.Split(Regex(WORDS), "isolated")
        own = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        inner.pre_tokenizer = pre_tokenizers.Sequence([words, own])
        inner.decoder = decoders.ByteLevel()
    roles = {f"<|{x}|>" for x in ("user", "assistant", "system")}
    marks = {*re.findall(r"<[^<>\s{}]+>|\[/?INST\]", template)} | roles
    texts = [x for _, _, *said in TALKS.values() for y in said for x in y] + [template]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<pad>", *sorted(marks)], show_progress=False
    )
    inner.train_from_iterator([*texts * 9, "You play\n\ngames. Be kind. Guess a number."], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token=stop)
    tokenizer.chat_template = template
    return tokenizer


# catches: a frame that is read from what the policy wrote, an end mark that is written twice or
# never, a line break that is lost behind it, a blank that a tokenizer puts in front of a text
@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("name", CHAT)
def test_a_conversation_that_is_played_has_the_ids_of_the_whole(name, pieces):
    tokenizer, stop = reader(name, pieces), CHAT[name][-1]
    lead = " " if name in ("mistral", "vicuna") else ""  # what the policy writes in front
    end = tokenizer.convert_tokens_to_ids(stop)
    for kind, (prompt, settings, said, seen) in TALKS.items():
        hidden = "tools" in settings and "tools" not in tokenizer.chat_template
        if hidden or (name, kind) in REFUSED:
            with pytest.raises(ValueError, match="no system|same text|does not show the tools"):
                observation_frame(prompt, tokenizer, **settings)
            continue
        frame, talk = observation_frame(prompt, tokenizer, **settings), [*prompt]
        ids = encode_prompts([prompt_text(prompt, tokenizer, **settings)], tokenizer)[0]
        for answer, world in zip(said, seen):
            drawn = tokenizer(f"x{stop}{lead}{answer}")["input_ids"]
            ids += [*drawn[drawn.index(end) + 1 :], end]
            ids += frame.encode(world, tokenizer, end)
            talk += [dict(role="assistant", content=answer), dict(role="user", content=world)]
        (whole,) = encode_prompts([prompt_text(talk, tokenizer, **settings)], tokenizer)
        if kind == "ends in blanks":  # a mark's line break and an answer's may be one token there
            same = tokenizer.decode(ids) == tokenizer.decode(whole)
            assert same is (name not in TRIMS), tokenizer.decode(ids)
        else:
            assert (ids == whole) is ((name, kind) not in REWRITTEN), (kind, tokenizer.decode(ids))
        cut = frame.encode("low", tokenizer, None)  # a turn that was cut off gets its end mark
        assert cut == [end, *frame.encode("low", tokenizer, end)]


@pytest.mark.parametrize(
    ("template", "role", "said"),
    [
        (written(*CHAT["mistral"]), "tool", "no tool"),
        (written(IM % ("{{ loop.index }}" + TEXT), OPENS), "user", "same text around"),
        (written(IM % "{{ m.content | upper }}", OPENS), "user", "an answer 0 times"),
        ("{{ messages[-1].content }}", "user", "not write all that turn 0"),
    ],
)
def test_a_template_that_cannot_go_on_is_refused(signs, template, role, said):
    tokenizer = copy.deepcopy(signs)
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=said):
        observation_frame(USER, tokenizer, role)


# catches: Llama 3's results of tools, which it writes as JSON: a quote in one would end it
def test_an_observation_that_is_written_as_json(signs):
    tokenizer, talk = copy.deepcopy(signs), [*USER, dict(role="assistant", content="a")]
    tokenizer.chat_template = BRACKETS.replace("'(' ~ m.content", "'(' ~ m.content | tojson")
    frame = observation_frame(USER, tokenizer)
    assert frame == Frame("](", ")[", True) and not observation_frame(USER, signs).as_json
    (ids,) = tokenizer([prompt_text([*talk, dict(role="user", content='b"\nc')], tokenizer)])[
        "input_ids"
    ]
    assert ids[-len(frame.encode('b"\nc', tokenizer)) :] == frame.encode('b"\nc', tokenizer)


# ---- One engine that writes what it is told, one world that answers what it is told ----


class Script:
    "Writes the rows of each turn, as text; keeps the ids that it read."

    def __init__(self, tokenizer, turns: list[list[str]]):
        self.tokenizer, self.turns, self.read = tokenizer, iter(turns), []

    def generate(self, ids, mask, settings):
        self.read.append([row[real.bool()].tolist() for row, real in zip(ids, mask)])
        rows = [
            self.tokenizer(x)["input_ids"] if isinstance(x, str) else x for x in next(self.turns)
        ]
        drawn, real = right_pad(rows, settings.pad_id)
        stopped = torch.tensor([row[-1] in settings.stop_ids for row in rows])
        return Sample(drawn, real.bool(), stopped), None


class World:
    "Answers from a list; an exception is raised."

    def __init__(self, *answers: Any, began: Any = None):
        self.answers, self.began, self.said = iter(answers), began, list[str]()

    def reset(self) -> Any:
        return self.began

    def step(self, action: str) -> Any:
        self.said.append(action)
        answer = next(self.answers)
        if isinstance(answer, BaseException):
            raise answer
        return answer


def said(text: Any, reward: Any = 0.0, terminated: Any = False, truncated: Any = False) -> tuple:
    return text, reward, terminated, truncated, {}


def told(tokenizer, turns: list[list[str]], worlds: list[World], prompts: Any = None, **how: Any):
    "The record of such a play, and the engine."
    makes, engine = iter(worlds), Script(tokenizer, turns)
    size, how = how.pop("size", 1), dict(max_turns=3) | how
    settings = Sampling(how.pop("length", 3), 0, (1,))
    player = Player(how.pop("factory", lambda: next(makes)), tokenizer, settings, **how)
    batch = as_batch(prompts or ["ab"] * len(worlds), tokenizer)
    begun, drawn = player(engine, batch, range(len(worlds)), size)
    return Rollout(begun["prompt_ids"], begun["prompt_mask"], **drawn), engine


LATER = "of episode 1, turn 1, with the action 'd': "
BAD = {  # what the second episode's second turn gets, and what is said about it
    "raises": (KeyError("x"), "it raised KeyError: 'x'"),
    "leaves": (SystemExit(3), "it raised SystemExit: 3"),
    "four": (("low", 0.0, False, False), r"step returned \('low', 0.0, False, False\): return obs"),
    "text alone": ("wrong", "step returned 'wrong': return observation, reward"),
    "nan": (said("low", math.nan), "its reward is no finite number"),
    "infinite": (said("low", math.inf), "its reward is no finite number"),
    "worded": (said("low", "1"), "its reward is no finite number"),
    "bytes": (said(b"low"), "its observation is no text"),
    "nothing": (said(None), "its observation is no text"),
    "no token": (said(""), "the observation '' has no token"),
    "flag": (said("low", 0.0, 1), "its terminated and truncated are not both True or False"),
    "info": (("low", 0.0, False, False, None), "its info is no dict"),
}


# catches: an answer that is taken for another, and an error that does not say where
@pytest.mark.parametrize("kind", BAD)
def test_a_bad_answer_is_named_with_episode_turn_and_action(signs, kind):
    answer, why = BAD[kind]
    worlds = [World(*[said("low")] * 3), World(said("high"), answer)]
    with pytest.raises((ValueError, RuntimeError), match=f"World {LATER}(.* )?{why}"):
        told(signs, [["a<eos>", "b"], ["c", "d<eos>"]], worlds)


class Lame:
    def reset(self):
        pass


@pytest.mark.parametrize(
    ("how", "why"),
    [
        (
            dict(worlds=[World(began=7)]),
            "World of episode 0, before its first turn: reset returned 7",
        ),
        (dict(worlds=[World(began="a"), World(began="b")], size=2), "episode 1 began with 'b'"),
        (dict(worlds=[World(began="a")], prompts=[dict(input_ids=[2])]), "prompts are ids alone"),
        (
            dict(worlds=[World(began="a")], prompts=[[dict(role="system", content="x")]]),
            "no turn of a user",
        ),
        (dict(worlds=[World()], factory=7), "environment_factory is 7: give a function or a class"),
        (dict(worlds=[World()], factory=Lame), "which has no step and the tools"),
        (dict(worlds=[World()], max_length=2), "max_episode_length is 2 and a turn may have"),
    ],
)
def test_what_cannot_begin_is_refused(signs, how, why):
    with pytest.raises(ValueError, match=why):
        told(signs, [["a"]], **how)


# catches: an episode that goes on after its end, an observation that is kept after `terminated`,
# lost after `truncated`, or that overruns; a reward of 0 or the last one lost; a stop token in the
# action; what began behind the prompt
def test_each_end_is_in_the_record(signs):
    worlds = [
        World(said("no", 0.5, terminated=True), began="x"),
        World(said("hello", 0.0, truncated=True), began="x"),
        World(said("d"), said("e", 2.0), said("f", 1.0), began="x"),
        World(said("d"), said("01234567", 1.0), began="x"),
        World(said("d"), said("0123", 1.0), began="x"),
    ]
    turns = [["a<eos>", "bc", "abc", "a<eos>", "a"], ["d<eos>", "e<eos>", "b<eos>"], ["g"]]
    r, engine = told(signs, turns, worlds, max_length=10)
    assert r.stop_reason == ["terminated", "truncated", "max_turns", "context", "context"]
    spell = lambda keep: [
        "".join(signs.batch_decode(i[k].tolist())) for i, k in zip(r.response_ids, keep)
    ]
    assert spell(r.chosen) == ["a<eos>", "bc", "abcd<eos>g", "a<eos>e<eos>", "ab<eos>"]
    assert spell(r.mask & ~r.chosen) == ["", "hello", "def", "d", "d0123"]
    assert r.responses == ["a", "bchello"[:2], "abcdd<eos>eg", "a<eos>de", "adb"]
    assert r.turn_rewards.tolist() == [[0.5, 0, 0], [0, 0, 0], [0, 2, 1], [0, 1, 0], [0, 1, 0]]
    ended = [[1, 0, 0], [0, 0, 0], [0, 1, 0], [1, 1, 0], [0, 1, 0]]
    assert r.turn_stopped.int().tolist() == ended and r.stopped.tolist() == [1, 0, 0, 1, 1]
    assert r.turn[2][r.mask[2]].tolist() == [0] * 4 + [1] * 3 + [2] * 2
    assert r.turn_counts.tolist() == [1, 1, 3, 2, 2] and r.ended.tolist() == [1, 0, 0, 0, 0]
    assert [w.said for w in worlds[:3]] == [["a"], ["bc"], ["abc", "d", "g"]]
    assert signs.decode(r.prompt_ids[0]) == "abx"
    for i, row in enumerate((2, 3, 4)):  # the second call: what was read before, and what is new
        upto = r.response_ids[row][(r.turn[row] == 0) & r.mask[row]].tolist()
        assert engine.read[1][i] == engine.read[0][row] + upto


def merging(strip: bool) -> PreTrainedTokenizerFast:
    "A tokenizer that makes one token of a and b; or one whose decoder swallows a blank."
    words = ["<pad>", "<eos>", "a", "b", "ab", "▁a", "▁", "▁b"]
    merges = [("▁", "a"), ("▁", "b")] if strip else [("a", "b")]
    inner = Tokenizer(models.BPE({x: i for i, x in enumerate(words)}, merges))
    blanks = dict(prepend_scheme="never" if not strip else "first")
    inner.pre_tokenizer = pre_tokenizers.Metaspace(**blanks)
    inner.decoder = decoders.Metaspace(**blanks)
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")


# catches: history that is decoded and encoded again (trl 5224, rllm 272, SkyRL 123, cs336 15)
@pytest.mark.parametrize(("strip", "ids"), [(False, [2, 3, 1]), (True, [2, 7, 1])])
def test_what_was_drawn_is_what_is_read(strip, ids):
    tokenizer = merging(strip)
    worlds = [World(said("b"), said("b", terminated=True))]
    r, engine = told(tokenizer, [[ids], [ids]], worlds, ["a"])
    assert r.response_ids[0][r.chosen[0]].tolist() == ids * 2
    assert engine.read[1][0] == engine.read[0][0] + ids + tokenizer("b")["input_ids"]
    again = tokenizer(tokenizer.decode(ids[:-1]))["input_ids"]  # the planted fault
    assert again != ids[:-1]


def hang(said: str) -> None:
    "In a process of its own, with stderr in a file."
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    world = World(("low", 0.0, False, False, {}))
    world.answers = (time.sleep(60) for _ in range(9))
    told(signs.__wrapped__(), [["ab<eos>"]], [world], timeout=0.2)


# catches: a run that waits for ever, without a word on where
def test_an_environment_that_hangs_ends_the_process(tmp_path):
    child = processes.Process(target=hang, args=(str(tmp_path / "said"),))
    child.start()
    child.join(60)
    assert child.exitcode == 124
    where = "World of episode 0, turn 0, with the action 'ab': no answer within environment_timeout"
    assert (tmp_path / "said").read_text().startswith(f"{where} = 0.2 seconds. The run ends here")


# ---- A trainer ----


class Seeded:
    "Notes its seed, and ends by it."

    seeds: ClassVar[list[int]] = []

    def reset(self, seed: int) -> str:
        self.seeds.append(seed)
        self.left, self.wins = 1 + seed % 3, seed % 2
        return "abc"[seed % 3]

    def step(self, action: str) -> tuple:
        self.left -= 1
        done = self.left == 0
        return "de"[self.left % 2], len(action) / 4, bool(done and self.wins), done, {}


def turns_trainer(ppo, **how: Any):
    how = dict(response_length=3, num_ppo_epochs=1, learning_rate=0.0, save_rollouts=False) | how
    parts = dict(environment_factory=Seeded, max_turns=3) | how.pop("parts", {})
    Seeded.seeds.clear()
    return ppo(None, parts=parts, **how)


# catches: a bootstrap by the stop token, or by the policy's last word where something answered; a
# penalty a response; a ratio that is not 1 where nothing was learned
def test_what_comes_after_the_end_and_what_a_turn_costs(ppo):
    t = turns_trainer(ppo, bootstrap_truncated=True, missing_eos_penalty=0.5, temperature=0.7)
    t.prepare()
    r = t.score(t.rollout(PROMPTS[:8]))
    paid = (r.turn_rewards - 0.5 * ~r.turn_stopped).tolist()
    for i, turns in enumerate(r.turn_counts.tolist()):
        for k in range(turns):
            at = ((r.turn[i] == k) & r.chosen[i]).nonzero()[:, 0]
            assert r.scores[i, at].tolist() == pytest.approx([0.0] * (len(at) - 1) + [paid[i][k]])
    after = t.last_values(r)
    assert {"terminated", "truncated"} <= {*r.stop_reason}
    for i, why in enumerate(r.stop_reason):
        ids = torch.cat([r.prompt_ids[i][r.prompt_mask[i].bool()], r.response_ids[i][r.mask[i]]])
        value = t.pair.value
        with torch.no_grad():
            state = value.base_model(input_ids=ids[None]).last_hidden_state[0, -1]
            wanted = value.score(state).item() if why != "terminated" else 0.0
        assert after[i].item() == pytest.approx(wanted, abs=1e-5)
    metrics = t.update(t.advantages(r))
    assert metrics["val/ratio"] == pytest.approx(1, abs=1e-6) and metrics["val/ratio_var"] < 1e-9


# catches: worlds that a resumed run does not meet again, or that differ within a group
def test_worlds_are_those_of_run_update_and_prompt(ppo):
    t = turns_trainer(ppo, num_generations=2)
    made = [len(Seeded.seeds)]
    for _ in range(2):
        t.step(PROMPTS[:4])
        made.append(len(Seeded.seeds))
    first, second = (Seeded.seeds[a:b] for a, b in pairwise(made))
    assert first[::2] == first[1::2] and len({*first, *second}) == 8
    other = turns_trainer(ppo, num_generations=2)
    other.update_count = 1
    other.prepare()
    other.rollout(PROMPTS[:4])
    assert Seeded.seeds[-8:] == second


@pytest.mark.parametrize(
    ("how", "why"),
    [
        (
            dict(non_eos_penalty=True, missing_eos_penalty=None),
            "non_eos_penalty replaces the score",
        ),
        (dict(ds3_gather_for_generation=False), "ds3_gather_for_generation is False"),
        (dict(advantage_estimator="gae_turns", gamma=0.9), "gae_turns has gamma_turn and lam_turn"),
        (dict(parts=dict(environment_factory=None)), r"\['max_turns'\] is given without"),
        (dict(parts=dict(max_episode_length=2)), "max_episode_length is 2"),
    ],
)
def test_settings_that_turns_exclude(ppo, how, why):
    with pytest.raises(ValueError, match=why):
        turns_trainer(ppo, **how)
