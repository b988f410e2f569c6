"""Preferences: the loss and the scores by hand, padding, centring, reward functions, and the proof
that nothing but the labels carries the judge's opinion."""

import copy
import math
import random
import sys
import textwrap
import warnings
from itertools import pairwise

import forks
import numpy as np
import pytest
import torch
from datasets import Dataset
from ppo_fixtures import BEST, check_adapter, check_best, check_damaged
from transformers import EvalPrediction, TrainerCallback

from rlhf_nb.masks import left_pad, right_pad
from rlhf_nb.models import scorer_from, scorer_head, sequence_scores
from rlhf_nb.preferences import (
    bradley_terry_loss,
    calibration,
    calibration_error,
    pair_batch,
    preference_metrics,
)
from rlhf_nb.reward import RewardConfig, RewardTrainer, decided_pairs, encode_pairs, reversed_labels
from rlhf_nb.scoring import center_rewards, pair_accuracy, score_texts
from rlhf_nb.training.model_loading import load_reward_model, load_scorer
from rlhf_nb.ui.plots import calibration_plot
from rlhf_nb.world import edit_pairs


@pytest.fixture(scope="module")
def pairs(world):
    return edit_pairs(world["train"], 0)


@pytest.fixture
def trained(tiny, tokenizer, pairs, small_args):
    def make(data=None, seed=0, **changes):
        args = small_args(
            RewardConfig,
            **dict(max_steps=3, per_device_train_batch_size=8, learning_rate=1e-2, seed=seed)
            | changes,
        )
        return RewardTrainer(
            scorer_from(tiny(seed), seed),
            args,
            (data or pairs).select_columns(["prompt", "chosen", "rejected"]),
            pairs.select(range(13)),
            tokenizer,
        )

    return make


# ---- Loss and batches ----


@pytest.mark.parametrize(
    "chosen, rejected, margin, nats",
    [
        (0, 0, 0, math.log(2)),
        (2, 0, 0, math.log1p(math.exp(-2))),
        (0, 2, 0, math.log1p(math.exp(2))),
        (2, 0, 1.5, math.log1p(math.exp(-0.5))),
        (0, 1000, 0, 1000),
        (1000, 0, 0, 0),
    ],
)
def test_loss_by_hand(chosen, rejected, margin, nats):
    scores = torch.tensor([float(chosen), float(rejected)], requires_grad=True)
    loss = bradley_terry_loss(*scores.chunk(2), margin)
    loss.sum().backward()
    assert (
        loss.item() == pytest.approx(nats, abs=1e-6)
        and scores.grad.isfinite().all()
        and scores.grad[0] <= 0 <= scores.grad[1]
    )


def test_encoding_by_hand(pairs, tokenizer):
    for row, found in zip(pairs.select(range(30)), encode_pairs(pairs, tokenizer)):
        prompt, chosen, rejected = (
            tokenizer(row[name], add_special_tokens=False).input_ids
            for name in ("prompt", "chosen", "rejected")
        )
        assert found["chosen_ids"] == prompt + chosen + [tokenizer.eos_token_id] and found[
            "rejected_ids"
        ] == prompt + rejected + [tokenizer.eos_token_id]
        assert found["length"] == len(prompt) + max(len(chosen), len(rejected)) + 1


# catches: truncation on the right; a prompt cut at another place for each of the two, which would
# tell them apart by itself
def test_the_stop_token_is_never_cut(pairs, tokenizer):
    whole, cut = encode_pairs(pairs, tokenizer), encode_pairs(pairs, tokenizer, 50)
    for a, b in zip(whole, cut):
        prompt = next(
            i for i, (x, y) in enumerate(zip(a["chosen_ids"], a["rejected_ids"])) if x != y
        )  # at least this much is shared
        off = max(0, max(len(a["chosen_ids"]), len(a["rejected_ids"])) - 50)
        for name in ("chosen_ids", "rejected_ids"):
            assert off <= prompt and b[name] == a[name][off:]
    with pytest.raises(ValueError, match="max_length is 12: raise max_length"):
        encode_pairs(pairs, tokenizer, 12)
    with pytest.raises(ValueError, match=r"lacks \['rejected'\]"):
        encode_pairs(pairs.remove_columns("rejected"), tokenizer)


# catches: chosen and rejected interleaved, which chunk(2) would then take apart wrongly
def test_batches_hold_chosen_first():
    batch = pair_batch(
        [
            dict(chosen_ids=[3, 4, 1], rejected_ids=[3, 1]),
            dict(chosen_ids=[5, 1], rejected_ids=[5, 6, 7, 1]),
        ],
        0,
    )
    assert batch["input_ids"].tolist() == [
        [3, 4, 1, 0],
        [5, 1, 0, 0],
        [3, 1, 0, 0],
        [5, 6, 7, 1],
    ] and batch["attention_mask"].sum(1).tolist() == [3, 2, 2, 4]


