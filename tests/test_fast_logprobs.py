"""Fused log-probs: numbers and gradients of the plain way, one block of logits at a time, and which
models take them."""

from __future__ import annotations

import math
import sys
import textwrap
import weakref
from itertools import combinations, product

import forks
import pytest
import torch
import transformers as tf
from pairs import pairwise
from test_logprobs import SHORT, SIZES
from torch import nn, tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf_nb import fast_logprobs as module
from rlhf_nb import forward as forward_module
from rlhf_nb.base import fused
from rlhf_nb.base.fused import Head, fused_logprobs, plain_head
from rlhf_nb.base.opened import separable_model
from rlhf_nb.fast_logprobs import chunked_logprobs, response_logprobs
from rlhf_nb.logprobs import token_entropy, token_logprobs

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
    "Five rows, prompts of 1 to 7 tokens, responses of 0 to 6, and padding that must not be read."
    torch.manual_seed(1)
    prompt_mask = torch.arange(7) >= tensor([[0], [2], [6], [3], [1]])
    mask = torch.arange(6) < tensor([[6], [1], [0], [3], [5]])
    return (
        torch.randint(1, 37, (5, 7)),
        prompt_mask,
        torch.randint(1, 37, (5, 6)).masked_fill(~mask, -100),
        mask,
    )


# ---- The same numbers as the plain way ----

CASES = [
    dict(temperature=t, scale=s, bias=b, rows=rows, entropy=e)
    for t, s, b, rows, e in (
        (1.0, 1.0, None, 5, "look"),
        (0.7, 1.0, None, 5, None),
        (1.0, 0.25, None, 4, "learn"),
        (2.5, 3.0, "banned", 3, "learn"),
        (0.7, 1.0, "banned", 99, "look"),
        (0.05, 1.0, "plain", 2, "learn"),
        (1.0, 1.0, "far", 6, "learn"),
        (1.0, 1.0, "far", 99, "look"),
        (0.7, 0.5, "banned", 13, None),
        (2.5, 3.0, "banned", 1, "learn"),
        (1.0, 1.0, "only entropy", 5, "learn"),
        (2.5, 0.25, None, 4, "look"),
        (0.05, 1.0, None, 2, None),
        (0.7, 3.0, None, 99, "look"),
    )
]


def problem(case: dict, dtype: torch.dtype = torch.float32) -> list:
    "States [13, 8], weight [29, 8], bias or None, ids; banned: logit -inf, far: 200 and more."
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


def fused_way(measure, case: dict, dtype: torch.dtype) -> list:
    *leaves, ids = problem(case, dtype)
    leaves = [None if x is None else x.requires_grad_() for x in leaves]
    head = Head(leaves[1], leaves[2], case["scale"])
    outputs = measure(leaves[0], head, ids, case["temperature"], case["rows"], case["entropy"])
    return pulled(*outputs, case, leaves)


def gap(measure, case: dict, dtype: torch.dtype = torch.float32) -> float:
    "Largest difference of the two ways, in units of a tensor's largest number, or 1; NaN is inf."
    ways = fused_way(measure, case, dtype), plain_way(case, dtype)
    assert len(ways[0]) == len(ways[1])
    gaps = [((a - b).abs().max() / max(1.0, b.abs().max())).item() for a, b in zip(*ways)]
    return max(math.inf if math.isnan(x) else x for x in gaps)


# catches: any operator, sign or call of the fused function that is another or left out, and what is
# nearly right: 2e-6 in float32, 1e-14 in float64
# (at temperature 1)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients_are_those_of_the_plain_way(case):
    # what a logit was rounded by is divided by the temperature
    coarse = 1 / min(1.0, case["temperature"])
    assert gap(fused_logprobs, case) < 2e-6 * coarse  # 1.004e-6 on one processor
    assert gap(fused_logprobs, case, torch.float64) < 1e-14 * coarse


