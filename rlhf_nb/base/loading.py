"Models by name or folder: what is wrong with one is an error of one line, and no weight is random."

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from rlhf_nb.base.files import check_folder, check_saved
from rlhf_nb.base.opened import unwrap
from rlhf_nb.base.real import SHORT_NAME, real_place
from rlhf_nb.base.sharding import zero3_is_live

OF_HUB = "revision token trust_remote_code cache_dir subfolder local_files_only gguf_file".split()


def from_where(name: str) -> dict[str, str]:
    """What `from_pretrained` is given for a name. A GGUF file, or the one in a folder without a
    config.json, becomes its folder and `gguf_file`; `smollm2` is found wherever it is."""
    if name == SHORT_NAME and not Path(name).exists():
        name = real_place()[1]
    path = Path(name)
    files = [] if (path / "config.json").is_file() else sorted(path.glob("*.gguf"))
    if path.suffix == ".gguf" and not path.is_dir():
        files = [path]
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {name}: give the GGUF file, or its folder.")
    if len(files) > 1:
        raise ValueError(
            f"{name} holds {len(files)} GGUF files, such as {files[0].name} and {files[1].name}: "
            "give one of them."
        )
    if not files:
        return dict(pretrained_model_name_or_path=name)
    if find_spec("gguf") is None:
        raise ValueError(f"{name} is a GGUF file, which needs the library gguf: pip install gguf.")
    return dict(pretrained_model_name_or_path=str(files[0].parent), gguf_file=files[0].name)


@contextmanager
def no_bars(
    quiet: bool = False,  # no warnings either, such as that of a head that is missing and made here
) -> Iterator[None]:
    "transformers shows no progress bars meanwhile."
    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    if quiet:
        logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def no_programs(name: str | Path) -> Iterator[None]:
    "Raises ValueError where torch refused a pickle, which can run whatever its maker wrote in it."
    try:
        yield
    except pickle.UnpicklingError:
        raise ValueError(
            f"a file in {name} is damaged, or runs code when it is read: do not read it by other "
            "means, but remove it, and take an earlier checkpoint, or a copy from whom you trust."
        ) from None  # torch advises to read it all the same


