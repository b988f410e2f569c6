"""A stand-in that speaks vLLM 0.33's API, for tests: LLM, SamplingParams, outputs, weight
transfer, and an HTTP server on loopback.

Behind it stands a small model of transformers, without a cache, so that what it says is right by
another road than the package's own sampler. It takes the arguments that vLLM takes and no others,
and does what vLLM does with those that are easily missed: raw log-probs unless told otherwise, its
own end of a row unless ignore_eos, a temperature below 0.01 rounded up. Weights reach the server
by a second connection, as by NCCL.
"""

from __future__ import annotations

import io
import json
import math
import socket
import threading
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Client, Listener
from types import ModuleType

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

KEY = b"weights"


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
        self.tokenizer, self.mode, self.defaults = (
            AutoTokenizer.from_pretrained(folder),
            logprobs_mode,
            generation_config,
        )
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
        assert not self.asleep, "asked while asleep"
        assert not (self.stale and tuple(ids) in self.cached), (
            "answered from keys and values of old weights"
        )
        self.cached.add(tuple(ids))
        chance, out, said, reason = (
            torch.Generator().manual_seed(p.seed if p.seed is not None else 0),
            [],
            [],
            "length",
        )
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
                said.append(
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
        return CompletionOutput(index, text, out, said if p.logprobs is not None else None, reason)


class LLM:
    "In the process."

    made: list[LLM] = []

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
        self.core, self.sleeps, self.told = (
            Core(
                model,
                logprobs_mode=logprobs_mode,
                generation_config=generation_config,
                seed=seed,
                dtype=dtype,
            ),
            enable_sleep_mode,
            [],
        )
        self.given = dict(
            gpu_memory_utilization=gpu_memory_utilization, max_model_len=max_model_len
        )
        LLM.made.append(self)

    def generate(self, prompts, sampling_params=None, *, use_tqdm=True):
        assert len(sampling_params) == len(prompts)
        self.told.append("generate")
        return [
            RequestOutput(
                p["prompt_token_ids"],
                [self.core.one(p["prompt_token_ids"], s, i) for i in range(s.n)],
            )
            for p, s in zip(prompts, sampling_params)
        ]

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        assert (
            method == "reload_weights"
            and set(kwargs) == {"weights_iterator"}
            and not self.core.asleep
        )
        self.told.append(method)
        self.core.load_weights(kwargs["weights_iterator"])
        return [None]

    def reset_prefix_cache(self):
        self.core.reset_prefix_cache()
        return True

    def sleep(self, level=1, mode="abort"):
        assert self.sleeps, "Sleep mode is not enabled."
        self.told.append("sleep")
        self.core.asleep = True

    def wake_up(self, tags=None):
        self.told.append("wake_up")
        self.core.asleep = False
        return True


# ---- Weight transfer: the trainer's side ----


@dataclass(frozen=True)
class ParamMeta:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightSource:
    def __init_subclass__(cls):
        from functools import cached_property

        assert isinstance(cls.__dict__["metadata"], cached_property)


@dataclass
class NCCLTrainerInitInfo:
    master_address: str
    master_port: int
    world_size: int
    packed: bool = True
    rank: int = field(kw_only=True, default=0)


class HTTPVLLMWeightSyncClient:
    def __init__(self, base_url, timeout=300):
        self.base_url, self.timeout = base_url.rstrip("/"), timeout

    def post(self, path, body=None):
        import httpx

        httpx.post(f"{self.base_url}/{path}", json=body, timeout=self.timeout).raise_for_status()


class Trainer:
    "Listens where the server will call, as rank 0 of the group."

    def __init__(self, info, client, source):
        self.client, self.source = client, source
        self.listener = Listener((info.master_address, info.master_port), authkey=KEY)
        self.client.post(
            "init_weight_transfer_engine",
            dict(init_info={k: v for k, v in asdict(info).items() if k != "rank"}),
        )

    def send_weights(self):
        meta = self.source.metadata
        self.client.post("start_weight_update")
        told = dict(
            names=[m.name for m in meta],
            dtype_names=[str(m.dtype).split(".")[-1] for m in meta],
            shapes=[list(m.shape) for m in meta],
        )
        error = []

        def update():
            try:
                self.client.post("update_weights", dict(update_info=told))
            except Exception as problem:
                error.append(problem)

        thread = threading.Thread(target=update)
        thread.start()
        with self.listener.accept() as wire:
            for m, (name, tensor) in zip(meta, self.source.iter_full(), strict=True):
                assert (name, tensor.dtype, tuple(tensor.shape)) == (m.name, m.dtype, m.shape), (
                    "the two channels do not agree"
                )
                buffer = io.BytesIO()
                torch.save(tensor, buffer)
                wire.send_bytes(buffer.getvalue())
        thread.join()
        if error:
            raise error[0]
        self.client.post("finish_weight_update")

    def shutdown(self):
        self.listener.close()


class WeightTransferTrainerFactory:
    @staticmethod
    def trainer_init(init_info, *, client, source):
        return Trainer(init_info, client, source)


# ---- The server ----


class Server:
    "vLLM's HTTP server: `with Server(folder) as server: server.url`."

    def __init__(self, folder, port=0, version="0.33.0", **core):
        self.core, self.release, self.weights, self.paused, self.open, self.seen = (
            Core(folder, **core),
            version,
            "default",
            False,
            False,
            [],
        )
        self.tamper, self.wires = lambda answer: answer, []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args):
                pass

            def setup(self):
                super().setup()
                outer.wires.append(self.connection)

            def do_GET(self):
                self.reply()

            def do_POST(self):
                self.reply()

            def reply(self):
                body = json.loads(
                    self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}"
                )
                path = self.path.split("?")[0].strip("/")
                outer.seen.append(path)
                try:
                    code, found = outer.answer(path, body)
                except Exception as error:
                    code, found = 500, dict(error=f"{type(error).__name__}: {error}")
                data = b"" if found is None else json.dumps(found).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        class Http(ThreadingHTTPServer):
            daemon_threads, request_queue_size = True, 256

        self.http = Http(("127.0.0.1", port), Handler)
        self.port, self.lock = self.http.server_address[1], threading.Lock()
        self.url = f"http://127.0.0.1:{self.port}"
        self.thread = threading.Thread(
            target=self.http.serve_forever, kwargs=dict(poll_interval=0.01), daemon=True
        )
        self.thread.start()

    def answer(self, path, body):
        if path == "health":
            return 200, None
        if path == "version":
            return 200, dict(version=self.release)
        if path == "get_world_size":
            return 200, dict(world_size=1)
        if path == "weight_info":
            return 200, dict(weight_version=self.weights)
        if path == "v1/completions":
            return self.complete(**body)
        if path == "init_weight_transfer_engine":
            self.wire = body["init_info"]["master_address"], body["init_info"]["master_port"]
        elif path == "pause":
            self.paused = True
            self.core.reset_prefix_cache()
        elif path == "resume":
            self.paused = False
        elif path == "start_weight_update":
            assert self.paused, "weights would change under a request"
            self.open = True
        elif path == "update_weights":
            assert self.open
            info = body["update_info"]
            with Client(self.wire, authkey=KEY) as wire:
                got = [torch.load(io.BytesIO(wire.recv_bytes())) for _ in info["names"]]
            assert [list(x.shape) for x in got] == info["shapes"]
            self.core.load_weights(zip(info["names"], got))
        elif path == "finish_weight_update":
            self.open = False
        elif path == "update_weight_version":
            self.weights = body["new_version"]
        else:
            return 404, dict(error="Not Found")
        return 200, dict(message="done")

    def complete(self, prompt, return_token_ids=False, **given):
        if self.paused:
            return 503, dict(error="paused")
        with self.lock:
            p = SamplingParams(**given)  # TypeError, and so 500, on an argument that there is not
            choices = []
            for i in range(p.n):
                one = self.core.one(prompt, p, i)
                logprobs = (
                    None
                    if one.logprobs is None
                    else dict(
                        tokens=[str(t) for t in one.token_ids],
                        token_logprobs=[
                            at[t].logprob for t, at in zip(one.token_ids, one.logprobs)
                        ],
                        top_logprobs=[
                            {str(t): x.logprob for t, x in at.items()} for at in one.logprobs
                        ],
                    )
                )
                choices.append(
                    dict(
                        index=i,
                        text=one.text,
                        logprobs=logprobs,
                        finish_reason=one.finish_reason,
                        stop_reason=None,
                        token_ids=one.token_ids if return_token_ids else None,
                    )
                )
        return 200, self.tamper(dict(id="cmpl", choices=choices))

    def close(self):
        self.http.shutdown()
        self.http.server_close()
        for wire in self.wires:
            try:
                wire.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # closed by the other side

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()


def modules(version: str = "0.33.0") -> dict[str, ModuleType]:
    "What `import vllm` finds: put them into sys.modules."

    def make(name, **what):
        module = ModuleType(name)
        vars(module).update(what)
        return module

    return {
        "vllm": make("vllm", __version__=version, LLM=LLM, SamplingParams=SamplingParams),
        "vllm.distributed": make("vllm.distributed"),
        "vllm.distributed.weight_transfer": make(
            "vllm.distributed.weight_transfer",
            ParamMeta=ParamMeta,
            WeightSource=WeightSource,
            HTTPVLLMWeightSyncClient=HTTPVLLMWeightSyncClient,
            WeightTransferTrainerFactory=WeightTransferTrainerFactory,
        ),
        "vllm.distributed.weight_transfer.nccl_engine": make(
            "vllm.distributed.weight_transfer.nccl_engine", NCCLTrainerInitInfo=NCCLTrainerInitInfo
        ),
        "vllm.utils": make("vllm.utils"),
        "vllm.utils.network_utils": make("vllm.utils.network_utils", get_ip=lambda: "127.0.0.1"),
    }
