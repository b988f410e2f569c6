"""Text becomes ids in one way: the ids of the joint text, and exactly what the assistant says, for
the tokenizers and templates that people bring."""

import copy
import re
from itertools import product

import pytest
import torch
from datasets import Dataset, IterableDataset
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer, WordLevelTrainer
from transformers import PreTrainedTokenizerFast

from rlhf_nb.encoding import (
    encode,
    encode_prompts,
    marked_answers,
    marked_pair,
    prompt_text,
)
from rlhf_nb.reward import encode_pairs
from rlhf_nb.sft import encode_rows
from rlhf_nb.training.prompts import collate_prompts

TEXTS = [
    "Who are you? A model. Is it late? There you are, it is late (yes) no!",
    "system user assistant think Be brief. Answer: \n\n<think>\n\n</think>\n\n[INST] [/INST]",
]
MARKS = "<s> </s> <pad> <|im_start|> <|im_end|> <|eot_id|> <|start_header_id|> <|end_header_id|>"
MARKS = [*MARKS.split(), "<start_of_turn>", "<end_of_turn>"]


def byte_level(**how):
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=how.get("prefix", False))
    words.decoder = decoders.ByteLevel()
    words.post_processor = processors.ByteLevel(trim_offsets=how.get("trim", False))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words.train_from_iterator(
        TEXTS, BpeTrainer(vocab_size=500, special_tokens=MARKS, initial_alphabet=alphabet)
    )
    return words


def metaspace(scheme):
    words = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    words.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    words.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme)]
    )
    known = ["<unk>", *MARKS, *(f"<0x{i:02X}>" for i in range(256))]
    words.train_from_iterator(TEXTS, BpeTrainer(vocab_size=700, special_tokens=known))
    return words


def legacy_llama():
    words = metaspace("never")
    words.pre_tokenizer = None
    words.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    return words