# catches: a score read at the last column, at a pad, or one token early; positions that count
# padding
def test_scores_do_not_see_padding(tiny):
    model, rows = scorer_from(tiny(), 1), [[5, 6, 7, 8, 9, 1], [4, 1], [0, 3, 0, 1]]
    alone = torch.cat(
        [sequence_scores(model, torch.tensor([row]), torch.ones(1, len(row))) for row in rows]
    )
    for pad in (left_pad, right_pad):
        for pad_id in (0, 11):
            for wider in ([], [[2] * 15]):
                assert torch.allclose(
                    sequence_scores(model, *pad(rows + wider, pad_id))[:3], alone, atol=1e-5
                )
    hidden = model.base_model(torch.tensor([rows[0]])).last_hidden_state[0, -1]
    assert alone[0].item() == pytest.approx(
        (scorer_head(model).weight[0] @ hidden).item(), abs=1e-5
    )


def test_metrics_by_hand():
    found = preference_metrics(
        torch.tensor([1.0, 2.0, -3.0, 0.5]), torch.tensor([0.0, 2.0, 1.0, -0.5])
    )
    assert found == pytest.approx(
        dict(accuracy=0.5, margin=-0.5, min_reward=-3, mean_reward=0.375, max_reward=2)
    )


def test_trainer_loss_and_metrics_by_hand(trained, tokenizer, pairs):
    trainer = trained(per_device_eval_batch_size=13, center_rewards_coefficient=0.1)
    found, some = trainer.evaluate(), pairs.select(range(13))
    chosen, rejected = (
        score_texts(trainer.model, tokenizer, some["prompt"], some[name]).double().numpy()
        for name in ("chosen", "rejected")
    )
    loss = np.log1p(np.exp(rejected - chosen)).mean() + 0.1 * ((chosen + rejected) ** 2).mean()
    wanted = dict(
        eval_loss=loss,
        eval_accuracy=(chosen > rejected).mean(),
        eval_margin=(chosen - rejected).mean(),
        eval_min_reward=min(chosen.min(), rejected.min()),
        eval_mean_reward=(chosen.mean() + rejected.mean()) / 2,
        eval_max_reward=max(chosen.max(), rejected.max()),
    )
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, abs=1e-4)


# catches: metrics over batches of unequal size averaged as if they were equal; training metrics
# that leak from one log into the next
def test_training_logs_metrics(trained):
    trainer = trained(per_device_eval_batch_size=5, eval_strategy="steps", eval_steps=3)
    trainer.train()
    logs = trainer.state.log_history
    assert all(
        {"loss", "accuracy", "margin", "min_reward", "mean_reward", "max_reward"} <= set(log)
        for log in logs
        if "loss" in log
    )
    assert [log["eval_accuracy"] for log in logs if "eval_accuracy" in log][
        0
    ] * 13 == pytest.approx(
        round([log["eval_accuracy"] for log in logs if "eval_accuracy" in log][0] * 13)
    )


# ---- Scores of texts, centring, accuracy ----


def test_texts_are_scored_in_the_order_given(trained, tokenizer, pairs):
    model, some = trained().model.train(), pairs.select(range(20))
    together = score_texts(model, tokenizer, some["prompt"], some["chosen"], batch_size=6)
    alone = torch.cat(
        [score_texts(model, tokenizer, [p], [c]) for p, c in zip(some["prompt"], some["chosen"])]
    )
    assert torch.allclose(together, alone, atol=1e-5) and model.training


# catches: a centre that is added, applied twice when found again, or lost in the file
def test_references_average_zero(trained, tokenizer, world, tmp_path):
    model, some = trained().model, world["validation"]
    before, center = (
        score_texts(model, tokenizer, some["prompt"], some["completion"]),
        center_rewards(model, tokenizer, some),
    )
    assert center == pytest.approx(before.mean().item(), abs=1e-6) and center_rewards(
        model, tokenizer, some
    ) == pytest.approx(center, abs=1e-6)
    after = score_texts(model, tokenizer, some["prompt"], some["completion"])
    assert torch.allclose(after, before - center, atol=1e-5) and abs(after.mean()) < 1e-5
    model.save_pretrained(tmp_path)
    assert torch.allclose(
        score_texts(load_scorer(str(tmp_path)), tokenizer, some["prompt"], some["completion"]),
        after,
        atol=1e-6,
    )


# catches: accuracy by the noisy label where gold is known; ties counted
def test_accuracy_goes_by_gold(trained, tokenizer, pairs):
    model, some = (
        trained().model,
        pairs.select(range(10)).remove_columns(["gold_chosen", "gold_rejected"]),
    )
    right = pair_accuracy(model, tokenizer, some)
    gold = lambda a, b: some.add_column("gold_chosen", [float(a)] * 10).add_column(
        "gold_rejected", [float(b)] * 10
    )
    assert torch.equal(pair_accuracy(model, tokenizer, gold(1, 0)), right) and torch.equal(
        pair_accuracy(model, tokenizer, gold(0, 1)), ~right
    )
    assert len(pair_accuracy(model, tokenizer, gold(1, 1))) == 0


