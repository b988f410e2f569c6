"Preferences: the loss and the scores by hand, padding, centring, reward functions, and the proof that nothing but the labels carries the judge's opinion."
import math
import random

import numpy as np
import pytest
import torch
from datasets import Dataset

from rlhf_nb.masks import left_pad, right_pad
from rlhf_nb.models import load_scorer, scorer_from, scorer_head, sequence_scores
from rlhf_nb.reward import (RewardConfig, RewardTrainer, bradley_terry_loss, call_reward, center_rewards, encode_pairs, pair_accuracy, pair_batch,
                            preference_metrics, score_texts)
from rlhf_nb.tldr import edit_pairs


@pytest.fixture(scope="module")
def pairs(world): return edit_pairs(world["train"], 0)


@pytest.fixture
def trained(tiny, tokenizer, pairs, small_args):
    def make(data=None, seed=0, **changes):
        args = small_args(RewardConfig, **dict(max_steps=3, per_device_train_batch_size=8, learning_rate=1e-2, seed=seed) | changes)
        return RewardTrainer(scorer_from(tiny(seed), seed), args, (data or pairs).select_columns(["prompt", "chosen", "rejected"]), pairs.select(range(13)), tokenizer)
    return make


# ---- Loss and batches ----

@pytest.mark.parametrize("chosen, rejected, margin, nats", [(0, 0, 0, math.log(2)), (2, 0, 0, math.log1p(math.exp(-2))), (0, 2, 0, math.log1p(math.exp(2))),
                                                           (2, 0, 1.5, math.log1p(math.exp(-0.5))), (0, 1000, 0, 1000), (1000, 0, 0, 0)])
def test_loss_by_hand(chosen, rejected, margin, nats):
    scores = torch.tensor([float(chosen), float(rejected)], requires_grad=True)
    loss = bradley_terry_loss(*scores.chunk(2), margin)
    loss.sum().backward()
    assert loss.item() == pytest.approx(nats, abs=1e-6) and scores.grad.isfinite().all() and scores.grad[0] <= 0 <= scores.grad[1]


def test_encoding_by_hand(pairs, tokenizer):
    for row, found in zip(pairs.select(range(30)), encode_pairs(pairs, tokenizer)):
        prompt, chosen, rejected = (tokenizer(row[name], add_special_tokens=False).input_ids for name in ("prompt", "chosen", "rejected"))
        assert found["chosen_ids"] == prompt + chosen + [tokenizer.eos_token_id] and found["rejected_ids"] == prompt + rejected + [tokenizer.eos_token_id]
        assert found["length"] == len(prompt) + max(len(chosen), len(rejected)) + 1


# catches: truncation on the right; a prompt cut at another place for each of the two, which would tell them apart by itself
def test_the_stop_token_is_never_cut(pairs, tokenizer):
    whole, cut = encode_pairs(pairs, tokenizer), encode_pairs(pairs, tokenizer, 50)
    for a, b in zip(whole, cut):
        prompt = next(i for i, (x, y) in enumerate(zip(a["chosen_ids"], a["rejected_ids"])) if x != y)  # at least this much is shared
        off = max(0, max(len(a["chosen_ids"]), len(a["rejected_ids"])) - 50)
        for name in ("chosen_ids", "rejected_ids"): assert off <= prompt and b[name] == a[name][off:]
    with pytest.raises(ValueError, match="max_length is 12: raise max_length"): encode_pairs(pairs, tokenizer, 12)
    with pytest.raises(ValueError, match=r"lacks \['rejected'\]"): encode_pairs(pairs.remove_columns("rejected"), tokenizer)


# catches: chosen and rejected interleaved, which chunk(2) would then take apart wrongly
def test_batches_hold_chosen_first():
    batch = pair_batch([dict(chosen_ids=[3, 4, 1], rejected_ids=[3, 1]), dict(chosen_ids=[5, 1], rejected_ids=[5, 6, 7, 1])], 0)
    assert batch["input_ids"].tolist() == [[3, 4, 1, 0], [5, 1, 0, 0], [3, 1, 0, 0], [5, 6, 7, 1]] and batch["attention_mask"].sum(1).tolist() == [3, 2, 2, 4]


# catches: a score read at the last column, at a pad, or one token early; positions that count padding
def test_scores_do_not_see_padding(tiny):
    model, rows = scorer_from(tiny(), 1), [[5, 6, 7, 8, 9, 1], [4, 1], [0, 3, 0, 1]]
    alone = torch.cat([sequence_scores(model, torch.tensor([row]), torch.ones(1, len(row))) for row in rows])
    for pad in (left_pad, right_pad):
        for pad_id in (0, 11):
            for wider in ([], [[2] * 15]):
                assert torch.allclose(sequence_scores(model, *pad(rows + wider, pad_id))[:3], alone, atol=1e-5)
    hidden = model.base_model(torch.tensor([rows[0]])).last_hidden_state[0, -1]
    assert alone[0].item() == pytest.approx((scorer_head(model).weight[0] @ hidden).item(), abs=1e-5)


