"""Rewards of tokens and steps: where they land, and what becomes of them, against loops in numpy.
Six wrong programs are kept, and each must differ from the loops."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise, product
from types import SimpleNamespace
from unittest.mock import ANY

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from packs import unpacked
from ppo_fixtures import PROMPTS, SIZES, likes_c, logs, rollouts, unlike, untimed, weights
from ranks import on_ranks
from transformers import (
    BertConfig,
    BertForTokenClassification,
    GPTNeoXConfig,
    GPTNeoXForSequenceClassification,
    GPTNeoXForTokenClassification,
)

import rlhf_nb.ppo
import rlhf_nb.reward_functions
import rlhf_nb.shaping
from rlhf_nb import replay
from rlhf_nb.base.encoding import token_spans
from rlhf_nb.diagnose import by_hand
from rlhf_nb.diagnose.preflight import LADDER, preflight
from rlhf_nb.diagnose.replay import source_of, update_again
from rlhf_nb.judges import Answers, Judges
from rlhf_nb.moments import RunningMoments
from rlhf_nb.packing import last_token, on_tokens, score_sums
from rlhf_nb.ppo import estimate_advantages, final_scores
from rlhf_nb.reward_functions import Written, call_reward
from rlhf_nb.rollout import Rollout
from rlhf_nb.scoring import step_ends
from rlhf_nb.training.config import PPOConfig
from rlhf_nb.training.model_loading import train_bpe_tokenizer
from rlhf_nb.ui.episodes import shown_of
from rlhf_nb.ui.foreign import ForeignRun, episodes_of, rollout_from
from rlhf_nb.ui.reader import packed_update
from rlhf_nb.ui.run_files import merge_rollouts
from rlhf_nb.ui.what_if import objective_of, reproduces, what_if
from rlhf_nb.update import Objective, update_metrics

BYTES = train_bpe_tokenizer(["a cup of tea"] * 10, 262)  # 茶 is three tokens, 🎉 four
TEXTS = ["tea 茶.a", "a 🎉 cup", "", "a cup of tea"]
NAN = math.nan


def written(texts=TEXTS, ended=(True, False, True, True)) -> Written:
    ids = [BYTES(text)["input_ids"] + [BYTES.eos_token_id] * e for text, e in zip(texts, ended)]
    return Written(texts, ids, BYTES)


def called(returned, texts=TEXTS) -> torch.Tensor:
    return call_reward(lambda prompts, responses: returned, texts, texts, {}, written(texts))


# ---- Where a number lands ----


def landing(tokenizer, ids: list[int], text: str, end: int) -> int:
    "The last token that begins before the end: as many characters as the tokens before it make."
    before = (tokenizer.decode(ids[:t]).rstrip("\ufffd") for t in range(len(ids)))
    begins = [min(len(x), len(text)) for x in before]
    return max(t for t, begin in enumerate(begins) if begin < end)


def check_landing() -> None:
    for i, text in enumerate(TEXTS):
        for end in range(1, len(text) + 1):
            given = [0.0] * len(TEXTS)
            given[i] = [(end, 2.5)]
            row = called(given)[i].tolist()
            at = landing(BYTES, written().ids[i], text, end)
            assert row[at] == 2.5 and sum(x == x for x in row) == 1, (text, end, row)


# catches: the token behind the end, the first piece of a character, the stop token
def test_an_end_lands_on_the_last_token_that_begins_before_it():
    check_landing()
    assert called([[(5, 1.0)], 0.0, 0.0, 0.0])[0].tolist()[4] == 1.0  # the last piece of 茶


def test_kinds_may_be_mixed():
    rows = called([[(3, 1.0), (3, 0.5), (7, 0.0)], 4.0, [(0, 0.5)], [0.25] * 8 + [-1.0]]).tolist()
    assert rows[0][0] == 1.5 and rows[0][6] == 0.0  # two ends on one token; a step may earn 0
    assert np.isnan(rows[0][1:6]).all() and np.isnan(rows[0][7])
    ended = [len(ids) for ids in written().ids]
    assert rows[1][ended[1] - 1] == 4.0 and rows[2][0] == 0.5  # an empty text: its stop token
    assert np.isnan(rows[2][1:]).all() and rows[3][: ended[3]][-1] == -1.0
    assert called([1.0, 2.0, 3.0, 4]).tolist() == [1.0, 2.0, 3.0, 4.0]  # numbers alone stay [B]
    none = called([[], [(1, 1.0)], 0.0, 0.0])
    assert none[0].isnan().all() and score_sums(none).tolist() == [0.0, 1.0, 0.0, 0.0]


def test_spans_are_the_whole_text_whatever_the_scripts():
    for text in ("", "a\n\n b  ", "नमस्ते 茶🎉", "مرحبا tea", "\ufffd", "x\ufffdy"):
        ids = BYTES(text)["input_ids"]
        for more in ([], [BYTES.eos_token_id]):
            spans = token_spans(BYTES, ids + more, text)
            assert len(spans) == len(ids + more) and "".join(text[a:b] for a, b in spans) == text
            assert all(a[1] == b[0] for a, b in pairwise(spans))
    cut = BYTES("a 茶")["input_ids"][:-1]  # a character that is not complete
    assert token_spans(BYTES, cut, BYTES.decode(cut))[-1][1] == len(BYTES.decode(cut))


def test_functions_that_ask_get_ids_and_offsets():
    seen = {}

    def asks(prompts, responses, response_ids, offsets, **columns):
        seen.update(columns, ids=response_ids, spans=offsets)
        return [[float(a == b) for a, b in row] for row in offsets]

    where = written()
    rows = call_reward(asks, TEXTS, TEXTS, dict(other=[1, 2, 3, 4]), where)
    assert seen["ids"] == [*where.ids] and seen["spans"] == where.offsets
    assert seen["other"] == [1, 2, 3, 4] and "response_ids" not in seen
    assert score_sums(rows).tolist() == [3.0, 3.0, 1.0, 1.0]  # pieces of characters, stop tokens


@pytest.mark.parametrize(
    "bad, complaint",
    [
        ([1.0, 2.0], "that is 2 numbers for 8 tokens: return a list with one for each token"),
        ([(3, 1.0), (2, 1.0)], "the end 2 comes after the end 3"),
        ([(8, 1.0)], "an end is 8: give a position from 1 to 7"),
        ([(0, 1.0)], "an end is 0: give a position from 1 to 7"),
        ([(1.5, 1.0)], "an end is 1.5: give a position"),
        ([(True, 1.0)], r"\(True, 1.0\) is no pair"),
        ([(3, NAN)], r"\(3, nan\) is no pair \(end, number\)"),
        ([(3, 1.0), 2.0], "2.0 is no pair"),
        ([NAN] * 8, "token 0 has nan: give a finite number"),
        ([0.0] * 7 + ["a"], "token 7 has 'a'"),
        ("abc", "return a finite number, a list with one for each token"),
        (None, "return a finite number"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(bad, complaint):
    pattern = rf"^reward function <lambda> returned .* for response 0 \('tea 茶.a'\): .*{complaint}"
    with pytest.raises(ValueError, match=pattern) as error:
        called([bad, [(1, 1.0)], 0.0, 0.0])
    assert "\n" not in str(error.value) and len(str(error.value)) < 320
    with pytest.raises(ValueError, match=r"response 2 \(''\): an end is 1: give 0, as the text"):
        called([0.0, 0.0, [(1, 1.0)], 0.0])


# catches: a response's number on every token, weights that are left out, a rollout wider than its
# rows
def test_judges_of_both_kinds_are_joined_on_the_last_token():
    steps = lambda prompts, responses: [[(1, 1.0)] if text else [] for text in responses]
    length = lambda prompts, responses: [float(len(text)) for text in responses]
    where, width = written(), 12
    mask = torch.arange(width) < torch.tensor([len(ids) for ids in where.ids])[:, None]
    ids = torch.zeros(4, width, dtype=torch.long)
    for i, row in enumerate(where.ids):
        ids[i, : len(row)] = torch.tensor(row)
    r = Rollout(ids[:, :1], mask[:, :1], ids, mask, prompts=TEXTS, responses=TEXTS)
    judges = Judges([steps, length], weights=[2.0, 0.5])
    total = judges.total(judges(r, None, BYTES), None, mask)
    wanted = np.full((4, width), np.nan)
    for i, row in enumerate(where.ids):
        wanted[i, len(row) - 1] = 0.5 * len(TEXTS[i])
        if TEXTS[i]:
            wanted[i, 0] = 2.0
    assert_allclose(total.numpy(), wanted, equal_nan=True)
    texts = judges.score_answers(Answers(TEXTS, TEXTS, [True, False, True, True]), BYTES)
    assert_allclose(texts.numpy(), np.nansum(wanted, 1))  # as an evaluation has them


# ---- From scores to advantages, in loops ----

K, T = 2, 6


def some_rollout(seed: int, kind: str = "steps") -> Rollout:
    "Four responses to two prompts; junk on the padding of what the models say."
    chance = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=chance, dtype=torch.float64)
    lengths = torch.tensor([T, 3, 1, 5])
    mask = torch.arange(T) < lengths[:, None]
    paid = {"steps": torch.rand(4, T, generator=chance) < 0.4, "tokens": mask}.get(kind, mask)
    paid = paid & mask
    if kind == "end":
        paid = torch.arange(T) == lengths[:, None] - 1
    paid[2] = mask[2] if kind != "steps" else False  # a response without a step
    raw = torch.where(paid, draw(4, T).round(decimals=1), 0.0)
    return Rollout(
        torch.tensor([[1], [1], [2], [2]]),
        torch.ones(4, 1, dtype=torch.bool),
        torch.zeros(4, T, dtype=torch.long),
        mask,
        stopped=torch.tensor([False, True, True, False]),
        kl=torch.where(mask, draw(4, T), torch.nan),
        values=torch.where(mask, draw(4, T), 0.0),
        raw_scores=raw,
        paid=paid,
    )


def shaped(r: Rollout, cfg: Objective) -> tuple[np.ndarray, np.ndarray]:
    "Scores of the tokens and rewards, row by row."
    rows = [row[:n].tolist() for row, n in zip(r.raw_scores, r.mask.sum(1).tolist())]
    sums = [sum(row) for row in rows]
    scores, rewards = np.zeros(r.mask.shape), np.zeros(r.mask.shape)
    for i, row in enumerate(rows):
        row = list(row)
        if cfg.normalize_scores:
            spread = np.std(sums, ddof=1)
            row = [x / spread for x in row]
            row[-1] -= np.mean(sums) / spread
        if not r.stopped[i] and cfg.missing_eos_penalty:
            row[-1] -= cfg.missing_eos_penalty
        if not r.stopped[i] and cfg.non_eos_penalty:
            row[-1] = cfg.penalty_reward_value
        for t, x in enumerate(row):
            scores[i, t] = x
            rewards[i, t] = x - cfg.kl_coef_of_rewards * r.kl[i, t].item()
    return scores, rewards


def white(rows: np.ndarray, mask: np.ndarray) -> np.ndarray:
    return np.where(mask, (rows - rows[mask].mean()) / np.sqrt(rows[mask].var(ddof=1) + 1e-8), 0)


def of_steps(r: Rollout, scores: np.ndarray, rewards: np.ndarray) -> np.ndarray:
    "arXiv 2402.03300, section 4.1.3: each step in units of its group, then what is to come."
    out = np.zeros(rewards.shape)
    for start in range(0, len(rewards), K):
        steps = []
        for i in range(start, start + K):
            n = int(r.mask[i].sum())
            ends = [t for t in range(n) if r.paid[i, t] or scores[i, t] != 0] or [n - 1]
            begins = [0, *(t + 1 for t in ends[:-1])]
            stops = [*(t + 1 for t in ends[:-1]), n]
            steps += [(i, end, rewards[i, a:b].sum()) for end, a, b in zip(ends, begins, stops)]
        earned = np.array([x for _, _, x in steps])
        for i, end, x in steps:
            out[i, : end + 1] += (x - earned.mean()) / (earned.std(ddof=1) + 1e-4)
    return out


def by_numpy(r: Rollout, cfg: Objective) -> tuple[np.ndarray, np.ndarray]:
    "Rewards and advantages by the formulas."
    scores, rewards = shaped(r, cfg)
    mask, (count, _), name = r.mask.numpy(), rewards.shape, cfg.advantage_estimator
    if name == "grpo":
        return rewards, of_steps(r, scores, rewards)
    out = np.zeros(rewards.shape)
    if name in ("rloo", "dr_grpo"):
        earned = rewards.sum(1)
        for i in range(count):
            group = earned[i // K * K : i // K * K + K]
            scale = K / (K - 1) if name == "rloo" else 1
            out[i] = np.where(mask[i], (earned[i] - group.mean()) * scale, 0)
        return rewards, out
    assert name in ("gae", "reinforce_pp"), f"no numbers in numpy for {name}"
    values = r.values.numpy() if name == "gae" else np.zeros(rewards.shape)
    lam = cfg.lam if name == "gae" else 1.0
    for i in range(count):
        carried, after = 0.0, 0.0
        for t in reversed(range(int(mask[i].sum()))):
            carried = rewards[i, t] + cfg.gamma * after - values[i, t] + cfg.gamma * lam * carried
            out[i, t], after = carried, values[i, t]
    return rewards, white(out, mask)


def computed(r: Rollout, cfg: Objective) -> Rollout:
    final = final_scores(r.raw_scores, r.stopped, cfg, RunningMoments(), mask=r.mask)
    return estimate_advantages(r.with_(scores=final), cfg, num_generations=K)


SCORES = {
    "plain": {},
    "normalised": dict(normalize_scores=True, missing_eos_penalty=0.5),
    "replaced": dict(non_eos_penalty=True, kl_in="loss", kl_estimator="k3"),
}


def by_preflight(r: Rollout, cfg: Objective) -> tuple[list, list]:
    "Rewards and advantages by the copy that the preflight compares with."
    cut = lambda rows: [row[real].tolist() for row, real in zip(rows, r.mask)]
    args = SimpleNamespace(**vars(cfg), num_generations=K)
    sums = score_sums(r.raw_scores)
    moments = sums.mean().item(), sums.std().item()
    ended = r.stopped.tolist()
    scores = [by_hand.final_scores(x, e, args, *moments) for x, e in zip(cut(r.raw_scores), ended)]
    steps = [
        [t for t, (paid, x) in enumerate(zip(row, score)) if paid or x]
        for row, score in zip(cut(r.paid), scores)
    ]
    values = [[*row, 0.0] for row in cut(r.values)]
    made = by_hand.targets_of(cut(r.kl), scores, values, ended, args, args.kl_coef, steps)
    return made.rewards, made.advantages


def check_numbers(kinds=("steps", "tokens")) -> None:
    for seed, (kind, estimator, how) in enumerate(product(kinds, by_hand.BY_HAND, SCORES.values())):
        r = some_rollout(seed, kind)
        cfg = Objective(advantage_estimator=estimator, kl_coef=0.3, lam=0.9, **how)
        ours, wanted = computed(r, cfg), by_numpy(r, cfg)
        for got, want, copy in zip((ours.rewards, ours.advantages), wanted, by_preflight(r, cfg)):
            case = dict(atol=1e-6, rtol=0, err_msg=f"{kind}, {estimator}, {how}")
            assert_allclose(got.numpy(), want, **case)
            assert_allclose([x for row in copy for x in row], want[r.mask.numpy()], **case)


# catches: what five of the wrong programs do, and steps of 0 that are forgotten; here or in the
# copy of the preflight
def test_numbers_are_those_of_numpy():
    check_numbers()


@pytest.mark.parametrize("how", SCORES.values(), ids=SCORES)
@pytest.mark.parametrize("estimator", by_hand.BY_HAND)
def test_a_score_on_the_last_token_is_the_score_of_the_response(estimator, how):
    "Bit for bit, as both are one path; grpo's form for steps up to rounding."
    r = some_rollout(3, "end")
    cfg = Objective(advantage_estimator=estimator, kl_coef=0.3, **how)
    of_tokens = computed(r, cfg)
    of_response = computed(r.with_(raw_scores=score_sums(r.raw_scores), paid=None), cfg)
    assert of_response.scores.dim() == 1
    assert torch.equal(of_tokens.rewards, of_response.rewards)
    close = dict(atol=1e-9, rtol=0) if estimator == "grpo" else dict(atol=0, rtol=0)
    torch.testing.assert_close(of_tokens.advantages, of_response.advantages, **close)
    if estimator == "gae":
        assert torch.equal(of_tokens.returns, of_response.returns)


def test_what_is_for_whole_responses_is_refused():
    r, clip = some_rollout(0), Objective(score_clip=1.0)
    one_ratio = Objective(advantage_estimator="grpo", importance_level="sequence")
    with pytest.raises(ValueError, match="score_clip is 1.0 and the judges score tokens: .*Leave"):
        computed(r, clip)
    with pytest.raises(ValueError, match="grpo has an advantage for each step here"):
        computed(r, one_ratio)
    computed(r.with_(raw_scores=score_sums(r.raw_scores), paid=None), clip)


# ---- Six wrong programs ----


def late(scores, mask, none=0.0):
    "One slot late."
    whole = right_on_tokens(scores, mask, none)
    return torch.cat([torch.full_like(whole[:, :1], none), whole[:, :-1]], 1)


def on_padding(scores, kl, mask, kl_coef):
    "Columns after the end are paid what the last token is paid."
    rewards, price = right_shape(scores, kl, mask, kl_coef)
    return torch.where(mask, rewards, rewards.gather(1, mask.sum(1, keepdim=True) - 1)), price


def twice(scores, mask, none=0.0):
    "The sum once more, on the last token."
    whole = right_on_tokens(scores, mask, none)
    return whole + torch.where(last_token(mask), score_sums(scores)[:, None], 0.0)


def one_early(scores, mask, none=0.0):
    "A token is paid for the one after it; the first keeps its own."
    whole = right_on_tokens(scores, mask, none)
    return torch.cat([whole[:, :1] + whole[:, 1:2], whole[:, 2:], whole[:, :1] * 0], 1)


def per_token(self, x, mask=None):
    "The mean off every token."
    return (x - self.mean) / max(self.std, 1e-8)


def early(tokenizer, ids, text):
    "Pieces of a character end it: the first has it all."
    spans = right_spans(tokenizer, ids, text)
    return [
        (min(a + (i > 0 and a == b and a < len(text)), len(text)), b)
        for i, (a, b) in enumerate(spans)
    ]


right_on_tokens, right_spans = on_tokens, token_spans
right_shape = rlhf_nb.shaping.shape_rewards
WRONG = {
    "one slot late": (rlhf_nb.shaping, "on_tokens", late, check_numbers),
    "paid on padding": (rlhf_nb.ppo, "shape_rewards", on_padding, check_numbers),
    "off by one in a character": (rlhf_nb.reward_functions, "token_spans", early, check_landing),
    "paid one token early": (rlhf_nb.shaping, "on_tokens", one_early, check_numbers),
    "the sum counted twice": (rlhf_nb.shaping, "on_tokens", twice, check_numbers),
    "normalised per token": (RunningMoments, "normalize", per_token, check_numbers),
}


@pytest.mark.parametrize("owner, name, wrong, check", WRONG.values(), ids=WRONG)
def test_a_wrong_program_is_red(owner, name, wrong, check, monkeypatch):
    check()
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises(AssertionError):
        check()


# ---- Ranks, files ----


def numbers(r: Rollout, rows: slice) -> Rollout:
    "Some rows, their scores as numbers where each has one on its last token alone."
    part = r.select(list(range(len(r)))[rows])
    if not torch.equal(part.paid, last_token(part.mask)):
        return part
    sums = {name: score_sums(getattr(part, name)) for name in ("raw_scores", "scores")}
    return part.with_(paid=None, **sums)


# catches: moments of tokens, a rank without scores of tokens that waits for another, a metric that
# is a mean of means
def test_two_ranks_compute_what_one_does():
    cfg = Objective(normalize_scores=True, missing_eos_penalty=0.5, kl_coef=0.3)
    whole = some_rollout(5)
    ends = last_token(whole.mask)
    whole = whole.with_(  # the second rank has a number for each response
        paid=torch.cat([whole.paid[:2], ends[2:]]),
        raw_scores=torch.cat([whole.raw_scores[:2], torch.where(ends, 0.5, 0.0)[2:].double()]),
        logprobs=torch.where(whole.mask, -1.0, 0.0),
    )
    whole = whole.with_(scores=whole.raw_scores)
    sums = dict.fromkeys("tokens loss policy approxkl clipfrac entropy ratio ratio_sq".split(), 1.0)

    def work(part: Rollout, reduce=None) -> tuple[Rollout, dict]:
        final = final_scores(
            part.raw_scores, part.stopped, cfg, RunningMoments(), reduce, part.mask
        )
        r = estimate_advantages(part.with_(scores=final), cfg, reduce=reduce)
        return r, update_metrics(r, cfg, sums, [1.0], *([reduce] if reduce else []))

    alone, metrics = work(whole)
    ranks = on_ranks(work, numbers(whole, slice(0, 2)), numbers(whole, slice(2, 4)))
    assert [r.paid is None for r, _ in ranks] == [False, True]
    together = merge_rollouts([r for r, _ in ranks])
    for name in ("scores", "raw_scores", "rewards", "advantages", "returns"):
        torch.testing.assert_close(getattr(together, name), getattr(alone, name))
    assert torch.equal(together.paid, alone.paid)
    for _, found in ranks:
        assert found.keys() == metrics.keys()
        assert_allclose([*found.values()], [*metrics.values()], atol=1e-12)
    paid, raw = whole.paid.numpy(), whole.raw_scores.abs().numpy()
    assert metrics["tokens/paid"] == paid.sum() / 4
    earned = raw[raw.sum(1) > 0]
    shares = earned.sum(1) ** 2 / (earned**2).sum(1) / whole.mask.sum(1).numpy()[raw.sum(1) > 0]
    assert_allclose(metrics["objective/score_spread"], shares.mean())
    assert_allclose(metrics["objective/scores"], alone.scores.sum(1).mean())


def each_c(prompts, responses, **columns):
    "A step for each letter from a to e; one number for a text with a j."
    steps = lambda text: [(i + 1, float(x == "c") - 0.1) for i, x in enumerate(text) if x < "f"]
    return [float(len(text)) / 4 if "j" in text else steps(text) for text in responses]


def sums_of(texts: list[str]) -> list[float]:
    kinds = each_c([], texts)
    return [x if isinstance(x, float) else sum(y for _, y in x) for x in kinds]


RUNS = dict(
    gae=dict(normalize_scores=True, missing_eos_penalty=0.5),
    grpo=dict(advantage_estimator="grpo", num_generations=2, missing_eos_penalty=0.5),
)
KEPT = dict(save_rollouts=True, save_strategy="steps", save_steps=1, save_start=True)


# catches: a file without the marks of steps, sums in their place, scores judged again
@pytest.mark.parametrize("kind", RUNS)
def test_a_run_keeps_resumes_replays_and_evaluates_them(kind, ppo):
    trainer = ppo.trained(each_c, **RUNS[kind], **KEPT)
    kept, logged = rollouts(trainer), logs(trainer)
    for r, log in zip(kept, logged):
        assert r.scores.shape == r.raw_scores.shape == r.mask.shape == r.paid.shape
        assert not r.raw_scores[~r.paid].any() and not r.paid[~r.mask].any()
        assert_allclose(score_sums(r.raw_scores), sums_of(r.responses), atol=1e-6)
        assert_allclose(log["objective/raw_scores"], np.mean(sums_of(r.responses)), atol=1e-6)
        assert_allclose(log["objective/scores"], score_sums(r.scores).mean(), atol=1e-6)
        assert_allclose(log["tokens/paid"], r.paid.sum() / len(r), atol=1e-6)
        assert r.episodes()["raw_score"].tolist() == score_sums(r.raw_scores).tolist()
    first, cfg = kept[0], trainer.objective_for(kept[0])
    for name, want in zip(("rewards", "advantages"), by_numpy(first, cfg)):
        assert_allclose(getattr(first, name), want, atol=1e-5, rtol=0)
    folder = trainer.args.output_dir
    assert replay(folder, 1).same
    _, harder, _ = update_again(source_of(folder, 1), dict(missing_eos_penalty=2.0))
    cut = (last_token(harder.mask) & ~harder.stopped[:, None]).float()
    torch.testing.assert_close(harder.rewards, kept[1].rewards - 1.5 * cut)
    if kind == "gae":
        assert reproduces(first, objective_of(first)) == (True, ANY)
        charged = what_if(first, replace(objective_of(first), missing_eos_penalty=2.0))
        cut = (last_token(first.mask) & ~first.stopped[:, None]).float()
        torch.testing.assert_close(charged.rewards, first.rewards - 1.5 * cut)
        header = unpacked(packed_update(shown_of(first)))[0]
        assert dict(header["arrays"])["earned"] == first.mask.sum() and header["recipe"]
    after, done = weights(trainer), sums_of(completed_texts(trainer))
    assert_allclose(trainer.evaluate()["eval_score"], np.mean(done), atol=1e-6)
    other = ppo(each_c, **RUNS[kind], **KEPT | dict(save_total_limit=9))
    other.train(resume_from_checkpoint=f"{folder}/checkpoint-1")
    assert unlike(weights(other), after) == []


def all_at_the_end(prompts, responses, response_ids, **columns):
    "The same numbers as `likes_c`, as lists with zeros before them."
    scores = likes_c(prompts, responses)
    return [[0.0] * (len(ids) - 1) + [x] for ids, x in zip(response_ids, scores)]


def test_a_run_is_the_same_bit_for_bit_in_either_form(ppo):
    how = dict(normalize_scores=True, missing_eos_penalty=0.5, whiten_rewards=True)
    of_responses, of_tokens = (ppo(reward, **how) for reward in (likes_c, all_at_the_end))
    for trainer in (of_responses, of_tokens):
        trainer.train()
    assert unlike(weights(of_responses), weights(of_tokens)) == []
    more = {"tokens/paid", "objective/score_spread"}
    for one, other in zip(logs(of_responses), logs(of_tokens)):
        assert untimed(one) == {k: x for k, x in untimed(other).items() if k not in more}
        assert more <= other.keys() and not more & one.keys()


def completed_texts(trainer) -> list[str]:
    return trainer.evaluator.complete(trainer.eval_dataset).texts


REWARDS = [x for x in LADDER if x.name.startswith(("data: episodes", "log-probs", "rewards: j"))]
REWARDS += [x for x in LADDER if x.name in ("rewards: scores", "rewards: per token")]
REWARDS += [x for x in LADDER if x.name.startswith("value model: adv") or "metrics" in x.name]


@pytest.mark.parametrize("kind", RUNS)
def test_the_preflight_computes_them_too(kind, ppo, monkeypatch):
    "And it sees a score that is paid one slot late."
    trainer = ppo(each_c, **RUNS[kind])
    assert preflight(trainer, rungs=REWARDS, quiet=True).passed
    monkeypatch.setattr(rlhf_nb.shaping, "on_tokens", late)
    done = preflight(trainer, rungs=REWARDS, quiet=True)
    assert next(x.name for x in done.checks if not x.passed) == "rewards: per token"


# ---- Reward models ----


def classifier(labels: int, **sizes) -> GPTNeoXForTokenClassification:
    "Of tokens, in the shape of the tests' policy."
    shape = dict(vocab_size=12, intermediate_size=32, num_labels=labels, pad_token_id=0)
    torch.manual_seed(labels)
    return GPTNeoXForTokenClassification(GPTNeoXConfig(**SIZES | shape | sizes)).eval()


def read_plainly(model, r: Rollout, i: int) -> np.ndarray:
    "What the model's own forward says after each token of a response."
    ids = torch.cat([r.prompt_ids[i][r.prompt_mask[i].bool()], r.response_ids[i][r.mask[i]]])
    with torch.no_grad():
        logits = model(input_ids=ids[None], attention_mask=torch.ones_like(ids[None])).logits[0]
    logits = logits[-int(r.mask[i].sum()) :].float()
    return (logits.softmax(-1)[:, 1] if logits.shape[-1] == 2 else logits[:, 0]).numpy()


# catches: the logit before the token, the probability of wrong, a separator's next token, a
# classifier that becomes the value model; and sums of an evaluation
@pytest.mark.parametrize("level", ["token", "step"])
def test_a_reward_model_judges_tokens_or_steps(level, ppo, tmp_path):
    model = classifier(1 if level == "token" else 2)
    model.save_pretrained(tmp_path / "judge")
    how = dict(reward_level=level) | (dict(step_separator="c") if level == "step" else {})
    trainer = ppo(
        [str(tmp_path / "judge"), lambda prompts, responses: [0.25] * len(responses)], **how
    )
    r = trainer.score(trainer.rollout(PROMPTS[:8]))
    seen = 0
    for i, text in enumerate(r.responses):
        said, n = read_plainly(model, r, i), int(r.mask[i].sum())
        wanted = np.full(n, np.nan)
        if level == "token":
            wanted[:] = said
        else:
            cuts = [t for t, x in enumerate(text) if x == "c" and (t == 0 or text[t - 1] != "c")]
            cuts = [t for t in cuts if t] + [len(text) - 1] * (bool(text) and text[-1] != "c")
            wanted[cuts] = said[cuts]
            seen += len(cuts) > 1
        wanted[-1] = np.nansum([wanted[-1], 0.25])
        assert r.paid[i, :n].tolist() == (~np.isnan(wanted)).tolist(), text
        assert_allclose(r.raw_scores[i, :n], np.nan_to_num(wanted), atol=1e-6)
    assert seen or level == "token"
    completions = trainer.evaluator.complete(trainer.eval_dataset)
    assert len(completions.scores) == len(completions.texts) and trainer.evaluate()["eval_score"]
    texts = [*completions.prompts], completions.texts, completions.stopped
    again = trainer.judges.score_answers(Answers(*texts), trainer.processing_class)
    assert_allclose(again, completions.scores, atol=1e-5)  # without the ids, from the texts
    done = preflight(trainer, rungs=REWARDS, quiet=True)
    assert done.passed, [x for x in done.checks if x.passed is False]
    told = next(x.measured for x in done.checks if x.name == "rewards: judges")
    assert f"not run as a plain model: model, whose scores are of {level}s" in told
    metrics = trainer.step(PROMPTS[:8])
    assert metrics["tokens/paid"] > 1 and "objective/raw_scores/model" in metrics


def test_steps_of_a_text():
    assert step_ends("a\n\nb\nc", "\n") == [2, 5, 6] and step_ends("a\n", "\n") == [2]
    assert step_ends("", "\n") == step_ends(" \n ", "\n") == [] and step_ends("x##", "##") == [3]


def test_other_reward_models_are_refused_by_name(tmp_path):
    for labels, level, wanted in ((2, "token", 1), (1, "step", 2), (3, "step", 2)):
        said = rf"GPTNeoXForTokenClassification has num_labels={labels}, .*'{level}' reads {wanted}"
        with pytest.raises(ValueError, match=said):
            Judges(classifier(labels), level=level)
    sequences = GPTNeoXForSequenceClassification(classifier(1).config)
    sequences.save_pretrained(tmp_path / "of_sequences")
    for given in (sequences, str(tmp_path / "of_sequences")):
        with pytest.raises(ValueError, match="GPTNeoXForSequenceClassification, which is no class"):
            Judges(given, level="token")
    classifier(1).save_pretrained(tmp_path / "of_tokens")
    with pytest.raises(ValueError, match="of_tokens holds .*: set reward_level to 'token'"):
        Judges(str(tmp_path / "of_tokens"))
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_labels=1)
    both_ways = BertForTokenClassification(BertConfig(vocab_size=12, **sizes))
    way_out = r".*can be called by a reward function.* list of \(end in its text, number\)"
    with pytest.raises(ValueError, match="BertForTokenClass.* from those before it" + way_out):
        Judges(both_ways, level="token")
    with pytest.raises(ValueError, match="'token' and the reward models have a tok" + way_out):
        Judges(classifier(1), tokenizer=BYTES, level="token")


@pytest.mark.parametrize(
    "settings, complaint",
    [
        (dict(step_separator=""), "step_separator is '': give the text"),
        (dict(step_separator="#"), "step_separator is '#': it needs reward_level='step'"),
        (dict(reward_level="step", score_clip=1.0), "score_clip is 1.0: it bounds one judgement"),
        (dict(reward_level="token", reward_aggregation="mean"), "reward_aggregation is 'mean'"),
        (dict(reward_level="word"), "reward_level is 'word'"),
    ],
)
def test_settings_that_do_not_fit(settings, complaint, small_args):
    with pytest.raises(ValueError, match=complaint):
        small_args(PPOConfig, **settings)


# ---- Files of other trainers ----


# catches: padding taken for tokens, a penalty that is lost, lists without tokens shown behind
# words, sums in the place of tokens
def test_the_token_scores_of_verl(tmp_path):
    text, width = "a cup", 9
    ids = BYTES(text)["input_ids"]
    padded = lambda x: [*x, *[0] * (width - len(ids))]
    scores = [0.0, 1.0, 0.0, -0.5][: len(ids)]
    row = dict(
        input="?", output=text, score=0.25, step=1, responses=padded(ids),
        token_level_scores=padded(scores), response_mask=padded([1] * len(ids)),
    )  # fmt: skip
    path = tmp_path / "1.jsonl"
    path.write_text(json.dumps(row) + "\n" + json.dumps(row | dict(score=0.5)))
    r = ForeignRun(path, tokenizer=BYTES).rollout(1)
    assert r.raw_scores.tolist() == [scores, scores] and r.mask.shape == (2, len(ids))
    assert r.paid[0].tolist() == [x != 0 for x in scores]
    assert r.scores[0].tolist() == [0.0, 1.0, 0.0, -0.75]  # 0.25 less than the raw score
    assert r.episodes()["score"].tolist() == [0.25, 0.5]
    assert again_from_file(r, tmp_path / "r.safetensors").episodes().equals(r.episodes())
    words = ForeignRun(path).rollout(1)  # without a tokenizer there are two words
    assert words.paid is None and words.raw_scores.tolist() == [0.5, 0.5]
    assert "raw_scores: some lists do not" in " ".join(words.info["notes"])
    mine = [dict(tokens=["a", "b"], scores=[0.5, 0.25]), dict(tokens=["c"], scores=[1.0])]
    assert rollout_from(episodes_of(mine)).scores.tolist() == [[0.5, 0.25], [1.0, 0.0]]


def again_from_file(r: Rollout, path) -> Rollout:
    return Rollout.load(r.save(path))