# ---- The leak ----


def swapped(data: Dataset, coins: list[bool]) -> Dataset:
    """Chosen and rejected exchanged where the coin says so. Gold columns stay behind, for whoever
    would peek."""
    chosen, rejected = zip(
        *((b, a) if coin else (a, b) for a, b, coin in zip(data["chosen"], data["rejected"], coins))
    )
    return (
        data.remove_columns(["chosen", "rejected"])
        .add_column("chosen", list(chosen))
        .add_column("rejected", list(rejected))
    )


# catches: any path from the judge into training beside the labels (gold columns, the order of the
# rows, held-out pairs trained on)
@pytest.mark.weekly
def test_with_permuted_labels_nothing_is_learned(tmp_path):
    from rlhf_nb.training.model_loading import tiny_policy, train_tokenizer
    from rlhf_nb.world import mini_tldr

    world, kinds = mini_tldr(0, 4000, 1, 400), ("drop", "opening", "repeat")
    tokenizer = train_tokenizer(
        p + c for p, c in zip(world["train"]["prompt"], world["train"]["completion"])
    )
    labelled, held_out = (
        edit_pairs(world["train"], 0, noise=0.5, kinds=kinds),
        edit_pairs(world["test"], 1, kinds=kinds),
    )

    def accuracy(data: Dataset) -> float:
        "Of a model trained on these labels, by the gold order of held-out pairs."
        args = RewardConfig(
            output_dir=str(tmp_path),
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            logging_strategy="no",
            max_length=44,
            learning_rate=5e-3,
            per_device_train_batch_size=16,
            num_train_epochs=1,
        )
        model = scorer_from(
            tiny_policy(tokenizer, 1, hidden_size=32, num_hidden_layers=1, num_attention_heads=2), 1
        )
        RewardTrainer(model, args, data, processing_class=tokenizer).train()
        return pair_accuracy(model, tokenizer, held_out).float().mean().item()

    rng = random.Random(0)
    coins = [rng.random() < 0.5 for _ in labelled]
    heads, tails = (
        accuracy(swapped(labelled, coins)),
        accuracy(swapped(labelled, [not coin for coin in coins])),
    )
    assert accuracy(labelled) > 0.72
    # One random labelling prefers, say, longer answers by chance, and its mirror image the shorter
    # ones: together they know nothing.
    # With 400 pairs and 2 runs the mean of chance has a standard deviation of 0.02; the band is
    # 0.06 wide on either side.
    assert abs((heads + tails) / 2 - 0.5) < 0.06 and max(heads, tails) < 0.72


# catches: an answer that was cut off scored as if it had ended, which hides a policy that never
# stops
def test_an_answer_that_did_not_stop_is_scored_without_the_stop_token(trained, pairs, tokenizer):
    model, prompts, answers = trained().model, pairs["prompt"][:2], pairs["chosen"][:2]
    ended, cut = (
        score_texts(model, tokenizer, prompts, answers, stopped=flags)
        for flags in ([True, True], [True, False])
    )
    assert (
        torch.equal(ended, score_texts(model, tokenizer, prompts, answers))
        and ended[0] == cut[0]
        and ended[1] != cut[1]
    )


# catches: a tie counted as right
def test_a_tie_is_no_right_order(trained, pairs, tokenizer):
    some = pairs.select(range(4)).remove_columns(["chosen", "rejected"])
    tied = some.add_column("chosen", ["the same"] * 4).add_column("rejected", ["the same"] * 4)
    assert not pair_accuracy(trained().model, tokenizer, tied).any()


# ---- Forms of pairs ----

