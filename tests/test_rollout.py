"""The sampler against softmax, against generate, against itself with padding; and a Rollout through
a file and back."""

from dataclasses import fields

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from small_models import small_config
from transformers import AutoModelForCausalLM, PreTrainedModel, StopStringCriteria

from rlhf_nb.masks import left_pad
from rlhf_nb.rollout import (
    OWN,
    SIGNALS,
    TENSORS,
    Rollout,
    Sample,
    sample,
    texts_of,
    token_texts,
    truncate_logits,
)
from rlhf_nb.sampling import Sampling, draw_tokens
from rlhf_nb.training.model_loading import train_bpe_tokenizer
from rlhf_nb.training.saving import rollouts

V, PAD, STOP = 12, 0, 1
SMALL = dict(num_hidden_layers=2, max_position_embeddings=48, initializer_range=0.4)
CONFIGS = dict(
    neox=small_config("gpt_neox", **SMALL),
    llama=small_config("llama", **SMALL, num_key_value_heads=1),
    gpt2=small_config("gpt2", **SMALL),
    qwen2=small_config("qwen2", **SMALL, num_key_value_heads=1),
    qwen3=small_config("qwen3", **SMALL, num_key_value_heads=1, head_dim=8),
)
PROMPTS = [[3, 4, 5, 6, 7, 8, 9], [5, 5], [10], [2, 3, 4]]


