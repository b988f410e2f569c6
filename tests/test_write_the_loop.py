"""The exercise in which a reader writes one update of PPO: answers that are right in other styles
pass, and what goes wrong in an answer made of the package's own functions is named, also where
several things go wrong at once.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
import torch

from rlhf_nb.checks import check_update
from rlhf_nb.exercises.training_loop import UPDATE
from rlhf_nb.fast_logprobs import response_logprobs
from rlhf_nb.gae import gae, returns_from
from rlhf_nb.kl import estimate_kl
from rlhf_nb.losses import policy_loss, value_loss
from rlhf_nb.masks import response_mask, whiten
from rlhf_nb.models import response_values
from rlhf_nb.shaping import shape_rewards

# As a reader writes it from the parts of the course.
PARTS = """
def my_update(policy, value, reference, optimizer, rollout, score, stop_id, kl_coef, epochs):
    prompt_ids, prompt_mask, response_ids = rollout(policy)
    mask = response_mask(response_ids, [stop_id])
    rows = prompt_ids, prompt_mask, response_ids, mask
    with torch.no_grad():
        old_logprobs = response_logprobs(policy, *rows).logprobs
        ref_logprobs = response_logprobs(reference, *rows).logprobs
    with torch.no_grad():
        old_values = response_values(value, *rows)[:, :-1]
    kl = estimate_kl(old_logprobs, ref_logprobs)
    rewards, _ = shape_rewards(score(response_ids, mask), kl, mask, kl_coef)
    advantages = gae(rewards, old_values, mask)
    returns = returns_from(advantages, old_values, mask)
    advantages = whiten(advantages, mask)
    losses = []
    for _ in range(epochs):
        logprobs = response_logprobs(policy, *rows).logprobs
        values = response_values(value, *rows)[:, :-1]
        loss = policy_loss(logprobs, old_logprobs, advantages, mask)
        loss = loss + 0.1 * value_loss(values, old_values, returns, mask)
        loss = loss / mask.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
