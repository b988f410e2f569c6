"""What counts in supervised fine-tuning: the completion and its stop token, nothing before and
nothing after, packed or padded, at once or resumed."""

import copy
import sys

import pytest
import torch
from datasets import Dataset, concatenate_datasets
from ppo_fixtures import BEST, check_adapter, check_best, check_damaged
from small_models import STILL, small_model
from small_runs import TEMPLATE, turn

from rlhf_nb.base.encoding import marked_pair
from rlhf_nb.sft import (
    SFTConfig,
    SFTTrainer,
    check_packing,
    completion_batch,
    encode_rows,
    fit_row,
    packed_batch,
    row_losses,
)


@pytest.fixture
def trained(tiny, tokenizer, world, small_args):
    def make(parts=None, **changes):
        data = world["train"].select_columns(["prompt", "completion"])
        return SFTTrainer(
            tiny(),
            small_args(
                SFTConfig,
                **dict(max_steps=3, per_device_train_batch_size=8, learning_rate=1e-2) | changes,
            ),
            data,
            data.select(range(13)),
            tokenizer,
            **(parts or {}),
        )

    return make


# catches: a stop token that is missing or comes twice, prompt and completion glued before they are
# cut into tokens
def test_encoding_by_hand(world, tokenizer):
    row, found = world["train"][0], encode_rows(world["train"], tokenizer)[0]
    prompt, answer = (
        tokenizer(row[name], add_special_tokens=False).input_ids
        for name in ("prompt", "completion")
    )
    assert found == dict(
        input_ids=prompt + answer + [tokenizer.eos_token_id],
        labels=[-100] * len(prompt) + answer + [tokenizer.eos_token_id],
        length=len(prompt) + len(answer) + 1,
    )


# catches: truncation on the right, which cuts the very token that teaches a model to stop
@pytest.mark.parametrize("spare", [1, 5, 1000])
def test_the_stop_token_is_never_cut(world, tokenizer, spare):
    whole = encode_rows(world["train"], tokenizer)
    learned = lambda row: [label for label in row["labels"] if label != -100]
    longest = max(len(learned(row)) for row in whole)
    for full, cut in zip(whole, encode_rows(world["train"], tokenizer, longest + spare)):
        assert cut["input_ids"] == full["input_ids"][-(longest + spare) :]
        assert cut["input_ids"][-1] == tokenizer.eos_token_id
        assert cut["length"] == len(cut["input_ids"]) and learned(cut) == learned(full)
    with pytest.raises(ValueError, match=f"max_length is {longest}: raise max_length"):
        encode_rows(world["train"], tokenizer, longest)


def test_an_empty_completion_still_teaches_to_stop(tokenizer):
    row = encode_rows(Dataset.from_dict(dict(prompt=["help"], completion=[""])), tokenizer)[0]
    labels = completion_batch([row], tokenizer.pad_token_id)["labels"][0]
    assert labels[labels != -100].tolist() == [tokenizer.eos_token_id]


@pytest.mark.parametrize(
    "rows, lacking",
    [(dict(prompt=["a"], answer=["b"]), "completion"), (dict(title=["a"]), "prompt")],
)
def test_a_missing_column_is_named(rows, lacking, tokenizer):
    with pytest.raises(ValueError, match=f"columns .*: supervised fine-tuning needs .*{lacking}"):
        encode_rows(Dataset.from_dict(rows), tokenizer)


# catches: labels one place off, labels on the prompt or on padding, a pad token in a completion
# taken for padding
def test_labels_stand_on_the_completion():
    rows = [
        dict(input_ids=[5, 6, 7, 8, 1], labels=[-100, -100, -100, 8, 1]),
        dict(input_ids=[9, 4, 0, 1], labels=[9, 4, 0, 1]),
        dict(input_ids=[3, 1], labels=[-100, 1]),
    ]
    batch = completion_batch(rows, 0)
    assert batch["labels"].tolist() == [
        [-100, -100, -100, 8, 1],
        [-100, 4, 0, 1, -100],
        [-100, 1, -100, -100, -100],
    ]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0], [1, 1, 0, 0, 0]]
    assert batch["input_ids"][0].tolist() == [5, 6, 7, 8, 1]