TEMPLATE = (
    "{% for m in messages %}{{ '[' + m.role + ']' + m.content }}{{ eos_token + '\\n' if "
    "m.role == 'assistant' }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def turn(role, content):
    return dict(role=role, content=content)


# catches: an implicit prompt cut inside a word or at a character, a stop token twice, conversations
# encoded otherwise than their text
def test_all_forms_of_a_pair_are_the_same_ids(pairs, tokenizer):
    chatty = copy.deepcopy(tokenizer)
    chatty.chat_template = TEMPLATE
    rows = [
        dict(prompt=p, chosen=c, rejected=r)
        for p, c, r in zip(pairs["prompt"], pairs["chosen"], pairs["rejected"])
    ][:40]
    opened = lambda p: [turn("user", p)]
    forms = dict(
        explicit=[
            dict(
                prompt=f"[user]{r['prompt']}[assistant]", chosen=r["chosen"], rejected=r["rejected"]
            )
            for r in rows
        ],
        talk=[
            dict(
                prompt=opened(r["prompt"]),
                chosen=[turn("assistant", r["chosen"])],
                rejected=[turn("assistant", r["rejected"])],
            )
            for r in rows
        ],
        short=[
            dict(prompt=opened(r["prompt"]), chosen=r["chosen"], rejected=r["rejected"])
            for r in rows
        ],
        whole_talk=[
            {
                name: [*opened(r["prompt"]), turn("assistant", r[name])]
                for name in ("chosen", "rejected")
            }
            for r in rows
        ],
        whole=[
            {name: f"[user]{r['prompt']}[assistant]{r[name]}" for name in ("chosen", "rejected")}
            for r in rows
        ],
    )
    found = {name: encode_pairs(Dataset.from_list(form), chatty)[:] for name, form in forms.items()}
    assert all(form == found["explicit"] for form in found.values())
    assert all(ids.count(chatty.eos_token_id) == 1 for ids in found["talk"]["chosen_ids"])
    model = scorer_from(tiny_of(chatty), 0)
    right = {
        name: pair_accuracy(model, chatty, Dataset.from_list(form)).tolist()
        for name, form in forms.items()
    }
    assert all(form == right["explicit"] for form in right.values())


def tiny_of(tokenizer):
    from rlhf_nb.training.model_loading import tiny_policy

    return tiny_policy(tokenizer, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)


# catches: an answer taken for a prompt and cut away where one answer is the beginning of the other
def test_an_implicit_prompt_is_what_both_share(letters):
    row = encode_pairs(Dataset.from_dict(dict(chosen=["abc"], rejected=["abcd"])), letters)[0]
    assert row["chosen_ids"] == [2, 3, 4, 1] and row["rejected_ids"] == [2, 3, 4, 5, 1]
    cut = encode_pairs(Dataset.from_dict(dict(chosen=["aaabc"], rejected=["aaade"])), letters, 4)[0]
    assert cut["chosen_ids"] == [2, 3, 4, 1] and cut["rejected_ids"] == [2, 5, 6, 1]


@pytest.mark.parametrize(
    "changes, complaint",
    [
        (dict(rejected="abc"), "row 1: chosen and rejected are the same"),
        (dict(chosen=""), "row 1: chosen is empty"),
        (dict(rejected=None), r"row 1: rejected is missing \(None\)"),
        (dict(prompt=""), "row 1: prompt is empty"),
        (dict(prompt=None), "row 1: prompt is missing"),
        (
            dict(chosen="abcdefgh"),
            "row 1: an answer has 9 tokens .* max_length is 8: raise max_length",
        ),
        (dict(margin=-1.0), "row 1: its margin is -1"),
        (dict(margin=math.inf), "row 1: its margin is inf"),
        (dict(margin=None), "row 1: its margin is None"),
    ],
)
def test_rows_that_cannot_teach_are_named(letters, tiny, small_args, changes, complaint):
    good = dict(prompt="j", chosen="abc", rejected="abd", margin=1.0)
    data = Dataset.from_list([good, good | changes])
    with pytest.raises(ValueError, match=complaint):
        RewardTrainer(tiny_of(letters), small_args(RewardConfig, max_length=8), data, None, letters)
    with pytest.raises(ValueError, match=complaint):
        RewardTrainer(tiny_of(letters), small_args(RewardConfig, max_length=8), None, data, letters)


# catches: a data set whose prompts are in a column of another name, trained on answers without
# their prompts
def test_answers_without_a_prompt_are_named(letters):
    with pytest.raises(ValueError, match="row 0: there is no column prompt.*rename"):
        encode_pairs(
            Dataset.from_dict(dict(question=["j"], chosen=["abc"], rejected=["cba"])), letters
        )


def test_a_row_beyond_the_positions_is_named(tokenizer, pairs, small_args, tiny):
    with pytest.raises(ValueError, match="40 positions: set max_length=40"):
        RewardTrainer(
            tiny(max_position_embeddings=40), small_args(RewardConfig), pairs, None, tokenizer
        )


# ---- Margin ----


# catches: a margin dropped on the way to the loss (a column Trainer removes), repeated for both
# halves, or with the wrong sign
def test_the_margin_reaches_the_loss(trained, tokenizer, pairs, small_args, tiny):
    some = pairs.select(range(13)).select_columns(["prompt", "chosen", "rejected"])
    margins = [float(i % 4) for i in range(13)]
    trainer = RewardTrainer(
        scorer_from(tiny(), 0),
        small_args(RewardConfig, per_device_eval_batch_size=5),
        some,
        some.add_column("margin", margins),
        tokenizer,
    )
    chosen, rejected = (
        score_texts(trainer.model, tokenizer, some["prompt"], some[name]).double().numpy()
        for name in ("chosen", "rejected")
    )
    assert trainer.evaluate()["eval_loss"] == pytest.approx(
        np.log1p(np.exp(rejected + np.array(margins) - chosen)).mean(), abs=1e-5
    )
    assert trainer.evaluate(trainer.train_dataset)["eval_loss"] == pytest.approx(
        np.log1p(np.exp(rejected - chosen)).mean(), abs=1e-5
    )


# ---- Calibration ----


# catches: probabilities of the chosen answer instead of the preferred one (always observed), bins
# over 0 to 1, unweighted bins, ties as wrong
def test_calibration_by_hand():
    rng = np.random.default_rng(0)
    chosen, rejected = rng.normal(size=(2, 500)) * 2
    sure, right = 1 / (1 + np.exp(-np.abs(chosen - rejected))), chosen > rejected
    edges = np.linspace(0.5, 1, 8)
    error = sum(
        abs(sure[inside].mean() - right[inside].mean()) * inside.mean()
        for low, high in pairwise(edges)
        if (inside := (sure >= low) & (sure < high)).any()
    )
    table = calibration(torch.tensor(chosen), torch.tensor(rejected), bins=7)
    assert (
        calibration_error(table) == pytest.approx(error, abs=1e-9)
        and table.pairs.sum() == 500
        and table.predicted.between(0.5, 1).all()
    )
    assert (
        calibration_error(calibration(torch.zeros(5), torch.zeros(5))) == 0
        and len(calibration(torch.tensor([1e4]), torch.zeros(1))) == 1
    )
    with pytest.raises(ValueError, match="1 of 2 pairs"):
        calibration(torch.tensor([1.0, float("nan")]), torch.zeros(2))


# catches: a measure that depends on which answer comes first
def test_a_model_that_says_what_happens_is_calibrated():
    generator = torch.Generator().manual_seed(0)
    gap = torch.randn(20000, generator=generator) * 2
    gap = torch.where(
        torch.rand(20000, generator=generator) < gap.abs().sigmoid(), gap.abs(), -gap.abs()
    )
    error = lambda k: calibration_error(calibration(k * gap, torch.zeros(20000)))
    assert error(1) < 0.015 and error(2) > 0.04 and error(0.5) > 0.04
    axis = calibration_plot(calibration(gap, torch.zeros(20000))).axes[0]
    assert (
        axis.get_xlabel().startswith("predicted")
        and axis.get_ylabel().startswith("observed")
        and "0.0" in axis.get_title()
    )


def test_evaluation_measures_calibration(trained, tokenizer, pairs):
    trainer, some = trained(per_device_eval_batch_size=5), pairs.select(range(13))
    both = [
        score_texts(trainer.model, tokenizer, some["prompt"], some[name])
        for name in ("chosen", "rejected")
    ]
    assert trainer.evaluate()["eval_calibration_error"] == pytest.approx(
        calibration_error(calibration(*both)), abs=1e-5
    )
    nothing = torch.full((3, 2), float("nan"))
    assert math.isnan(trainer.measure(EvalPrediction(nothing, None))["calibration_error"])


# ---- Labels the wrong way round ----


@pytest.mark.parametrize(
    "wrong, pairs, told",
    [
        (100, 100, True),
        (50, 100, False),
        (69, 100, False),
        (71, 100, True),
        (5, 5, False),
        (590, 1000, False),
        (610, 1000, True),
        (0, 0, False),
    ],
)
def test_far_below_half_is_said(wrong, pairs, told):
    scores = torch.tensor([0.0] * wrong + [2.0] * (pairs - wrong))
    assert (reversed_labels(scores, torch.ones(pairs)) is not None) == told


# catches: no word, or one at every evaluation; a word about ties; a word about the opinion that a
# new head was born with
def test_reversed_labels_are_told_once(tiny, tokenizer, pairs, small_args):
    rows = pairs.select_columns(["prompt", "chosen", "rejected"])
    short = lambda better, worse: Dataset.from_list(
        [
            dict(prompt=r["prompt"], **{better: " my cat", worse: " my cat my cat my cat"})
            for r in rows
        ]
    )
    args = small_args(RewardConfig, max_steps=15, learning_rate=1e-2, per_device_train_batch_size=8)
    trainer = RewardTrainer(
        scorer_from(tiny()),
        args,
        short("chosen", "rejected"),
        short("rejected", "chosen"),
        tokenizer,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.warn_if_reversed(torch.zeros(100), torch.zeros(100))
    trainer.train()
    with pytest.warns(UserWarning, match="swapped") as told:
        trainer.evaluate()
        trainer.evaluate()
    assert len([w for w in told if "swapped" in str(w.message)]) == 1
    args = small_args(
        RewardConfig,
        max_steps=15,
        learning_rate=1e-6,
        per_device_train_batch_size=8,
        logging_steps=5,
    )
    known = RewardTrainer(
        trainer.model, args, short("rejected", "chosen"), None, tokenizer
    )  # a good model, meeting reversed labels
    with pytest.warns(UserWarning, match="swapped"):
        known.train()


# ---- Heads ----


# catches: a head as wide as the rest of the model was initialised (0.08, 0.02), another at every
# load, a trained head thrown away
@pytest.mark.parametrize("kind", ["gpt_neox", "llama", "gpt2"])
def test_a_new_head_is_as_wide_as_it_should_be(kind, tokenizer, tmp_path):
    from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig, LlamaConfig

    ids = dict(vocab_size=len(tokenizer), pad_token_id=0, bos_token_id=None, eos_token_id=1)
    small = dict(hidden_size=256, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    policy = AutoModelForCausalLM.from_config(
        dict(
            gpt_neox=GPTNeoXConfig(**ids, **small),
            llama=LlamaConfig(**ids, **small),
            gpt2=GPT2Config(**ids, n_embd=256, n_layer=1, n_head=2),
        )[kind]
    )
    policy.save_pretrained(tmp_path / "policy")
    for source in (policy, str(tmp_path / "policy")):
        made = load_reward_model(source, 3)
        weights = [
            scorer_head(model).weight
            for model in (made, load_reward_model(source, 3), load_reward_model(source, 4))
        ]
        assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
        assert weights[0].std().item() == pytest.approx(257**-0.5, rel=0.2)
    assert torch.equal(made.get_input_embeddings().weight, policy.get_input_embeddings().weight)
    made.save_pretrained(tmp_path / "reward")
    torch.nn.init.constant_(scorer_head(made).weight, 0.25)
    made.save_pretrained(tmp_path / "reward")
    assert (
        torch.equal(
            scorer_head(load_reward_model(str(tmp_path / "reward"), 3)).weight,
            scorer_head(made).weight,
        )
        and load_reward_model(made) is made
    )


def test_a_classifier_of_two_labels_is_refused(tiny):
    from transformers import AutoModelForSequenceClassification

    with pytest.raises(ValueError, match="num_labels=2"):
        load_reward_model(AutoModelForSequenceClassification.from_config(tiny().config))


# ---- Saving, resuming, adapters ----


# catches: a score read elsewhere in training than in use; a bypassed forward (no autocast, no DDP,
# no adapter)
def test_training_reads_what_sequence_scores_reads(trained, tokenizer):
    trainer = trained()
    trainer.model.config.reward_center = 0.7
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(9)])
    assert torch.equal(
        trainer.scores(trainer.model, **batch), sequence_scores(trainer.model, **batch)
    )
    calls = []
    trainer.model.register_forward_hook(lambda *_: calls.append(1))
    trainer.compute_loss(trainer.model, batch)
    assert calls


# catches: a folder that only this package can load, a centre lost on the way, a checkpoint without
# a card
def test_what_is_saved_loads_with_transformers_alone(trained, tokenizer, world, tmp_path):
    from transformers import AutoModelForSequenceClassification

    trainer, some = (
        trained(save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=1),
        world["validation"],
    )
    trainer.train()
    center_rewards(trainer.model, tokenizer, some)
    trainer.save_model(str(tmp_path / "final"))
    again = AutoModelForSequenceClassification.from_pretrained(
        str(tmp_path / "final"), num_labels=1
    )
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(9)])
    assert torch.allclose(
        again.eval()(**batch).logits, trainer.model.eval()(**batch).logits, atol=1e-6
    )
    assert (
        torch.allclose(
            sequence_scores(again, **batch), sequence_scores(trainer.model, **batch), atol=1e-6
        )
        and again.config.reward_center != 0
    )
    for folder in (
        tmp_path / "final",
        tmp_path / "run" / "checkpoint-2",
        tmp_path / "run" / "checkpoint-3",
    ):
        card = (folder / "README.md").read_text()
        assert (
            card.startswith("---\nlibrary_name: transformers\n")
            and f"# {folder.name}\n" in card
            and "| eval_accuracy |" in card
            and str(tmp_path) not in card
        )


