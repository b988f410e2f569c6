"""Who samples the rollouts: one interface, the package's own sampler, and vLLM in the process."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion

from rlhf_nb.base.opened import unwrap
from rlhf_nb.base.sharding import full_tensor, gather_weights, is_sharded
from rlhf_nb.masks import left_pad
from rlhf_nb.packing import check_left_padded
from rlhf_nb.rollout import Sample, sample
from rlhf_nb.sampling import Conversation, Sampling, goes_on

VLLM = "0.33"  # the releases that VLLMEngine was written for


@runtime_checkable
class Engine(Protocol):
    "A sampler of responses, whatever program runs it."

    def sync(self, model: nn.Module) -> None:
        "Copy the policy's current weights. Call it on every rank."

    def generate(
        self, prompt_ids: Tensor, prompt_mask: Tensor, settings: Sampling
    ) -> tuple[Sample, Tensor | None]:
        """A response to each prompt [B, P], and the engine's log-probs [B, T], zero on padding. One
        that never draws `settings.unused_ids` has `skips_unused_ids = True`."""

    def close(self) -> None:
        "Free its memory and connections."


class Talk:
    "Conversations that an engine writes in, turn after turn, each context read from its beginning."

    def __init__(
        self,
        draw: Callable[[Tensor, Tensor, Sampling], tuple[Sample, Tensor | None]],  # as `generate`
        prompts: Sequence[list[int]],
        settings: Sampling,
        device: torch.device,
    ) -> None:
        self.draw, self.settings, self.device = draw, settings, device
        self.contexts = [*prompts]

    def _padded(self, rows: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
        ids, mask = left_pad([*rows], self.settings.pad_id)
        return ids.to(self.device), mask.to(self.device)

    def write(self) -> tuple[Sample, Tensor | None]:
        "A turn of each conversation."
        return self.draw(*self._padded(self.contexts), self.settings)

    def answer(self, rows: Sequence[int], more: Sequence[list[int]]) -> None:
        "Go on with some of them: what each wrote last, and what was answered."
        self.contexts = [self.contexts[i] + new for i, new in zip(rows, more)]


class CachedTalk(Talk):
    "The same from the model's cache: a turn reads what is new alone."

    def __init__(
        self,
        model: Any,
        prompts: Sequence[list[int]],
        settings: Sampling,
        device: torch.device,
        rows: int,  # most conversations in one batch
    ) -> None:
        self.model, self.settings, self.device = model, settings, device
        self.parts: list[Conversation] = []
        for i in range(0, len(prompts), rows):
            self.parts.append(Conversation(model, *self._padded(prompts[i : i + rows])))

    def write(self) -> tuple[Sample, None]:
        "A turn of each conversation."
        drawn = [
            sample(self.model, part.unread, part.unread_mask, self.settings, writing=part)
            for part in self.parts
        ]
        both = Sample(*map(torch.cat, zip(*drawn)))
        self.lengths = both.mask.sum(1).tolist()
        return both, None

    def answer(self, rows: Sequence[int], more: Sequence[list[int]]) -> None:
        "Go on with some of them: what each wrote last, and what was answered."
        parts, start = [], 0
        for part in self.parts:
            size = len(part.mask)
            new = {i - start: x for i, x in zip(rows, more) if start <= i < start + size}
            # all that was written is in the cache but its last token
            unread = [x[self.lengths[i + start] - 1 :] for i, x in new.items()]
            start += size
            if new:
                part.go_on(torch.tensor([*new], device=self.device), *self._padded(unread))
                parts.append(part)
        self.parts = parts


def converse(
    engine: Engine, prompts: Sequence[list[int]], settings: Sampling, device: torch.device
) -> AbstractContextManager[Talk]:
    "Conversations of any engine; our own keeps its cache from turn to turn."
    if isinstance(engine, CachedEngine):
        return engine.converse(prompts, settings, device)
    return nullcontext(Talk(engine.generate, prompts, settings, device))


class CachedEngine:
    "The package's own sampler: samples from the model in training, token by token, with a cache."

    skips_unused_ids = True

    def __init__(
        self,
        rows: int = 64,  # prompts in one batch
        # a context to sample in: autocast, gathered weights
        around: Callable[[], AbstractContextManager] = nullcontext,
    ) -> None:
        self.rows, self.around = rows, around
        self.model: nn.Module | None = None

    def sync(self, model: nn.Module) -> None:
        "Nothing to copy: the weights are the trainer's own."
        self.model = model

    def generate(
        self, prompt_ids: Tensor, prompt_mask: Tensor, settings: Sampling
    ) -> tuple[Sample, None]:
        "As `rollout.sample`, in batches of `rows`."
        if self.model is None:
            raise RuntimeError("the engine has no weights yet: call sync(model) before generate.")
        with self.around():
            return self._draw(prompt_ids, prompt_mask, settings)

    def _draw(
        self, prompt_ids: Tensor, prompt_mask: Tensor, settings: Sampling
    ) -> tuple[Sample, None]:
        parts = [
            sample(self.model, ids, mask, settings)
            for ids, mask in zip(prompt_ids.split(self.rows), prompt_mask.split(self.rows))
        ]
        return Sample(*map(torch.cat, zip(*parts))), None

    @contextmanager
    def converse(
        self, prompts: Sequence[list[int]], settings: Sampling, device: torch.device
    ) -> Iterator[Talk]:
        "Turns that go on from one cache, or, where the model cannot, are read again."
        with self.around():
            if goes_on(self.model):
                yield CachedTalk(self.model, prompts, settings, device, self.rows)
            else:
                yield Talk(self._draw, prompts, settings, device)

    def close(self) -> None:
        self.model = None


@contextmanager
def synced(engine: Engine, policy: nn.Module) -> Iterator[Engine]:
    "Inside, the engine has the policy's weights, and the policy is not in training."
    if hasattr(unwrap(policy), "masked_ids") and not getattr(engine, "skips_unused_ids", False):
        raise ValueError(
            f"the policy has ids without a token, and {type(engine).__name__} may draw them: have "
            "it leave out settings.unused_ids (by a logit_bias, say) and set its skips_unused_ids "
            "= True, or cut the policy, model.resize_token_embeddings(len(tokenizer))."
        )
    policy.eval()  # a layer that recomputes its activations refuses a cache while it trains
    engine.sync(policy)
    try:
        yield engine
    finally:
        policy.train()


class Answer(NamedTuple):
    "One response, as an engine returns it."

    token_ids: list[int]  # its tokens, the stop token included
    logprobs: list[float] | None  # of each token, from the distribution it was drawn from
    finish_reason: str | None  # stop, or length


def _problem(row: int, answer: Answer, settings: Sampling) -> str | None:
    "What is wrong with an answer and how to fix it, or None."
    ids, ended = answer.token_ids, answer.finish_reason
    if not 0 < len(ids) <= settings.response_length:
        return (
            f"row {row} has {len(ids)} tokens, expected 1 to {settings.response_length}: check the "
            "engine's own limits."
        )
    if answer.logprobs is None or len(answer.logprobs) != len(ids):
        count = "no" if answer.logprobs is None else len(answer.logprobs)
        return (
            f"row {row} has {len(ids)} tokens and {count} log-probs: the engine must return one "
            "for each (logprobs=0)."
        )
    if not all(isinstance(x, (int, float)) and math.isfinite(x) for x in answer.logprobs):
        return (
            f"row {row} has a log-prob that is not finite, {answer.logprobs}: check the "
            "weights that the engine was given."
        )
    if ended not in ("stop", "length"):
        return (
            f"row {row} ended with {ended!r}, expected 'stop' or 'length': the engine was "
            "interrupted; sample again."
        )
    if settings.unused_ids and (unused := {*settings.unused_ids}.intersection(ids)):
        return f"row {row} has the id {unused.pop()}, which has no token: leave those out."
    stops = list(settings.stop_ids)
    if any(i in stops for i in ids[:-1]) or (ended == "length" and ids[-1] in stops):
        return (
            f"row {row} continues after one of the stop tokens {stops}: the engine was given "
            "different ones."
        )
    if ended == "stop" and settings.stop_strings is None and ids[-1] not in stops:
        return (
            f"row {row} stopped at token {ids[-1]}, but the stop tokens are {stops}: the engine "
            "has a stop rule of its own, perhaps from the model's generation config; turn it off."
        )
    return None


def collect(
    answers: Sequence[Answer],  # B of them
    rows: int,  # B, the number of prompts
    settings: Sampling,
    device: torch.device | str = "cpu",
) -> tuple[Sample, Tensor]:  # the sample, and the engine's log-probs [B, T], zero on padding
    "An engine's answers as tensors, padded on the right. Raises ValueError if they do not fit."
    if len(answers) != rows:
        raise ValueError(
            f"the engine returned {len(answers)} responses to {rows} prompts: "
            "expected one for each; check its log."
        )
    ids = torch.full((rows, settings.response_length), settings.pad_id)
    mask, logprobs = torch.zeros_like(ids, dtype=torch.bool), torch.zeros(ids.shape)
    for row, answer in enumerate(answers):
        if problem := _problem(row, answer, settings):
            raise ValueError(problem)
        ids[row, : len(answer.token_ids)] = torch.tensor(answer.token_ids)
        logprobs[row, : len(answer.token_ids)] = torch.tensor(answer.logprobs)
        mask[row, : len(answer.token_ids)] = True
    stopped = torch.tensor([answer.finish_reason == "stop" for answer in answers], dtype=torch.bool)
    return Sample(*(x.to(device) for x in (ids, mask, stopped))), logprobs.to(device)


@runtime_checkable
class _LoraLayer(Protocol):
    "The part of peft's LoRA layers that is used here."

    merged: bool
    disable_adapters: bool
    active_adapters: list[str]
    scaling: dict[str, float]

    def get_delta_weight(self, adapter: str) -> Tensor: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...


def _lora_layers(model: nn.Module) -> dict[str, _LoraLayer]:
    "LoRA's layers by name. Raises ValueError on adapters other than plain LoRA."
    for name, config in getattr(model, "peft_config", {}).items():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        dora = getattr(config, "use_dora", False)
        if kind != "LORA" or dora:
            raise ValueError(
                f"adapter {name!r} is {kind}{' with DoRA' if dora else ''}, but an engine takes "
                "only plain LoRA: train with that, or sample with use_vllm=False."
            )
    return {name: part for name, part in model.named_modules() if isinstance(part, _LoraLayer)}


def _named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor, _LoraLayer | None]]:
    "Each weight under its name in a plain model, and the LoRA layer that changes it."
    layers = _lora_layers(model)
    wrappers = ("_checkpoint_wrapped_module.", "_orig_mod.", "base_layer.")
    for name, weight in model.named_parameters():
        if ".lora_" in name or ".original_module." in name:
            continue
        owner, _, kind = name.rpartition(".base_layer.")
        for wrapper in (*wrappers, "modules_to_save.default."):
            name = name.replace(wrapper, "")
        layer = layers.get(owner) if kind == "weight" else None
        yield name.removeprefix("base_model.model."), weight, layer


def _with_lora(weight: Tensor, layer: _LoraLayer | None) -> Tensor:
    "A whole weight, with the active adapters added."
    full = full_tensor(weight.detach())
    if layer is None or layer.merged or layer.disable_adapters:
        return full
    for adapter in layer.active_adapters:
        if adapter in layer.scaling:
            full = full + full_tensor(layer.get_delta_weight(adapter)).to(full.dtype)
    return full


@torch.no_grad()
def policy_weights(
    model: nn.Module,  # a causal language model, with LoRA or without, sharded or not
    dtype: torch.dtype | None = None,  # the engine's dtype; None: unchanged
) -> Iterator[tuple[str, Tensor]]:  # name in a checkpoint, whole weight
    "The weights one by one, LoRA added in, the model unchanged. Call it on every rank, in step."
    plain = unwrap(model)
    for name, weight, layer in _named_weights(model):
        with gather_weights([weight, *(layer.parameters() if layer is not None else ())]):
            full = _with_lora(weight, layer)
            # gathered weights are freed afterwards, so they must be copied
            full = full.to(dtype or full.dtype, copy=is_sharded(weight))
            if isinstance(plain, PreTrainedModel):  # perhaps saved under other names, or in parts
                yield from revert_weight_conversion(plain, {name: full}).items()
            else:
                yield name, full


def vllm_module() -> Any:
    "The module vllm. Raises ImportError if it is missing or of another release."
    try:
        import vllm
    except ImportError as error:
        raise ImportError(
            f"use_vllm is set and vLLM cannot be imported ({error}): "
            f"pip install 'vllm=={VLLM}.*' on a machine with a GPU, "
            "or set use_vllm=False for the package's own engine."
        ) from error
    if not vllm.__version__.startswith(f"{VLLM}."):
        raise ImportError(
            f"installed is vLLM {vllm.__version__}, but rlhf_nb was written for {VLLM}: pip "
            f"install 'vllm=={VLLM}.*', or set use_vllm=False."
        )
    return vllm


def request(
    settings: Sampling,
    seed: int,  # of this row only
) -> dict[str, Any]:
    "vLLM's settings, all of them. Below temperature 0.01 greedy: vLLM would round up to 0.01."
    stops = list(settings.stop_strings.stop_strings) if settings.stop_strings is not None else None
    return dict(
        n=1,
        max_tokens=settings.response_length,
        temperature=settings.temperature if settings.temperature >= 0.01 else 0.0,
        top_k=settings.top_k,
        top_p=settings.top_p,
        min_p=0.0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        seed=seed,
        logprobs=0,
        stop_token_ids=list(settings.stop_ids),
        ignore_eos=True,
        stop=stops,
        logit_bias=dict.fromkeys(settings.unused_ids, -100.0) or None,  # the lowest that it takes
        include_stop_str_in_output=True,
        skip_special_tokens=False,
    )


def answer_of(one: Any) -> Answer:
    "vLLM's CompletionOutput as an `Answer`; each token's log-prob is looked up by its id."
    ids, tables = list(one.token_ids), one.logprobs or []
    known = len(tables) == len(ids) and all(i in table for i, table in zip(ids, tables))
    logprobs = [table[i].logprob for i, table in zip(ids, tables)] if known else None
    return Answer(ids, logprobs, one.finish_reason)


class VLLMEngine:
    "vLLM in this process, on this rank's GPU. Raises ImportError as `vllm_module` does."

    skips_unused_ids = True

    def __init__(
        self,
        model: nn.Module,  # the policy, for its config
        tokenizer: PreTrainedTokenizerBase,  # for texts that end a row
        dtype: torch.dtype = torch.bfloat16,  # the engine's dtype: that of the trainer's forward
        gpu_memory_utilization: float = 0.3,  # share of the GPU; the trainer needs the rest
        max_model_length: int | None = None,  # of prompt and response; None: the model's positions
        sleep: bool = False,  # free the GPU between rollouts; uses host memory
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        vllm = vllm_module()
        config = getattr(model, "config", None)
        if not isinstance(config, PreTrainedConfig):
            raise ValueError(
                f"the policy is a {type(model).__name__} without a config: "
                "give a transformers model."
            )
        # Weights are passed within this process, so vLLM must not start another.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        self._folder = tempfile.TemporaryDirectory()
        config.save_pretrained(self._folder.name)
        tokenizer.save_pretrained(self._folder.name)
        launcher = dict(distributed_executor_backend="external_launcher") if ranks > 1 else {}
        self.llm = vllm.LLM(
            model=self._folder.name,
            load_format="dummy",
            dtype=str(dtype).removeprefix("torch."),
            gpu_memory_utilization=gpu_memory_utilization,
            max_model_len=max_model_length,
            enable_sleep_mode=sleep,
            logprobs_mode="processed_logprobs",
            generation_config="vllm",
            seed=rank,
            **launcher,
        )
        self.params, self.dtype, self.sleep = vllm.SamplingParams, dtype, sleep
        self.awake, self.synced = True, False

    def sync(self, model: nn.Module) -> None:
        "Copy the policy's weights into the engine."
        self._wake()
        weights = policy_weights(model, self.dtype)
        self.llm.collective_rpc("reload_weights", kwargs=dict(weights_iterator=weights))
        self.llm.reset_prefix_cache()
        self.synced = True

    def generate(
        self, prompt_ids: Tensor, prompt_mask: Tensor, settings: Sampling
    ) -> tuple[Sample, Tensor]:
        "Responses, and the engine's log-probs. Raises RuntimeError before the first sync."
        if not self.synced:
            raise RuntimeError("the engine's weights are empty: call sync(model) before generate.")
        self._wake()
        check_left_padded(prompt_mask)
        seeds = torch.randint(2**31 - 1, (len(prompt_ids),)).tolist()
        prompts = [ids[keep].tolist() for ids, keep in zip(prompt_ids, prompt_mask.bool())]
        outputs = self.llm.generate(
            [dict(prompt_token_ids=ids) for ids in prompts],
            [self.params(**request(settings, seed)) for seed in seeds],
            use_tqdm=False,
        )
        if self.sleep:
            self.llm.sleep(level=1)
            self.awake = False
        answers = [answer_of(one) for output in outputs for one in output.outputs]
        return collect(answers, len(prompts), settings, prompt_ids.device)

    def _wake(self) -> None:
        if not self.awake:
            self.llm.wake_up()
        self.awake = True

    def close(self) -> None:
        self._folder.cleanup()
        del self.llm
