"""The exercise of the page on the training loop: a whole update, run on a world of five tokens.

The world is made anew for each program, so that its weights can be compared after each step: a
policy that looks at one token back, a value for each token, and an optimizer without a memory.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Generator, Tensor, nn

from rlhf_nb.exercises.draw import integers, normal, two, uniform
from rlhf_nb.exercises.engine import Exercise, Verdict, rewrite
from rlhf_nb.exercises.values import Case, Raised, attempt, same

PAGE = "13_training_loop"
WORDS = 5  # tokens of the world

# ---- The world ----


class Policy(nn.Module):
    """A causal language model whose next token depends on the last one alone. Its weights are a
    tenth of the logits: a gradient is so large that a clip of its norm shows."""

    def __init__(self, table: Any) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.tensor(table) / 10)
        self.calls = 0

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        self.calls += 1
        return SimpleNamespace(logits=10 * self.table[input_ids])


class Body(nn.Module):
    "The part of the value model below its head: a number for each token."

    def __init__(self, table: Any) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.tensor(table))

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        return SimpleNamespace(last_hidden_state=self.table[input_ids][..., None])


class Value(nn.Module):
    "A value model with the parts of a classifier of transformers; its head multiplies by 1."

    def __init__(self, table: Any) -> None:
        super().__init__()
        self.config, self.base_model = SimpleNamespace(), Body(table)
        self.score = nn.Linear(1, 1, bias=False).requires_grad_(False)
        self.score.weight.fill_(1.0)

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.score(self.base_model(input_ids).last_hidden_state))


class Steps(torch.optim.SGD):
    "Plain gradient descent, in which a factor of the loss is not lost; notes the weights."

    def __init__(self, policy: Policy, value: Value, lr: float) -> None:
        self.noted: list[tuple[Tensor, Tensor]] = []
        self.tables = policy.table, value.base_model.table
        each = zip(self.tables, (lr / 100, min(lr, 13.0)))
        super().__init__([{"params": [table], "lr": rate} for table, rate in each], lr)

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.noted.append((self.tables[0].detach().clone(), self.tables[1].detach().clone()))
        return loss


def my_update(
    policy: Any,
    value: Any,
    reference: Any,
    optimizer: Any,
    rollout: Callable,
    score: Callable,
    stop_id: int,
    kl_coef: float,
    epochs: int,
) -> list[float]:
    prompt_ids, _, response_ids = rollout(policy)
    ended = (response_ids == stop_id).long()
    mask = ended.cumsum(1) - ended == 0
    rows = prompt_ids, response_ids
    with torch.no_grad():
        old_logprobs = logprobs_of(policy, *rows)
        ref_logprobs = logprobs_of(reference, *rows)
        old_values = values_of(value, *rows)
    scores = score(response_ids, mask)
    last = torch.arange(mask.shape[1]) == mask.sum(1, keepdim=True) - 1
    kl = old_logprobs - ref_logprobs
    rewards = -kl_coef * kl + torch.where(last, scores[:, None], 0.0)
    later, after, backwards = torch.zeros(len(mask)), torch.zeros(len(mask)), []
    for t in reversed(range(mask.shape[1])):
        delta = rewards[:, t] + after - old_values[:, t]
        later = torch.where(mask[:, t], delta + 0.95 * later, 0.0)
        after = torch.where(mask[:, t], old_values[:, t], 0.0)
        backwards.append(later)
    advantages = torch.stack(backwards[::-1], 1)
    returns = advantages + old_values
    real = advantages[mask]
    advantages = (advantages - real.mean()) / real.std()
    losses = []
    for _ in range(epochs):
        logprobs = logprobs_of(policy, *rows)
        values = values_of(value, *rows)
        ratio = (logprobs - old_logprobs).exp()
        near = ratio.clamp(0.8, 1.2)
        policy_loss = torch.maximum(-advantages * ratio, -advantages * near)
        close = values.clamp(old_values - 0.2, old_values + 0.2)
        value_loss = 0.5 * torch.maximum((values - returns) ** 2, (close - returns) ** 2)
        loss = (policy_loss + 0.1 * value_loss)[mask].sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def logprobs_of(model: Any, prompt_ids: Tensor, response_ids: Tensor) -> Tensor:
    "The log-prob of every response token, from the column in front of it."
    ids = torch.cat([prompt_ids, response_ids], 1)
    logprobs = model(ids).logits.log_softmax(-1)[:, prompt_ids.shape[1] - 1 : -1]
    return logprobs.gather(-1, response_ids[..., None]).squeeze(-1)


def values_of(model: Any, prompt_ids: Tensor, response_ids: Tensor) -> Tensor:
    "In front of every response token."
    ids = torch.cat([prompt_ids, response_ids], 1)
    return model(ids).logits.squeeze(-1)[:, prompt_ids.shape[1] - 1 : -1]


# ---- Running it ----


def run_update(program: Callable, given: Case) -> Any:
    """What a program did in a new world: the numbers of rollouts and steps, whether it read the
    reference, what it returned, and the weights of policy and value model after each step."""
    policy, value = Policy(given["policy"]), Value(given["value"])
    reference = Policy(given["reference"]).requires_grad_(False)
    optimizer = Steps(policy, value, given["optimizer"])
    prompts, *answers = (torch.tensor(rows) for rows in given["rollout"])
    points, calls = torch.tensor(given["score"]), itertools.count()

    def rollout(model: Any) -> tuple[Tensor, Tensor, Tensor]:
        "Prompt ids and mask, and what the policy wrote: other answers at each call."
        drawn = answers[(next(calls) + (model is not policy)) % len(answers)]
        return prompts.clone(), torch.ones_like(prompts).bool(), drawn.clone()

    def score(response_ids: Tensor, mask: Tensor) -> Tensor:
        return torch.where(mask.bool(), points[response_ids], 0.0).sum(1)

    rest = given["stop_id"], given["kl_coef"], given["epochs"]
    result = attempt(program, policy, value, reference, optimizer, rollout, score, *rest)
    steps = optimizer.noted
    if isinstance(result, Raised) and not steps:
        return result
    weights = [torch.stack(each) for each in zip(*steps)] or [torch.zeros(0)] * 2
    return next(calls), reference.calls > 0, len(steps), result, *weights


@lru_cache(maxsize=2048)
def run_known(program: Callable, given: tuple[tuple[str, Any], ...]) -> Any:
    "The same, of the right answer or one of the catalogue, which is run once on each case."
    return run_update(program, dict(given))


class UpdateExercise(Exercise):
    """A checker that runs an update in the world of a case, and compares what it did. It names as
    many as three mistakes at once."""

    def draw(self, seed: int) -> list[Case]:
        return _draw_worlds(seed)

    def judge(self, answer: Any, seed: int) -> Verdict:
        "In up to three draws: in one, chance or rounding may hide a mistake, or which it is."
        verdicts = []
        for k in range(3):
            verdicts.append(super().judge(answer, seed + k))
            named = any(text in verdicts[-1].text for text in self.mistakes)
            if named or not (verdicts[-1] or verdicts[-1].seen):
                return verdicts[-1]
        return next((verdict for verdict in verdicts if not verdict), verdicts[0])

    def result(self, program: Callable, given: Case) -> Any:
        file = getattr(getattr(program, "__code__", None), "co_filename", "")
        ours = program is self.right or file == f"<{self.name} with a mistake>"
        return run_known(program, tuple(given.items())) if ours else run_update(program, given)

    def _judge(self, answer: Callable, cases: list[Case], seed: int) -> Verdict:
        verdict = super()._judge(answer, cases, seed)
        if verdict or verdict.text in self.mistakes:
            return verdict
        got = [self.result(answer, case) for case in cases]
        if all(isinstance(x, tuple) and not x[2] and x[3] is None for x in got):
            todo = f"{self.name} returns None: write its body, then run this cell again."
            return Verdict(False, todo, begun=False)
        for messages, program in combine_mistakes():
            if all(same(self.result(program, c), x) for c, x in zip(cases, got)):
                text = " ".join(f"({i}) {x}" for i, x in enumerate(messages, 1))
                return Verdict(False, f"{len(messages)} mistakes at once. {text}", verdict.seen)
        return verdict

    def _show_case(
        self, case: Case, got: Any, want: Any = None, gradients: Callable | bool = False
    ) -> str:
        def name_results(x: Any) -> Any:
            return dict(zip(self.results, x)) if isinstance(x, tuple) else x

        return super()._show_case(case, name_results(got), name_results(want), gradients)


@lru_cache
def combine_mistakes() -> list[tuple[tuple[str, ...], Callable]]:
    "Programs that make two or three of the commonest mistakes at once."
    common: Any = {x: edit for x, edit in UPDATE.mistakes.items() if x.startswith(COMMON)}
    programs = []
    for count in (2, 3):
        for messages in itertools.combinations(common, count):
            edits = "; ".join(common[message] for message in messages)
            program = attempt(rewrite, my_update, edits)
            if not isinstance(program, Raised):  # two edits of the same place
                programs.append((messages, program))
    return programs


_draw_worlds = lru_cache(maxsize=256)(lambda seed: _worlds(Generator().manual_seed(seed)))


def _worlds(g: Generator) -> list[Case]:
    def world(*given: Any) -> Case:
        return dict(zip(inspect.signature(my_update).parameters, map(rows_of, given)))

    def draw_world(
        lengths: tuple, stop: int, epochs: int, lr: float, kl_coef: float, scale: float
    ) -> Case:
        def answers() -> Tensor:
            "Rows that stop at these lengths, then noise and other stops. The longest does not."
            ids = (stop + integers(g, 1, WORDS - 2, len(lengths), max(lengths))) % WORDS
            for i, length in enumerate(lengths):
                ids[i, length - 1 : max(lengths) - 1 : 2] = stop
            return ids

        # One prompt ends with the rare word, whose value and KL are very far from the others'.
        policy, value, rare = normal(g, WORDS, WORDS), normal(g, WORDS), (stop - 1) % WORDS
        prompts = (stop + integers(g, 0, WORDS - 2, len(lengths), 2)) % WORDS
        reference = policy + normal(g, WORDS, WORDS)
        sign = 1 if scale > 1 else -1
        prompts[1, -1], value[rare] = rare, 40 * sign
        policy[rare, rare] += 15
        reference[rare, rare] += 60 * sign
        rollout, score = (prompts, answers(), answers()), scale * uniform(g, -3, 3, WORDS)
        models = policy, scale * value, reference
        return world(*models, lr, rollout, score, stop, kl_coef, epochs)

    stops, rates, prices = two(g, range(WORDS)), two(g, [11.0, 12.0, 13.0]), two(g, [0.3, 0.4, 0.5])
    # Token 1 is worse than most, and one step makes it more than 10 times as likely, because token
    # 0 in the same place is worse still, and there are 30 of it.
    policy = torch.tensor([0.0, -3.2, -8.0, -8.0, -8.0]) + normal(g, WORDS, WORDS, scale=0.05)
    models = policy, 20 + normal(g, WORDS), policy + normal(g, WORDS, WORDS, scale=0.1)
    rows = ((0,) * 10,) * 3 + ((2,) * 10,) * 3 + ((1, *[3] * 9),)
    rollout = ((3, 0),) * 3 + ((3, 2),) * 3 + ((3, 0),), rows, rows
    # In the last world token 4 is worth about 20, its three bad answers are worth less and its good
    # one more: the value in front of the good one moves away from its target. The steps are small.
    return [
        draw_world((5, 2, 4, 3), stops[0], 4, rates[0], prices[0], 10.0),
        draw_world((4, 1, 5, 3, 6), stops[1], 5, rates[1], prices[1], 1.0),
        world(*models, 500.0, rollout, (-3.0, -16.0, 3.0, 0.0, 0.0), 3, prices[0], 2),
        world(*models, 13.0, (((3, 4),) * 4, *[rows[:4]] * 2), (-5.0, 0, 4, 0, 0), 3, 0.3, 2),
    ]


def rows_of(x: Any) -> Any:
    "The numbers of tensors as tuples in tuples."
    if isinstance(x, tuple) or (isinstance(x, Tensor) and x.ndim):
        return tuple(map(rows_of, x))
    return round(x.item(), 2) if isinstance(x, Tensor) else x


COMMON = (  # how the commonest mistakes begin
    "The old log-probs move",
    "Whitening counts",
    "The value model's target is made",
    "There is one step",
    "The loss is a mean over",
    "The reference is never read",
    "The score is in the last column",
    "The score is on every token",
    "Of the clipped",
    "The gradients of earlier",
    "The old values have a gradient, and through",
    "The sign of the KL",
)
RETURNS = "    returns = advantages + old_values\n"
WHITENED = "(advantages - real.mean()) / real.std()"
TOTAL = "(policy_loss + 0.1 * value_loss)[mask].sum() / mask.sum()"
PAID = "torch.where(last, scores[:, None], 0.0)"
LAST = "torch.arange(mask.shape[1]) == mask.sum(1, keepdim=True) - 1"
WORSE = "torch.maximum(-advantages * ratio, -advantages * near)"
WORSE_VALUE = "torch.maximum((values - returns) ** 2, (close - returns) ** 2)"
CLEAR = "        optimizer.zero_grad()\n"
BACKWARD = "        loss.backward()\n"
K1 = "old_logprobs - ref_logprobs"


def _rollout_each_epoch(*given: Any) -> list[float]:
    return [loss for _ in range(given[-1]) for loss in my_update(*[*given[:-1], 1])]


UPDATE = UpdateExercise(
    my_update,
    _worlds,
    "You wrote PPO: the losses are right, and so is every weight after every step.",
    {
        # What is kept from the rollout
        "The old log-probs move with the policy, so the ratio is always 1 and nothing is clipped: "
        "keep them from before the first step.": (
            "logprobs = logprobs_of(policy, *rows)\n        values → logprobs = "
            "logprobs_of(policy, *rows)\n        old_logprobs = logprobs.detach()\n        values"
        ),
        "You let the policy write new answers in each epoch: go over the same rollout in all of "
        "them.": (_rollout_each_epoch),
        "There is one step in all: "
        "take a step in each epoch, over the same rollout.": "range(epochs) → range(1)",
        "The old log-probs have a gradient, which cancels that of the new ones: "
        "compute them under torch.no_grad().": (
            "old_logprobs = logprobs_of → old_logprobs = torch.enable_grad()(logprobs_of)"
        ),
        "The old values have a gradient, and through the advantages and returns it reaches the "
        "value model: compute them under "
        "torch.no_grad().": "old_values = values_of → old_values = torch.enable_grad()(values_of)",
        "The old values have a gradient, and retain_graph only hides that: "
        "compute them under torch.no_grad().": (
            "old_values = values_of → old_values = torch.enable_grad()(values_of); "
            "loss.backward() → loss.backward(retain_graph=True)"
        ),
        "Old log-probs and values both have a gradient: "
        "compute them under torch.no_grad().": "torch.no_grad() → torch.enable_grad()",
        "Old log-probs and values both have a gradient, and retain_graph only hides that: "
        "compute them under torch.no_grad().": (
            "torch.no_grad() → torch.enable_grad(); "
            "loss.backward() → loss.backward(retain_graph=True)"
        ),
        "No gradient reaches the value model, because the new values are detached: compute them "
        "with a gradient in each epoch.": (
            "values = values_of(value, *rows)\n        ratio → "
            "values = values_of(value, *rows).detach()\n        ratio"
        ),
        "The values are one column late: read each in the column in front of its token.": (
            "values_of(value, *rows) → value(torch.cat(rows, 1)).logits[:, rows[0].shape[1] :, 0]"
        ),
        # Mask, KL and score
        "What follows the stop token counts as part of the response: "
        "cut it off with a mask.": "ended.cumsum(1) - ended == 0 → torch.ones_like(ended).bool()",
        "The stop token itself is cut off: it was chosen too, "
        "and it carries the score.": "ended.cumsum(1) - ended == 0 → ended.cumsum(1) == 0",
        "The mask goes on to the last stop token: the first one ends a response.": (
            "ended.cumsum(1) - ended == 0 → "
            "(ended.flip(1).cumsum(1).flip(1) > 0) | (ended.sum(1, keepdim=True) == 0)"
        ),
        "The KL is k3: the default in the rewards is k1, logprobs - "
        "ref_logprobs.": f"{K1} → torch.expm1(ref_logprobs - old_logprobs) + {K1}",
        "The reference is never read, so there is no KL to pay for: take its log-probs "
        "from the reference, not from the policy.": "logprobs_of(reference → logprobs_of(policy",
        "The KL is not in the rewards: "
        "every token pays kl_coef times its KL.": "-kl_coef * kl → 0 * kl",
        "The sign of the KL is wrong, so drift from the reference is rewarded: "
        "the KL is a price, -kl_coef * (logprobs - ref_logprobs).": "-kl_coef * kl → kl_coef * kl",
        "kl_coef makes no difference: the price is kl_coef times the KL.": "-kl_coef * kl → -kl",
        "The score is in the last column, padding or not: it belongs on the last real "
        "token.": f"{LAST} → (torch.arange(mask.shape[1]) == mask.shape[1] - 1).expand_as(mask)",
        "The score is on every token: "
        "it is paid once a response, on the last real token.": f"{PAID} → scores[:, None]",
        "The score is one token too early: "
        "it belongs on the last real token.": "keepdim=True) - 1 → keepdim=True) - 2",
        "The score is not in the rewards: add it to the last real token.": f" + {PAID} →",
        "Tokens after the stop token are scored too: give the "
        "mask to score.": "score(response_ids, mask) → score(response_ids, torch.ones_like(mask))",
        **{
            f"The rewards are whitened{kept}: leave them as they are, and whiten the advantages.": (
                "    later, after →     rewards = (rewards - rewards[mask].mean()) / "
                f"rewards[mask].std(){mean}\n    later, after"
            )
            for kept, mean in (("", ""), (" around their mean", " + rewards[mask].mean()"))
        },
        # Advantages and returns
        "lambda is 1: the default is 0.95.": "0.95 → 1.0",
        "gamma is 0.99: the default is 1, so that the end of a response counts in full.": (
            "+ after - → + 0.99 * after -; 0.95 → 0.99 * 0.95"
        ),
        "The advantages are clamped to -3 and 3: whitening is all that is done to "
        "them.": f"{WHITENED} → ({WHITENED}).clamp(-3, 3)",
        "Whitening counts padding: use the mean and the standard deviation "
        "of the real tokens alone, by the mask.": "advantages[mask] → advantages.reshape(-1)",
        "The advantages are not whitened.": f"{WHITENED} → advantages",
        "Each response is whitened by itself: whiten over the real tokens of all of them.": (
            f"{WHITENED} → torch.stack([(a - a[m].mean()) / (a[m].std() "
            "if m.sum() > 1 else 1) for a, m in zip(advantages, mask)])"
        ),
        "The value model's target is made of whitened advantages: compute "
        "the returns first, then whiten.": f"{RETURNS} →; {WHITENED}\n → {WHITENED}\n{RETURNS}",
        "The value model's target is the advantage: a return "
        "is advantage plus value.": "returns = advantages + old_values → returns = advantages",
        "The value model's target is the reward of the token itself: a "
        "return is advantage plus value.": "returns = advantages + old_values → returns = rewards",
        "The values on padding leak into the advantages: give the mask to GAE.": (
            "torch.where(mask[:, t], delta + 0.95 * later, 0.0) → delta + 0.95 * later; "
            "torch.where(mask[:, t], old_values[:, t], 0.0) → old_values[:, t]"
        ),
        # The loss
        "Of the clipped and the unclipped policy loss you take the smaller: "
        "take the larger, the maximum.": "maximum(-adv → minimum(-adv",
        "The policy loss is not clipped.": f"{WORSE} → -advantages * ratio",
        "You take the clipped policy loss alone: "
        "take the maximum of it and the unclipped one.": f"{WORSE} → -advantages * near",
        "The ratio is upside down: its "
        "log is logprobs - old_logprobs.": "(logprobs - old_logprobs) → (old_logprobs - logprobs)",
        "The sign of the policy loss is wrong: an optimizer minimises, so the loss is minus "
        "advantage times "
        "ratio.": "-advantages * ratio, -advantages * near → advantages * ratio, advantages * near",
        "The clip of the value loss never acts: clip around the values from before the first step, "
        "and take the larger of the two errors.": f"{WORSE_VALUE} → (values - returns) ** 2",
        "The value loss is not in the loss: add 0.1 times it.": " + 0.1 * value_loss →",
        "The policy gets no gradient from the policy loss: it belongs in the loss, with a minus "
        "sign in front of each advantage, and with log-probs that are computed with a gradient in "
        "each epoch.": "policy_loss + 0.1 → 0.1",
        "The value loss has the weight 1: multiply it by 0.1.": "0.1 * value → value",
        "The loss is a mean over all columns, padding included: divide its sum by the number "
        "of real tokens.": "[mask].sum() / mask.sum() → .where(mask, torch.zeros(())).mean()",
        "The loss is a sum: divide it by the number of real tokens.": " / mask.sum() →",
        "The loss is divided by the number of responses: "
        "divide it by the number of real tokens.": " / mask.sum() →  / len(mask)",
        "The loss is a mean of the responses' means, so a token of a short response weighs more: "
        "divide one sum by the number of real tokens.": (
            f"{TOTAL} → (((policy_loss + 0.1 * value_loss) * mask).sum(1) / mask.sum(1)).mean()"
        ),
        "Padding counts in the loss: sum over the real tokens.": "[mask].sum() / → .sum() /",
        "The policy loss is clipped a second time (dual clip, at a ratio of 3): a token that is "
        "bad and became likely is pulled back in full.": (
            f"{WORSE} → torch.where(advantages < 0, {WORSE}.minimum(-3 * advantages), {WORSE})"
        ),
        # The steps
        "The norm of the gradients is clipped to 1: take each step with the gradients as they "
        "are.": f"{BACKWARD} → {BACKWARD}        torch.nn.utils.clip_grad_norm_("
        "[*policy.parameters(), *value.parameters()], 1.0)\n",
        "The gradients of earlier steps are still there: "
        "zero them before each backward pass.": f"{CLEAR} →",
        "No weight moves: you zero the gradients "
        "between backward and step.": f"{CLEAR} →; loss.backward()\n → loss.backward()\n{CLEAR}",
        "You take the step before the backward pass, with the gradients of the loss before.": (
            f"{CLEAR}        loss.backward()\n        optimizer.step()\n → "
            f"        optimizer.step()\n{CLEAR}        loss.backward()\n"
        ),
    },
    results=(
        "the number of rollouts",
        "whether the reference is read",
        "the number of optimizer steps",
        "the losses",
        "the policy weights after each step",
        "the value weights after each step",
    ),
)