def word_level():
    words = Tokenizer(models.WordLevel(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.train_from_iterator(TEXTS, WordLevelTrainer(special_tokens=["<unk>", *MARKS]))
    return words


TOKENIZERS = {
    "byte-level": byte_level,
    "byte-level, trimmed offsets": lambda: byte_level(trim=True),
    "byte-level, prefix space": lambda: byte_level(prefix=True),
    "metaspace, first": lambda: metaspace("first"),
    "metaspace, always": lambda: metaspace("always"),
    "legacy Llama": legacy_llama,
    "word-level": word_level,
}
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>"
    "\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
QWEN3 = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' and loop.index0 > ns.last %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% if enable_thinking is defined "
    "and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
MISTRAL = (  # the system's text goes into the last turn of the user
    "{{ bos_token }}{% set first = messages[0].role == 'system' %}{% set users = messages | "
    "selectattr('role', 'equalto', 'user') | list %}{% for m in messages %}{% if m.role == 'user' "
    "%}{{ '[INST] ' }}{% if first and m == users[-1] %}{{ messages[0].content + '\n\n' }}"
    "{% endif %}{{ m.content + ' [/INST]' }}{% elif m.role == 'assistant' %}"
    "{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (  # without a system turn
    "{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' + ('model' if m.role == "
    "'assistant' else 'user') + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
TWO_ENDS = (  # another mark at the end of a conversation than inside it
    "{% for m in messages %}{{ '[' + m.role + ']' + m.content }}{% if m.role == 'assistant' %}"
    "{{ '</s>' if loop.last else '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ m.role + ': ' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + '<|eot_id|>' }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
THOUGHT = "<think>\n\n</think>\n\n"
# Template -> what stands behind an answer inside a conversation, and what in front of the last.
TEMPLATES = {
    "ChatML": (CHATML, "<|im_end|>", ""),
    "Llama 3": (LLAMA3, "<|eot_id|>", ""),
    "Qwen3": (QWEN3, "<|im_end|>", THOUGHT),
    "Mistral": (MISTRAL, "EOS", ""),
    "Gemma": (GEMMA, "<end_of_turn>", ""),
    "two ends": (TWO_ENDS, "<|eot_id|>", ""),
    "generation": (MARKED, "<|eot_id|>", ""),
}


def turn(role, content):
    return dict(role=role, content=content)


ONE = [turn("user", "Who are you?"), turn("assistant", "A model.")]
TWO = [*ONE, turn("user", "Is it late?"), turn("assistant", "There you are")]
TALKS = {
    "one answer": ONE,
    "two answers": TWO,
    "a system turn": [turn("system", "Be brief."), *TWO],
    "the user has the last word": TWO[:3],
    "an answer of one word that comes twice": [*ONE[:1], turn("assistant", "no"), *TWO[2:3]]
    + [turn("assistant", "no")],
}


@pytest.fixture(scope="module")
def tokenizers():
    "By name; every other one puts BOS in front. EOS is ChatML's."
    found = {}
    for bos, (name, make) in enumerate(TOKENIZERS.items()):
        words = make()
        if bos % 2:
            mark = ("<s>", words.token_to_id("<s>"))
            front = [processors.TemplateProcessing(single="<s> $A", special_tokens=[mark])]
            before = [] if words.post_processor is None else [words.post_processor]
            words.post_processor = processors.Sequence([*before, *front])
        found[name] = PreTrainedTokenizerFast(
            tokenizer_object=words, bos_token="<s>", eos_token="<|im_end|>", pad_token="<pad>"
        )
    return found


def spoken(ids, labels) -> list[list[int]]:
    "The stretches of ids that have labels."
    runs, before = [], False
    for i, label in zip(ids, labels):
        if label != -100:
            assert label == i
            runs = runs if before else [*runs, []]
            runs[-1].append(i)
        before = label != -100
    return runs


def squeezed(text) -> str:
    "Without white space, which word-level tokenizers lose and metaspace may add in front."
    return re.sub(r"\s", "", text)


# catches: answers lost or cut where a template writes the last turn otherwise, the system's text
# elsewhere or another end mark; headers that are learned; pieces tokenized apart, with a space that
# nobody wrote; BOS or EOS twice; one trainer that reads other ids than another
def test_a_conversation_has_the_same_ids_everywhere(tokenizers):
    tried = 0
    for (name, tokenizer), (style, (template, mark, lead)) in product(
        tokenizers.items(), TEMPLATES.items()
    ):
        tokenizer.chat_template = template
        eos, mark = tokenizer.eos_token, mark.replace("EOS", tokenizer.eos_token)
        talks = [x for x in TALKS if style != "Gemma" or x != "a system turn"]
        data = Dataset.from_list([dict(messages=TALKS[form]) for form in talks])
        rows = encode_rows(data, tokenizer, assistant_only=True)
        front = encode_prompts([""], tokenizer)[0]
        closed = {}
        for form, ids, labels in zip(talks, rows["input_ids"], rows["labels"]):
            case, talk = f"{name}, {style}, {form}", TALKS[form]
            said = [x["content"] + mark for x in talk if x["role"] == "assistant"]
            if ends := talk[-1]["role"] == "assistant":
                last = "</s>" if style == "two ends" else mark
                said[-1] = lead + talk[-1]["content"] + last.removesuffix(eos) + eos
                closed[form] = ids, labels
            found = [squeezed(tokenizer.decode(run)) for run in spoken(ids, labels)]
            assert found == [squeezed(x) for x in said], case
            kept = ids[:-1] if ends else ids
            theirs = tokenizer.apply_chat_template(talk, tokenize=True)["input_ids"]
            theirs = theirs if theirs[: len(front)] == front else front + theirs
            assert theirs[: len(kept)] == kept, case  # the ids of the joint text
            tried += 1
        pairs = [dict(prompt=TALKS[x][:-1], completion=TALKS[x][-1:]) for x in closed]
        other = [turn("assistant", "(yes)")]
        choices = [dict(prompt=x["prompt"], chosen=x["completion"], rejected=other) for x in pairs]
        of_sft = encode_rows(Dataset.from_list(pairs), tokenizer)
        of_reward = encode_pairs(Dataset.from_list(choices), tokenizer)
        of_ppo = collate_prompts([dict(prompt=x["prompt"]) for x in pairs], tokenizer)
        assert of_sft["input_ids"][:] == [ids for ids, _ in closed.values()], (name, style)
        assert of_reward["chosen_ids"][:] == of_sft["input_ids"][:], (name, style)
        for i, (ids, labels) in enumerate(closed.values()):
            begins = len(ids) - len(spoken(ids, labels)[-1])
            assert of_sft["labels"][i] == [-100] * begins + ids[begins:], (name, style)
            kept = of_ppo["prompt_mask"][i]
            if not encode([marked_pair(**renamed(pairs[i]), tokenizer=tokenizer)], tokenizer)[0][2]:
                assert of_ppo["prompt_ids"][i][kept].tolist() == ids[:begins], (name, style)
    assert tried >= 200, tried


def renamed(pair):
    return dict(prompt=pair["prompt"], answer=pair["completion"])
