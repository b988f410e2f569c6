"""The models of a run, from names, folders and adapters; each is checked as it is loaded."""

from __future__ import annotations

import copy
import json
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPTNeoXConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from rlhf_nb.base.custom import as_scorer, linear_head
from rlhf_nb.base.encoding import encode_prompts, plain_ids
from rlhf_nb.base.loading import (
    NOT_AT_THE_LAST,
    check_placed,
    check_policy,
    check_scorer,
    check_weights,
    explain_load_errors,
    load_pretrained,
    normalize_dtype,
    pretrained_tokenizer,
)
from rlhf_nb.base.opened import FAILURES, embedding_rows, mask_ids, unwrap
from rlhf_nb.base.random_state import random_state_kept
from rlhf_nb.base.sharding import gather_weights, zero3_is_live
from rlhf_nb.checkpoint import MANIFEST, verify
from rlhf_nb.models import scorer_from, scorer_head, sequence_scores

logger = logging.get_logger(__name__)
SPECIAL: dict[str, Any] = dict(pad_token="<pad>", eos_token="<eos>", padding_side="left")


def train_tokenizer(
    texts: Iterable[str],  # the vocabulary is built from them
) -> PreTrainedTokenizerFast:
    "A word-level tokenizer with <pad>, <eos> and <unk>; `TL;DR:`, `POST:`, `r/name` are tokens."
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(
        Regex(r"TL;DR:|r/\w+|[A-Z]+:|\w+|[^\w\s]"), behavior="removed", invert=True
    )
    # joins words by a space, and punctuation without one
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    trainer = trainers.WordLevelTrainer(
        special_tokens=["<pad>", "<eos>", "<unk>"], show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **SPECIAL)