# catches: a rounding that would send a seeded run another way: a small model's log-probs and
# gradients stay as they were, to the bit
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_one_block_is_the_plain_way_to_the_bit(kind, temperature):
    torch.manual_seed(0)
    found = []
    for quick in (False, True):
        draw = torch.Generator().manual_seed(0)
        h = torch.randn(600, 64, generator=draw).to(kind).requires_grad_()
        w = torch.randn(146, 64, generator=draw).to(kind).requires_grad_()
        ids, pull = torch.randint(146, (600,), generator=draw), torch.randn(600, generator=draw)
        if quick:
            logprobs, *_ = fused_logprobs(h, Head(w, None, 1.0), ids, temperature, 600, "look")
        else:
            logprobs = token_logprobs(nn.functional.linear(h, w), ids, temperature)
        found.append([logprobs.detach(), *torch.autograd.grad((logprobs * pull).sum(), [h, w])])
    for a, b in zip(*found):
        assert torch.equal(a, b)


def both_ways(monkeypatch, make, act) -> list:
    "What `act(model)` finds and the gradients, the plain way and the quick way."
    found, calls, real = [], [], module.plain_head
    for plain in (True, False):
        with monkeypatch.context() as patch:
            if plain:
                patch.setattr(module, "plain_head", lambda model: None)
            else:
                patch.setattr(module, "plain_head", lambda m: (calls.append(1), real(m))[1])
            model = make()
            values = act(model)
            found.append(
                [x.detach() for x in values]
                + [p.grad for p in model.parameters() if p.grad is not None]
            )
    assert calls and len(found[0]) == len(found[1])
    return found


# a model, whether its head is tied, logits at a time, whether layers are checkpointed
OPTIONS = pairwise(
    ("Llama", "GPTNeoX", "GPT2", "Cohere", "Granite", "CodeGen"),
    (False, True),
    (37, 37 * 4, 2**26),
    (False, True),
)


# catches: a pair of settings that no run has, a combination that is not allowed
def test_each_pair_that_is_allowed_is_in_some_row():
    axes = (1, 2, 3), (1, 2, 4), (1, 2, 3, 4), (1, 3)
    fits = lambda rows, accumulation, parts, epochs: rows * accumulation % parts == 0
    met = lambda rows: {pair for row in rows for pair in combinations(enumerate(row), 2)}
    chosen, whole = pairwise(*axes, allowed=fits), [row for row in product(*axes) if fits(*row)]
    assert met(chosen) == met(whole) != met(chosen[1:]) and {*chosen} <= {*whole}
    assert len(chosen) < len(whole) / 3


# catches: a head that is not the model's, a bias or tie forgotten, padding that is read, a chunk of
# one token, gradients lost under checkpointing
@pytest.mark.parametrize("name, tied, chunk, again", OPTIONS, ids=str)
def test_models(name, tied, chunk, again, batch, monkeypatch):
    weight = torch.randn(batch[3].shape, generator=torch.Generator().manual_seed(2))

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
        patch.setattr(fused, "BLOCK", 1)
        (logprobs, entropy, *grads), (quick, looked, *quick_grads) = both_ways(
            monkeypatch, lambda: build("Llama"), act
        )
    assert torch.equal(logprobs, quick) and torch.allclose(entropy, looked, atol=1e-6)
    for a, b in zip(grads, quick_grads):
        assert (a - b).norm() < 1e-2 * a.norm()