@contextmanager
def explain_load_errors(name: str, what: str = "model") -> Iterator[None]:
    "Errors in one line: OSError where nothing is there, ValueError on what cannot be used."
    folder, gguf = Path(name), name.endswith(".gguf")
    if folder.is_file() and not gguf:
        raise NotADirectoryError(f"{name} is a file: give the folder that the {what} is in.")
    check_folder(name)
    check_saved(name, what)
    try:
        with no_programs(name):
            yield
    except (OSError, ValueError, RuntimeError, SafetensorError, LookupError, TypeError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        if lines[0].endswith(":"):  # the reason is below it
            lines[:2] = [" ".join(part.strip() for part in lines[:2])]
        kind = OSError if isinstance(error, OSError) else ValueError
        fix = f"Give a name on the hub, or a folder that a {what} was saved to and you may read."
        if "gguf_file" in from_where(name):
            fix = (
                "Is the GGUF file cut off? Then copy it again. Where transformers cannot read it, "
                f"give the {what} in its own format."
            )
        if isinstance(error, SafetensorError):
            fix = "The file is damaged: copy it again."
        raise kind(f"{name} cannot be loaded: {lines[0].rstrip('. ')}. {fix}") from error


def pretrained_tokenizer(name: str, **options: Any) -> Any:
    "The tokenizer in a folder or a GGUF file, or of that name on the hub."
    place = from_where(name)
    with explain_load_errors(name, "tokenizer"):
        return AutoTokenizer.from_pretrained(**place, **options)


def normalize_dtype(given: dict[str, Any], default: torch.dtype) -> dict[str, Any]:
    """What `from_pretrained` gets, with a `dtype`; `torch_dtype`, as it was called before, is the
    same. Raises ValueError where both are given and differ, and on a name that is no dtype."""
    kinds = {name: given[name] for name in ("dtype", "torch_dtype") if given.get(name) is not None}
    if len({str(kind).removeprefix("torch.") for kind in kinds.values()}) > 1:
        raise ValueError(
            f"dtype is {kinds['dtype']} and torch_dtype is {kinds['torch_dtype']}: give one of "
            "them, they are the same setting."
        )
    others = {name: x for name, x in given.items() if name != "torch_dtype"}
    kind = named = next(iter(kinds.values()), default)
    if isinstance(named, str) and named != "auto":
        kind = getattr(torch, named.removeprefix("torch."), None)
        if not isinstance(kind, torch.dtype):
            raise ValueError(f"dtype is {named!r}: give float32, bfloat16, float16 or auto.")
    return others | dict(dtype=kind)


def check_decoder(config: PreTrainedConfig, name: str) -> None:
    "Raises ValueError on a part of an encoder-decoder."
    if config.is_encoder_decoder or type(config).is_encoder_decoder:
        raise ValueError(
            f"{name} is no decoder: {config.model_type} is an encoder-decoder. Give a causal "
            "language model, such as Llama or Qwen."
        )


NOT_AT_THE_LAST = (
    "Give a sequence classifier that is made from a causal language model; as a judge also a "
    "function f(prompts, responses, **columns) that calls it."
)


def reads_both_ways(config: PreTrainedConfig) -> bool:
    "Whether a token sees those behind it: BERT and its relatives, unless they are decoders."
    decoder = getattr(config, "is_decoder", False)
    encoder = type(config) in MODEL_FOR_MASKED_LM_MAPPING and not decoder
    return encoder or getattr(config.get_text_config(), "use_bidirectional_attention", None) is True


def check_policy(model: Any) -> None:
    "Raises ValueError on a transformers model that is no causal language model."
    inner = unwrap(model)
    if not isinstance(config := getattr(inner, "config", None), PreTrainedConfig):
        return
    kind = type(inner).__name__
    check_decoder(config, kind)
    if isinstance(inner, PreTrainedModel) and inner.get_output_embeddings() is None:
        raise ValueError(
            f"{kind} writes no tokens, having no language-model head: give an AutoModelForCausalLM."
        )
    if reads_both_ways(config):
        raise ValueError(
            f"{kind} cannot be sampled: it reads both ways, so what it predicts depends on later "
            "tokens. Give a causal language model; BERT and the like need is_decoder=True in their "
            "config."
        )


def check_scorer(model: Any, labels: int = 2) -> None:  # that it may have
    "Raises ValueError on a classifier of tokens, and on one whose score is not at the last token."
    inner = unwrap(model)
    kind = type(inner)
    if isinstance(inner, PreTrainedModel):
        check_decoder(inner.config, kind.__name__)
        if (found := inner.config.num_labels or 0) > labels:
            raise ValueError(f"{kind.__name__} has num_labels={found}: load it with num_labels=1.")
    if any(base.__name__.endswith("ForTokenClassification") for base in kind.__mro__):
        raise ValueError(
            f"{kind.__name__} is a classifier of tokens, and a reward or value model is one of "
            f"sequences: load it by AutoModelForSequenceClassification. {NOT_AT_THE_LAST}"
        )
    if isinstance(inner, PreTrainedModel) and reads_both_ways(inner.config):
        raise ValueError(
            f"{kind.__name__} does not read its score at the last token: it is an encoder, which "
            f"reads both ways. {NOT_AT_THE_LAST}"
        )


@torch.no_grad()
def check_weights(model: nn.Module) -> None:
    "Raises ValueError on weights that are no finite numbers, and names the first such tensor."
    for name, weight in model.named_parameters():
        if weight.is_floating_point() and not weight.is_meta and not weight.isfinite().all():
            kind, wrong = type(unwrap(model)).__name__, int((~weight.isfinite()).sum())
            where = getattr(model, "name_or_path", "") or "the model given"
            raise ValueError(
                f"{where} ({kind}) has {wrong} of {weight.numel()} numbers in {name} that are NaN "
                "or infinite: the run that saved it had diverged, or the file is damaged. Give an "
                "earlier checkpoint, or copy it again."
            )


def check_class(config: PreTrainedConfig, kind: Any, name: str) -> None:
    "Raises ValueError where transformers has no such class for this type of model."
    if kind is AutoModelForCausalLM:
        known, what = MODEL_FOR_CAUSAL_LM_MAPPING, "causal language model: give a decoder"
    else:
        known = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
        what = (
            "sequence classifier that reads its score at the last token: set share_value_trunk="
            "True for a value head on the policy's body, and take another base for a reward model"
        )
    pooled = kind is not AutoModelForCausalLM and type(config) in MODEL_FOR_MASKED_LM_MAPPING
    if (pooled or type(config) not in known) and not hasattr(config, "auto_map"):
        raise ValueError(f"{name} is of type {config.model_type}, which has no {what}.")


def check_placed(name: str, keys: Iterable[str], model: Any) -> None:
    """Raises ValueError on saved weights of a layer, or of a bias, that the body of a model is
    without. What is beside it, such as another head, a buffer or a pooler, may be left out."""

    def is_left_out(key: str) -> bool:
        part, (*path, last) = model.base_model, key.removeprefix(body).split(".")
        for step in path:
            if (below := dict(part.named_children()).get(step)) is None:
                return isinstance(part, nn.ModuleList)
            part = below
        return getattr(part, last, part) is None

    body = f"{model.base_model_prefix}."  # which may be saved alone
    if wrong := sorted(filter(is_left_out, keys)):
        raise ValueError(
            f"{name} has {len(wrong)} weights that {type(model).__name__} has no place for, such "
            f"as {', '.join(wrong[:3])}. Put back the config.json, or the base model of an "
            "adapter, that they were saved with."
        )


def load_pretrained(kind: Any, name: str, **kwargs: Any) -> tuple[Any, bool]:
    """A model of one of transformers' Auto classes, and whether its head was there. Raises
    ValueError where other weights would be random, and on a classifier for a policy."""
    kwargs |= from_where(name)
    with explain_load_errors(name):
        of_hub = {key: kwargs[key] for key in OF_HUB if key in kwargs}
        config = AutoConfig.from_pretrained(kwargs["pretrained_model_name_or_path"], **of_hub)
    check_decoder(config, name)
    check_class(config, kind, name)
    with explain_load_errors(name):
        model, report = kind.from_pretrained(
            output_loading_info=True, ignore_mismatched_sizes=not zero3_is_live(), **kwargs
        )
    if "gguf_file" in kwargs:  # its weights are plain numbers by now, which train and can be saved
        del model.config.quantization_config
        model.is_quantized, model.hf_quantizer = False, None
        model.name_or_path = model.config.name_or_path = name
    writes, saved = kind is AutoModelForCausalLM, " ".join(config.architectures or ())
    if writes and "SequenceClassification" in saved:
        raise ValueError(
            f"{name} holds {saved}, a reward or value model, where a language model is wanted: "
            "give the folder of that."
        )
    check_placed(name, report["unexpected_keys"], model)
    missing, body = {*report["missing_keys"]}, f"{model.base_model_prefix}."
    head = {key for key in missing if not writes and not key.startswith(body)}
    random = sorted({*missing, *(key for key, *_ in report["mismatched_keys"])} - head)
    if random:
        raise ValueError(
            f"{name} lacks {len(random)} weights of {type(model).__name__}, or has them in another "
            f"shape, such as {random[0]}: they would be random. Save the model as a whole again."
        )
    return model, not head
