"""Preferences: the loss and the scores by hand, padding, centring, reward functions, and the proof
that nothing but the labels carries the judge's opinion."""

import copy
import math
import random
import warnings
from functools import partial
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from datasets import Dataset
from ppo_fixtures import BEST, check_adapter, check_best, check_damaged, unlike, weights
from small_runs import TEMPLATE, turn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    EvalPrediction,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    TrainerCallback,
)

from rlhf_nb.base.encoding import ANSWERS
from rlhf_nb.masks import left_pad, right_pad
from rlhf_nb.models import scorer_from, scorer_head, sequence_scores
from rlhf_nb.preferences import bradley_terry_loss, calibration, calibration_error, pair_batch
from rlhf_nb.reward import RewardConfig, RewardTrainer, decided_pairs, encode_pairs, reversed_labels
from rlhf_nb.scoring import center_rewards, pair_accuracy, score_texts
from rlhf_nb.training.model_loading import (
    load_reward_model,
    load_scorer,
    tiny_policy,
    train_tokenizer,
)
from rlhf_nb.ui.plots import calibration_plot
from rlhf_nb.world import edit_pairs, mini_tldr


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


def test_loss_by_hand():
    nats = lambda gap: math.log1p(math.exp(-gap))
    for chosen, rejected, margin, wanted in (
        (0, 0, 0, math.log(2)),
        (2, 0, 0, nats(2)),
        (0, 2, 0, nats(-2)),
        (2, 0, 1.5, nats(0.5)),
        (0, 1000, 0, 1000),
        (1000, 0, 0, 0),
    ):
        scores = torch.tensor([float(chosen), float(rejected)], requires_grad=True)
        loss = bradley_terry_loss(*scores.chunk(2), margin)
        loss.sum().backward()
        assert loss.item() == pytest.approx(wanted, abs=1e-6)
        assert scores.grad.isfinite().all() and scores.grad[0] <= 0 <= scores.grad[1]


def test_encoding_by_hand(pairs, tokenizer):
    ids = lambda text: tokenizer(text, add_special_tokens=False).input_ids
    for row, found in zip(pairs.select(range(30)), encode_pairs(pairs, tokenizer)):
        prompt, *answers = (ids(row[name]) for name in ("prompt", "chosen", "rejected"))
        both = [prompt + answer + [tokenizer.eos_token_id] for answer in answers]
        assert [found["chosen_ids"], found["rejected_ids"]] == both
        assert found["length"] == max(map(len, both))


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
    chosen, rejected = ([3, 4, 1], [5, 1]), ([3, 1], [5, 6, 7, 1])
    rows = [dict(chosen_ids=a, rejected_ids=b) for a, b in zip(chosen, rejected)]
    batch = pair_batch(rows, 0)
    assert batch["input_ids"].tolist() == [[3, 4, 1, 0], [5, 1, 0, 0], [3, 1, 0, 0], [5, 6, 7, 1]]
    assert batch["attention_mask"].sum(1).tolist() == [3, 2, 2, 4]


# catches: a score read at the last column, at a pad, or one token early; positions that count
# padding
def test_scores_do_not_see_padding(tiny):
    model, rows = scorer_from(tiny(), 1), [[5, 6, 7, 8, 9, 1], [4, 1], [0, 3, 0, 1]]
    score = lambda row: sequence_scores(model, torch.tensor([row]), torch.ones(1, len(row)))
    alone = torch.cat([*map(score, rows)])
    for pad, pad_id, wider in product((left_pad, right_pad), (0, 11), ([], [[2] * 15])):
        together = sequence_scores(model, *pad(rows + wider, pad_id))[:3]
        assert torch.allclose(together, alone, atol=1e-5)
    hidden = model.base_model(torch.tensor([rows[0]])).last_hidden_state[0, -1]
    by_hand = (scorer_head(model).weight[0] @ hidden).item()
    assert alone[0].item() == pytest.approx(by_hand, abs=1e-5)