def model_of(name: str = "neox", seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(CONFIGS[name]).eval()


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def greedy(model, prompts, length=10, stop_ids=(STOP,), **options) -> list[list[int]]:
    "Near-greedy responses as lists, padding taken off."
    drawn = sample(
        model,
        *left_pad(prompts, PAD),
        Sampling(length, PAD, stop_ids, temperature=0.0001, **options),
        seeded(),
    )
    return [row[keep].tolist() for row, keep in zip(drawn.response_ids, drawn.mask)]


def only(*tokens: int) -> list[int]:
    return [i for i in range(V) if i not in tokens]


# ---- What is drawn ----


# catches: temperature multiplied or forgotten, argmax, a draw from logits, the logits of another
# column
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_first_tokens_follow_softmax(temperature):
    model, n = model_of(), 4000
    prompt, mask = left_pad([[3, 4, 5], [7]], PAD)
    drawn = sample(
        model,
        prompt.repeat_interleave(n, 0),
        mask.repeat_interleave(n, 0),
        Sampling(1, PAD, (STOP,), temperature),
        seeded(),
    )
    for row, ids in zip(([3, 4, 5], [7]), drawn.response_ids[:, 0].chunk(2)):
        p = (model(torch.tensor([row])).logits[0, -1].double() / temperature).softmax(-1).detach()
        found, wanted = torch.bincount(ids, minlength=V).double(), n * p
        likely = wanted > 5
        chi2 = ((found - wanted)[likely] ** 2 / wanted[likely]).sum().item()
        assert chi2 < likely.sum() + 4 * (2 * likely.sum()) ** 0.5
        assert (found[~likely].sum() - wanted[~likely].sum()).abs() < 20


# catches: a cache that forgets, positions that drift, a mask that stays behind: later tokens given
# all before them
@pytest.mark.parametrize("name", CONFIGS)
def test_later_tokens_follow_softmax_too(name):
    model, n = model_of(name), 3000
    prompt, mask = left_pad([[3, 4, 5]] * n, PAD)
    prompt = torch.cat([torch.full((n, 2), PAD), prompt], 1)
    mask = torch.cat([torch.zeros(n, 2, dtype=torch.bool), mask], 1)
    drawn = sample(model, prompt, mask, Sampling(3, PAD, (), 1.0), seeded()).response_ids
    first = drawn[:, :2].mode(0).values
    given = drawn[(drawn[:, :2] == first).all(1), 2]
    p = model(torch.tensor([[3, 4, 5, *first.tolist()]])).logits[0, -1].softmax(-1).detach()
    share = torch.bincount(given, minlength=V) / len(given)
    assert len(given) > 20 and (share - p).abs().max() < 4.5 * 0.5 / len(given) ** 0.5


@pytest.mark.parametrize(
    "top_k, top_p, kept",
    [
        (0, 1.0, {0, 1, 2, 3}),
        (2, 1.0, {0, 1}),
        (9, 1.0, {0, 1, 2, 3}),
        (0, 0.5, {0}),
        (0, 0.51, {0, 1}),
        (0, 0.81, {0, 1, 2}),
        (3, 0.6, {0, 1}),
        (0, 1e-9, {0}),
    ],
)
def test_truncation_by_hand(top_k, top_p, kept):
    order = torch.tensor([2, 0, 3, 1])  # where the likeliest, the second, ... stand
    logits = torch.zeros(1, 4).index_copy(1, order, torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log())
    before, found = logits.clone(), truncate_logits(logits, top_k, top_p).isfinite()[0]
    assert {order.tolist().index(i) for i in found.nonzero()[:, 0].tolist()} == kept
    assert torch.equal(logits, before)


def test_top_k_and_top_p_reach_the_sampler():
    model = model_of()
    prompt, mask = left_pad([[3, 4, 5]] * 500, PAD)
    p = model(prompt[:1]).logits[0, -1].softmax(-1).detach()
    drawn = lambda **options: set(
        sample(model, prompt, mask, Sampling(1, PAD, **options), seeded())
        .response_ids[:, 0]
        .tolist()
    )
    assert drawn(top_k=3) == set(p.topk(3).indices.tolist())
    assert drawn(top_k=1) == drawn(top_p=1e-6) == {p.argmax().item()}
    assert len(drawn()) > 3


# ---- Padding, stops, leftovers ----


# catches: rows that go on after their end, a mask without the stop token, stopped where the limit
# was reached
def test_rows_end_at_their_stop():
    model = model_of()
    prompt, mask = left_pad(PROMPTS * 50, PAD)
    drawn = sample(model, prompt, mask, Sampling(6, PAD, (STOP, 7)), seeded())
    lengths = set()
    for ids, keep, stopped in zip(drawn.response_ids.tolist(), drawn.mask, drawn.stopped.tolist()):
        n = int(keep.sum())
        lengths.add((n, stopped))
        assert keep.tolist() == [True] * n + [False] * (6 - n) and ids[n:] == [PAD] * (6 - n)
        assert not set(ids[: n - 1]) & {STOP, 7}
        assert stopped == (ids[n - 1] in (STOP, 7))
        assert stopped or n == 6
    assert {(1, True), (2, True), (6, True), (6, False)} <= lengths


# ---- Drawing ----


def at(monkeypatch, numbers) -> None:
    "Meanwhile chance says these numbers, a row each."
    monkeypatch.setattr(
        torch,
        "rand",
        lambda *shape, dtype=None, **more: (
            torch.tensor(numbers, dtype=torch.float64).to(dtype).view(shape)
        ),
    )


# catches: a token that may not be drawn, the last one at the end of the line, sums in float32,
# blocks that are mixed up; the wrong end of a piece, rows that are not normalised
def test_draws_by_hand(monkeypatch):
    four = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0])
    for scale in (1.0, 3.0, 1e-3):
        with monkeypatch.context() as patch:
            at(patch, [0.0, 0.25, 0.5 - 1e-12, 0.5, 0.75, 1 - 2.0**-53])
            drawn = draw_tokens((four * scale).expand(6, 5))
            assert drawn[:, 0].tolist() == [1, 1, 1, 3, 3, 3]
    # pieces of 7.6e-9: float32 cannot tell them apart near 1
    short = torch.full((2**17,), 1e-3 / 2**17)
    line, wanted = torch.cat([torch.tensor([0.999]), short]), torch.tensor([5, 100, 77_777, 2**17])
    ends = line.double().cumsum(0)
    with monkeypatch.context() as patch:
        at(patch, ((ends[wanted] + ends[wanted - 1]) / 2 / ends[-1]).tolist())
        assert draw_tokens(line.expand(4, -1))[:, 0].tolist() == wanted.tolist()
    many = torch.rand(21, 2**18, generator=seeded(1))  # more than one block
    ends = many.double().cumsum(1)
    chance = torch.rand(21, 1, dtype=torch.float64, generator=seeded(2))
    wanted = (ends <= chance * ends[:, -1:]).sum(1, keepdim=True)
    assert torch.equal(draw_tokens(many, seeded(2)), wanted)
    assert draw_tokens(torch.zeros(0, 5)).shape == (0, 1)


# catches: a policy that has diverged and writes its last token for ever
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0])
def test_what_is_no_probability_is_refused(bad):
    probs = torch.full((3, 4), 0.25)
    probs[1] = bad
    with pytest.raises(FloatingPointError, match="not finite numbers.*Lower learning_rate"):
        draw_tokens(probs)
    model = model_of()
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="diverged"):
        greedy(model, PROMPTS)


