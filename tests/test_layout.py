"""How models are spread, in one process: FSDP2 on a mesh of one rank, offloaded models, ranks in
step."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from small_models import small_model
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from rlhf_nb.base.sharding import gather_weights, layer_names, name_layers
from rlhf_nb.models import scorer_from, scorer_head, sequence_scores
from rlhf_nb.training import layout

IDS = torch.tensor([[5, 6, 7, 8], [4, 3, 2, 9]])
HERE, SHARDED = "Tensor", "DTensor"


@pytest.mark.slow
def test_deepspeed_does_not_say_that_there_is_no_gpu() -> None:
    # catches: a line of another library in the middle of a command's log; all of its lines gone
    pytest.importorskip("deepspeed")
    code = """if True:
        import rlhf_nb.sft, deepspeed, logging
        deepspeed.accelerator.get_accelerator()
        logging.getLogger("DeepSpeed").warning("something else")"""
    clean = {k: x for k, x in os.environ.items() if k != "DS_ACCELERATOR"}
    env = clean | dict(CUDA_VISIBLE_DEVICES="")
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    told = done.stdout + done.stderr
    assert done.returncode == 0 and "something else" in told and "accelerator to" not in told


@pytest.fixture
def policy() -> nn.Module:
    return small_model("gpt_neox", vocab_size=20, num_hidden_layers=2).eval()


@pytest.fixture
def scorer(policy) -> nn.Module:
    return scorer_from(policy, 1).eval().requires_grad_(False)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    "One rank."
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def scores(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return sequence_scores(model, IDS, torch.ones_like(IDS))


def kinds(model: nn.Module) -> dict[str, str]:
    "Whether the weights of a layer and of the head are whole at this moment."
    layer = model.base_model.layers[0].mlp.dense_h_to_4h
    return {
        name: type(part.weight.data).__name__
        for name, part in dict(layer=layer, head=scorer_head(model)).items()
    }


def spread(model: nn.Module, mesh: DeviceMesh, layers: bool = True) -> nn.Module:
    model = copy.deepcopy(model)
    for layer in model.base_model.layers if layers else ():
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


# ---- Weights that are sharded ----


# catches: a part that is called while its weights are sharded, weights that stay whole afterwards, or
# after the next call
@pytest.mark.parametrize("layers", [False, True])
def test_unsharded(scorer, mesh, layers):
    model, wanted = spread(scorer, mesh, layers), scores(scorer)
    assert set(kinds(model).values()) == {SHARDED}
    with layout.unshard_all(model):
        assert set(kinds(model).values()) == {HERE}
        assert torch.allclose(scores(model), wanted, atol=1e-6)
        assert set(kinds(model).values()) == {HERE}  # a call leaves them whole
    assert set(kinds(model).values()) == {SHARDED}
    model(input_ids=IDS[:1])
    assert set(kinds(model).values()) == {SHARDED}  # a later call leaves none whole
    with pytest.raises(RuntimeError, match="on purpose"), layout.unshard_all(model):
        raise RuntimeError("on purpose")
    assert set(kinds(model).values()) == {SHARDED}


# catches: a value model that is gathered while the policy samples
def test_unsharded_but_for_a_part(scorer, mesh):
    pair = nn.Sequential(copy.deepcopy(scorer), copy.deepcopy(scorer))  # it has a forward
    for model in pair:
        for layer in model.base_model.layers:
            fully_shard(layer, mesh=mesh)
    fully_shard(pair, mesh=mesh)
    with layout.unshard_all(pair, but=pair[1]):
        assert set(kinds(pair[0]).values()) == {HERE}
        assert torch.allclose(scores(pair[0]), scores(scorer), atol=1e-6)
        assert kinds(pair[1])["layer"] == SHARDED
    assert kinds(pair[0])["layer"] == kinds(pair[1])["layer"] == SHARDED


# catches: all layers whole at a time, or a head that is not
def test_layer_by_layer(scorer, mesh):
    model, seen = spread(scorer, mesh), []
    last = model.base_model.layers[1]
    last.mlp.register_forward_hook(lambda *_: seen.append((kinds(model)["layer"], 1)))
    with layout.layer_by_layer(model):
        assert kinds(model) == dict(layer=SHARDED, head=HERE)
        assert torch.allclose(scores(model), scores(scorer), atol=1e-6)
        assert kinds(model) == dict(layer=SHARDED, head=HERE)
    assert seen == [(SHARDED, 1)] and set(kinds(model).values()) == {SHARDED}


# catches: a model that is not sharded, touched all the same
def test_other_models_are_left_alone(scorer):
    before = {name: p.data_ptr() for name, p in scorer.named_parameters()}
    for context in (layout.unshard_all, layout.layer_by_layer, layout.unshard_root, gather_weights):
        with context(scorer):
            assert {name: p.data_ptr() for name, p in scorer.named_parameters()} == before
    assert {name: p.data_ptr() for name, p in scorer.named_parameters()} == before


# ---- Models that nobody trains ----


# catches: layers that stay whole after a call, a model that becomes the root itself
def test_a_frozen_model_is_sharded_layer_by_layer(scorer, mesh):
    model = copy.deepcopy(scorer)
    placed = layout.sharded_frozen(model, mesh=mesh)
    assert isinstance(placed, layout.Frozen) and not isinstance(model, FSDPModule)
    for _ in range(2):
        inside, measured = placed(lambda model: (kinds(model), scores(model)))
        assert inside == dict(layer=SHARDED, head=HERE)
        assert torch.allclose(measured, scores(scorer), atol=1e-6)
        assert set(kinds(model).values()) == {SHARDED}
    with layout.unshard_root(model):  # its layers fetch themselves
        assert set(kinds(model).values()) == {SHARDED}
    with layout.unshard_root(root := spread(scorer, mesh)):
        assert set(kinds(root).values()) == {HERE}


def test_frozen_returns_what_was_measured(scorer):
    assert torch.equal(layout.Frozen(scorer)(scores), scores(scorer))


# catches: weights fetched twice, or not given back, or given back too early; numbers of other
# weights
def test_offloaded(scorer):
    model, fetched, wanted = copy.deepcopy(scorer), [], scores(scorer)

    def fetch(weight):
        fetched.append(weight.numel())
        return weight.clone()

    place = lambda: scorer_head(model).weight.data_ptr()
    offloaded = layout.Offloaded(model, "cpu", fetch)
    home, sizes = place(), [p.numel() for p in model.parameters()]
    for times in (1, 2):
        with offloaded:
            with offloaded:
                assert place() != home and torch.equal(scores(model), wanted)
            assert place() != home  # one `with` is left
            assert fetched == sizes * times
        assert place() == home
    with pytest.raises(RuntimeError, match="on purpose"), offloaded:
        raise RuntimeError("on purpose")
    assert place() == home and torch.equal(scores(model), wanted)


# ---- Ranks together ----


# catches: a rank that stops calling while others go on, one call too many, a hook that stays
@pytest.mark.parametrize("mine, others", [(2, 5), (5, 5), (0, 3), (4, 0)])
def test_in_step(policy, mine, others):
    left, calls, shapes = iter([1] * others), [], []

    def count(n: int) -> int:
        "A sum over the ranks: the others are together one call behind or ahead."
        return n + next(left, 0)

    def note(model, args, kwargs):
        calls.append(torch.is_grad_enabled())
        shapes.append(kwargs["input_ids"].shape)

    policy.register_forward_pre_hook(note, with_kwargs=True)
    with layout.match_calls(policy, count, "cpu"):
        for _ in range(mine):
            policy(input_ids=IDS)
    assert len(calls) == max(mine, others) and calls[mine:] == [False] * max(0, others - mine)
    assert set(shapes[mine:]) <= {torch.Size([1, 1])}
    assert len(policy._forward_pre_hooks) == 1  # the test's own


# catches: a library's hook that runs while it is off, another's that does not, a changed order
def test_without_hooks_of(policy):
    ran = []

    def hook_of(library: str, name: str):
        def hook(*_):
            ran.append(name)

        hook.__module__ = library
        return hook

    body = policy.get_decoder()
    for library, name in (("deepspeed.runtime", "a"), ("other", "b"), ("deepspeed", "c")):
        body.register_forward_hook(hook_of(library, name))
        body.layers[0].register_forward_pre_hook(hook_of(library, name.upper()))
    with layout.disable_hooks(policy, "deepspeed"):
        policy(input_ids=IDS)
    assert ran == ["B", "b"]
    ran.clear()
    policy(input_ids=IDS)
    assert ran == ["A", "B", "C", "a", "b", "c"]


# catches: a layer that FSDP does not hear of
def test_layer_names(policy, scorer):
    assert layer_names(policy, scorer) == ["GPTNeoXLayer"] and layer_names(nn.Linear(2, 2)) == []
    pair = nn.ModuleList([policy, scorer])
    name_layers(pair)
    assert pair._no_split_modules == ["GPTNeoXLayer"]