# catches: a mean of batches' means, in the loss or a metric; a margin dropped on the way to the loss
# (a column Trainer removes), repeated for both halves, or with the wrong sign; raw pairs that
# predict cannot read
@pytest.mark.parametrize("size", [1, 5, 13])
def test_an_evaluation_by_hand(trained, tokenizer, pairs, size):
    trainer = trained(per_device_eval_batch_size=size, center_rewards_coefficient=0.1)
    some = pairs.select(range(13)).select_columns(["prompt", "chosen", "rejected"])
    scores = [score_texts(trainer.model, tokenizer, some["prompt"], some[name]) for name in ANSWERS]
    chosen, rejected = (x.double().numpy() for x in scores)
    margins = np.arange(13.0) % 4
    for margin, data in ((0.0, some), (margins, some.add_column("margin", margins.tolist()))):
        each = np.log1p(np.exp(rejected + margin - chosen)) + 0.1 * (chosen + rejected) ** 2
        wanted = dict(
            accuracy=(chosen > rejected).mean(),
            margin=(chosen - rejected).mean(),
            min_reward=min(chosen.min(), rejected.min()),
            mean_reward=(chosen.mean() + rejected.mean()) / 2,
            max_reward=max(chosen.max(), rejected.max()),
            calibration_error=calibration_error(calibration(*scores)),
        )
        done = trainer.predict(data)
        assert {k: done.metrics[f"test_{k}"] for k in wanted} == pytest.approx(wanted, abs=1e-5)
        assert done.metrics["test_loss"] == pytest.approx(each.mean(), rel=1e-5)
        assert trainer.evaluate(data)["eval_loss"] == pytest.approx(each.mean(), rel=1e-5)
        torch.testing.assert_close(torch.tensor(done.predictions), torch.stack(scores, 1))
    assert len(trainer.get_eval_dataloader()) == -(-13 // size)
    nothing = torch.full((3, 2), float("nan"))
    assert math.isnan(trainer.measure(EvalPrediction(nothing, None))["calibration_error"])


# ---- Scores of texts, centring, accuracy ----


# catches: an answer that was cut off scored as if it had ended, which hides a policy that never
# stops; rows over max_length scored whole, or cut on the right
def test_texts_are_scored_as_they_are(trained, tokenizer, pairs):
    model = trained().model.train()
    prompts, answers = pairs["prompt"][:20], pairs["chosen"][:20]
    score = partial(score_texts, model, tokenizer)
    together = score(prompts, answers, batch_size=6)
    alone = torch.cat([score([p], [c]) for p, c in zip(prompts, answers)])
    assert torch.allclose(together, alone, atol=1e-5) and model.training
    cut = score(prompts[:2], answers[:2], stopped=[True, False])
    assert cut[0] == score(prompts[:2], answers[:2])[0] and (cut - together[:2]).abs()[1] > 1e-4
    ids = lambda text: tokenizer(text, add_special_tokens=False).input_ids
    fits = len(ids(answers[0])) + 6  # five tokens of the prompt, and the stop token
    short = tokenizer.decode(ids(prompts[0])[-5:])
    torch.testing.assert_close(
        score(prompts[:1], answers[:1], max_length=fits), score([short], answers[:1])
    )
    with pytest.raises(ValueError, match="raise max_length"):
        score(prompts[:1], answers[:1], max_length=fits - 6)


# catches: a centre that is added, applied twice when found again, or lost in the file
def test_references_average_zero(trained, tokenizer, world, tmp_path):
    model, some = trained().model, world["validation"]
    score = lambda model: score_texts(model, tokenizer, some["prompt"], some["completion"])
    before = score(model)
    for _ in range(2):
        center = center_rewards(model, tokenizer, some)
        assert center == pytest.approx(before.mean().item(), abs=1e-6)
    after = score(model)
    assert torch.allclose(after, before - center, atol=1e-5) and abs(after.mean()) < 1e-5
    model.save_pretrained(tmp_path)
    assert torch.allclose(score(load_scorer(str(tmp_path))), after, atol=1e-6)
    for bad in (some.remove_columns("completion"), some.select([])):
        with pytest.raises(ValueError, match="give prompt and completion"):
            center_rewards(model, tokenizer, bad)


# catches: accuracy by the noisy label where gold is known; ties counted, of gold or of scores
def test_accuracy_goes_by_gold(trained, tokenizer, pairs):
    model, some = trained().model, pairs.select(range(10)).select_columns(["prompt", *ANSWERS])
    right = pair_accuracy(model, tokenizer, some)
    for (better, worse), wanted in {(1.0, 0.0): right, (0.0, 1.0): ~right, (1.0, 1.0): []}.items():
        gold = some.add_column("gold_chosen", [better] * 10)
        gold = gold.add_column("gold_rejected", [worse] * 10)
        assert pair_accuracy(model, tokenizer, gold).tolist() == [*wanted]
    tied = some.remove_columns("rejected").add_column("rejected", some["chosen"][:])
    assert not pair_accuracy(model, tokenizer, tied).any()


# ---- The leak ----


# catches: any path from the judge into training beside the labels (gold columns, the order of the
# rows, held-out pairs trained on)
@pytest.mark.weekly
def test_with_permuted_labels_nothing_is_learned(small_args):
    world, kinds = mini_tldr(0, 4000, 1, 400), ("drop", "opening", "repeat")
    train = world["train"]
    tokenizer = train_tokenizer(p + c for p, c in zip(train["prompt"], train["completion"]))
    labelled = edit_pairs(train, 0, noise=0.5, kinds=kinds)
    held_out = edit_pairs(world["test"], 1, kinds=kinds)

    def accuracy(coins: list[bool]) -> float:
        """By the gold order of held-out pairs, of a model that was trained with the labels exchanged
        where the coin says so. Gold columns stay behind, for whoever would peek."""
        rows = zip(labelled["chosen"], labelled["rejected"], coins)
        both = zip(*((b, a) if coin else (a, b) for a, b, coin in rows))
        data = labelled.remove_columns(ANSWERS)
        for name, column in zip(ANSWERS, both):
            data = data.add_column(name, list(column))
        sizes = dict(per_device_train_batch_size=16, num_train_epochs=1)
        args = small_args(
            RewardConfig, logging_strategy="no", max_length=44, learning_rate=5e-3, **sizes
        )
        small = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
        model = scorer_from(tiny_policy(tokenizer, 1, **small), 1)
        RewardTrainer(model, args, data, processing_class=tokenizer).train()
        return pair_accuracy(model, tokenizer, held_out).float().mean().item()

    rng = random.Random(0)
    coins = [rng.random() < 0.5 for _ in labelled]
    heads, tails = accuracy(coins), accuracy([not coin for coin in coins])
    assert accuracy([False] * len(labelled)) > 0.72
    # One random labelling prefers, say, longer answers by chance, and its mirror image the shorter
    # ones: together they know nothing.
    # With 400 pairs and 2 runs the mean of chance has a standard deviation of 0.02; the band is
    # 0.06 wide on either side.
    assert abs((heads + tails) / 2 - 0.5) < 0.06 and max(heads, tails) < 0.72


# ---- Forms of pairs ----


# catches: an implicit prompt cut inside a word or at a character, a stop token twice, conversations
# encoded otherwise than their text
def test_all_forms_of_a_pair_are_the_same_ids(pairs, tokenizer):
    chatty = copy.deepcopy(tokenizer)
    chatty.chat_template = TEMPLATE
    text = lambda row: f"[user]{row['prompt']}[assistant]"
    talk = lambda row: [turn("user", row["prompt"])]
    said = lambda answer: [turn("assistant", answer)]
    form = lambda make: Dataset.from_list([make(row) for row in pairs.select(range(40))])
    both = lambda make, row: {name: make(row[name]) for name in ANSWERS}
    forms = dict(
        explicit=form(lambda row: dict(prompt=text(row), **both(str, row))),
        talk=form(lambda row: dict(prompt=talk(row), **both(said, row))),
        short=form(lambda row: dict(prompt=talk(row), **both(str, row))),
        whole_talk=form(lambda row: both(lambda answer: talk(row) + said(answer), row)),
        whole=form(lambda row: both(lambda answer: text(row) + answer, row)),
    )
    found = {name: encode_pairs(data, chatty)[:] for name, data in forms.items()}
    assert all(data == found["explicit"] for data in found.values())
    assert all(ids.count(chatty.eos_token_id) == 1 for ids in found["talk"]["chosen_ids"])
    model = scorer_from(tiny_of(chatty), 0)
    right = [pair_accuracy(model, chatty, data).tolist() for data in forms.values()]
    assert all(one == right[0] for one in right)


def tiny_of(tokenizer):
    from rlhf_nb.training.model_loading import tiny_policy

    return tiny_policy(tokenizer, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)


# catches: an answer taken for a prompt and cut away where one answer is the beginning of the other;
# a data set whose prompts are in a column of another name, trained on answers without their prompts
def test_an_implicit_prompt_is_what_both_share(letters):
    made = lambda *more, **row: encode_pairs(Dataset.from_list([row]), letters, *more)[0]
    row = made(chosen="abc", rejected="abcd")
    assert row["chosen_ids"] == [2, 3, 4, 1] and row["rejected_ids"] == [2, 3, 4, 5, 1]
    cut = made(4, chosen="aaabc", rejected="aaade")
    assert cut["chosen_ids"] == [2, 3, 4, 1] and cut["rejected_ids"] == [2, 5, 6, 1]
    with pytest.raises(ValueError, match="row 0: there is no column prompt.*rename"):
        made(question="j", chosen="abc", rejected="cba")


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


def test_a_row_beyond_the_positions_is_named(tokenizer, pairs, small_args, tiny):
    with pytest.raises(ValueError, match="40 positions: set max_length=40"):
        RewardTrainer(
            tiny(max_position_embeddings=40), small_args(RewardConfig), pairs, None, tokenizer
        )


# ---- Calibration ----


# catches: probabilities of the chosen answer instead of the preferred one (always observed), bins
# over 0 to 1, unweighted bins, ties as wrong
def test_calibration_by_hand():
    chosen, rejected = np.random.default_rng(0).normal(size=(2, 500)) * 2
    sure, right = 1 / (1 + np.exp(-np.abs(chosen - rejected))), chosen > rejected
    edges = np.linspace(0.5, 1, 8)
    error = sum(
        abs(sure[inside].mean() - right[inside].mean()) * inside.mean()
        for low, high in pairwise(edges)
        if (inside := (sure >= low) & (sure < high)).any()
    )
    table = calibration(torch.tensor(chosen), torch.tensor(rejected), bins=7)
    assert calibration_error(table) == pytest.approx(error, abs=1e-9)
    assert table.pairs.sum() == 500
    assert table.predicted.between(0.5, 1).all()
    assert calibration_error(calibration(torch.zeros(5), torch.zeros(5))) == 0
    assert len(calibration(torch.tensor([1e4]), torch.zeros(1))) == 1
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
    assert axis.get_xlabel().startswith("predicted")
    assert axis.get_ylabel().startswith("observed")
    assert "0.0" in axis.get_title()


# ---- Labels the wrong way round ----


def test_far_below_half_is_said():
    told = [(100, 100), (71, 100), (610, 1000)]
    silent = [(50, 100), (69, 100), (5, 5), (590, 1000), (0, 0)]
    for wrong, pairs in told + silent:
        scores = torch.tensor([0.0] * wrong + [2.0] * (pairs - wrong))
        assert (reversed_labels(scores, torch.ones(pairs)) is not None) == ((wrong, pairs) in told)


# catches: no word, or one at every evaluation; a word about ties; a word about the opinion that a
# new head was born with
def test_reversed_labels_are_told_once(tiny, tokenizer, pairs, small_args):
    long = {"chosen": " my cat my cat my cat", "rejected": " my cat my cat my cat"}
    short = lambda better: Dataset.from_list(
        [dict(prompt=prompt, **long | {better: " my cat"}) for prompt in pairs["prompt"]]
    )
    settings = dict(max_steps=15, per_device_train_batch_size=8)
    args = small_args(RewardConfig, learning_rate=1e-2, **settings)
    trainer = RewardTrainer(
        scorer_from(tiny()), args, short("chosen"), short("rejected"), tokenizer
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.warn_if_reversed(torch.zeros(100), torch.zeros(100))
    trainer.train()
    with pytest.warns(UserWarning, match="swapped") as told:
        trainer.evaluate()
        trainer.evaluate()
    assert len([w for w in told if "swapped" in str(w.message)]) == 1
    args = small_args(RewardConfig, learning_rate=1e-6, logging_steps=5, **settings)
    known = RewardTrainer(trainer.model, args, short("rejected"), None, tokenizer)
    with pytest.warns(UserWarning, match="swapped"):  # a good model, meeting reversed labels
        known.train()


# ---- Heads ----


# catches: a head as wide as the rest of the model was initialised (0.08, 0.02), another at every
# load, a trained head thrown away, a classifier of two labels
@pytest.mark.parametrize("kind", ["gpt_neox", "llama", "gpt2"])
def test_a_new_head_is_as_wide_as_it_should_be(kind, tokenizer, tmp_path):
    ids = dict(vocab_size=len(tokenizer), pad_token_id=0, bos_token_id=None, eos_token_id=1)
    small = dict(hidden_size=256, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    configs = dict(
        gpt_neox=GPTNeoXConfig(**ids, **small),
        llama=LlamaConfig(**ids, **small),
        gpt2=GPT2Config(**ids, n_embd=256, n_layer=1, n_head=2),
    )
    policy, folder = AutoModelForCausalLM.from_config(configs[kind]), str(tmp_path / "reward")
    policy.save_pretrained(tmp_path / "policy")
    for source in (policy, str(tmp_path / "policy")):
        made = load_reward_model(source, 3)
        first, same, other = (
            scorer_head(model).weight
            for model in (made, load_reward_model(source, 3), load_reward_model(source, 4))
        )
        assert torch.equal(first, same) and not torch.equal(first, other)
        assert first.std().item() == pytest.approx(257**-0.5, rel=0.2)
    assert torch.equal(made.get_input_embeddings().weight, policy.get_input_embeddings().weight)
    torch.nn.init.constant_(scorer_head(made).weight, 0.25)
    made.save_pretrained(folder)
    assert (scorer_head(load_reward_model(folder, 3)).weight == 0.25).all()
    assert load_reward_model(made) is made
    with pytest.raises(ValueError, match="num_labels=2"):
        load_reward_model(AutoModelForSequenceClassification.from_config(policy.config))


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
    saves = dict(save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=1)
    trainer, final = trained(**saves), tmp_path / "final"
    trainer.train()
    center_rewards(trainer.model, tokenizer, world["validation"])
    trainer.save_model(str(final))
    again = AutoModelForSequenceClassification.from_pretrained(final, num_labels=1).eval()
    batch, ours = trainer.data_collator(list(trainer.train_dataset)[:9]), trainer.model.eval()
    assert torch.allclose(again(**batch).logits, ours(**batch).logits, atol=1e-6)
    both = [sequence_scores(model, **batch) for model in (again, ours)]
    assert torch.allclose(*both, atol=1e-6) and again.config.reward_center != 0
    run = tmp_path / "run"
    for folder in (final, run / "checkpoint-2", run / "checkpoint-3"):
        card = (folder / "README.md").read_text()
        assert card.startswith("---\nlibrary_name: transformers\n")
        assert f"# {folder.name}\n" in card and "| eval_accuracy |" in card
        assert str(tmp_path) not in card


# catches: optimizer, order of the rows, random state or head lost on resuming
@pytest.mark.parametrize(
    "strategy", ["group_by_length", "random", pytest.param("sequential", marks=pytest.mark.slow)]
)
def test_a_resumed_run_is_the_same_bit_for_bit(trained, pairs, tmp_path, strategy):
    saves = dict(max_steps=9, save_strategy="steps", save_steps=3, learning_rate=1e-3)
    how = dict(center_rewards_coefficient=0.01, train_sampling_strategy=strategy)

    def go(resume=None):
        trainer = trained(pairs.select(range(40)), **saves, **how)
        if resume:
            torch.nn.init.normal_(scorer_head(trainer.model).weight)
        trainer.train(resume_from_checkpoint=resume)
        logs = [log for log in trainer.state.log_history if "loss" in log][-3:]
        return weights(trainer), [[log[k] for k in ("loss", "accuracy", "margin")] for log in logs]

    whole, tail = go()
    for step in (3, 6):  # in the first epoch of 5 steps, and in the second
        resumed, last = go(str(tmp_path / "run" / f"checkpoint-{step}"))
        assert not unlike(whole, resumed) and tail == last


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


# ---- Files of labels ----


# catches: a choice that was taken back and is learned because its line went into another split, a
# shuffle that takes back somebody else's
def test_label_lines_out_of_order():
    lines = Dataset.from_list(
        [
            dict(chosen=f"{key}{i}", rejected="-", choice=key, again=False, pair=pair)
            for i, (key, pair) in enumerate([("1", 0), ("2", 1), ("undo", 1), ("2", 1)])
        ]
    )
    assert decided_pairs(lines)["chosen"][:] == ["10", "23"]
    for rows, said in (([0, 2, 3], "row 1 takes back a choice for pair 1"), ([2, 0, 1], "row 0")):
        with pytest.raises(ValueError, match=said):
            decided_pairs(lines.select(rows))


# catches: a mean of micro-batches' means, in which the pairs of a small last one count more;
# training metrics that leak from one log into the next
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
    alone = lambda ids: sequence_scores(again, torch.tensor([ids]), torch.ones(1, len(ids)))
    data = encode_pairs(rows, tokenizer)
    chosen, rejected = (torch.cat([*map(alone, data[f"{name}_ids"][:])]) for name in ANSWERS)
    gap, both = chosen - rejected, chosen + rejected
    loss = (torch.log1p(torch.exp(-gap)) + 0.1 * both.square()).sum() / 7
    for grad, wanted in zip(seen[0], torch.autograd.grad(loss, list(again.parameters()))):
        torch.testing.assert_close(grad, wanted, rtol=1e-4, atol=1e-6)
    logged = trainer.state.log_history[0]
    wanted = dict(loss=loss.item(), margin=gap.mean().item(), mean_reward=both.mean().item() / 2)
    assert {name: logged[name] for name in wanted} == pytest.approx(wanted, rel=1e-4)
    assert {"accuracy", "min_reward", "max_reward"} <= logged.keys()
    assert trainer.scores_since_log == []
