"""The quick way from states to log-probs: the plain way's numbers and gradients, one block of the
vocabulary at a time, and who takes it."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
import textwrap
import weakref
from pathlib import Path

import pytest
import torch
import transformers as tf
from torch import nn, tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf_nb import logprobs as module
from rlhf_nb import trainer as trainer_module
from rlhf_nb.logprobs import response_logprobs, token_entropy, token_logprobs

SIZES = dict(
    vocab_size=37,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=48,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
SHORT = dict(
    vocab_size=37, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
)
MODELS = dict(
    Llama=SIZES,
    GPTNeoX=SIZES,
    GPT2=SHORT | dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    Cohere=SIZES | dict(logit_scale=0.25),
    Granite=SIZES | dict(logits_scaling=4.0),
    CodeGen=SHORT | dict(rotary_dim=4),
    Gemma2=SIZES | dict(head_dim=8, final_logit_softcapping=5.0),
)  # CodeGen's head has a bias


def build(name: str, **changes) -> nn.Module:
    torch.manual_seed(0)
    made = getattr(tf, f"{name}ForCausalLM", None) or getattr(tf, f"{name}LMHeadModel")
    model = made(getattr(tf, f"{name}Config")(**MODELS[name] | changes))
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.2)
    return model.eval()


@pytest.fixture
def batch():
    """Five rows, prompts of 1 to 7 tokens, responses of 0 to 6, and what must not be read on
    padding."""
    torch.manual_seed(1)
    prompt_mask, mask = (
        torch.arange(7) >= tensor([[0], [2], [6], [3], [1]]),
        torch.arange(6) < tensor([[6], [1], [0], [3], [5]]),
    )
    return (
        torch.randint(1, 37, (5, 7)),
        prompt_mask,
        torch.randint(1, 37, (5, 6)).masked_fill(~mask, -100),
        mask,
    )


# ---- The same numbers as the plain way ----

CASES = [
    dict(temperature=t, scale=s, bias=b, size=size, entropy=e)
    for t, s, b, size, e in (
        (1.0, 1.0, None, (5, 29), "look"),
        (0.7, 1.0, None, (5, 7), None),
        (1.0, 0.25, None, (4, 29), "learn"),
        (2.5, 3.0, "banned", (3, 5), "learn"),
        (0.7, 1.0, "banned", (99, 4), "look"),
        (0.05, 1.0, "plain", (2, 10), "learn"),
        (1.0, 1.0, "far", (6, 29), "learn"),
        (1.0, 1.0, "far", (6, 9), "learn"),
        (0.7, 0.5, "banned", (13, 5), None),
        (2.5, 3.0, "banned", (3, 29), "learn"),
        (1.0, 1.0, "only entropy", (5, 12), "learn"),
    )
]
CASES += [
    dict(temperature=t, scale=s, bias=None, size=(rows, 29), entropy=e, keeps=True)
    for t, s, rows, e in (
        (1.0, 1.0, 5, "look"),
        (0.7, 1.0, 13, None),
        (2.5, 0.25, 4, "look"),
        (0.05, 1.0, 2, None),
        (0.7, 3.0, 99, "look"),
    )
]


def problem(case: dict, dtype: torch.dtype = torch.float32) -> list:
    """States [13, 8], weight [29, 8], bias or None, ids; banned tokens have a logit of -inf, far
    ones of 200 and more."""
    draw = torch.Generator().manual_seed(3)
    states, weight, bias = (
        torch.randn(*shape, generator=draw).to(dtype) for shape in ((13, 8), (29, 8), (29,))
    )
    ids = torch.randint(5, 29, (13,), generator=draw)
    if case["bias"] == "banned":
        bias[:5] = -math.inf
    if case["bias"] == "far":
        bias = bias * 100 + 200
    return [states, weight, bias if case["bias"] in ("banned", "plain", "far") else None, ids]


def pulled(logprobs, entropy, case: dict, leaves: list) -> list:
    "Values, and the gradients that a loss pulls out of them."
    draw = torch.Generator().manual_seed(4)
    pulls = [torch.randn(13, generator=draw).to(logprobs.dtype) for _ in range(2)]
    loss = 0 if case["bias"] == "only entropy" else (logprobs * pulls[0]).sum()
    if case["entropy"] == "learn":
        loss = loss + (entropy * pulls[1]).sum()
    grads = torch.autograd.grad(loss, [x for x in leaves[:3] if x is not None])
    return [logprobs.detach(), *([] if entropy is None else [entropy.detach()]), *grads]


def plain_way(case: dict, dtype: torch.dtype) -> list:
    *leaves, ids = problem(case, dtype)
    leaves = [None if x is None else x.requires_grad_() for x in leaves]
    logits = nn.functional.linear(*leaves) * case["scale"]
    entropy = None if case["entropy"] is None else token_entropy(logits, case["temperature"])
    return pulled(token_logprobs(logits, ids, case["temperature"]), entropy, case, leaves)


def quick_way(module, case: dict, dtype: torch.dtype) -> list:
    *leaves, ids = problem(case, dtype)
    leaves = [None if x is None else x.requires_grad_() for x in leaves]
    how = case["scale"], case["temperature"]
    if case.get("keeps"):
        return pulled(
            *module._Keep.apply(*leaves[:2], ids, *how, case["size"][0], case["entropy"] == "look"),
            case,
            leaves,
        )
    return pulled(
        *module._Measure.apply(*leaves, ids, *how, case["size"], case["entropy"]), case, leaves
    )


def gap(module, case: dict, dtype: torch.dtype = torch.float32) -> float:
    """Largest difference of the two ways, in units of the largest number of each tensor (at least
    1); inf where one is not a number."""
    ways = quick_way(module, case, dtype), plain_way(case, dtype)
    assert len(ways[0]) == len(ways[1])
    gaps = [((a - b).abs().max() / max(1.0, b.abs().max())).item() for a, b in zip(*ways)]
    return max(math.inf if math.isnan(x) else x for x in gaps)


# catches: every wrong program of WRONG, and what is nearly right: 1e-6 in float32, 1e-14 in float64
# (at temperature 1)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients_are_those_of_the_plain_way(case):
    coarse = 1 / min(
        1.0, case["temperature"]
    )  # what a logit was rounded by is divided by the temperature
    if case["size"][1] < 29:
        coarse *= 1.5  # and sums of slices are rounded once more
    if case.get("keeps") and case["entropy"]:
        coarse *= (
            1 + 3 * case["scale"]
        )  # an entropy to look at: a difference of numbers as large as the logits
    assert gap(module, case) < 1e-6 * coarse
    assert gap(module, case, torch.float64) < 1e-14 * coarse


WRONG = {
    "backward forgets the temperature": (
        "z if temperature == 1.0 else z.div_(temperature)).to",
        "z).to",
    ),
    "forward forgets the temperature": (
        "return z if temperature == 1.0 else z.div_(temperature)",
        "return z",
    ),
    "backward forgets the scale": (
        "if scale != 1.0: z.mul_(scale)\n                if grads",
        "if grads",
    ),
    "forward forgets the scale": (
        "    if scale != 1.0: z.mul_(scale)\n    if z.dtype",
        "    if z.dtype",
    ),
    "the last block's gradient of the weight": (
        "grads[1][b:b + words].addmm_(z.T, some)",
        "torch.mm(z.T, some, out=grads[1][b:b + words])",
    ),
    "the last block's gradient of the bias": (
        "grads[2][b:b + words].add_(z.sum(0))",
        "torch.sum(z, 0, out=grads[2][b:b + words])",
    ),
    "labels of the first block": ("x[a:a + rows] for x", "x[:rows][:len(states) - a] for x"),
    "0 * -inf in the entropy": ("mean = z.clamp_(min=-1e4)", "mean = z"),
    "0 * -inf in its gradient": ("z.clamp_(min=-1e4).add_", "z.add_"),
    "the entropy left out of its gradient": (".add_(entropy[:, None])", ""),
    "the gradient of a negative entropy": (
        ".mul_(-pull_entropy[:, None])",
        ".mul_(pull_entropy[:, None])",
    ),
    "a label that replaces the softmax": ("z.scatter_add_(1, columns", "z.scatter_(1, columns"),
    "a softmax without its sign": (".mul_(-pull[:, None])", ".mul_(pull[:, None])"),
    "an exponential that overflows": ("    z.sub_(top)\n", "    top = torch.zeros_like(top)\n"),
    "the largest logit forgotten": (
        "sum(1, keepdim=True).log_() + top)",
        "sum(1, keepdim=True).log_())",
    ),
    "labels of the first slice": ("_word(z, of_some - a,", "_word(z, of_some,"),
    "labels of the first slice in backward": ("ids - b, *rest", "ids, *rest"),
    "a label's pull in every slice": ("(pull * here)[:, None]", "pull[:, None]"),
    "the last slice's states": (
        "grads[0][a:a + rows].addmm_(z, part[0])",
        "torch.mm(z, part[0], out=grads[0][a:a + rows])",
    ),
    "slices that weigh the same": (
        "share = (totals - total).exp()",
        "share = torch.full_like(totals, 1 / len(totals))",
    ),
    "an empty slice": (".masked_fill(share == 0, 0.0)", ""),
    "a sum that is not divided": (".sum(1, keepdim=True) / sums", ".sum(1, keepdim=True)"),
    "kept, and the scale forgotten": (
        "            if scale != 1.0: z.mul_(scale)\n            if temp",
        "            if temp",
    ),
    "kept, and the temperature forgotten": (
        "            if temperature != 1.0: z.div_(temperature)\n",
        "",
    ),
    "kept, and the slope forgotten": ("ctx.slope = scale / temperature ", "ctx.slope = 1.0 "),
    "kept, and an entropy of other logits": ("(total - ctx.slope * (states", "(total - (states"),
    "kept, and the label left out": (".index_add_(0, ids, states * pull)", ""),
    "kept, and the label's row left out": ("(weight[ids] - mean).mul_", "(-mean).mul_"),
    "kept, and the first block for all": (
        "torch.mm(states[some], weight.T, out=probs[some] if",
        "torch.mm(states[:some.stop - a], weight.T, out=probs[some] if",
    ),
    "kept, and not normalised": ("torch.mm(z.div_(sums), weight", "torch.mm(z, weight"),
    "kept, and the largest logit forgotten": ("(sums.log_() + top)", "sums.log_()"),
    "the entropy's pull alone": ("if pull is not None: z.sub_(pull[:, None])", "pass"),
}


def changed(old: str, new: str):
    "The module with one passage of its text replaced."
    text = Path(module.__file__).read_text()
    assert text.count(old) == 1, (
        f"{old!r} stands {text.count(old)} times in logprobs.py: name the passage anew"
    )
    made = importlib.util.module_from_spec(
        importlib.util.spec_from_loader("rlhf_nb.changed_logprobs", loader=None)
    )
    exec(compile(text.replace(old, new), "changed_logprobs.py", "exec"), made.__dict__)
    return made


# catches: a grid of cases that would let a wrong program pass
@pytest.mark.parametrize("name", WRONG)
def test_wrong_programs_are_seen(name):
    wrong = changed(*WRONG[name])
    assert max(gap(wrong, case) for case in CASES) > 1e-3


# catches: a formula that is wrong in the same way on both sides
@pytest.mark.parametrize("entropy", ["learn", "look", None])
def test_gradcheck(entropy):
    case = dict(bias="plain")
    *leaves, ids = problem(case, torch.float64)
    measure = lambda *x: [
        y
        for y in module._Measure.apply(*x, ids, 0.5, 0.7, (4, 5), entropy)
        if y is not None and y.requires_grad
    ]
    assert torch.autograd.gradcheck(measure, [x.requires_grad_() for x in leaves])


# catches: a rounding that would send a seeded run another way: a small model's log-probs and
# gradients stay as they were, to the bit
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_one_block_is_the_plain_way_to_the_bit(kind, temperature):
    torch.manual_seed(0)
    found = []
    for quick in (False, True):
        draw = torch.Generator().manual_seed(0)
        h, w = (
            torch.randn(600, 64, generator=draw).to(kind).requires_grad_(),
            torch.randn(146, 64, generator=draw).to(kind).requires_grad_(),
        )
        ids, pull = torch.randint(146, (600,), generator=draw), torch.randn(600, generator=draw)
        if quick:
            logprobs, *_ = module._Measure.apply(
                h, w, None, ids, 1.0, temperature, (600, 146), "look"
            )
        else:
            logprobs = token_logprobs(nn.functional.linear(h, w), ids, temperature)
        found.append([logprobs.detach(), *torch.autograd.grad((logprobs * pull).sum(), [h, w])])
    for a, b in zip(*found):
        assert torch.equal(a, b)


def both_ways(monkeypatch, make, act) -> list:
    "What `act(model)` finds and the gradients, the plain way and the quick way."
    found, calls, real = [], [], module._plain_head
    for plain in (True, False):
        with monkeypatch.context() as patch:
            patch.setattr(
                module,
                "_plain_head",
                lambda model: None if plain else (calls.append(1), real(model))[1],
            )
            model = make()
            values = act(model)
            found.append(
                [x.detach() for x in values]
                + [p.grad for p in model.parameters() if p.grad is not None]
            )
    assert calls and len(found[0]) == len(found[1])
    return found


# catches: a head that is not the model's, a bias or tie forgotten, padding that is read, a chunk of
# one token, gradients lost under checkpointing
@pytest.mark.parametrize("again", [False, True], ids=["kept", "activation checkpointing"])
@pytest.mark.parametrize("chunk", [37, 37 * 4, 2**26])
@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
@pytest.mark.parametrize("name", ["Llama", "GPTNeoX", "GPT2", "Cohere", "Granite", "CodeGen"])
def test_models(name, tied, chunk, again, batch, monkeypatch):
    weight, mask = torch.randn(batch[3].shape, generator=torch.Generator().manual_seed(2)), batch[3]

    def make():
        model = build(name, tie_word_embeddings=tied)
        if again:
            model.train().gradient_checkpointing_enable(dict(use_reentrant=False))
        assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
        return model

    def act(model):
        found = response_logprobs(model, *batch, temperature=0.7, chunk_logits=chunk)
        (weight * (found.logprobs + 0.1 * found.entropy)).sum().backward()
        return found

    for a, b in zip(*both_ways(monkeypatch, make, act)):
        torch.testing.assert_close(a, b, atol=1e-6 * max(1.0, b.abs().max().item()), rtol=0)


# catches: log-probs summed in bf16, a float32 product under autocast, a gradient that was not cast
# back, one added up in bf16 block by block
def test_bf16_autocast(batch, monkeypatch):
    def act(model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = response_logprobs(model, *batch)
        assert found.logprobs.dtype == found.entropy.dtype == torch.float32
        (found.logprobs + 0.1 * found.entropy).sum().backward()
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())
        return found

    with monkeypatch.context() as patch:
        patch.setattr(module, "BLOCK", 1)
        (logprobs, entropy, *grads), (quick, looked, *quick_grads) = both_ways(
            monkeypatch, lambda: build("Llama"), act
        )
    assert torch.equal(logprobs, quick) and torch.allclose(entropy, looked, atol=1e-6)
    for a, b in zip(grads, quick_grads):
        assert (a - b).norm() < 1e-2 * a.norm()


# catches: work for a head that does not learn, a graph where nothing learns, a second use of the
# graph that finds it used up, silence on a second derivative
def test_frozen_and_used_twice():
    case = CASES[2]
    *leaves, ids = problem(case)
    states, weight = leaves[0].requires_grad_(), leaves[1]
    logprobs, entropy = module._Measure.apply(states, weight, None, ids, 1.0, 0.7, (4, 29), "learn")
    (first,) = torch.autograd.grad(logprobs.sum() + entropy.sum(), states, retain_graph=True)
    assert torch.equal(first, torch.autograd.grad(logprobs.sum() + entropy.sum(), states)[0])
    assert not module._Measure.apply(
        states.detach(), weight, None, ids, 1.0, 0.7, (4, 29), "learn"
    )[0].requires_grad
    logprobs, _ = module._Measure.apply(states, weight, None, ids, 1.0, 0.7, (4, 10), None)
    (once,) = torch.autograd.grad(logprobs.square().sum(), states, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        once.sum().backward()


# ---- One block of the vocabulary at a time ----


class Wide(TorchDispatchMode):
    """The largest tensor of so many columns that an operation made, and the most bytes of such
    tensors alive at a time."""

    def __init__(self, *columns: int):
        super().__init__()
        self.columns, self.largest, self.most, self.made = columns, 0, 0, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **kwargs or {})
        # a view has a base: only what has memory of its own counts
        for x in made if isinstance(made, (tuple, list)) else (made,):
            if (
                isinstance(x, torch.Tensor)
                and x.ndim == 2
                and x.shape[1] in self.columns
                and x._base is None
            ):
                self.largest = max(self.largest, x.numel())
                self.made.append(weakref.ref(x))
        self.most = max(self.most, self.now())
        return made

    def now(self) -> int:
        return sum(
            {x.data_ptr(): x.nbytes for ref in self.made if (x := ref()) is not None}.values()
        )


# catches: logits or a softmax kept from forward to backward, a chunk that grows with the tokens,
# copies where one piece of memory serves
@pytest.mark.parametrize("entropy, copies", [("learn", 2), ("look", 2), (None, 1)])
def test_no_vocabulary_beyond_a_block(entropy, copies):
    vocab, rows, hidden = 5000, 2000, 16
    assert vocab * rows >= module.SPAN.stop
    head = module._Head(torch.randn(vocab, hidden, requires_grad=True), None, 1.0)
    states, ids = torch.randn(rows, hidden, requires_grad=True), torch.randint(vocab, (rows,))
    block, words = module.BLOCK, 4096
    assert block < rows * vocab / 4
    with Wide(vocab, words, vocab - words) as seen:
        found = module._fast(states, head, ids, 0.7, 2**26 // vocab, entropy)
        after = seen.now()
        sum(x.sum() for x in found if x.requires_grad).backward()
    assert (
        after == 0 and seen.largest == block and seen.most <= 4 * (block * copies + vocab * hidden)
    )  # and the weight, the other way round


# catches: probabilities kept twice, or for a head that does not learn, or beyond a chunk that was
# asked for, or where fewer would do
@pytest.mark.parametrize("entropy", ["look", None])
def test_few_probabilities_are_kept_once(entropy):
    vocab, rows, hidden = 5000, 600, 16
    states, ids = torch.randn(rows, hidden, requires_grad=True), torch.randint(vocab, (rows,))

    def kept(learns: bool = True, chunk: int = 10**6, rows: int = rows, on: bool = True) -> int:
        head = module._Head(torch.randn(vocab, hidden, requires_grad=learns), None, 1.0)
        with Wide(vocab) as seen, torch.set_grad_enabled(on):
            found = module._fast(states[:rows], head, ids[:rows], 0.7, chunk, entropy)
            after = seen.now()
            if on:
                found[0].sum().backward()
        del found
        assert seen.now() == 0
        return after

    assert rows * vocab in module.SPAN and kept() == 4 * rows * vocab
    assert kept(learns=False) == kept(chunk=599) == kept(rows=50) == kept(on=False) == 0


# catches: a graph that can be used once only, and a gradient for what needs none
def test_kept_and_used_twice():
    *leaves, ids = problem(dict(bias=None))
    states, weight = leaves[0].requires_grad_(), leaves[1].requires_grad_()
    logprobs, entropy = module._Keep.apply(states, weight, ids, 1.0, 0.7, 4, True)
    assert not entropy.requires_grad
    first, again = (
        torch.autograd.grad(logprobs.sum(), [states, weight], retain_graph=True) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    half, _ = module._Keep.apply(states.detach(), weight, ids, 1.0, 0.7, 4, False)
    assert torch.equal(torch.autograd.grad(half.sum(), weight)[0], first[1])
    measure = lambda *x: module._Keep.apply(*x, ids, 0.5, 0.7, 4, False)[0]
    assert torch.autograd.gradcheck(
        measure, [x.detach().double().requires_grad_() for x in leaves[:2]]
    )
    (once,) = torch.autograd.grad(measure(states, weight).square().sum(), states, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        once.sum().backward()


# catches: an entropy below 0 where the policy is sure, or one that is far off
def test_the_entropy_of_a_sure_policy():
    draw = torch.Generator().manual_seed(0)
    states, weight, ids = (
        torch.randn(50, 16, generator=draw) * 40,
        torch.randn(300, 16, generator=draw),
        torch.randint(300, (50,), generator=draw),
    )
    found = module._Keep.apply(states, weight, ids, 1.0, 1.0, 20, True)[1]
    exact = token_entropy(states.double() @ weight.double().T, 1.0)
    assert (
        (found >= 0).all()
        and (exact < 1e-6).any()
        and (found - exact).abs().max() < 1e-6 * (states @ weight.T).abs().max()
    )  # as the logits are rounded


# catches: a rollout and an update that differ because one of them keeps
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_keeping_says_the_same_to_the_bit(temperature):
    states, ids = torch.randn(700, 16, requires_grad=True), torch.randint(5000, (700,))
    head = module._Head(torch.randn(5000, 16, requires_grad=True), None, 0.5)
    with torch.no_grad():
        (plain,) = module._fast(states, head, ids, temperature, 10**6, None)
    kept, entropy = module._fast(states, head, ids, temperature, 10**6, "look")
    assert type(kept.grad_fn).__name__ == "_KeepBackward" and torch.equal(plain, kept)
    assert (
        entropy - module._fast(states, head, ids, temperature, 10**6, "learn")[1]
    ).abs().max() < 1e-5


# catches: a wish for smaller chunks that is not heard, and a cache's size asked of a GPU or of bf16
# sums
def test_the_chunk_is_a_bound():
    sizes = []

    class Spy(module._Measure):
        @classmethod
        def apply(cls, *given):
            sizes.append(given[6])
            return super().apply(*given)

    head, ids = module._Head(torch.randn(64, 8), None, 1.0), torch.randint(64, (50,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_Measure", Spy)
        for rows in (7, 10**6):
            module._fast(torch.randn(50, 8), head, ids, 1.0, rows, None)
        module._fast(
            torch.randn(50, 8).bfloat16(),
            module._Head(head.weight.bfloat16(), None, 1.0),
            ids,
            1.0,
            10**6,
            None,
        )
    assert sizes == [(7, 64), (module.BLOCK // 64, 64), (10**6, 64)]


# ---- Who takes it ----


def adapted(*targets: str, **more) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        build("Llama"), LoraConfig(r=2, target_modules=[*targets], init_lora_weights=False, **more)
    )


def with_head(change) -> nn.Module:
    model = build("Llama")
    change(model)
    return model


class OwnHead(nn.Linear):
    "Something that calls itself a linear layer."


def replaced(model):
    forward = model.lm_head.forward
    model.lm_head.forward = lambda x: forward(x)  # as Accelerate's hooks do


def own(model):
    model.lm_head.__class__ = OwnHead


def in_parts(model):
    model.lm_head.weight = nn.Parameter(
        torch.Tensor._make_subclass(
            type("Sharded", (torch.Tensor,), {}), model.lm_head.weight.detach()
        )
    )


QUICK = dict(
    llama=lambda: build("Llama"),
    neox=lambda: build("GPTNeoX"),
    cohere=lambda: build("Cohere"),
    bias=lambda: build("CodeGen"),
    lora=lambda: adapted("q_proj"),
    bf16=lambda: build("Llama").bfloat16(),
    frozen=lambda: build("Llama").requires_grad_(False),
)
CALLED = dict(
    capped=lambda: build("Gemma2"),
    lora=lambda: adapted("q_proj", "lm_head"),
    saved=lambda: adapted("q_proj", modules_to_save=["lm_head"]),
    hook=lambda: with_head(lambda m: m.lm_head.register_forward_hook(lambda *_: None)),
    before=lambda: with_head(lambda m: m.lm_head.register_forward_pre_hook(lambda *_: None)),
    replaced=lambda: with_head(replaced),
    subclass=lambda: with_head(own),
    subclass_weight=lambda: with_head(in_parts),
    normed=lambda: with_head(lambda m: nn.utils.parametrizations.weight_norm(m.lm_head)),
)


# catches: an adapter, a hook, a cap or a sharded weight passed by; a model that could be quick and
# is not
@pytest.mark.parametrize("quick, name", [(True, x) for x in QUICK] + [(False, x) for x in CALLED])
def test_who_takes_the_quick_way(quick, name, batch, monkeypatch):
    model = (QUICK if quick else CALLED)[name]()
    opened = module._open(model)
    assert opened is not None and (module._plain_head(opened) is not None) == quick
    if name == "frozen":
        return
    calls, apply = [], module._Measure.apply
    monkeypatch.setattr(
        module._Measure, "apply", lambda *given: (calls.append(1), apply(*given))[1]
    )
    response_logprobs(model, *batch).logprobs.sum().backward()
    assert bool(calls) == quick


WORKER = textwrap.dedent(
    """
    import os, torch, torch.distributed as dist, transformers as tf
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.parallel import DistributedDataParallel
    from rlhf_nb import logprobs as module
    from rlhf_nb.logprobs import response_logprobs

    class Pair(torch.nn.Module):
        def __init__(self, policy): super().__init__(); self.policy = policy
        def forward(self, *batch, chunk=37 * 3): return response_logprobs(self.policy, *batch, chunk_logits=chunk, entropy="learn")

    def make():
        torch.manual_seed(0)
        return tf.LlamaForCausalLM(tf.LlamaConfig(vocab_size=37, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, tie_word_embeddings=True))

    calls, apply = [], module._Measure.apply
    module._Measure.apply = lambda *given: (calls.append(1), apply(*given))[1]
    loss = lambda found: found.logprobs.sum() + 0.1 * found.entropy.sum()
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    prompt_mask, mask = torch.arange(7) >= torch.tensor([[0], [2], [6], [3]]), torch.arange(6) < torch.tensor([[6], [4], [0], [1]])
    batch = (torch.randint(37, (4, 7)), prompt_mask, torch.randint(37, (4, 6)), mask)
    mine = [x[2 * dist.get_rank():][:2] for x in batch]
    alone = make()
    loss(response_logprobs(alone, *batch)).backward()
    for kind in ("ddp", "fsdp", "fsdp resharded", "fsdp head apart", "fsdp around the policy"):
        policy, calls[:] = make(), []
        root = policy if kind.endswith("policy") else Pair(policy)
        if kind == "ddp": root = DistributedDataParallel(root)
        else:
            mesh = init_device_mesh("cpu", (2,))
            for layer in policy.model.layers: fully_shard(layer, mesh=mesh)
            if kind.endswith("apart"):
                policy.lm_head.weight = torch.nn.Parameter(policy.lm_head.weight.detach().clone())
                fully_shard(policy.lm_head, mesh=mesh)
            fully_shard(root, mesh=mesh, reshard_after_forward=kind == "fsdp resharded")
        whole = dict(chunk=10**6) if kind.endswith("apart") else {}  # ranks must call such a head equally often
        found = response_logprobs(root, *mine) if root is policy else root(*mine, **whole)
        loss(found).backward()
        assert bool(calls) == (kind in ("ddp", "fsdp", "fsdp resharded")), kind
        if not kind.endswith("apart"):
            for (name, p), q in zip(policy.named_parameters(), alone.parameters()):
                grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
                assert torch.allclose(2 * grad, q.grad, atol=1e-5), (kind, name)
        if dist.get_rank() == 0: print("right:", kind, flush=True)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)
    """
)


# catches: gradients that are not reduced, a weight read while it lies in parts, a layout that takes
# another way than it is said to
@pytest.mark.skipif(sys.platform != "linux", reason="torchrun with gloo on one machine")
def test_layouts(tmp_path):
    (tmp_path / "worker.py").write_text(WORKER)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        str(tmp_path / "worker.py"),
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=900,
        env=dict(os.environ, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""),
    )
    assert done.returncode == 0 and done.stdout.count("right:") == 5, done.stderr[-3000:]


# ---- What the trainer asks for ----


def asked(monkeypatch) -> list:
    seen, real = [], trainer_module.response_logprobs

    def note(*given, **options):
        found = real(*given, **options)
        seen.append(
            (
                torch.is_grad_enabled(),
                options["entropy"],
                None if found.entropy is None else found.entropy.requires_grad,
            )
        )
        return found

    monkeypatch.setattr(trainer_module, "response_logprobs", note)
    return seen


# catches: an entropy that is worked out for nobody, a bonus without a gradient, a graph for a
# coefficient of 0 or a policy that does not learn yet
@pytest.mark.parametrize(
    "changes, want",
    [
        (dict(), "look"),
        (dict(entropy_coef=0.01), "learn"),
        (dict(entropy_coef=0.01, value_warmup_updates=9), "look"),
    ],
)
def test_the_trainer_asks_for_no_more_than_is_read(changes, want, ppo, monkeypatch):
    seen = asked(monkeypatch)
    metrics = ppo(num_ppo_epochs=2, **changes).step()
    assert set(seen) == {(False, None, None), (True, want, want == "learn")}
    assert (
        seen.count((False, None, None)) == 2 and metrics["policy/entropy_avg"] > 0.5
    )  # policy and reference, one chunk each


# catches: an update that differs from the plain way's by more than rounding, a logged number that
# went missing
@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(entropy_coef=0.1, temperature=0.7),
        dict(share_value_trunk=True, kl_estimator="full"),
        dict(activation_checkpointing=True),
    ],
    ids=str,
)
def test_an_update_is_that_of_the_plain_way(changes, ppo, monkeypatch):
    found = []
    for plain in (True, False):
        with monkeypatch.context() as patch:
            if plain:
                patch.setattr(module, "_plain_head", lambda model: None)
            trainer = ppo(
                max_grad_norm=0.5, num_ppo_epochs=1, optim="sgd", learning_rate=0.1, **changes
            )
            metrics = trainer.step()
        found.append(
            (
                [p.detach().clone() for p in trainer.model.parameters()],
                {
                    k: v
                    for k, v in metrics.items()
                    if not k.startswith("time/") and k != "tokens/per_second"
                },
            )
        )
    for a, b in zip(found[0][0], found[1][0]):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)
    assert found[0][1].keys() == found[1][1].keys()
    for name, value in found[0][1].items():
        assert found[1][1][name] == pytest.approx(value, abs=1e-5), name


def test_an_unknown_wish_is_refused(batch):
    with pytest.raises(ValueError, match="entropy is 'yes': give 'learn', 'look', or None"):
        response_logprobs(build("Llama"), *batch, entropy="yes")
