"""Whether a checkpoint belongs to this run: what names a run, what may differ after a resume, and
the line that says so."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import sys
import sysconfig
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import partial
from itertools import islice
from logging import Logger
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedTokenizerBase, TrainingArguments
from transformers.utils import logging

from rlhf_nb.base.encoding import encode_prompts
from rlhf_nb.base.errors import did_you_mean
from rlhf_nb.base.fields import settings_that_say
from rlhf_nb.base.files import read_object
from rlhf_nb.base.opened import attention_of
from rlhf_nb.base.random_state import random_state_kept
from rlhf_nb.base.sharding import full_shape, is_sharded
from rlhf_nb.checkpoint import MANIFEST, verify
from rlhf_nb.reward_functions import rewarder_name
from rlhf_nb.training.prompts import sets_of

logger = logging.get_logger(__name__)
NUMBER = re.compile(r"u?int\d|float|double|halffloat|bool")  # types of Arrow
LIBRARIES = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
# where code lies whose name and version stand for it
PACKAGES = *(f"{x}{os.sep}" for x in [*LIBRARIES, Path(__file__).parents[1]]), "<frozen"
LEARNING_RATES = {"learning_rate", "value_learning_rate"}


def digest(*parts: bytes) -> str:
    "Sixteen characters of a SHA-256."
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()[:16]


def as_bytes(column: Any) -> bytes:
    "What an Arrow array holds, however it is laid out in memory."
    if hasattr(column, "combine_chunks"):
        column = column.combine_chunks()
    if hasattr(column, "value_lengths"):  # lists
        return as_bytes(column.value_lengths()) + as_bytes(column.flatten())
    if NUMBER.match(str(column.type)) and not column.null_count:
        return column.to_numpy(zero_copy_only=False).tobytes()
    return repr(column.to_pylist()).encode()


def fingerprint_data(data: Any) -> str | None:
    "Rows and a hash of all in their order; of a stream, of its first ones. None for anything else."
    if isinstance(data, IterableDataset):
        with random_state_kept():
            return f"a stream that begins with {digest(repr([*islice(data, 64)]).encode())}"
    if not isinstance(data, Dataset):
        return None
    tables = data.with_format("arrow").iter(1000)
    names = sorted(data.column_names)
    parts = (as_bytes(table[name]) for table in tables for name in names)
    return f"{len(data)} rows {digest(repr(names).encode(), *parts)}"


def fingerprint_sets(train: Any, evaluation: Any) -> dict[str, str]:
    "Those of a run, by name."
    sets = {"eval_dataset" + f" {k}" * bool(k): x for k, x in sets_of(evaluation).items()}
    both = (dict(train_dataset=train) | sets).items()
    return {name: found for name, x in both if (found := fingerprint_data(x))}


def fingerprint_tokenizer(tokenizer: Any) -> str:
    "A hash of what decides which ids a text gets."
    rules = tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.chat_template
    words = sorted(tokenizer.get_vocab().items())
    tried = encode_prompts(["A text, a b c."], tokenizer)
    return f"{len(words)} tokens {digest(repr((words, rules, tried)).encode())}"


def sample_of(weight: Tensor) -> bytes:
    "A thousand or so numbers spread over it."
    flat = weight.detach().flatten()
    return flat[:: max(1, len(flat) // 1024)].cpu().contiguous().view(torch.uint8).numpy().tobytes()


def fingerprint_model(name: str, model: Any) -> dict[str, str]:
    """Class, name and shapes of a model, and a hash of the weights that do not learn; the
    others are in the checkpoint. No hash where they are sharded."""
    weights = [*model.named_parameters()]
    shapes = [(part, tuple(full_shape(p))) for part, p in weights]
    config = getattr(model, "config", None)
    of = Path(getattr(config, "name_or_path", "") or "from scratch").name
    described = {name: f"{type(model).__name__} {of} {digest(repr(shapes).encode())}"}
    fixed = [p for _, p in weights if not p.requires_grad]
    if fixed and not any(is_sharded(p) for p in fixed):
        center = repr(getattr(config, "reward_center", 0.0)).encode()
        described[f"{name}_weights"] = digest(center, *(sample_of(p) for p in fixed))
    return described


def fingerprint_code(code: types.CodeType) -> str:
    "What a function does, without its line numbers."

    def constant(x: Any) -> Any:
        if isinstance(x, types.CodeType):
            return fingerprint_code(x)
        return sorted(repr(x)) if isinstance(x, frozenset) else x

    return repr((code.co_code, code.co_names, [*map(constant, code.co_consts)]))


def is_own(x: types.FunctionType | type | types.ModuleType) -> bool:
    "Whether it is code of the user's, and no package's or Python's, whose name stands for it."
    if isinstance(x, types.FunctionType):
        return not x.__code__.co_filename.startswith(PACKAGES)
    module = x if isinstance(x, types.ModuleType) else sys.modules.get(x.__module__ or "__main__")
    if getattr(module, "__name__", "") in sys.builtin_module_names:
        return False
    return not str(getattr(module, "__file__", "")).startswith(PACKAGES)


def codes_in(code: types.CodeType) -> list[types.CodeType]:
    "It, and the functions inside."
    inner = (x for x in code.co_consts if isinstance(x, types.CodeType))
    return [code, *(y for x in inner for y in codes_in(x))]


class Content:
    """What decides an object's answers: code, defaults, closures, what a function reads of its
    module, attributes, containers, weights. `unknown` has the kinds that cannot be told."""

    def __init__(self) -> None:
        self.seen, self.unknown = dict[int, Any](), set[str]()

    def __call__(self, x: Any) -> Any:
        kind = type(x).__qualname__
        if x is None or isinstance(x, (bool, int, float, complex, str, bytes)):
            return repr(x)
        if id(x) in self.seen:
            return f"{kind} again"
        self.seen[id(x)] = x  # kept, so that no other gets its id
        return kind, self.parts(x)

    def parts(self, x: Any) -> Any:
        match x:
            case types.FunctionType():
                cells = [c.cell_contents for c in x.__closure__ or () if c != types.CellType()]
                held = map(self, (x.__defaults__, x.__kwdefaults__, cells))
                return x.__qualname__, *held, *(self.source(x) if is_own(x) else ())
            case type():
                own = {k: v for k, v in vars(x).items() if k[:2] != "__" or callable(v)}
                return x.__qualname__, self((own, x.__bases__) if is_own(x) else None)
            case partial():
                return self((x.func, x.args, x.keywords))
            case types.MethodType():
                return self((x.__func__, x.__self__))
            case types.ModuleType() | types.BuiltinFunctionType() | types.MemberDescriptorType():
                return x.__name__
            case Logger():
                return x.name
            case Mapping():
                return [(self(k), self(v)) for k, v in x.items()]
            case list() | tuple():
                return [self(v) for v in x]
            case set() | frozenset():
                return sorted(repr(self(v)) for v in x)
            case Tensor():
                return tuple(x.shape), digest(sample_of(x))
            case nn.Module():
                return self({**x.state_dict()})
            case PreTrainedTokenizerBase():
                return fingerprint_tokenizer(x)
        if inner := getattr(x, "__wrapped__", getattr(x, "fget", None)):  # cached, static, property
            return self(inner)
        if is_own(type(x)):
            names = (k for c in type(x).__mro__ for k in vars(c).get("__slots__", ()))
            slots = {k: getattr(x, k, None) for k in names}
            return self((type(x), getattr(x, "__dict__", None), slots))
        with suppress(TypeError, AttributeError, pickle.PicklingError):
            if not hasattr(x, "__dict__"):
                return digest(pickle.dumps(x))
        self.unknown.add(type(x).__qualname__)
        return None

    def source(self, f: types.FunctionType) -> tuple:
        "Its code, and what it reads of its module."
        names = {name for code in codes_in(f.__code__) for name in code.co_names}
        read = {k: f.__globals__[k] for k in sorted(names & f.__globals__.keys())}
        for k, m in [*read.items()]:
            # of the user's modules, what it names
            if isinstance(m, types.ModuleType) and is_own(m):
                read |= {f"{k}.{n}": vars(m)[n] for n in sorted(names & vars(m).keys())}
        return fingerprint_code(f.__code__), self(read)


def fingerprint_function(function: Any) -> str:
    """Name of a reward function, environment or tool, and a hash of what decides its answers. What
    cannot be told is logged, once."""
    found = (content := Content())(function)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    if content.unknown:
        logger.warning_once(
            f"{name} holds {', '.join(sorted(content.unknown))}, which a resume cannot compare: "
            "make sure that it is the same."
        )
    return f"{name} {digest(repr(found).encode())}"


def to_manifest(x: Any) -> Any:
    "As a manifest keeps it."
    return json.loads(json.dumps(getattr(x, "value", x), default=str))


def naming_settings(args: TrainingArguments) -> dict[str, Any]:
    "The settings that name a run."
    names = settings_that_say(type(args), "names")
    return {name: to_manifest(getattr(args, name)) for name in names}


def free_settings(args: TrainingArguments) -> dict[str, Any]:
    "The settings that may change between two parts of a run."
    others = settings_that_say(type(args), "names", "place")
    names = [f.name for f in fields(args) if f.name not in others]
    return {name: to_manifest(getattr(args, name, None)) for name in [*names, "world_size"]}


def check_same_run(
    folder: Path,  # a checkpoint, verified
    identity: dict[str, Any],
    anyway: Sequence[str] | None = None,  # names that may differ
) -> dict[str, tuple[Any, Any]]:  # what differs and may, saved and now
    """Raises ValueError where a checkpoint belongs to another run, with each difference. A name
    that one of the two does not know is not compared."""
    if unknown := [name for name in anyway or () if name not in identity]:
        raise ValueError(
            f"resume_anyway names {unknown[0]!r}, which does not name a run."
            f"{did_you_mean(unknown[0], identity)} There are: {', '.join(identity)}."
        )
    saved, now = saved_run(folder), to_manifest(identity)
    if not saved:
        raise ValueError(f"{folder / MANIFEST} does not say which run it is of: it was changed.")
    different = {k: (saved[k], x) for k, x in now.items() if k in saved and saved[k] != x}
    refused = {name: both for name, both in different.items() if name not in (anyway or ())}
    if refused:
        texts = [f"its {k} is {old!r}, this run's is {new!r}" for k, (old, new) in refused.items()]
        raise ValueError(
            f"{folder} belongs to another run: {'; '.join(texts)}. Give this run's own checkpoint, "
            f"or the same settings; resume_anyway={[*refused]} (--resume_anyway "
            f"{' '.join(refused)}) goes on all the same."
        )
    return different


def saved_run(folder: Path) -> dict[str, Any]:
    "What a checkpoint records of its run."
    return read_object(folder / MANIFEST)["run"]


def changed_settings(run: dict[str, Any], settings: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    "Settings that have another value than those a checkpoint records, saved and now."
    saved = run.get("settings", {})
    return {k: (saved[k], x) for k, x in settings.items() if k in saved and saved[k] != x}


def changes_text(
    changes: dict[str, tuple[Any, Any]],  # saved and now
    kind: type,  # of the settings
) -> str:
    "'kl_coef 0.1 (was 0.05), ...', and whether the bits can be the same."
    rounds = {"world_size", *settings_that_say(kind, "rounds")}
    text = ", ".join(f"{name} {new} (was {old})" for name, (old, new) in changes.items())
    return text + "; not bit for bit" * bool(rounds & changes.keys())


def apply_new_rates(
    scheduler: Any,  # loaded from a checkpoint, and its optimizer too
    fresh: Sequence[dict[str, Any]],  # the optimizer's groups as this run's settings made them
    changed: set[str],  # settings
) -> None:
    """Betas, weight decay and, where they changed, learning rates of this run's settings; the rate
    of the next step is that of this run's schedule."""
    kept = {"params"} if changed & LEARNING_RATES else {"params", "lr", "initial_lr"}
    state, rates = scheduler.state_dict(), []
    for i, (group, ours) in enumerate(zip(scheduler.optimizer.param_groups, fresh)):
        old = group.get("initial_lr", group["lr"])
        group.update({name: x for name, x in ours.items() if name not in kept})
        base = group.get("initial_lr", group["lr"])
        if isinstance(scheduler, LambdaLR):
            rate = base * scheduler.lr_lambdas[i](scheduler.last_epoch)
        else:
            rate = state["_last_lr"][i] * base / old
        group["lr"] = rate
        rates.append((base, rate))
    bases = dict(base_lrs=[base for base, _ in rates]) if "base_lrs" in state else {}
    scheduler.load_state_dict({**state, **bases, "_last_lr": [rate for _, rate in rates]})