"""


def smaller_policy_loss(logprobs, old_logprobs, advantages, mask):
    ratio = (logprobs - old_logprobs).exp()
    return torch.minimum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))[mask].sum()


def paid(where: Callable) -> Callable:
    "shape_rewards with the score elsewhere."

    def shape(scores, kl, mask, kl_coef):
        price = torch.where(mask, -kl_coef * kl, 0.0)
        return price + where(mask) * scores[:, None], price

    return shape


def every_token(mask):
    return torch.ones_like(mask)


def last_column(mask):
    return torch.arange(mask.shape[1]) == mask.shape[1] - 1


# the message that begins so
common = lambda beginning: next(x for x in UPDATE.mistakes if x.startswith(beginning))

# The classic mistakes: the text of an answer, what it has instead, and what the verdict must call it.
CLASSIC: dict[str, tuple[tuple[str, ...], str]] = {
    "old log-probs recomputed": (
        ("        loss = policy_loss(", "        old_logprobs = logprobs.detach()\n        loss = policy_loss("),
        common("The old log-probs move"),
    ),
    "whitened before the mask": (
        ("whiten(advantages, mask)", "whiten(advantages, torch.ones_like(mask))"),
        common("Whitening counts"),
    ),
    "targets from whitened advantages": (
        (
            "    returns = returns_from(advantages, old_values, mask)\n", "",
            "    losses = []\n",
            "    returns = returns_from(advantages, old_values, mask)\n    losses = []\n",
        ),
        common("The value model's target is made"),
    ),
    "one step": (("range(epochs)", "range(1)"), common("There is one step")),
    "mean over padding": (("loss / mask.sum()", "loss / mask.numel()"), common("The loss is a mean over")),
    "reference from the policy": (
        ("response_logprobs(reference,", "response_logprobs(policy,"),
        common("The reference is never read"),
    ),
    "score on every token": (("shape_rewards(", "paid(every_token)("), common("The score is on every token")),
    "score in the last column": (("shape_rewards(", "paid(last_column)("), common("The score is in the last column")),
    "minimum": (("loss = policy_loss(", "loss = smaller_policy_loss("), common("Of the clipped")),
    "gradients kept": (("        optimizer.zero_grad()\n", ""), common("The gradients of earlier")),
    "values with a gradient": (
        (
            "    with torch.no_grad():\n        old_values =",
            "    if True:\n        old_values =",
        ),
        common("The old values have a gradient, and through"),
    ),
    "KL the other way round": (
        ("estimate_kl(old_logprobs, ref_logprobs)", "estimate_kl(ref_logprobs, old_logprobs)"),
        common("The sign of the KL"),
    ),
}  # fmt: skip


def written(source: str, *edits: str) -> Callable:
    "An answer, some of its text replaced."
    for old, new in zip(edits[::2], edits[1::2]):
        assert old in source, old
        source = source.replace(old, new)
    scope = globals() | dict(estimate_kl=estimate_kl, returns_from=returns_from)
    exec(compile(source, "<an answer>", "exec"), scope)
    return scope["my_update"]


# ---- Right answers in other styles ----


def by_hand_and_in_place(policy, value, reference, optimizer, rollout, score, stop, beta, epochs):
    "Nothing of the package; tensors changed in place, rows one by one."
    prompts, _, answers = rollout(policy)
    real = torch.zeros_like(answers, dtype=torch.bool)
    for b, row in enumerate(answers.tolist()):
        real[b, : row.index(stop) + 1 if stop in row else len(row)] = True
    answers[~real] = stop
    ids = torch.cat([prompts, answers], 1)

    def chosen(model):
        logp = model(ids).logits[:, 1:-1].log_softmax(-1)
        return logp.gather(2, answers.unsqueeze(2))[:, :, 0]

    before, frozen = chosen(policy).detach(), chosen(reference)
    guess = value.base_model(ids).last_hidden_state[:, 1:-1, 0].detach().clone()
    points, signal, targets = score(answers, real), torch.zeros_like(before), guess.clone()
    for b in range(len(answers)):
        n, later, following = int(real[b].sum()), 0.0, 0.0
        for t in range(n - 1, -1, -1):
            reward = -beta * (before[b, t] - frozen[b, t]) + (points[b] if t == n - 1 else 0.0)
            later = reward + following - guess[b, t] + 0.95 * later
            following = guess[b, t]
            signal[b, t] = later
    targets += signal
    signal -= signal[real].mean()
    signal /= signal[real].std()
    history = []
    for _ in range(epochs):
        optimizer.zero_grad(set_to_none=False)
        total = 0.0
        v = value.base_model(ids).last_hidden_state[:, 1:-1, 0]
        r = torch.exp(chosen(policy) - before)
        for b, t in real.nonzero().tolist():
            gain = torch.min(signal[b, t] * r[b, t], signal[b, t] * r[b, t].clip(0.8, 1.2))
            near = guess[b, t] + (v[b, t] - guess[b, t]).clip(-0.2, 0.2)
            error = torch.max((v[b, t] - targets[b, t]) ** 2, (near - targets[b, t]) ** 2)
            total = total - gain + 0.05 * error
        total /= real.sum()
        total.backward()
        optimizer.step()
        history.append(total.detach())
    return torch.stack(history)


def with_a_closure(policy, value, reference, optimizer, rollout, score, stop_id, kl_coef, epochs):
    "The optimizer calls for the loss, and the two losses have backward passes of their own."
    rows = rollout(policy)
    rows = (*rows, response_mask(rows[2], [stop_id]))
    mask = rows[3]
    old = response_logprobs(policy, *rows).logprobs.detach()
    kl = old - response_logprobs(reference, *rows).logprobs
    v = response_values(value, *rows)[:, :-1].detach()
    advantages = gae(shape_rewards(score(rows[2], mask), kl, mask, kl_coef)[0], v, mask)
    targets, advantages = advantages + v, whiten(advantages, mask)

    def closure():
        optimizer.zero_grad()
        a = policy_loss(response_logprobs(policy, *rows).logprobs, old, advantages, mask)
        b = value_loss(response_values(value, *rows)[:, :-1], v, targets, mask)
        (a / mask.sum()).backward()
        (0.1 * b / mask.sum()).backward()
        return (a + 0.1 * b) / mask.sum()

    return [optimizer.step(closure) for _ in range(epochs)]


RIGHT = {
    "of the course's parts": written(PARTS),
    "by hand and in place": by_hand_and_in_place,
    "a closure": with_a_closure,
    "all of it without a gradient": written(
        PARTS, "    losses = []\n", "    advantages = advantages.detach()\n    losses = []\n"
    ),
    "losses as tensors": written(PARTS, "loss.item()", "loss"),
}


# catches: a checker that knows one order of lines, one type of result, or one set of functions
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_answer_passes_in_any_style(name, seed):
    for k in range(3):  # other draws in each run
        verdict = UPDATE(RIGHT[name], seed + k)
        assert verdict and verdict.text == UPDATE.praise, (seed + k, verdict)


# ---- Wrong ones ----


def named(text: str) -> set[str]:
    "The mistakes that a verdict names."
    return {message for message in UPDATE.mistakes if message in text}


# catches: a mistake that passes, or is called something else, in an answer of the course's parts
@pytest.mark.parametrize("name", CLASSIC)
def test_a_classic_mistake_is_named(name, seed):
    edits, message = CLASSIC[name]
    for k in range(2):
        verdict = UPDATE.judge(written(PARTS, *edits), seed + k)
        assert not verdict and verdict.text == message, (seed + k, verdict)


def edits_of(names: tuple[str, ...]) -> list[str]:
    return [*itertools.chain(*(CLASSIC[name][0] for name in names))]


def apart(names: tuple[str, ...]) -> bool:
    "Whether none of several mistakes takes the place of another."
    edits, source = edits_of(names), PARTS
    for old, new in zip(edits[::2], edits[1::2]):
        if old not in source:
            return False
        source = source.replace(old, new)
    return len({CLASSIC[name][0][0] for name in names}) == len(names)


# catches: several mistakes at once that pass, and a verdict that names none of them, or one that
# was not made
@pytest.mark.parametrize(
    "count, most", [(2, 24), (3, 12), pytest.param(2, 66, marks=pytest.mark.weekly)]
)  # others in each run
def test_combined_mistakes_are_named(count, most, seed):
    problems, every = [], [x for x in itertools.combinations(CLASSIC, count) if apart(x)]
    for names in random.Random(seed).sample(every, min(most, len(every))):
        verdict = UPDATE.judge(written(PARTS, *edits_of(names)), seed)
        made, found = {CLASSIC[name][1] for name in names}, named(verdict.text)
        if verdict or not found or not found <= made:
            problems.append((names, verdict.text))
    assert len(every) > 60 and not problems, (seed, problems)


# catches: mistakes that cancel each other
def test_many_at_once_do_not_pass(seed):
    rng = random.Random(seed)
    for count in range(4, 11):
        names: tuple[str, ...] = ()
        while not names or not apart(names):
            drawn = rng.sample([*CLASSIC], count)
            names = tuple(name for name in CLASSIC if name in drawn)
        verdict = UPDATE.judge(written(PARTS, *edits_of(names)), seed)
        assert not verdict and len(verdict.text) > 20, (seed, names)


OTHERS = {
    "only losses, no step": (("        optimizer.step()\n", ""), "optimizer steps"),
    "no losses": (("return losses", "return None"), "losses"),
    "the last loss": (("return losses", "return losses[-1]"), "losses"),
    "no gradient cut anywhere": (("torch.no_grad()", "torch.enable_grad()"), "torch.no_grad"),
    "an own optimizer": (
        (
            "    losses = []\n",
            "    optimizer = torch.optim.SGD([*policy.parameters(), *value.parameters()], 12.0)\n"
            "    losses = []\n",
        ),
        "optimizer steps",
    ),
    "a temperature": (("(policy, *rows)", "(policy, *rows, temperature=0.7)"), "losses"),
    "lam 1": (("gae(rewards, old_values, mask)", "gae(rewards, old_values, mask, lam=1.0)"), "lambda"),
    "gamma 0.99": (("gae(rewards, old_values, mask)", "gae(rewards, old_values, mask, 0.99)"), "gamma"),
    "values one column late": (("[:, :-1]", "[:, 1:]"), "one column late"),
    "k3": (("estimate_kl(old_logprobs, ref_logprobs)", "estimate_kl(old_logprobs, ref_logprobs, 'k3')"),
           "k3"),
    "whitened rewards": (
        ("    advantages = gae", "    rewards = whiten(rewards, mask)\n    advantages = gae"),
        "rewards are whitened"),
    "values without a gradient": (
        ("_values(value, *rows)[:, :-1]\n        loss", "_values(value, *rows)[:, :-1].detach()\n        loss"),
        "No gradient reaches the value"),
    "log-probs without a gradient": (
        ("        loss = policy_loss(logprobs,", "        loss = policy_loss(logprobs.detach(),"),
        "gets no gradient"),
    "clipped gradients": (
        ("        optimizer.step", "        torch.nn.utils.clip_grad_norm_([*policy.parameters(), "
         "*value.parameters()], 1.0)\n        optimizer.step"), "norm of the gradients is clipped"),
    "a rollout of the reference": (("rollout(policy)", "rollout(reference)"), "losses"),
    "no mask": (("response_mask(response_ids, [stop_id])", "torch.ones_like(response_ids).bool()"),
                "stop token"),
    "whitened returns": (
        ("    losses = []\n", "    returns = whiten(returns, mask)\n    losses = []\n"), "losses"),
    "the policy alone": (("loss = loss + 0.1 * value_loss(values, old_values, returns, mask)", "pass"),
                         "value loss is not"),
    "no epochs, the loop inside": (("range(epochs)", "range(epochs - 1)"), "optimizer steps"),
}  # fmt: skip


# catches: an answer that does something else, and passes because only its losses, or only its
# weights, are compared
@pytest.mark.parametrize("name", OTHERS)
def test_other_mistakes_fail_too(name, seed):
    edits, words = OTHERS[name]
    verdict = UPDATE.judge(written(PARTS, *edits), seed)
    assert not verdict and words in verdict.text, verdict


# catches: a checker that compares what is returned, and not what was done
def test_right_losses_alone_do_not_pass(seed):
    def answer(policy, value, reference, optimizer, *rest):
        before = [p.clone() for p in (*policy.parameters(), *value.base_model.parameters())]
        losses = RIGHT["of the course's parts"](policy, value, reference, optimizer, *rest)
        with torch.no_grad():
            for p, old in zip((*policy.parameters(), *value.base_model.parameters()), before):
                p.copy_(old)
        optimizer.noted[:] = [tuple(before)] * len(losses)
        return losses

    verdict = UPDATE.judge(answer, seed)
    assert not verdict and "weights" in verdict.text


# catches: results that are kept from an earlier answer; a world that an answer changed for the next
def test_an_answer_in_any_world_is_read_anew(seed):
    spoil = written(
        PARTS, "    losses = []\n", "    reference.table.data.zero_()\n    losses = []\n"
    )
    assert UPDATE(spoil, seed) and UPDATE(written(PARTS), seed) and UPDATE(spoil, seed)
    assert check_update is UPDATE