def equal(a, b):
    return all(
        torch.equal(x, y)
        for x, y in zip(a.model.state_dict().values(), b.model.state_dict().values())
    )


# catches: optimizer, order of the rows, random state or head lost on resuming
@pytest.mark.parametrize(
    "strategy",
    ["group_by_length", "random", pytest.param("sequential", marks=pytest.mark.slow)],
)
def test_a_resumed_run_is_the_same_bit_for_bit(trained, pairs, tmp_path, strategy):
    def go(resume=None):
        trainer = trained(
            pairs.select(range(40)),
            max_steps=9,
            save_strategy="steps",
            save_steps=3,
            center_rewards_coefficient=0.01,
            train_sampling_strategy=strategy,
            learning_rate=1e-3,
        )
        if resume:
            torch.nn.init.normal_(scorer_head(trainer.model).weight)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = go()
    tail = lambda t: [
        (log["loss"], log["accuracy"], log["margin"])
        for log in t.state.log_history
        if "loss" in log
    ][-3:]
    for step in (3, 6):  # in the first epoch of 5 steps, and in the second
        resumed = go(str(tmp_path / "run" / f"checkpoint-{step}"))
        assert equal(whole, resumed) and tail(whole) == tail(resumed)


# catches: a best checkpoint under the name that it has while it is written, other weights at the end
def test_the_best_checkpoint_is_named_and_loaded(trained):
    best = dict(greater_is_better=True, metric_for_best_model="eval_loss", **BEST)
    trainer = trained(max_steps=6, learning_rate=0.5, **best)
    trainer.train()  # the loss falls: the "best" step is the first, whose weights are not the last
    check_best(trainer, "eval_loss", largest=True)