def changes_since(
    folder: Path, named: dict[str, Any], args: TrainingArguments
) -> tuple[dict[str, Any], dict[str, str]]:
    """What is other than in a checkpoint, and what had changed before, in words. Raises ValueError
    where it is damaged, holds weights alone, or is of another run."""
    verify(folder)
    saved = saved_run(folder)
    if saved.get("settings", {}).get("save_only_model"):
        raise ValueError(
            f"{folder} was saved with save_only_model: it holds weights, and neither optimizer "
            "nor random state, so the run cannot go on from it. Give it to a new run as its "
            "model, or save without save_only_model."
        )
    name = "value_learning_rate"  # with one, the optimizer has two groups of weights
    old, new = saved.get("settings", {}).get(name), getattr(args, name, None)
    if (old is None) != (new is None):
        raise ValueError(f"{name} is {new}, and was {old} in {folder}: set it as it was.")
    changes = check_same_run(folder, named, getattr(args, "resume_anyway", ()))
    return changes | changed_settings(saved, free_settings(args)), {**saved.get("changes", {})}


def identify_ppo(trainer: Any) -> dict[str, Any]:
    "What names a run of PPO: its models, judges, tokenizers and stop tokens."
    pair, judges = trainer.pair, trainer.judges
    names: dict[str, Any] = dict(processing_class=fingerprint_tokenizer(trainer.processing_class))
    names |= fingerprint_model("model", pair.policy)
    if pair.value is not None:
        names |= fingerprint_model("value_model", pair.value)
    names["ref_model"] = "the policy without its adapter"
    if trainer.ref_model is not None:
        names |= fingerprint_model("ref_model", trainer.ref_model)
    names["judges"] = ", ".join(f"{name} x {weight:g}" for name, weight in judges.weights.items())
    for name, judge in judges.judges.items():
        known = f"reward_{name}"
        if isinstance(judge, nn.Module):
            names |= fingerprint_model(known, judge)
        else:
            names[known] = fingerprint_function(judge)
    given = () if trainer.player is None else (trainer.player.factory, *trainer.player.tools)
    names |= {f"environment_{rewarder_name(x)}": fingerprint_function(x) for x in given}
    if judges.ensemble is not None:
        names["ensemble"] = repr(judges.ensemble)
    if judges.tokenizer is not None:
        names["reward_processing_class"] = fingerprint_tokenizer(judges.tokenizer)
    return names | dict(stop_token_id=list(trainer.sampling_settings.stop_ids))


def computing(model: Any) -> dict[str, Any]:
    "How a model computes, where its weights do not tell: precision, attention, what never learns."
    fixed = [name for name, p in model.named_parameters() if not p.requires_grad]
    return dict(
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        attention=attention_of(model),
        fixed=[] if hasattr(model, "peft_config") else fixed,  # of an adapter, all but itself
    )


def surroundings(pair: Any, forward: Any, device: torch.device) -> dict[str, Any]:
    "What an update's last bits depend on beside settings and weights, for whoever does it again."
    models = dict(policy=pair.policy, value=pair.value)
    return dict(
        device=device.type,
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        micro_batch_tokens=forward.tokens,
        trim_padding=forward.align is not None,
        **{name: computing(model) for name, model in models.items() if model is not None},
    )