def test_metrics_by_hand():
    found = preference_metrics(torch.tensor([1.0, 2.0, -3.0, 0.5]), torch.tensor([0.0, 2.0, 1.0, -0.5]))
    assert found == pytest.approx(dict(accuracy=0.5, margin=-0.5, min_reward=-3, mean_reward=0.375, max_reward=2))


def test_trainer_loss_and_metrics_by_hand(trained, tokenizer, pairs):
    trainer = trained(per_device_eval_batch_size=13, center_rewards_coefficient=0.1)
    found, some = trainer.evaluate(), pairs.select(range(13))
    chosen, rejected = (score_texts(trainer.model, tokenizer, some["prompt"], some[name]).double().numpy() for name in ("chosen", "rejected"))
    loss = np.log1p(np.exp(rejected - chosen)).mean() + 0.1 * ((chosen + rejected) ** 2).mean()
    wanted = dict(eval_loss=loss, eval_accuracy=(chosen > rejected).mean(), eval_margin=(chosen - rejected).mean(), eval_min_reward=min(chosen.min(), rejected.min()),
                  eval_mean_reward=(chosen.mean() + rejected.mean()) / 2, eval_max_reward=max(chosen.max(), rejected.max()))
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, abs=1e-4)


# catches: metrics over batches of unequal size averaged as if they were equal; training metrics that leak from one log into the next
def test_training_logs_metrics(trained):
    trainer = trained(per_device_eval_batch_size=5, eval_strategy="steps", eval_steps=3)
    trainer.train()
    logs = trainer.state.log_history
    assert all({"loss", "accuracy", "margin", "min_reward", "mean_reward", "max_reward"} <= set(log) for log in logs if "loss" in log)
    assert [log["eval_accuracy"] for log in logs if "eval_accuracy" in log][0] * 13 == pytest.approx(round([log["eval_accuracy"] for log in logs if "eval_accuracy" in log][0] * 13))


# ---- Scores of texts, centring, accuracy ----

def test_texts_are_scored_in_the_order_given(trained, tokenizer, pairs):
    model, some = trained().model.train(), pairs.select(range(20))
    together = score_texts(model, tokenizer, some["prompt"], some["chosen"], batch_size=6)
    alone = torch.cat([score_texts(model, tokenizer, [p], [c]) for p, c in zip(some["prompt"], some["chosen"])])
    assert torch.allclose(together, alone, atol=1e-5) and model.training


# catches: a centre that is added, applied twice when found again, or lost in the file
def test_references_average_zero(trained, tokenizer, world, tmp_path):
    model, some = trained().model, world["validation"]
    before, center = score_texts(model, tokenizer, some["prompt"], some["completion"]), center_rewards(model, tokenizer, some)
    assert center == pytest.approx(before.mean().item(), abs=1e-6) and center_rewards(model, tokenizer, some) == pytest.approx(center, abs=1e-6)
    after = score_texts(model, tokenizer, some["prompt"], some["completion"])
    assert torch.allclose(after, before - center, atol=1e-5) and abs(after.mean()) < 1e-5
    model.save_pretrained(tmp_path)
    assert torch.allclose(score_texts(load_scorer(str(tmp_path)), tokenizer, some["prompt"], some["completion"]), after, atol=1e-6)


# catches: accuracy by the noisy label where gold is known; ties counted
def test_accuracy_goes_by_gold(trained, tokenizer, pairs):
    model, some = trained().model, pairs.select(range(10)).remove_columns(["gold_chosen", "gold_rejected"])
    right = pair_accuracy(model, tokenizer, some)
    gold = lambda a, b: some.add_column("gold_chosen", [float(a)] * 10).add_column("gold_rejected", [float(b)] * 10)
    assert torch.equal(pair_accuracy(model, tokenizer, gold(1, 0)), right) and torch.equal(pair_accuracy(model, tokenizer, gold(0, 1)), ~right)
    assert len(pair_accuracy(model, tokenizer, gold(1, 1))) == 0


# ---- Reward functions ----

def returning(value):
    def scorer(prompts, responses, **columns): return value
    return scorer


@pytest.mark.parametrize("value", [[1, 2.5], (1, 2.5), np.array([1, 2.5]), torch.tensor([1, 2.5]), [torch.tensor(1), np.float64(2.5)], iter([1, 2.5])])
def test_a_reward_function_may_return(value):
    assert call_reward(returning(value), ["a", "b"], ["c", "d"], {}).tolist() == [1, 2.5]


# catches: isinstance(x, float), which numpy's float64 passes and float32 and integers do not
@pytest.mark.parametrize("kind", [np.float32, np.int64, np.float16])
def test_a_reward_function_may_return_any_numpy_number(kind):
    assert call_reward(returning(np.array([1, 2], kind)), ["a", "b"], ["c", "d"], {}).tolist() == [1, 2]