# catches: a checkpoint that is half written and looks whole, a resume from one that is damaged
def test_a_damaged_checkpoint_is_refused_by_name(trained):
    check_damaged(trained)


# catches: a head that is not trained or not saved, a base that moves, a centre that an adapter's
# folder has no place for
def test_an_adapter_is_trained_saved_and_resumed_alone(
    tiny, tokenizer, pairs, world, small_args, tmp_path
):
    base, data = str(tmp_path / "base"), pairs.select_columns(["prompt", "chosen", "rejected"])
    scorer_from(tiny()).save_pretrained(base)

    def make(config, **settings):
        args, tests = small_args(RewardConfig, **settings), data.select(range(13))
        return RewardTrainer(base, args, data, tests, tokenizer, peft_config=config)

    folder, some = tmp_path / "adapter", world["validation"]
    trainer = check_adapter(make, folder, "CAUSAL_LM")
    assert {"eval_accuracy", "eval_calibration_error"} <= set(trainer.evaluate())
    center = center_rewards(trainer.model, tokenizer, some)
    trainer.save_model(str(folder))
    score = lambda model: score_texts(model, tokenizer, some["prompt"], some["completion"])
    again, before = load_reward_model(str(folder)), load_scorer(base)
    assert again.config.reward_center == center
    assert torch.allclose(score(again), score(trainer.model), atol=1e-5)
    peft = pytest.importorskip("peft")
    plain = peft.AutoPeftModelForSequenceClassification.from_pretrained(str(folder), num_labels=1)
    assert torch.allclose(score(plain), score(trainer.model) + center, atol=1e-6)
    embedding = lambda model: model.get_input_embeddings().weight
    assert torch.equal(embedding(before), embedding(trainer.model))
    head = trainer.model.base_model.model.score.modules_to_save["default"].weight
    assert not torch.equal(scorer_head(before).weight, head)