# catches: losses and counts of tokens that are added up in the model's own precision
def test_losses_of_a_bf16_model_are_added_up_in_float32():
    logits = torch.randn(2, 300, 7, generator=torch.Generator().manual_seed(0)).bfloat16()
    labels = torch.arange(600).view(2, 300) % 7
    found, wanted = row_losses(logits, labels), row_losses(logits.float(), labels)
    torch.testing.assert_close(found, wanted, atol=0, rtol=0)
    assert found[:, 1].tolist() == [299, 299]


# catches: tokens weighed by the micro-batch they are in
def test_the_step_does_not_depend_on_accumulation(trained):
    weights = []
    for rows, steps in ((8, 1), (2, 4)):
        sizes = dict(
            per_device_train_batch_size=rows, gradient_accumulation_steps=steps, max_steps=1
        )
        learning = dict(optim="sgd", max_grad_norm=0)
        trainer = trained(train_sampling_strategy="sequential", **sizes, **learning)
        trainer.train()
        weights.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    assert (weights[0] - weights[1]).abs().max() < 1e-6


# ---- Conversations ----


@pytest.fixture
def chatty(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


# the ids of conversations: test_encoding.py, test_reward.py
# catches: a template that opens an answer with more than it then writes (an empty thought), cut in
# the middle of the answer
def test_a_template_that_takes_back_what_it_opened(chatty):
    chatty.chat_template = TEMPLATE.replace("%}[assistant]{%", "%}[assistant]<think>{%")
    found = marked_pair([turn("user", "a")], [turn("assistant", "b")], chatty)
    assert found.text == "[user]a[assistant]b" and found.answers == [(18, 19)]


@pytest.mark.parametrize(
    "prompt, completion, complaint",
    [
        ("a", [turn("assistant", "b")], "make the prompt a turn"),
        ([], "b", "the prompt is .*: give text, or turns"),
        (["a"], "b", "the prompt is .*: give text, or turns"),
        (None, "b", "row 0: it has no prompt"),
        ("a", None, "no completion"),
    ],
)
def test_what_is_no_text_is_named(chatty, prompt, completion, complaint):
    data = Dataset.from_list([dict(prompt=prompt, completion=completion)])
    with pytest.raises(ValueError, match=complaint):
        encode_rows(data, chatty)


# ---- Packing ----


def families(tokenizer) -> dict:
    "A tiny model of each kind of positions: rotary in part, rotary, learned."
    how = dict(num_hidden_layers=2, initializer_range=0.5, max_position_embeddings=1024)
    how |= dict(vocab_size=len(tokenizer), **STILL)
    return {name: small_model(name, **how) for name in ("gpt_neox", "llama", "gpt2")}


@pytest.fixture(scope="module")
def uneven(world):
    "Rows of very different lengths, one with a prompt of one token."
    rows = [
        dict(prompt=p if i % 3 else p.split()[-1], completion=c)
        for i, (p, c) in enumerate(zip(world["train"]["prompt"], world["train"]["completion"]))
    ]
    return Dataset.from_list(rows[:48])


def run(tokenizer, data, small_args, kind, **changes):
    sizes = dict(per_device_train_batch_size=6, gradient_accumulation_steps=2, num_train_epochs=1)
    learning = dict(learning_rate=0.05, optim="sgd", max_grad_norm=0, lr_scheduler_type="constant")
    args = small_args(SFTConfig, **changes, **sizes, **learning)
    trainer = SFTTrainer(families(tokenizer)[kind], args, data, data.select(range(13)), tokenizer)
    start = trainer.evaluate()["eval_loss"]
    trainer.train()
    return trainer, [log["loss"] for log in trainer.state.log_history if "loss" in log], start


# catches: rows that see each other (an attention mask, the cache left on, positions that run
# through), labels on the first token of the next row,
# a loss divided by the tokens of a line instead of those of the step, other rows in a step than
# without packing
@pytest.mark.parametrize("kind", ["gpt_neox", "llama", "gpt2"])
def test_packing_changes_no_loss(tokenizer, uneven, small_args, kind):
    (off, losses, start), (on, packed, packed_start) = (
        run(tokenizer, uneven, small_args, kind, packing=p) for p in (False, True)
    )
    assert packed == pytest.approx(losses, abs=1e-5)
    assert packed_start == pytest.approx(start, abs=1e-5)
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert sum(packed) / 4 == pytest.approx(sum(losses) / 4, abs=1e-5)
    ends = zip(off.model.parameters(), on.model.parameters())
    assert max((a - b).abs().max().item() for a, b in ends) < 1e-4
    assert (
        on.data_collator([on.train_dataset[i] for i in range(12)])["input_ids"].numel()
        < off.data_collator([off.train_dataset[i] for i in range(12)])["input_ids"].numel()
    )


# catches: a row lost, split, or put where there is no room; a label on a row's first token (an
# empty prompt), or on what fills a line
def test_lines_by_hand():
    rows = [
        dict(input_ids=[2, 3, 1], labels=[2, 3, 1]),
        dict(input_ids=[4, 5, 6, 7, 1], labels=[-100, -100, -100, 7, 1]),
        dict(input_ids=[8, 1], labels=[-100, 1]),
    ]
    batch = packed_batch(rows, 9)
    assert batch["input_ids"].tolist() == [[4, 5, 6, 7, 1], [2, 3, 1, 8, 1]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 0, 1]]
    assert batch["labels"].tolist() == [[-100, -100, -100, 7, 1], [-100, 3, 1, -100, 1]]
    assert batch["use_cache"] is False
    assert "attention_mask" not in batch
    assert packed_batch(rows[1:], 9, 9)["input_ids"].tolist() == [[4, 5, 6, 7, 1, 8, 1]]
    left = packed_batch(rows[:2], 9)
    assert left["input_ids"].tolist()[1] == [2, 3, 1, 9, 9]
    assert left["position_ids"].tolist()[1] == [0, 1, 2, 0, 1]
    assert left["labels"].tolist()[1][3:] == [-100, -100]