# catches: stopping before the loop, an empty row (there is always the stop token itself), a batch
# that goes on without anyone
def test_the_first_token_may_be_the_stop_and_none_runs_to_the_limit():
    model = model_of()
    prompt, mask = left_pad(PROMPTS, PAD)
    first = sample(model, prompt, mask, Sampling(5, PAD, tuple(range(V))), seeded())
    assert first.mask.tolist() == [[True] + [False] * 4] * 4
    assert first.stopped.all()
    assert (first.response_ids[:, 1:] == PAD).all()
    endless = sample(model, prompt, mask, Sampling(6, PAD), seeded())
    assert endless.mask.all() and not endless.stopped.any()


# catches: a pad token that is sampled (it may be: it is a token like any other) taken for padding
def test_a_sampled_pad_token_is_real():
    model = model_of()
    drawn = sample(model, *left_pad(PROMPTS * 50, PAD), Sampling(6, PAD, (STOP,)), seeded())
    assert (drawn.response_ids[drawn.mask] == PAD).any()


# catches: stop strings looked for in the prompt, or only within one token
def test_stop_strings_end_a_row(letters):
    tokenizer, model = letters, model_of()
    text = lambda row, keep: tokenizer.decode(row[keep].tolist())
    prompt, mask = left_pad([[2, 3]] * 300, PAD)  # "ab"
    free = sample(model, prompt, mask, Sampling(8, PAD), seeded())
    texts = [text(*row) for row in zip(free.response_ids, free.mask)]
    common = max(
        {t[i : i + 2] for t in texts for i in range(1, 5)},
        key=lambda pair: sum(pair in t for t in texts) if set(pair) <= set("abcdfgh") else 0,
    )
    drawn = sample(
        model,
        prompt,
        mask,
        Sampling(8, PAD, stop_strings=StopStringCriteria(tokenizer, [common, "ab" * 9])),
        seeded(),
    )
    found = [text(*row) for row in zip(drawn.response_ids, drawn.mask)]
    assert 10 < int(drawn.stopped.sum()) < 300
    for t, stopped in zip(found, drawn.stopped.tolist()):
        assert stopped == (common in t) and common not in t[:-1]


# catches: a sampler that asks model.generation_config; generate itself is shown to fall for it
def test_leftovers_of_the_generation_config_do_not_matter():
    model = model_of()
    before = greedy(model, PROMPTS)
    free = sample(model, *left_pad(PROMPTS, PAD), Sampling(8, PAD, (STOP,)), seeded())
    c = model.generation_config
    c.repetition_penalty = 5.0
    c.forced_bos_token_id = 9
    c.forced_eos_token_id = 9
    c.suppress_tokens = [2, 3, 4, 5, 6]
    c.bad_words_ids = [[7]]
    c.no_repeat_ngram_size = 2
    c.temperature = 0.1
    c.top_k = 1
    c.top_p = 0.1
    c.min_new_tokens = 8
    c.eos_token_id = 10
    assert greedy(model, PROMPTS) == before
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            free, sample(model, *left_pad(PROMPTS, PAD), Sampling(8, PAD, (STOP,)), seeded())
        )
    )
    prompt, mask = left_pad(PROMPTS, PAD)
    theirs = model.generate(
        prompt, attention_mask=mask.long(), max_new_tokens=10, do_sample=False, pad_token_id=PAD
    )[:, prompt.shape[1] :]
    assert theirs[0].tolist()[: len(before[0])] != before[0]


def test_the_generator_is_the_only_chance():
    model = model_of()
    draw = lambda seed: (
        sample(model, *left_pad(PROMPTS, PAD), Sampling(8, PAD, (STOP,)), seeded(seed)).response_ids
    )
    state = torch.random.get_rng_state()
    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(1)
    first = sample(model, *left_pad(PROMPTS, PAD), Sampling(8, PAD, (STOP,))).response_ids
    torch.manual_seed(1)
    assert torch.equal(
        first, sample(model, *left_pad(PROMPTS, PAD), Sampling(8, PAD, (STOP,))).response_ids
    )


def test_texts_leave_out_the_stop_alone(letters):
    drawn = Sample(
        torch.tensor([[2, 3, 1, 0], [2, 3, 4, 5], [1, 0, 0, 0]]),
        torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0]]).bool(),
        torch.tensor([True, False, True]),
    )
    texts, tokens = texts_of(letters, drawn, [STOP])
    assert texts == ["ab", "abcd", ""]
    assert tokens == [["a", "b", "<eos>"], ["a", "b", "c", "d"], ["<eos>"]]


@pytest.fixture(scope="module")
def bytewise():
    return train_bpe_tokenizer(["a cup of tea, and a cake"] * 9, 280)