# catches: rows over max_length scored whole, or cut on the right
def test_texts_are_cut_on_their_left(trained, tokenizer, pairs):
    model, (prompt, answer) = trained().model, (pairs["prompt"][0], pairs["chosen"][0])
    answer_length = len(tokenizer(answer, add_special_tokens=False).input_ids)
    ids = tokenizer(prompt, add_special_tokens=False).input_ids[-5:]
    assert score_texts(
        model, tokenizer, [prompt], [answer], max_length=answer_length + 6
    ).item() == pytest.approx(
        score_texts(model, tokenizer, [tokenizer.decode(ids)], [answer]).item(), abs=1e-6
    )
    with pytest.raises(ValueError, match="raise max_length"):
        score_texts(model, tokenizer, [prompt], [answer], max_length=answer_length)


def test_centring_asks_for_references(trained, tokenizer, world):
    for bad in (world["validation"].remove_columns("completion"), world["validation"].select([])):
        with pytest.raises(ValueError, match="give prompt and completion"):
            center_rewards(trained().model, tokenizer, bad)


# ---- Two processes ----

WORKER = textwrap.dedent(
    """
    import os, sys, torch, torch.distributed as dist
    from datasets import Dataset
    from rlhf_nb.models import scorer_from
    from rlhf_nb.reward import RewardConfig, RewardTrainer
    from rlhf_nb.training.model_loading import tiny_policy, train_tokenizer
    from rlhf_nb.world import edit_pairs, mini_tldr
    world = mini_tldr(0, 40, 1, 1)
    pairs = edit_pairs(world["train"], 0).select_columns(["prompt", "chosen", "rejected"]).select(range(32))
    tokenizer = train_tokenizer(a + b for a, b in zip(pairs["prompt"], pairs["chosen"]))
    size = 16 // int(os.environ.get("WORLD_SIZE", 1))
    args = RewardConfig(sys.argv[1], use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True, logging_steps=1, max_steps=2, learning_rate=1e-2, optim="sgd",
                        per_device_train_batch_size=size, per_device_eval_batch_size=size, train_sampling_strategy="sequential", max_grad_norm=0, lr_scheduler_type="constant")
    model = scorer_from(tiny_policy(tokenizer, hidden_size=16, num_hidden_layers=1, num_attention_heads=2))
    trainer = RewardTrainer(model, args, pairs, pairs.select(range(13)), tokenizer)
    trainer.train()
    found = trainer.evaluate()
    names = ("accuracy", "margin", "min_reward", "mean_reward", "max_reward")
    logs = [[log[name] for name in names] for log in trainer.state.log_history if "loss" in log]
    if int(os.environ.get("RANK", 0)) == 0:
        torch.save(dict(logs=logs, found=[found[f"eval_{name}"] for name in (*names, "calibration_error")], weights=[p.detach() for p in trainer.model.parameters()]), sys.argv[1] + ".pt")
    if dist.is_initialized(): dist.barrier()
    os._exit(0)
    """
)


