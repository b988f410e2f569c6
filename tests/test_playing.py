"""Play, proven: the ids that were drawn are the ids that every later turn and the update see, with
any model, engine and chat template; environments that misbehave; runs that are killed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from marks import slow_but
from test_families import tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlhf_nb.base.frames import Frame
from rlhf_nb.forward import Forward, PolicyAndValue
from rlhf_nb.playing import Player
from rlhf_nb.rollout import Rollout
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


# catches: holes that shorter rows leave in a cache and that a window, a recurrent state or a bias by
# distance counts; positions that they move; a last token that is read twice or never
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