# catches: a replacement mark for each byte, a number without a token, a character given twice, one
# that is cut off taken for whole, a token that holds the end of one character and the start of another
@pytest.mark.parametrize("text", ["naïve 你好", "a cup of 茶!", "👩\u200d👧 ok", "", "e\u0301é"])
def test_parts_of_a_character_are_joined(bytewise, text):
    ids = bytewise(text)["input_ids"]
    pieces = token_texts(bytewise, ids)
    assert len(pieces) == len(ids) and "".join(pieces) == text
    for t, piece in enumerate(pieces):
        alone = bytewise.decode(ids[t : t + 1])
        assert piece == alone if "\ufffd" not in alone else piece == "" or len(piece) == 1
    cut = token_texts(bytewise, ids[:-1])
    assert len(cut) == max(len(ids) - 1, 0) and "".join(cut) == bytewise.decode(ids[:-1])


def test_a_token_may_end_one_character_and_begin_another():
    parts = [b"a\xe4", b"\xbd\xa0\xe5", b"\xa5\xbd", b"!", b"\xff"]  # byte-level merges cut so

    class Odd:
        def decode(self, ids):
            return b"".join(parts[i] for i in ids).decode("utf-8", "replace")

    assert token_texts(Odd(), [0, 1, 2, 3]) == ["a你好", "", "", "!"]
    assert token_texts(Odd(), [4, 3, 3]) == ["\ufffd", "!", "!"]
    assert token_texts(Odd(), [3, 0]) == ["!", "a\ufffd"]


# ---- The record ----

HOSTILE = [
    "",
    " ",
    "\x00\x1b[31m\r\n",
    "</script><b>&amp;",
    "日本語 \U0001f600 e\u0301 \u202e",
    "\ud800 alone",
    '{"json": ["',
    "a" * 100_000,
]


def filled(n: int = len(HOSTILE)) -> Rollout:
    g = seeded()
    mask = torch.arange(5) < torch.tensor([[1 + i % 5] for i in range(n)])
    numbers = {name: torch.randn(n, 5, generator=g) for name in SIGNALS}
    numbers["kl"][0, 0], numbers["values"][0, 1], numbers["logprobs"][0, 0] = (
        float("inf"),
        float("nan"),
        -1e4,
    )
    return Rollout(
        torch.randint(0, V, (n, 4), generator=g),
        torch.ones(n, 4, dtype=torch.bool),
        torch.randint(0, V, (n, 5), generator=g),
        mask,
        torch.arange(n) % 2 == 0,
        **numbers,
        raw_scores=torch.randn(n, generator=g),
        scores=torch.randn(n, generator=g),
        prompts=HOSTILE[:n],
        responses=HOSTILE[:n][::-1],
        tokens=[["<", "\n", "é", "", " "][: int(row.sum())] for row in mask],
        columns=dict(label=list(range(n)), note=HOSTILE[:n]),
        info=dict(update=3, kl_coef=0.05, seed=0),
    )


def assert_same(a: Rollout, b: Rollout):
    for f in fields(Rollout):
        x, y = getattr(a, f.name), getattr(b, f.name)
        if isinstance(x, torch.Tensor):
            assert (
                x.dtype == y.dtype
                and x.shape == y.shape
                and np.array_equal(x.numpy(), y.numpy(), equal_nan=x.is_floating_point())
            ), f.name
        else:
            assert x == y, f.name


def test_a_rollout_comes_back_from_its_file(tmp_path):
    r = filled()
    assert_same(r, Rollout.load(r.save(tmp_path / "r.safetensors")))
    bare = Rollout(r.prompt_ids, r.prompt_mask, r.response_ids, r.mask, r.stopped)
    assert_same(bare, Rollout.load(bare.save(tmp_path / "bare.safetensors")))
    bf16 = r.with_(values=r.values.bfloat16()[:, :].T.contiguous().T)  # not contiguous
    assert torch.equal(Rollout.load(bf16.save(tmp_path / "half.safetensors")).mask, r.mask)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "bare.safetensors",
        "half.safetensors",
        "r.safetensors",
    ]