# catches: work for a head that does not learn, a graph where nothing learns, a second use of the
# graph that finds it used up, silence on a second derivative
def test_frozen_and_used_twice():
    *leaves, ids = problem(CASES[2])
    states, weight = leaves[0].requires_grad_(), leaves[1]
    head, how = Head(weight, None, 1.0), (ids, 0.7, 4)
    logprobs, entropy = fused_logprobs(states, head, *how, "learn")
    (first,) = torch.autograd.grad(logprobs.sum() + entropy.sum(), states, retain_graph=True)
    assert torch.equal(first, torch.autograd.grad(logprobs.sum() + entropy.sum(), states)[0])
    assert not fused_logprobs(states.detach(), head, *how, "learn")[0].requires_grad
    logprobs, looked = fused_logprobs(states, head, *how, "look")
    assert logprobs.requires_grad and not looked.requires_grad
    logprobs, _ = fused_logprobs(states, head, *how, None)
    (once,) = torch.autograd.grad(logprobs.square().sum(), states, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        once.sum().backward()


# ---- One block of logits at a time ----


class Wide(TorchDispatchMode):
    "The largest tensor of at least so many columns, and the most bytes of such alive at a time."

    def __init__(self, columns: int):
        super().__init__()
        self.columns, self.largest, self.most, self.made = columns, 0, 0, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **kwargs or {})
        # a view has a base: only what has memory of its own counts
        for x in made if isinstance(made, (tuple, list)) else (made,):
            if (
                isinstance(x, torch.Tensor)
                and x.ndim == 2
                and x.shape[1] >= self.columns
                and x._base is None
            ):
                self.largest = max(self.largest, x.numel())
                self.made.append(weakref.ref(x))
        self.most = max(self.most, self.now())
        return made

    def now(self) -> int:
        self.made = [ref for ref in self.made if ref() is not None]
        return sum({x.data_ptr(): x.nbytes for r in self.made if (x := r()) is not None}.values())