# catches: a model that leaks trained with packing in silence
def test_a_model_that_mixes_rows_is_refused(tokenizer, uneven, small_args):
    for model in families(tokenizer).values():
        check_packing(model)
        plain = model.forward
        model.forward = lambda *args, plain=plain, use_cache=None, **inputs: plain(
            *args, use_cache=True, **inputs
        )
        with pytest.raises(ValueError, match="packing=False"):
            SFTTrainer(model, small_args(SFTConfig, packing=True), uneven, None, tokenizer)
        SFTTrainer(model, small_args(SFTConfig), uneven, None, tokenizer)


# ---- Bad input, bars ----


# catches: a row beyond the model's positions found by an index error in the middle of an epoch
def test_a_row_beyond_the_positions_is_named(tiny, tokenizer, world, small_args):
    data = world["train"].select_columns(["prompt", "completion"])
    model = tiny(max_position_embeddings=40)
    with pytest.raises(ValueError, match="40 positions: set max_length=40"):
        SFTTrainer(model, small_args(SFTConfig), data, None, tokenizer)
    with pytest.raises(ValueError, match="40 positions"):
        SFTTrainer(model, small_args(SFTConfig), None, data, tokenizer)
    SFTTrainer(model, small_args(SFTConfig, max_length=40), data, None, tokenizer)
    with pytest.raises(ValueError, match="processing_class is None"):
        SFTTrainer(model, small_args(SFTConfig), data)


# catches: bars that disable_tqdm does not reach, or that stay off for the rest of the program
def test_bars_are_silent_and_come_back(tiny, tokenizer, world, small_args, monkeypatch):
    bars = sys.modules["datasets.utils.tqdm"]  # the name datasets.utils.tqdm is the class
    monkeypatch.setattr(bars, "_hf_datasets_progress_bars_disabled", False)
    monkeypatch.setattr(bars, "HF_DATASETS_DISABLE_PROGRESS_BARS", None)
    data, seen, real = world["train"].select_columns(["prompt", "completion"]), [], bars.tqdm
    monkeypatch.setattr(
        "datasets.arrow_dataset.hf_tqdm",
        lambda *x, **more: seen.append(bars.are_progress_bars_disabled()) or real(*x, **more),
    )
    for quiet in (True, False):
        SFTTrainer(tiny(), small_args(SFTConfig, disable_tqdm=quiet), data, None, tokenizer)
        assert seen and set(seen) == {quiet} and not bars.are_progress_bars_disabled()
        seen.clear()
    with pytest.raises(ValueError):
        SFTTrainer(tiny(), small_args(SFTConfig), data.remove_columns("prompt"), None, tokenizer)
    assert not bars.are_progress_bars_disabled()


# ---- Resume, adapters ----