# catches: some field that stays behind, order lost, a boolean index taken for numbers, an argument
# changed in place
def test_select_picks_every_field():
    r, before = filled(), filled()
    more = dict.fromkeys(("paid", "chosen", "valued"), r.mask)
    of_turns = dict.fromkeys(("turn_stopped", "turn_rewards"), torch.rand(len(r), 2))
    more |= of_turns | dict(turn=r.mask.short(), stop_reason=["terminated"] * len(r))
    r, before = (x.with_(**more) for x in (r, before))
    picked = r.select([6, 2, 2])
    for name in TENSORS:
        assert np.array_equal(
            getattr(picked, name).numpy(),
            getattr(r, name)[[6, 2, 2]].numpy(),
            equal_nan=getattr(r, name).is_floating_point(),
        ), name
    for name in ("prompts", "responses", "tokens"):
        assert getattr(picked, name) == [getattr(r, name)[i] for i in (6, 2, 2)]
    assert picked.columns["label"] == [6, 2, 2]
    assert picked.info == r.info
    assert len(picked) == 3
    assert isinstance(picked, Rollout)
    assert_same(r.select(r.stopped), r.select([i for i in range(len(r)) if i % 2 == 0]))
    # an empty list becomes floats, which index nothing
    assert len(r.select(torch.zeros(len(r), dtype=torch.bool))) == len(r.select([])) == 0
    assert_same(r.select(range(len(r))), before)


def test_tables_show_real_tokens_alone():
    r = filled(5)  # without the lone surrogate, which pandas cannot hold
    by_token, episodes = r.by_token(), r.episodes()
    assert len(by_token) == int(r.mask.sum()) and len(episodes) == len(r)
    row = by_token[(by_token.episode == 3) & (by_token.position == 2)].iloc[0]
    assert row.id == r.response_ids[3, 2]
    assert row.returns == pytest.approx(r.returns[3, 2].item())
    assert row.token == r.tokens[3][2]
    assert episodes.length.tolist() == r.mask.sum(1).tolist()
    assert episodes.kl[1] == pytest.approx(r.kl[1, :2].sum().item())
    assert "<script>" not in r._repr_html_() and "</script><b>" not in r._repr_html_()


# catches: a data set's own columns in place of ours, or ours left out with them, in tables and views
def test_columns_with_our_names_get_a_prefix():
    r = filled(5)
    theirs = {name: ["theirs"] * len(r) for name in OWN}
    taken, plain = r.with_(columns=theirs | dict(label=range(len(r)))), r.with_(columns={})
    frame = taken.episodes()
    assert frame[[*plain.episodes()]].equals(plain.episodes())
    assert [*frame.label] == [*range(len(r))]
    assert all((frame[f"data/{name}"] == "theirs").all() for name in OWN)
    assert str(taken) == str(plain) and taken._repr_html_() == plain._repr_html_()
    assert "score" not in r.with_(scores=None, columns=theirs).episodes()


@pytest.mark.parametrize("damage", ["cut", "garbage", "empty", "header"])
def test_a_damaged_file_is_refused(tmp_path, damage):
    path = filled().save(tmp_path / "r.safetensors")
    whole = path.read_bytes()
    path.write_bytes(
        dict(
            cut=whole[: len(whole) // 2],
            garbage=b"not a file of tensors" * 99,
            empty=b"",
            header=whole[:8] + b"X" + whole[9:],
        )[damage]
    )
    with pytest.raises(ValueError, match="r.safetensors"):
        Rollout.load(path)


def test_a_foreign_file_is_refused(tmp_path):
    save_file(dict(x=torch.zeros(2)), tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="not written by Rollout.save"):
        Rollout.load(tmp_path / "x.safetensors")
    with pytest.raises(FileNotFoundError):
        Rollout.load(tmp_path / "nowhere.safetensors")
    with pytest.raises(ValueError, match="is a folder: .*update-00000.*rlhf_nb.rollouts"):
        Rollout.load(tmp_path)


# catches: ranks that are left out or taken for updates; a column of the prompts in place of ours
def test_the_rollouts_of_a_run_are_one_frame(tmp_path):
    with pytest.raises(ValueError, match="keeps no rollouts: .*save_rollouts=True"):
        rollouts(tmp_path)
    r = filled(5).with_(columns=dict(update=[*"abcde"]))
    names = "update-00000-rank0", "update-00000-rank1", "update-00007-rank0", "update-00007-rank1"
    (tmp_path / "rollouts").mkdir()
    for name in names:
        r.save(tmp_path / "rollouts" / f"{name}.safetensors")
    of_episodes, of_tokens = rollouts(str(tmp_path)), rollouts(tmp_path, tokens=True)
    assert [*of_episodes["update"]] == [0] * 10 + [7] * 10
    assert [*of_episodes.episode] == [*range(10)] * 2 and of_episodes.columns[0] == "update"
    assert [*of_episodes["data/update"]] == [*"abcde"] * 4
    assert of_episodes.score.tolist() == r.episodes().score.tolist() * 4
    lengths = of_tokens.groupby(["update", "episode"]).size()
    assert lengths.tolist() == of_episodes.length.tolist()