# catches: metrics of one rank taken for all, a forward that goes round DDP (it has no such
# attribute, or gradients stay unreduced)
@pytest.mark.skipif(sys.platform != "linux", reason="torchrun with gloo on one machine")
def test_two_processes_measure_what_one_does(tmp_path):
    (tmp_path / "worker.py").write_text(WORKER)
    for name, ranks in dict(one=1, two=2).items():
        done = forks.run(
            tmp_path / "worker.py",
            str(tmp_path / name),
            folder=tmp_path,
            ranks=ranks,
            ACCELERATE_USE_CPU="true",
        )
        assert (tmp_path / f"{name}.pt").exists(), done.stdout[-3000:]
    one, two = (torch.load(tmp_path / f"{name}.pt") for name in ("one", "two"))
    assert np.allclose(one["logs"], two["logs"], atol=1e-5) and np.allclose(
        one["found"], two["found"], atol=1e-5
    )
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(one["weights"], two["weights"]))


# ---- Files of labels ----


# catches: a choice that was taken back and is learned because its line went into another split, a
# shuffle that takes back somebody else's
@pytest.mark.parametrize(
    "rows, said",
    [([0, 2, 3], "row 1 takes back a choice for pair 1"), ([2, 0, 1, 3], "row 0 takes back")],
)
def test_label_lines_out_of_order(rows, said):
    keys = [("1", 0), ("2", 1), ("undo", 1), ("2", 1)]
    lines = Dataset.from_list(
        [
            dict(chosen=f"{key}{i}", rejected="-", choice=key, again=False, pair=pair)
            for i, (key, pair) in enumerate(keys)
        ]
    )
    assert decided_pairs(lines)["chosen"][:] == ["10", "23"]
    with pytest.raises(ValueError, match=said):
        decided_pairs(lines.select(rows))


# catches: a mean of micro-batches' means, in which the pairs of a small last one count more
def test_each_pair_of_a_step_counts_alike(tiny, tokenizer, pairs, small_args):
    seen = []

    class Looks(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **_):
            seen.append([p.grad.clone() for p in model.parameters()])

    rows = pairs.select(range(7)).select_columns(["prompt", "chosen", "rejected"])
    args = small_args(
        RewardConfig,
        max_steps=1,
        per_device_train_batch_size=3,  # 3, 3 and 1
        gradient_accumulation_steps=3,
        max_grad_norm=0,
        center_rewards_coefficient=0.1,
    )
    model = scorer_from(tiny())
    trainer = RewardTrainer(model, args, rows, None, tokenizer, callbacks=[Looks()])
    again = copy.deepcopy(trainer.model)
    trainer.train()
    scores = torch.stack(
        [
            torch.stack([sequence_scores(again, ids, torch.ones_like(ids))[0] for ids in both])
            for both in (
                [torch.tensor([row[f"{name}_ids"]]) for name in ("chosen", "rejected")]
                for row in encode_pairs(rows, tokenizer)
            )
        ]
    )
    gap = scores[:, 0] - scores[:, 1]
    loss = (torch.log1p(torch.exp(-gap)) + 0.1 * scores.sum(1).square()).sum() / 7
    right = torch.autograd.grad(loss, list(again.parameters()))
    for grad, wanted in zip(seen[0], right):
        torch.testing.assert_close(grad, wanted, rtol=1e-4, atol=1e-6)
    logged = trainer.state.log_history[0]
    assert logged["loss"] == pytest.approx(loss.item(), rel=1e-4)


# catches: a mean of batches' means, raw pairs that predict cannot read
def test_the_loss_of_an_evaluation_is_a_mean_over_pairs(trained, tokenizer, pairs):
    trainer, rows = trained(), pairs.select(range(13))
    prompts, *answers = (list(rows[name]) for name in ("prompt", "chosen", "rejected"))
    chosen, rejected = (
        score_texts(trainer.model, tokenizer, prompts, part).double() for part in answers
    )
    right = torch.log1p(torch.exp(rejected - chosen)).mean().item()
    for size in (1, 4, 13):
        trainer.args.per_device_eval_batch_size = size
        assert len(trainer.get_eval_dataloader()) == -(-13 // size)
        assert trainer.evaluate()["eval_loss"] == pytest.approx(right, rel=1e-5)
        done = trainer.predict(rows.select_columns(["prompt", "chosen", "rejected"]))
        assert done.metrics["test_loss"] == pytest.approx(right, rel=1e-5)
        torch.testing.assert_close(
            torch.tensor(done.predictions), torch.stack([chosen, rejected], 1).float()
        )
