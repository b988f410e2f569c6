"""A stand-in that speaks vLLM 0.33's API in the process, for tests: LLM, SamplingParams, outputs.

Behind it is a small model of transformers, without a cache, so that what it returns is computed
in another way than by the package's own sampler. It takes the arguments that vLLM takes and no
others, and does what vLLM does with those that are easily missed: raw log-probs unless another
mode is set, its own end of a row unless ignore_eos, a temperature below 0.01 rounded up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import ModuleType
from typing import ClassVar

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


@dataclass
class SamplingParams:
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: dict[int, float] | None = None

    def __post_init__(self):
        if 0 < self.temperature < 1e-2:
            self.temperature = 1e-2


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None


@dataclass
class CompletionOutput:
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class RequestOutput:
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)


class Core:
    "The model, and how it samples."

    def __init__(
        self,
        folder,
        *,
        logprobs_mode="raw_logprobs",
        generation_config="auto",
        seed=0,
        dtype="auto",
    ):
        torch.manual_seed(99 + seed)
        with torch.random.fork_rng():
            self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).eval()
        if dtype != "auto":
            self.model.to(getattr(torch, dtype))
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.mode = logprobs_mode
        self.defaults = generation_config
        self.cached, self.stale = set(), False
        self.asleep = False

    def load_weights(self, weights):
        own, seen = (
            {
                name.replace("lm_head.", "embed_out."): x
                for name, x in self.model.named_parameters()
            },
            set(),
        )  # GPT-NeoX's name on disk
        for name, weight in weights:
            with torch.no_grad():
                own[name].copy_(weight)  # KeyError on a name that is in no checkpoint
            seen.add(name)
        assert seen == set(own), f"not sent: {set(own) - seen}"
        self.stale = bool(self.cached)  # prompts that were cached belong to the old weights

    def reset_prefix_cache(self):
        self.cached, self.stale = set(), False

    @torch.no_grad()
    def one(self, ids: list[int], p: SamplingParams, index: int = 0) -> CompletionOutput:
        assert not self.asleep, "sampled from while asleep"
        assert not (self.stale and tuple(ids) in self.cached), (
            "answered from keys and values of old weights"
        )
        self.cached.add(tuple(ids))
        chance = torch.Generator().manual_seed(p.seed if p.seed is not None else 0)
        out = []
        logprobs = []
        reason = "length"
        stops = list(p.stop_token_ids or []) + (
            [] if p.ignore_eos else [self.tokenizer.eos_token_id]
        )
        for _ in range(p.max_tokens):
            raw = self.model(torch.tensor([ids + out])).logits[0, -1].float()
            seen = list(set(ids + out))
            z = raw.clone()
            if p.repetition_penalty != 1:
                z[seen] = torch.where(
                    z[seen] > 0, z[seen] / p.repetition_penalty, z[seen] * p.repetition_penalty
                )
            for i, more in (p.logit_bias or {}).items():
                z[i] += max(-100.0, min(100.0, more))
            if p.temperature >= 1e-5:
                z = z / p.temperature
            if p.top_k:
                z = z.masked_fill(z < z.topk(p.top_k).values[-1], -math.inf)
            if p.top_p < 1:
                s, order = z.sort(descending=True)
                z[order[s.softmax(0).cumsum(0) - s.softmax(0) >= p.top_p]] = -math.inf
            token = (
                int(z.argmax())
                if p.temperature < 1e-5
                else int(torch.multinomial(z.softmax(0), 1, generator=chance))
            )
            logp = (raw if self.mode == "raw_logprobs" else z).log_softmax(0)
            out.append(token)
            if p.logprobs is not None:
                logprobs.append(
                    {
                        i: Logprob(float(logp[i]), 1 + int((logp > logp[i]).sum()))
                        for i in [*logp.topk(p.logprobs).indices.tolist(), token]
                    }
                )
            text = self.tokenizer.decode(out, skip_special_tokens=p.skip_special_tokens)
            wanted = [p.stop] if isinstance(p.stop, str) else p.stop or []
            if token in stops or any(s in text for s in wanted):
                reason = "stop"
                break
        kept = logprobs if p.logprobs is not None else None
        return CompletionOutput(index, text, out, kept, reason)


class LLM:
    "In the process."

    made: ClassVar[list[LLM]] = []

    def __init__(
        self,
        model: str,
        *,
        tokenizer=None,
        dtype="auto",
        seed=0,
        gpu_memory_utilization=0.92,
        max_model_len=None,
        enable_sleep_mode=False,
        load_format="auto",
        logprobs_mode="raw_logprobs",
        generation_config="auto",
        tensor_parallel_size=1,
        enforce_eager=False,
        distributed_executor_backend=None,
    ):
        assert load_format == "dummy", "there are no weights in this folder"
        self.core = Core(
            model,
            logprobs_mode=logprobs_mode,
            generation_config=generation_config,
            seed=seed,
            dtype=dtype,
        )
        self.sleeps = enable_sleep_mode
        self.calls = []
        self.given = dict(
            gpu_memory_utilization=gpu_memory_utilization, max_model_len=max_model_len
        )
        LLM.made.append(self)

    def generate(self, prompts, sampling_params=None, *, use_tqdm=True):
        assert len(sampling_params) == len(prompts)
        self.calls.append("generate")
        return [
            RequestOutput(
                p["prompt_token_ids"],
                [self.core.one(p["prompt_token_ids"], s, i) for i in range(s.n)],
            )
            for p, s in zip(prompts, sampling_params)
        ]

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        assert method == "reload_weights"
        assert set(kwargs) == {"weights_iterator"}
        assert not self.core.asleep
        self.calls.append(method)
        self.core.load_weights(kwargs["weights_iterator"])
        return [None]

    def reset_prefix_cache(self):
        self.core.reset_prefix_cache()
        return True

    def sleep(self, level=1, mode="abort"):
        assert self.sleeps, "Sleep mode is not enabled."
        self.calls.append("sleep")
        self.core.asleep = True

    def wake_up(self, tags=None):
        self.calls.append("wake_up")
        self.core.asleep = False
        return True


def modules(version: str = "0.33.0") -> dict[str, ModuleType]:
    "What `import vllm` finds: put it into sys.modules."
    module = ModuleType("vllm")
    vars(module).update(__version__=version, LLM=LLM, SamplingParams=SamplingParams)
    return {"vllm": module}