def train_bpe_tokenizer(
    texts: Iterable[str],  # the merges are learned from them
    vocab_size: int = 1024,  # 256 bytes, <pad>, <eos>, and merges
) -> PreTrainedTokenizerFast:
    "Byte-level BPE with <pad> and <eos>; decoding restores any text, `<eos>` as text as well."
    if vocab_size < 258:
        raise ValueError(
            f"vocab_size is {vocab_size}: give at least 258, for 256 bytes, <pad> and <eos>."
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<pad>", "<eos>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    as_written = dict(split_special_tokens=True, clean_up_tokenization_spaces=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL, **as_written)


def drop_long_rows(
    data: Dataset,  # prompt and completion, or prompt, chosen and rejected
    tokenizer: PreTrainedTokenizerBase,
    prompt: int | None = None,  # maximum tokens of a prompt; None: no limit
    answer: int | None = None,  # maximum tokens of an answer, with its stop token
) -> Dataset:
    "The rows whose texts fit. Raises ValueError if none does."
    rest = None if answer is None else answer - 1
    limits = {
        name: most
        for name, most in dict(prompt=prompt, completion=rest, chosen=rest, rejected=rest).items()
        if most is not None and name in data.column_names
    }

    def fits(rows: dict[str, list]) -> list[bool]:
        short = []
        for name, most in limits.items():
            encode = encode_prompts if name == "prompt" else plain_ids
            short.append([len(ids) <= most for ids in encode(rows[name], tokenizer)])
        return [all(row) for row in zip(*short)]

    kept = data.filter(fits, batched=True) if limits else data
    if len(data) and not len(kept):
        raise ValueError(
            f"none of {len(data)} rows fits into prompt={prompt} and answer={answer} tokens: "
            "raise the limits, or train a tokenizer with a larger vocabulary."
        )
    return kept


def tiny_config(
    tokenizer: PreTrainedTokenizerBase,
    hidden_size: int = 64,
    num_hidden_layers: int = 2,
    num_attention_heads: int = 8,
    max_position_embeddings: int = 192,  # prompt and response together
    initializer_range: float = 0.08,  # the default 0.02 is for widths in the thousands
) -> GPTNeoXConfig:
    "A GPT-NeoX (Pythia) small enough for a laptop's CPU."
    return GPTNeoXConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=num_attention_heads,
        max_position_embeddings=max_position_embeddings,
        initializer_range=initializer_range,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def tiny_policy(
    tokenizer: PreTrainedTokenizerBase,
    seed: int = 0,
    **sizes: int,  # of `tiny_config`
) -> PreTrainedModel:
    "A causal language model with random weights. The global random state is left as it was."
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(tiny_config(tokenizer, **sizes))


def load_tokenizer(name_or_path: Any) -> PreTrainedTokenizerBase:
    "A tokenizer that pads on the left, as prompts need. If it has no pad token, `[PAD]` is added."
    tokenizer = name_or_path
    if isinstance(tokenizer, (str, Path)):
        tokenizer = pretrained_tokenizer(str(tokenizer), padding_side="left")
    if not hasattr(tokenizer, "pad_token_id"):
        kind = type(tokenizer).__name__
        raise TypeError(f"processing_class is {kind}: give a tokenizer, its name, or its folder.")
    if tokenizer.pad_token_id is None:
        tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    return tokenizer


def fit_embeddings(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    "The same model, its embedding grown to hold all ids of the tokenizer, its pad token set."
    return set_pad_token(grow_embedding(model, len(tokenizer)), tokenizer)


def grow_embedding(model: PreTrainedModel, rows: int) -> PreTrainedModel:
    "The same model, its embedding grown to `rows` at least; new ones are drawn from a fixed seed."
    if rows <= embedding_rows(model):
        return model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model.resize_token_embeddings(rows)
    return model


def distinct_pad_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    "The pad token's id; None where it is the stop token as well, so that an id alone says nothing."
    return None if tokenizer.pad_token_id == tokenizer.eos_token_id else tokenizer.pad_token_id


def set_pad_token(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The same model, its pad token set, whose row of the embedding learns like any other: it may
    be the stop token's, which torch's `padding_idx` would hold fixed."""
    model.config.pad_token_id = tokenizer.pad_token_id
    embedding: Any = model.get_input_embeddings()
    embedding.padding_idx = None
    return model


def add_pad_row(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    "The same model; if only the pad token is outside its embedding, a row is added and logged."
    rows, pad = embedding_rows(model), distinct_pad_id(tokenizer)
    if {i for i in tokenizer.get_vocab().values() if i >= rows} == {pad} and pad == rows:
        logger.warning(
            f"the pad token's id {pad} is one past the embedding of {type(model).__name__}: "
            "a row was added for it."
        )
        grow_embedding(model, rows + 1)
    return model


def check_embeddings(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    "The same model, its pad token set. Raises ValueError on ids beyond the embedding."
    rows = embedding_rows(add_pad_row(model, tokenizer))
    if len(tokenizer) > rows:
        raise ValueError(
            f"the tokenizer has ids 0 to {len(tokenizer) - 1} (pad: {tokenizer.pad_token_id}) and "
            f"the model's embedding rows 0 to {rows - 1}: set resize_embeddings=True, or call "
            f"model.resize_token_embeddings({len(tokenizer)}) first."
        )
    return set_pad_token(model, tokenizer)


# a file in an adapter's folder, which has no model config to store the centre in
CENTER = "reward_center.json"


def load_whole(kind: Any, name: str, **kwargs: Any) -> tuple[PreTrainedModel, bool]:
    """A model by name or folder, in float32 unless `dtype` is given, and whether it had its head.
    An adapter's folder gives its base model, which may be one too, with the adapter merged in.
    Raises ValueError on weights that are not those of the folder's manifest."""
    if (Path(name) / MANIFEST).is_file():
        verify(name, only=".safetensors")
    kwargs = normalize_dtype(kwargs, torch.float32)  # transformers defaults to the saved dtype
    if not (Path(name) / "adapter_config.json").is_file():
        return load_pretrained(kind, name, **kwargs)
    peft = _peft()
    config = peft.PeftConfig.from_pretrained(name)
    if config.base_model_name_or_path is None or config.is_prompt_learning:
        raise ValueError(
            f"{name} holds an adapter ({config.peft_type.value}) on "
            f"{config.base_model_name_or_path or 'a model without a name'}, which cannot be merged "
            "into a model from here: give SFTTrainer the peft.PeftModel itself; PPO and reward "
            "models need an adapter inside the layers, such as LoraConfig."
        )
    check_kind(config)
    base, has_head = load_whole(kind, config.base_model_name_or_path, **kwargs)
    config.task_type = None  # a classifier is grown from a language model's adapter as well
    embedding = unwrap(base.get_input_embeddings())
    (part,) = (part for part, layer in base.named_modules() if layer is embedding)
    with explain_load_errors(name, "adapter"):
        saved = {key: weight.shape for key, weight in peft.load_peft_weights(name, "cpu").items()}
        of_part = re.compile(rf"\b{part}(\.base_layer)?\.weight$")
        rows = [shape[0] for key, shape in saved.items() if of_part.search(key)]
        grow_embedding(base, max(rows, default=0))  # they may have grown for a pad token
        model = peft.PeftModel.from_pretrained(base, name, config=config)
    check_placed(name, (key.removeprefix("base_model.model.") for key in saved), unwrap(model))
    model = merge_adapter(model)
    model.requires_grad_(True)  # as any model that was loaded; peft has frozen it
    model.name_or_path = model.config.name_or_path = name  # what the next adapter is put on
    if (kept := Path(name) / CENTER).is_file():
        model.config.reward_center = json.loads(kept.read_text())
    return model, has_head or any(re.search(r"\b(score|classifier)\.", key) for key in saved)


def _named(given: Any, what: str) -> str | None:
    "A name or folder as text; None: it is a model. Raises TypeError on anything else."
    if not isinstance(given, (str, Path, nn.Module)):
        raise TypeError(f"the {what} is {given!r}: give a model, a name on the hub, or a folder.")
    return None if isinstance(given, nn.Module) else str(given)


def load_policy(name_or_path: Any, **kwargs: Any) -> PreTrainedModel:
    """A causal language model from a name, a folder, or itself. `kwargs` go to `from_pretrained`;
    without a `dtype`, weights are float32. Raises ValueError on an encoder-decoder."""
    name = _named(name_or_path, "policy")
    model = name_or_path if name is None else load_whole(AutoModelForCausalLM, name, **kwargs)[0]
    check_policy(model)
    check_weights(model)
    mask_ids(model, [])  # of the trainer, and the tokenizer, that it had before
    return model


def fresh_head(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """The same scorer with a new head, N(0, 1/sqrt(d + 1)), as in `scorer_from`. The global random
    state is left as it was."""
    head = scorer_head(model)
    with torch.random.fork_rng(devices=[]), gather_weights(head, write=True):
        torch.manual_seed(seed)
        nn.init.normal_(head.weight, std=(head.in_features + 1) ** -0.5)
        if head.bias is not None:
            nn.init.zeros_(head.bias)
        head.drawn = head.weight.detach().clone()  # by which one that was never trained is known
    return model


def check_judge_head(judge: Any, has_head: bool = True) -> None:
    "Raises ValueError where a judge has no head, or still the one that `fresh_head` drew."
    head: Any = unwrap(linear_head(judge))
    drawn = getattr(head, "drawn", None)
    if not has_head or (drawn is not None and torch.equal(drawn.to(head.weight), head.weight)):
        name = getattr(judge, "name_or_path", "") or type(judge).__name__
        raise ValueError(
            f"{name} has no reward head, so its scores would be random: it is a language model. "
            f"Train a reward model from it, rlhf-nb reward --model_name_or_path {name}, and give "
            "its folder."
        )


def load_scorer(name_or_path: Any, **kwargs: Any) -> PreTrainedModel:
    """A sequence classifier with one label: a reward or value model, loaded as by `load_policy`; or
    a module with a `score` and a body named by its `base_model_prefix`. A language model's folder
    gets a new head, which is logged. Raises ValueError on anything else, and on more labels."""
    name, model = _named(name_or_path, "reward or value model"), name_or_path
    if name is not None:
        kind = AutoModelForSequenceClassification
        model, has_head = load_whole(kind, name, num_labels=1, **kwargs)
        if not has_head:
            logger.warning(
                f"{name} has no head of a reward or value model, so it starts with a new one. "
                "(With save_value_model, a run keeps its value model in value/ beside its policy.)"
            )
            fresh_head(model)
    model = as_scorer(model)
    check_scorer(model, 1)
    check_weights(model)
    _check_reads_last(model)
    return model


@torch.no_grad()
def load_reward_model(
    model: Any,  # a classifier with one label, a causal model, or the name or folder of either
    seed: int = 0,  # of a new head
    **kwargs: Any,  # of `from_pretrained`
) -> PreTrainedModel:
    "A reward model; if it had no head, it gets a new one, N(0, 1/sqrt(d + 1))."
    if not isinstance(model, (str, Path)):
        given: Any = unwrap(model)
        known = hasattr(given, "get_output_embeddings")
        causal = known and given.get_output_embeddings() is not None
        if causal:
            check_policy(model)
        if causal and hasattr(model, "peft_config"):  # as the adapter has trained it
            model = merge_adapter(copy.deepcopy(model))
        return scorer_from(model, seed) if causal else load_scorer(model)
    kind = AutoModelForSequenceClassification
    loaded, has_head = load_whole(kind, str(model), num_labels=1, **kwargs)
    scorer = load_scorer(loaded)
    return scorer if has_head else fresh_head(scorer, seed)


def _check_reads_last(model: Any) -> None:
    """Raises ValueError if a classifier's score is not the output of its head at the last token,
    as where a pooler is between them."""
    if not isinstance(model, PreTrainedModel) or zero3_is_live():
        return
    known = range(min(5, embedding_rows(model)))
    ids = torch.tensor([[i for i in known if i != model.config.pad_token_id]])
    ids, ours = ids.to(model.device), getattr(model.config, "reward_center", 0.0)
    was_training = model.training
    model.eval()
    ours = ours + sequence_scores(model, ids, torch.ones_like(ids))
    own = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, 0].float()
    model.train(was_training)
    if not torch.allclose(own, ours, rtol=0.05, atol=0.05, equal_nan=True):
        raise ValueError(
            f"{type(model).__name__} does not read its score at the last token: it returns "
            f"{own.item():.3f}, and its head gives {ours.item():.3f} there. {NOT_AT_THE_LAST}"
        )


def _peft() -> Any:
    "The library peft. Raises ImportError if it is not installed."
    try:
        import peft
    except ImportError as error:
        raise ImportError(
            "adapters need the library peft: pip install peft, or leave peft_config out."
        ) from error
    # peft reads an old name of the models that it wraps, which no user can change
    warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
    return peft


def add_adapter(
    model: PreTrainedModel,
    peft_config: Any,  # of peft, such as LoraConfig(r=8); it is not changed. None: no adapter
    seed: int = 0,  # of the adapter's initial weights; the global random state is left as it was
) -> nn.Module:  # a peft.PeftModel around the same model, whose own weights are frozen
    """The model with a new adapter; the head of a reward or value model is trained as well. Raises
    ValueError if it has one or cannot have this one, TypeError if peft_config is none of peft's."""
    if peft_config is None:
        check_single(model)
        for part in model.modules():
            if isinstance(kept := getattr(part, "kwargs", None), dict):
                kept.pop("tied_adapter", None)  # by which peft ties weights: it cannot be copied
        for config in getattr(model, "peft_config", {}).values():
            check_kind(config)
        for name, x in model.named_parameters():
            if "lora_magnitude_vector" in name and not x.all():
                where = f"row {int((x == 0).nonzero()[0, 0])} of {name.split('.lora_')[0]}"
                raise ValueError(f"DoRA divides by a row's length: {where} is 0. Leave either out.")
        return model
    if not isinstance(peft_config, _peft().PeftConfig):
        kind = type(peft_config).__name__
        raise TypeError(f"peft_config is {kind}: give one of peft, such as LoraConfig(r=8).")
    check_single(model, peft_config)
    scorer = linear_head(model) is not None
    task, own = "SEQ_CLS" if scorer else "CAUSAL_LM", copy.deepcopy(peft_config)
    if own.task_type not in (None, task) or (scorer and own.is_prompt_learning):
        raise ValueError(
            f"the adapter's config is {type(own).__name__}(task_type={own.task_type!r}): "
            f"{type(model).__name__} takes one of task_type={task!r}, or without a task_type"
            f"{', that puts no virtual tokens in front of a text' * scorer}."
        )
    own.task_type = task  # of SEQ_CLS, peft trains the head too
    own.inference_mode = False  # which a saved adapter's config says
    if (Path(getattr(model, "name_or_path", "")) / "adapter_config.json").is_file():
        logger.warning(
            f"the adapter is put on {model.name_or_path}, which is an adapter itself: load_policy, "
            "load_scorer and the commands merge one after the other, and peft alone loads only the "
            "last one. For others, save a merged model (save_merged=True of PPOConfig)."
        )
    changed = isinstance(getattr(own, "init_lora_weights", None), str)  # the model's weights, too
    shared = [] if changed else [*model.parameters(), *model.buffers()]
    bare = None if zero3_is_live() else copy.deepcopy(model, {id(x): x for x in shared})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            adapted = _peft().get_peft_model(model, own)
        except FAILURES as error:
            text = f"peft cannot put {type(own).__name__} on {type(model).__name__} ({error})"
            raise ValueError(f"{text}: give another kind, or other target_modules.") from error
        adapted = add_adapter(adapted, None)
    return adapted if bare is None else check_adapter(adapted, bare)


def check_single(model: Any, peft_config: Any = None) -> None:
    "Raises ValueError where an adapter is, or would be, put on another; peft saves one."
    nested = sum(hasattr(x, "get_base_model") for x in getattr(model, "modules", tuple)()) > 1
    if nested or (peft_config is not None and hasattr(model, "peft_config")):
        raise ValueError(
            "the model already has an adapter, and peft saves only one that is put on it: leave "
            "peft_config out to train the one it has, or merge it first, model.merge_and_unload()."
        )


def check_kind(config: Any) -> None:
    "Raises ValueError on an adapter that would not be, once loaded, what was trained."
    init, why = getattr(config, "init_lora_weights", None), ""
    if getattr(config, "alora_invocation_tokens", None):
        why = "has alora_invocation_tokens, which trainers, or one merged, do not wait for"
    if "_niter_" in str(init):
        why = f"has init_lora_weights={init!r}: each load changes the model's weights at random"
    if why:
        raise ValueError(f"{type(config).__name__} {why}. Give another, such as LoraConfig(r=8).")


def _outputs(model: Any) -> Tensor:
    ids = torch.arange(4, device=model.device)[None] % embedding_rows(model)
    return model.eval()(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.float()


@torch.no_grad()
def check_adapter(model: Any, bare: Any) -> Any:
    """The same PEFT model. Raises ValueError where its weights, moved and saved, do not come back
    on `bare`, the model as it was. Not tried where that cannot be called yet, such as on a GPU."""
    kept = [(x, x.clone()) for x in model.parameters() if x.requires_grad]
    kind, was_training = type(model.active_peft_config).__name__, model.training
    if not kept:
        raise ValueError(f"the adapter of {kind} has no weight that learns: give target_modules.")
    with random_state_kept(), TemporaryDirectory() as folder:
        try:
            _outputs(bare).tolist()
        except FAILURES:
            return model
        try:
            for x, own in kept:
                x.add_(torch.randn_like(own), alpha=0.01)
            wanted = _outputs(model)
            model.save_pretrained(folder, save_embedding_layers=False)
            gap = (_outputs(_peft().PeftModel.from_pretrained(bare, folder)) - wanted).abs().max()
            if not gap <= 8 * torch.finfo(model.dtype).eps * wanted.abs().max().clamp(min=1):
                raise ValueError(f"its outputs are {gap:.2g} off")
        except FAILURES as error:
            text = f"the adapter of {kind} does not come back from what peft saves of it ({error})"
            raise ValueError(f"{text}: give another kind, or other target_modules.") from error
        finally:
            for x, own in kept:
                x.copy_(own).requires_grad_()  # some are in both models
    return model.train(was_training)


def merge_adapter(model: Any) -> PreTrainedModel:
    """A PEFT model's inner model, its adapter merged into the weights. An embedding and a head that
    are tied, and that the adapter made different, are so no more, nor layers that it repeats."""
    if not hasattr(model, "merge_and_unload"):
        raise ValueError(
            f"the adapter of {type(model).__name__} cannot be merged into its weights: give one of "
            "peft.get_peft_model that is inside the layers, such as LoraConfig(r=8)."
        )
    inner: Any = unwrap(model)
    layers = inner.get_input_embeddings(), inner.get_output_embeddings()
    embedding, head = map(unwrap, layers)
    if head is not None and head.weight is embedding.weight and layers != (embedding, head):
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    kept = {id(x) for layer in layers if layer is not None for x in layer.parameters()}
    tied: set[int] = set()
    for part in inner.modules():  # layers that an adapter repeats have weights in common
        for name, weight in [*part.named_parameters(recurse=False)]:
            if id(weight) in tied - kept:
                setattr(part, name, nn.Parameter(weight.detach().clone(), requires_grad=False))
            tied.add(id(weight))
    full: PreTrainedModel = model.merge_and_unload()
    embedding, head = full.get_input_embeddings(), full.get_output_embeddings()
    if head is not None and head.weight is not embedding.weight:
        for config in (full.config, full.config.get_text_config()):
            config.tie_word_embeddings = False
    return full


def check_vocabulary(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    name: str,  # of the model, for the message
) -> None:
    """Raises ValueError if the tokenizer has ids that the model has no embedding for; only the pad
    token may be outside. The policy writes no others."""
    rows = embedding_rows(model)
    highest = max(i for i in tokenizer.get_vocab().values() if i != distinct_pad_id(tokenizer))
    if highest >= rows:
        raise ValueError(
            f"the {name} has an embedding for ids 0 to {rows - 1}, but the tokenizer's ids go up "
            f"to {highest}: use a {name} that was trained with this tokenizer."
        )