# catches: a head that resuming leaves at random because the file calls it otherwise (GPT-NeoX);
# optimizer, order or random state lost
@pytest.mark.parametrize(
    "kind, packing",
    [("gpt_neox", False), ("llama", True), pytest.param("gpt2", False, marks=pytest.mark.slow)],
)
def test_a_resumed_run_is_bitwise_the_same(tokenizer, uneven, small_args, tmp_path, kind, packing):
    data = (
        concatenate_datasets([uneven.shuffle(seed=i) for i in range(5)])
        .map(lambda row, i: dict(completion=row["completion"] + " my" * (i % 2)), with_indices=True)
        .select(range(18))
    )

    def go(resume=None):
        saves = dict(save_strategy="steps", save_steps=2)
        sizes = dict(per_device_train_batch_size=4, max_steps=8)
        args = small_args(SFTConfig, learning_rate=1e-2, packing=packing, **saves, **sizes)
        model = families(tokenizer)[kind]
        if resume:
            torch.nn.init.normal_(next(model.parameters()))  # another start must not matter
        trainer = SFTTrainer(model, args, data, None, tokenizer)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = go()
    tail = lambda t: [log["loss"] for log in t.state.log_history if "loss" in log][-2:]
    for step in (2, 6):  # in the first epoch of 5 steps, and in the second
        resumed = go(str(tmp_path / "run" / f"checkpoint-{step}"))
        assert all(
            torch.equal(a, b)
            for a, b in zip(whole.model.state_dict().values(), resumed.model.state_dict().values())
        ) and tail(whole) == tail(resumed)


# catches: a best checkpoint under the name that it has while it is written, other weights at the end
def test_the_best_checkpoint_is_named_and_loaded(trained):
    trainer = trained(
        max_steps=6, greater_is_better=True, metric_for_best_model="eval_loss", **BEST
    )
    trainer.train()  # the loss falls: the "best" step is the first, whose weights are not the last
    check_best(trainer, "eval_loss", largest=True)


# catches: a checkpoint that is half written and looks whole, a resume from one that is damaged
def test_a_damaged_checkpoint_is_refused_by_name(trained):
    check_damaged(trained)


# catches: a whole model saved beside the adapter, base weights that move, an adapter that does not
# load or resume
def test_an_adapter_is_trained_saved_resumed_alone(tiny, tokenizer, world, small_args, tmp_path):
    base, data = str(tmp_path / "base"), world["train"].select_columns(["prompt", "completion"])
    tiny().save_pretrained(base)

    def make(config, **settings):
        args = small_args(SFTConfig, **settings)
        return SFTTrainer(base, args, data, None, tokenizer, peft_config=config)

    trainer = check_adapter(make, tmp_path / "adapter", "SEQ_CLS")
    ids = torch.tensor([[3, 4, 5]])
    peft = pytest.importorskip("peft")
    again = peft.AutoPeftModelForCausalLM.from_pretrained(str(tmp_path / "adapter"))
    logits = [m.eval()(ids).logits for m in (trainer.model, again, tiny())]
    assert torch.allclose(logits[0], logits[1], atol=1e-6)
    assert not torch.allclose(logits[0], logits[2], atol=1e-3)


# ---- Evaluation ----


@torch.no_grad()
def nats_of(trainer, data) -> tuple[float, int]:
    "Of all rows, one at a time: the sum over counted tokens, and how many they are."
    model, total, count = trainer.model.eval(), 0.0, 0
    for row in encode_rows(data, trainer.processing_class):
        logits = model(torch.tensor([row["input_ids"]])).logits[0].double().log_softmax(-1)
        for i, label in enumerate(row["labels"][1:]):
            if label != -100:
                total, count = total - logits[i, label].item(), count + 1
    return total, count