@pytest.mark.parametrize("value, complaint", [([], "0 scores for 2"), ([1.0], "1 scores for 2"), ([1.0, 2.0, 3.0], "3 scores for 2"), ([1.0, float("nan")], "nan for response 1"),
                                              ([float("inf"), 1.0], "inf for response 0"), ([1.0, None], "None for response 1"), ([1.0, "2"], "'2' for response 1"),
                                              ([True, 1.0], "True for response 0"), ([torch.tensor(float("nan")), 1.0], "for response 0"), ([[1.0], 2.0], "for response 0")])
def test_bad_returns_are_named(value, complaint):
    with pytest.raises(ValueError, match=f"reward function scorer returned .*{complaint}"): call_reward(returning(value), ["a", "b"], ["c", "d"], {})


@pytest.mark.parametrize("value", [None, 0.5, [torch.zeros(2), torch.zeros(2)], [1e300, 0.0]])
def test_stranger_returns_are_named_too(value):
    with pytest.raises(ValueError, match="reward function scorer returned"): call_reward(returning(value), ["a", "b"], ["c", "d"], {})


def test_columns_reach_the_function():
    assert call_reward(lambda prompts, responses, bonus, **rest: [len(p + r) + b for p, r, b in zip(prompts, responses, bonus)], ["a", "b"], ["cc", "d"], dict(bonus=[1, 2], x=[0, 0])).tolist() == [4, 4]


# ---- The leak ----

def swapped(data: Dataset, coins: list[bool]) -> Dataset:
    "Chosen and rejected exchanged where the coin says so. Gold columns stay behind, for whoever would peek."
    chosen, rejected = zip(*((b, a) if coin else (a, b) for a, b, coin in zip(data["chosen"], data["rejected"], coins)))
    return data.remove_columns(["chosen", "rejected"]).add_column("chosen", list(chosen)).add_column("rejected", list(rejected))


# catches: any path from the judge into training beside the labels (gold columns, the order of the rows, held-out pairs trained on)
def test_with_permuted_labels_nothing_is_learned(tmp_path):
    from rlhf_nb.models import tiny_policy, train_tokenizer
    from rlhf_nb.tldr import mini_tldr
    world, kinds = mini_tldr(0, 4000, 1, 400), ("drop", "opening", "repeat")
    tokenizer = train_tokenizer(p + c for p, c in zip(world["train"]["prompt"], world["train"]["completion"]))
    labelled, held_out = edit_pairs(world["train"], 0, noise=0.5, kinds=kinds), edit_pairs(world["test"], 1, kinds=kinds)

    def accuracy(data: Dataset) -> float:
        "Of a model trained on these labels, by the gold order of held-out pairs."
        args = RewardConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True, logging_strategy="no", max_length=44,
                            learning_rate=5e-3, per_device_train_batch_size=16, num_train_epochs=1)
        model = scorer_from(tiny_policy(tokenizer, 1, hidden_size=32, num_hidden_layers=1, num_attention_heads=2), 1)
        RewardTrainer(model, args, data, processing_class=tokenizer).train()
        return pair_accuracy(model, tokenizer, held_out).float().mean().item()

    rng = random.Random(0)
    coins = [rng.random() < 0.5 for _ in labelled]
    heads, tails = accuracy(swapped(labelled, coins)), accuracy(swapped(labelled, [not coin for coin in coins]))
    assert accuracy(labelled) > 0.72
    # One random labelling prefers, say, longer answers by chance, and its mirror image the shorter ones: together they know nothing.
    # With 400 pairs and 2 runs the mean of chance has a standard deviation of 0.02; the band is 0.06 wide on either side.
    assert abs((heads + tails) / 2 - 0.5) < 0.06 and max(heads, tails) < 0.72


# catches: an answer that was cut off scored as if it had ended, which hides a policy that never stops
def test_an_answer_that_did_not_stop_is_scored_without_the_stop_token(trained, pairs, tokenizer):
    model, prompts, answers = trained().model, pairs["prompt"][:2], pairs["chosen"][:2]
    ended, cut = (score_texts(model, tokenizer, prompts, answers, stopped=flags) for flags in ([True, True], [True, False]))
    assert torch.equal(ended, score_texts(model, tokenizer, prompts, answers)) and ended[0] == cut[0] and ended[1] != cut[1]


# catches: a tie counted as right
def test_a_tie_is_no_right_order(trained, pairs, tokenizer):
    some = pairs.select(range(4)).remove_columns(["chosen", "rejected"])
    tied = some.add_column("chosen", ["the same"] * 4).add_column("rejected", ["the same"] * 4)
    assert not pair_accuracy(trained().model, tokenizer, tied).any()