# catches: logits or a softmax kept from forward to backward, a chunk that grows with the tokens,
# copies where one piece of memory serves
@pytest.mark.parametrize("entropy, copies", [("learn", 2), ("look", 2), (None, 1)])
def test_no_vocabulary_beyond_a_block(entropy, copies):
    vocab, rows, hidden = 5000, 2000, 16
    head = Head(torch.randn(vocab, hidden, requires_grad=True), None, 1.0)
    states, ids = torch.randn(rows, hidden, requires_grad=True), torch.randint(vocab, (rows,))
    block = fused.BLOCK
    assert block < rows * vocab / 4
    with Wide(vocab // 8) as seen:
        found = fused_logprobs(states, head, ids, 0.7, 2**26 // vocab, entropy)
        after = seen.now()
        sum(x.sum() for x in found if x is not None and x.requires_grad).backward()
    assert after == 0 and 0.5 * block < seen.largest <= 1.25 * block
    # and the weight, the other way round
    assert seen.most <= 4 * (1.25 * block * copies + vocab * hidden)


# catches: a sum over the vocabulary that is cut in pieces by the size of a block, or a block that
# follows the tokens
@pytest.mark.parametrize("entropy", ["learn", "look", None])
def test_the_size_of_a_block_does_not_matter(entropy, monkeypatch):
    draw = torch.Generator().manual_seed(0)
    states, weight = (torch.randn(n, 16, generator=draw) for n in (700, 900))
    ids, found = torch.randint(900, (700,), generator=draw), []
    for size in (1, 2**17, 2**30):
        monkeypatch.setattr(fused, "BLOCK", size)
        leaves = [x.clone().requires_grad_() for x in (states, weight)]
        with Wide(900) as seen:
            outputs = fused_logprobs(
                leaves[0], Head(leaves[1], None, 0.5), ids, 0.7, 10**6, entropy
            )
            loss = outputs[0].square().sum()
            if entropy == "learn":
                loss = loss + outputs[1].square().sum()
            found.append(
                [
                    *(x.detach() for x in outputs if x is not None),
                    *torch.autograd.grad(loss, leaves),
                ]
            )
        assert seen.largest <= max(size, 256 * 900) and (size < 2**30 or seen.largest == 700 * 900)
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert (a - b).abs().max() <= 5e-6 * max(1.0, a.abs().max())


# catches: an entropy below 0 where the policy is sure, or one that is far off
@pytest.mark.parametrize("entropy", ["learn", "look"])
def test_the_entropy_of_a_sure_policy(entropy):
    draw = torch.Generator().manual_seed(0)
    states = torch.randn(50, 16, generator=draw) * 40
    weight = torch.randn(300, 16, generator=draw)
    ids = torch.randint(300, (50,), generator=draw)
    measured = fused_logprobs(states, Head(weight, None, 1.0), ids, 1.0, 20, entropy)[1]
    exact = token_entropy(states.double() @ weight.double().T, 1.0)
    assert (
        (measured >= 0).all()
        and (exact < 1e-6).any()
        and (measured - exact).abs().max() < 1e-6 * (states @ weight.T).abs().max()
    )  # as the logits are rounded


# catches: a rollout and an update that differ because one of them has a gradient or an entropy
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_gradient_or_an_entropy_does_not_change_a_bit(temperature):
    states, ids = torch.randn(700, 16, requires_grad=True), torch.randint(5000, (700,))
    head = Head(torch.randn(5000, 16, requires_grad=True), None, 0.5)
    with torch.no_grad():
        (plain, nothing) = fused_logprobs(states, head, ids, temperature, 10**6, None)
    assert nothing is None
    looked, learned = (
        fused_logprobs(states, head, ids, temperature, 10**6, entropy)
        for entropy in ("look", "learn")
    )
    assert torch.equal(plain, looked[0]) and torch.equal(plain, learned[0])
    assert torch.equal(looked[1], learned[1])


# catches: a wish for smaller chunks that is not heard, a cache's size asked of bf16 sums, and a wide
# head whose weight is read again for a handful of rows
def test_the_chunk_is_a_bound():
    head, ids, sizes = Head(torch.randn(2048, 4), None, 1.0), torch.randint(2048, (900,)), []
    half, wide = Head(head.weight.bfloat16(), None, 1.0), Head(torch.randn(2**14, 4), None, 1.0)
    for rows, some in ((7, head), (10**6, head), (10**6, half), (600, half), (10**6, wide)):
        with Wide(2048) as seen:
            fused_logprobs(torch.randn(900, 4).to(some.weight.dtype), some, ids, 1.0, rows, None)
        sizes.append(seen.largest // len(some.weight))
    assert sizes == [7, fused.BLOCK // 2048, 900, 600, fused.ROWS]
    assert fused.BLOCK // 2**14 < fused.ROWS


# catches: a checkpointed chunk of a head that is no matrix that is another chunk, or keeps its
# logits
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_plain_way_in_chunks(case):
    def measure(states, head, ids, temperature, rows, entropy):
        logits = lambda h: nn.functional.linear(h, head.weight, head.bias) * head.scale
        return chunked_logprobs(states, logits, ids, temperature, rows, entropy)

    assert gap(measure, case) < 1e-6 / min(1.0, case["temperature"])


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
    inner = separable_model(model)
    assert inner is not None and (plain_head(inner) is not None) == quick
    if name == "frozen":
        return
    calls, real = [], module.fused_logprobs
    monkeypatch.setattr(module, "fused_logprobs", lambda *given: (calls.append(1), real(*given))[1])
    response_logprobs(model, *batch).logprobs.sum().backward()
    assert bool(calls) == quick


WORKER = textwrap.dedent(
    """
    import os, torch, torch.distributed as dist, transformers as tf, warnings
    from functools import partial
    from accelerate import PartialState
    from accelerate.utils import reduce
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.parallel import DistributedDataParallel
    from rlhf_nb import fast_logprobs as module
    from rlhf_nb.fast_logprobs import response_logprobs
    from rlhf_nb.masks import masked_mean

    class Pair(torch.nn.Module):
        def __init__(self, policy): super().__init__(); self.policy = policy
        def forward(self, *batch, chunk=37 * 3):
            return response_logprobs(self.policy, *batch, chunk_logits=chunk, entropy="learn")

    def make():
        torch.manual_seed(0)
        sizes = dict(vocab_size=37, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
        config = tf.LlamaConfig(**sizes, intermediate_size=48, tie_word_embeddings=True)
        return tf.LlamaForCausalLM(config)

    calls, real = [], module.fused_logprobs
    module.fused_logprobs = lambda *given: (calls.append(1), real(*given))[1]
    loss = lambda found: found.logprobs.sum() + 0.1 * found.entropy.sum()
    PartialState(cpu=True)
    warnings.simplefilter("error")  # what threads cannot show: a warning of autograd's about the reduce, a lost gradient
    own = slice(dist.get_rank(), dist.get_rank() + 1)
    x, kept = torch.tensor([[1.0, 2.0], [9.0, float("inf")]])[own], torch.tensor([[True, True], [True, False]])[own]
    mean = masked_mean(x.requires_grad_(), kept, partial(reduce, reduction="sum"))
    mean.backward()
    assert mean == 4 and torch.allclose(x.grad, kept / 3)
    warnings.resetwarnings()
    torch.manual_seed(1)
    prompt_mask = torch.arange(7) >= torch.tensor([[0], [2], [6], [3]])
    mask = torch.arange(6) < torch.tensor([[6], [4], [0], [1]])
    batch = (torch.randint(37, (4, 7)), prompt_mask, torch.randint(37, (4, 6)), mask)
    mine = [x[2 * dist.get_rank():][:2] for x in batch]
    alone = make()
    loss(response_logprobs(alone, *batch)).backward()
    for kind in ("ddp", "ddp around the policy", "fsdp", "fsdp resharded", "fsdp head apart", "fsdp around the policy"):
        policy, calls[:] = make(), []
        outside = kind.endswith("policy")
        root = policy if outside else Pair(policy)
        if kind.startswith("ddp"): root = DistributedDataParallel(root)
        else:
            mesh = init_device_mesh("cpu", (2,))
            for layer in policy.model.layers: fully_shard(layer, mesh=mesh)
            if kind.endswith("apart"):
                policy.lm_head.weight = torch.nn.Parameter(policy.lm_head.weight.detach().clone())
                fully_shard(policy.lm_head, mesh=mesh)
            fully_shard(root, mesh=mesh, reshard_after_forward=kind == "fsdp resharded")
        # ranks hold 10 and 1 real tokens, so different numbers of chunks; a head apart must be called equally often
        whole = dict(chunk=10**6) if kind.endswith("apart") else {}
        found = response_logprobs(root, *mine, chunk_logits=37, entropy="learn") if outside else root(*mine, **whole)
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


# catches: a wrapper bypassed (gradients that are not reduced), a weight read while it lies in parts,
# ranks that wait for each other, a layout that takes another way than it is said to; a mean over
# ranks whose reduce works in place or loses the gradient
@pytest.mark.skipif(sys.platform != "linux", reason="gloo on one machine")
def test_layouts(tmp_path):
    (tmp_path / "worker.py").write_text(WORKER)
    done = forks.run(tmp_path / "worker.py", folder=tmp_path, ranks=2)
    assert done.returncode == 0 and done.stdout.count("right:") == 6, done.stdout[-3000:]


# ---- What the trainer asks for ----


def asked(monkeypatch) -> list:
    seen, real = [], forward_module.response_logprobs

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

    monkeypatch.setattr(forward_module, "response_logprobs", note)
    return seen


# catches: an entropy that is worked out for nobody, a bonus without a gradient, a graph for a
# coefficient of 0 or a policy that does not learn yet
@pytest.mark.parametrize(
    "changes, want",
    [
        (dict(), "look"),
        (dict(entropy_coef=0.01), "learn"),
        (dict(entropy_coef=0.01, value_warmup_updates=1), "look"),
    ],
)
def test_the_trainer_asks_for_no_more_than_is_read(changes, want, ppo, monkeypatch):
    seen = asked(monkeypatch)
    metrics = ppo(num_ppo_epochs=2, **changes).step()
    assert set(seen) == {(False, None, None), (True, want, want == "learn")}
    # policy and reference, one chunk each
    assert seen.count((False, None, None)) == 2 and metrics["policy/entropy_avg"] > 0.5