# catches: a mean of batches' means where metrics are asked for or a loss is smoothed, a last batch
# that counts as much as the others, an evaluation that sees packed lines where it counts rows,
# labels that the metrics cannot read
@pytest.mark.parametrize("packing", [False, True])
def test_the_loss_of_an_evaluation_is_a_mean_over_tokens(trained, world, tokenizer, packing):
    data = world["train"].select_columns(["prompt", "completion"]).select(range(13))
    kept = [[i for i in row["labels"] if i != -100] for row in encode_rows(data, tokenizer)]
    seen = []

    def shares(found):
        seen.append((found.predictions, found.label_ids))
        return dict(counted=int((found.label_ids != -100).sum()))

    plain = trained(packing=packing)
    with_metrics = trained(packing=packing, parts=dict(compute_metrics=shares))
    plain.train()
    with_metrics.model.load_state_dict(plain.model.state_dict())
    nats, tokens = nats_of(plain, data)
    for size in (1, 4, 13):
        for trainer in (plain, with_metrics):
            trainer.args.per_device_eval_batch_size = size
            assert len(trainer.get_eval_dataloader()) == -(-13 // size)
        assert plain.evaluate()["eval_loss"] == pytest.approx(nats / tokens, rel=1e-5)
        found = with_metrics.evaluate()
        assert found["eval_loss"] == pytest.approx(nats / tokens, rel=1e-5)
        assert found["eval_counted"] == tokens and seen[-1][0].shape[:2] == seen[-1][1].shape
        done = plain.predict(data)  # raw rows
        assert done.metrics["test_loss"] == pytest.approx(nats / tokens, rel=1e-5)
        assert done.label_ids.shape == done.predictions.shape[:2] == seen[-1][1].shape
        assert [[i for i in row if i != -100] for row in done.label_ids.tolist()] == kept


def test_a_smoothed_loss_is_a_mean_over_tokens_too(trained):
    losses = [
        trained(per_device_eval_batch_size=size, label_smoothing_factor=0.2).evaluate()["eval_loss"]
        for size in (1, 13)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_logits_may_be_shortened_for_the_metrics(trained):
    best = lambda logits, labels: (logits.argmax(-1) * (labels != -100)).long()
    seen = []
    own = lambda found: seen.append(found.predictions) or {}
    parts = dict(compute_metrics=own, preprocess_logits_for_metrics=best)
    trained(parts=parts, per_device_eval_batch_size=13).evaluate()
    assert seen[0].ndim == 2


# ---- Streams ----


def shown(trainer) -> list[list[int]]:
    "The last token but one of each row, batch by batch, as it trains."
    seen, step = [], trainer.training_step

    def look(model, inputs, *given):
        seen.append(
            [
                row[mask.bool()][-2].item()
                for row, mask in zip(inputs["input_ids"], inputs["attention_mask"])
            ]
        )
        return step(model, inputs, *given)

    trainer.training_step = look
    return seen


# catches: a pass that begins anew after a resume, another shuffle of it, rows of an unfinished step
# whose gradient is added to the first step of the next pass
@pytest.mark.parametrize("shuffled", [False, True])
def test_a_stream_is_resumed_in_the_pass_it_was_in(tiny, letters, small_args, tmp_path, shuffled):
    rows = Dataset.from_dict(dict(prompt=["a"] * 10, completion=list("abcdefghij")))
    stream = rows.to_iterable_dataset(num_shards=2)
    stream = stream.shuffle(seed=3, buffer_size=4) if shuffled else stream

    def make(stream=stream, **changes):
        settings = dict(
            max_steps=7,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            save_strategy="steps",
            save_steps=1,
        )
        return SFTTrainer(
            tiny(), small_args(SFTConfig, **settings | changes), stream, None, letters
        )

    whole = make(output_dir=str(tmp_path / "whole"))
    seen = shown(whole)
    whole.train()
    # of five batches, the last is left out
    passes = [[i for batch in seen[k : k + 4] for i in batch] for k in (0, 4, 8)]
    assert len(seen) == 14 and all(len(set(rows)) == 8 for rows in passes)
    assert (passes[0] == passes[1] == passes[2]) == (not shuffled)
    for step in (3, 4, 6):  # within the second pass, at its end, at the end of the third
        again = make(output_dir=str(tmp_path / "whole"), overwrite_output_dir=False)
        rest = shown(again)
        again.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert rest == seen[2 * step :]
        for name, weight in whole.model.state_dict().items():
            assert torch.equal(weight, again.model.state_dict()[name]), (step, name)
    other = rows.select([0, 2, 1, *range(3, 10)]).to_iterable_dataset()
    with pytest.raises(ValueError, match="another run: its train_dataset is 'a stream that begins"):
        make(other, output_dir=str(tmp_path / "whole")).train(resume_from_checkpoint=True)


# catches: the label of the first token counted, which nothing predicts
def test_a_row_needs_a_token_that_something_predicts():
    with pytest.raises(ValueError, match="no token of it counts"):
        fit_row([5, 6], [5, -100], None)
    assert fit_row([5, 6, 7], [-100, 6, 7], 2) == ([5, 6], [-100, 6])
