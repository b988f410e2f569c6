"""Text becomes ids in one way: the ids of the joint text, and exactly what the assistant says, for
the tokenizers and templates that people bring."""

import copy
import json
import re
from contextlib import nullcontext
from itertools import product
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from small_runs import turn
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer, WordLevelTrainer
from transformers import PreTrainedTokenizerFast

import rlhf_nb
from rlhf_nb.base.encoding import (
    Marked,
    encode,
    encode_prompts,
    join_answer,
    marked_answers,
    marked_pair,
    prompt_text,
    render,
    template_settings,
)
from rlhf_nb.judges import Answers
from rlhf_nb.judging import RewardModelJudge
from rlhf_nb.models import scorer_from
from rlhf_nb.reward import encode_pairs
from rlhf_nb.scoring import score_ids, score_texts
from rlhf_nb.sft import encode_rows
from rlhf_nb.training import prompts, supervised
from rlhf_nb.training.completions import complete
from rlhf_nb.training.model_loading import tiny_policy
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


one = lambda **row: Dataset.from_list([row])
ONE = [turn("user", "Who are you?"), turn("assistant", "A model.")]
TWO = [*ONE, turn("user", "Is it late?"), turn("assistant", "There you are")]
TALKS = {
    "one answer": ONE,
    "two answers": TWO,
    "a system turn": [turn("system", "Be brief."), *TWO],
    "the user has the last word": TWO[:3],
    "one answer twice": [ONE[0], turn("assistant", "no"), TWO[2], turn("assistant", "no")],
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


def with_template(tokenizers, template: str) -> PreTrainedTokenizerFast:
    tokenizer = copy.deepcopy(tokenizers["byte-level"])
    tokenizer.chat_template = template
    return tokenizer


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
            runs = [tokenizer.decode(run) for run in spoken(ids, labels)]
            assert [*map(squeezed, runs)] == [*map(squeezed, said)], case
            if name.startswith("byte-level") and "prefix" not in name:  # which loses no white space
                # but a space in front, which is in one token with the first word
                assert [run.removeprefix(" ") for run in runs] == said, case
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
            if not encode([marked_pair(*pairs[i].values(), tokenizer)], tokenizer)[0].merged:
                assert of_ppo["prompt_ids"][i][kept].tolist() == ids[:begins], (name, style)
    assert tried >= 200, tried


# catches: a tokenizer that is called where BOS, EOS and what a template wrote are not known
def test_one_module_alone_calls_a_tokenizer_on_text():
    calls = re.compile(
        r"\b(tokenizer|processing_class)\((?!\))|\.apply_chat_template\(|tokenizer\.encode\("
    )
    assert {
        path.name
        for path in Path(rlhf_nb.__file__).parent.rglob("*.py")
        if calls.search(path.read_text("utf-8"))
    } == {"encoding.py"}


# ---- What a template does not show ----


# catches: fewer labels in silence, where a template marks fewer answers, or max_length cuts them off
def test_answers_that_are_not_learned_are_counted(tokenizers, monkeypatch):

    said: list[str] = []
    monkeypatch.setattr(supervised.logger, "warning", said.append)
    tokenizer = tokenizers["byte-level"]
    last = MARKED.replace("'assistant' %}", "'assistant' and loop.last %}")  # alone has the marks
    tokenizer.chat_template = last.replace("<|eot_id|>", tokenizer.eos_token).replace(": ", ":")
    data = Dataset.from_list([dict(messages=TWO)] * 3)
    row = encode_rows(data, tokenizer, assistant_only=True)[0]
    assert len(spoken(row["input_ids"], row["labels"])) == 1
    assert said[0].startswith("3 of 6 answers are learned from")
    tokenizer.chat_template = CHATML
    assert encode_rows(data, tokenizer, assistant_only=True).column_names == [*row]
    assert len(said) == 1
    ends = len(encode([marked_answers(ONE, tokenizer)], tokenizer)[0].ids)
    encode_rows(data, tokenizer, ends, assistant_only=True)
    assert said[1].startswith("3 of 6 answers are learned from")


# catches: a conversation that is rendered more often than its answers need
@pytest.mark.parametrize("style", ["ChatML", "Llama 3", "Qwen3", "Gemma"])
def test_an_answer_takes_two_renderings(style, tokenizers, monkeypatch):
    tokenizer, calls = copy.deepcopy(tokenizers["byte-level"]), []
    tokenizer.chat_template = TEMPLATES[style][0]
    plain = tokenizer.apply_chat_template
    count = lambda *given, **how: calls.append(given) or plain(*given, **how)
    monkeypatch.setattr(tokenizer, "apply_chat_template", count)
    marked_answers(TWO, tokenizer)
    assert len(calls) == 2 + 2 * 2  # one with marks, whether all is written


# catches: an end mark that is guessed
def test_a_template_that_cannot_tell_is_named(tokenizers):
    tokenizer = with_template(
        tokenizers,
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}"
        "{{ ' END' if loop.last else ' GO ON' }}{% endif %}{% endfor %}",
    )
    with pytest.raises(ValueError, match=r"writes ' END' behind the last answer.*generation"):
        marked_answers(TWO, tokenizer)


# catches: the user's last turn and headers that are learned, where an answer changes how the template
# writes what stands before it
def test_a_prompt_that_the_answer_changes(tokenizers):
    tokenizer = with_template(
        tokenizers,
        "{% set said = messages | selectattr('role', 'equalto', 'assistant') | list %}"
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if said and m == said[-1] %}"
        "{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    )
    found = marked_pair(TWO[:3], TWO[3:], tokenizer)
    assert [found.text[a:b] for a, b in found.answers] == [THOUGHT + "There you are"]
    assert found.text.count(THOUGHT) == 1 and prompt_text(TWO[:3], tokenizer).count(THOUGHT) == 1
    every = marked_answers(TWO, tokenizer)
    assert every.text == found.text and every.answers[-1:] == found.answers


def said_of(talk, tokenizer, **how):
    found = marked_answers(talk, tokenizer, **how)
    return [found.text[a:b] for a, b in found.answers]


# catches: Phi-3 with a system turn refused: its end mark is no special token, and EOS follows it
def test_a_mark_and_behind_the_last_one_eos(tokenizers):
    tokenizer = copy.deepcopy(tokenizers["byte-level"])
    tokenizer.eos_token = "</s>"
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<' + m.role + '>\n' + m.content + '<|eot_id|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<assistant>\n' }}{% else %}{{ eos_token }}{% endif %}"
    )
    wanted = ["A model.<|eot_id|>", "There you are<|eot_id|>\n"]  # and </s>, as an id
    assert said_of(TALKS["a system turn"], tokenizer) == said_of(TWO, tokenizer) == wanted
    tokenizer.eos_token = "<|eot_id|>"  # people do so, and then it comes twice
    assert said_of(TWO, tokenizer) == ["A model.<|eot_id|>", "There you are"]


# catches: two ends of an answer without a word: the template's mark, and EOS behind it
def test_a_mark_that_is_not_eos_is_logged(tokenizers, ppo, letters, monkeypatch):
    said, tokenizer = [], copy.deepcopy(letters)
    for logger, name in ((supervised.logger, "warning_once"), (prompts.logger, "warning")):
        monkeypatch.setattr(logger, name, said.append)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end>"]})
    tokenizer.chat_template = "{% for m in messages %}{{ m.content + '<end>\n' }}{% endfor %}"
    talk = [turn("user", "ab"), turn("assistant", "c")]
    pair = dict(
        prompt=[talk[:1]] * 8, chosen=[talk[1:]] * 8, rejected=[[turn("assistant", "d")]] * 8
    )
    encode_rows(Dataset.from_dict(dict(messages=[talk])), tokenizer, assistant_only=True)
    encode_pairs(Dataset.from_dict(pair), tokenizer)
    ends = "ends a turn by '<end>', and the tokenizer's EOS is '<eos>'"
    assert len(said) == 2 and all(ends in x for x in said)
    data = Dataset.from_dict(dict(prompt=pair["prompt"]))
    how = dict(data=data, parts=dict(processing_class=tokenizer), resize_embeddings=True)
    mark = tokenizer.convert_tokens_to_ids("<end>")
    ppo(**how).train()
    assert "by '<end>', and a response goes on behind it, to '<eos>'" in said[2]
    assert said[2].endswith(f"set stop_token_id={mark}.")
    ppo(**how, stop_token_id=mark).train()
    tokenizer.eos_token = "<end>"
    encode_rows(Dataset.from_dict(dict(messages=[talk])), tokenizer, assistant_only=True)
    assert len(said) == 3


# catches: a line break between the last mark and EOS where a conversation has no prompt apart, as of
# Gemma; the score of a pair is then read behind other ids
def test_a_whole_conversation_ends_as_its_pair_does(tokenizers):
    tokenizer = with_template(tokenizers, GEMMA)
    other = [turn("assistant", "no")]
    apart = dict(prompt=ONE[:1], chosen=ONE[1:], rejected=other)
    whole = dict(chosen=ONE, rejected=[*ONE[:1], *other])
    pairs = [encode_pairs(Dataset.from_list([row]), tokenizer)[0] for row in (apart, whole)]
    assert pairs[0] == pairs[1]
    of_sft = encode_rows(one(messages=ONE), tokenizer)["input_ids"][0]
    assert of_sft == pairs[0]["chosen_ids"]
    assert tokenizer.decode(of_sft).endswith("A model.<end_of_turn><|im_end|>")


# catches: EOS twice where the content of a last turn brings its own
def test_a_turn_may_bring_its_own_end(tokenizers):
    tokenizer = with_template(tokenizers, CHATML)
    own = [*TWO[:3], turn("assistant", TWO[3]["content"] + tokenizer.eos_token)]
    assert marked_answers(own, tokenizer) == marked_answers(TWO, tokenizer)


# catches: with marks of generation, answers of the prompt that count, or one of the completion that
# does not, where the template writes the prompt otherwise
@pytest.mark.parametrize("opening", ["{{ 'assistant: ' }}", "{{ 'assistant: <think>' }}"])
def test_marks_of_generation_in_a_completion(opening, tokenizers):
    tokenizer = with_template(
        tokenizers,
        "{% set users = messages | selectattr('role', 'equalto', 'user') | list %}{{ users | length"
        " }}" + MARKED.replace("{{ 'assistant: ' }}", opening),
    )
    talk = [*TWO, turn("user", "yes"), turn("assistant", "<no"), TWO[0], ONE[1]]
    assert said_of(talk, tokenizer, first=5) == ["<no<|eot_id|>", "A model.<|eot_id|>"]


# catches: Mistral's tool calls refused, since as text they would be turns that do not alternate; the
# second of two equal calls that is taken for the first; a call without its mark
@pytest.mark.parametrize("first", [[], [turn("system", "Be brief."), *TWO]])
def test_a_template_that_counts_turns_and_tool_calls_are_none(first, tokenizers):
    tokenizer = with_template(
        tokenizers,
        "{% set ns = namespace(n=0) %}{% for m in messages if m.role in ('user', 'assistant') and "
        "not m.tool_calls %}{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception("
        "'roles must alternate') }}{% endif %}{% set ns.n = ns.n + 1 %}{% endfor %}"
        "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.tool_calls %}"
        "{{ '[CALLS] ' + m.tool_calls | tojson + eos_token }}{% elif m.role == 'assistant' %}"
        "{{ ' ' + m.content + eos_token }}{% else %}{{ '[' + m.role + '] ' + m.content + ' [/]' }}"
        "{% if loop.last %}{{ 'Be brief.' }}{% endif %}{% endif %}{% endfor %}",
    )
    call = [dict(type="function", function=dict(name="late", arguments={}))]
    asks = [dict(role="assistant", tool_calls=call), dict(role="tool", content="no")]
    found = said_of([*first, ONE[0], *asks, *asks, *TWO[1:]], tokenizer)
    called = "[CALLS] " + json.dumps(call) + tokenizer.eos_token
    assert found[-4:-2] == [called, called] and len(found) == (6 if first else 4)
    assert found[-2].strip() == "A model." + tokenizer.eos_token


# catches: gpt-oss refused: turns end by a mark that is not EOS, and all of them begin alike
def test_a_mark_that_ends_every_turn_but_the_last(tokenizers):
    tokenizer = with_template(
        tokenizers,
        "{{ '<|im_start|>system: You are a model.<|eot_id|>' }}{% for m in messages %}"
        "{{ '<|im_start|>' + m.role + ': ' + m.content }}{% if m.role == 'assistant' and loop.last "
        "%}{{ eos_token }}{% else %}{{ '<|eot_id|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}",
    )
    wanted = [": A model.<|eot_id|>", ": There you are"]  # and EOS, as an id
    for form in ("two answers", "a system turn"):
        assert said_of(TALKS[form], tokenizer) == wanted


# catches: a traceback, or settings that decide where a prompt ends
def test_settings_that_are_wrong_are_named():
    decided = dict(add_generation_prompt=True, tokenize=True, depth=1)
    for given in (decided, json.dumps(decided)):
        assert template_settings(dict(chat_template_kwargs=given)) == dict(depth=1)
    for name, wrong in (("tools", "[{"), ("tools", '{"name": "a"}'), ("chat_template_kwargs", [1])):
        with pytest.raises(ValueError, match=f"^{name} is "):
            template_settings({name: wrong})


# catches: a completion that goes on with a begun answer refused as no answer; content in blocks
# and content as text that are joined letter by letter; a prompt that its answer repeats, twice
def test_prompts_and_answers_are_joined(tokenizers):
    tokenizer = with_template(tokenizers, CHATML)
    begun = [*ONE[:1], turn("assistant", "A")]
    data = one(prompt=begun, completion=[turn("assistant", " model.")])
    every, last = (encode_rows(data, tokenizer, assistant_only=x)[0] for x in (True, False))
    said = tokenizer.decode(spoken(every["input_ids"], every["labels"])[0])
    assert every == last and said == " model.<|im_end|>"
    assert marked_pair(ONE[:1], ONE, tokenizer) == marked_pair(ONE[:1], ONE[1:], tokenizer)
    named = [dict(prompt=ONE[:1], completion=[ONE[0], dict(ONE[1], name="b")])]  # None, of the user
    plain = [dict(prompt=ONE[:1], completion=ONE[1:])]
    rows = [
        encode_rows(Dataset.from_list(x), tokenizer, assistant_only=only)[:]
        for x in (named, plain)
        for only in (False, True)
    ]
    assert all(row == rows[0] for row in rows)
    block = lambda text: [dict(type="text", text=text)]
    wanted = [*ONE[:1], turn("assistant", [*block("A"), *block(" model.")])]
    assert join_answer([*ONE[:1], turn("assistant", block("A"))], " model.") == wanted
    assert join_answer(begun, [turn("assistant", block(" model."))]) == wanted
    whole = [turn("user", block(ONE[0]["content"])), *ONE[1:]]  # the same question in blocks
    assert join_answer(ONE[:1], whole) == whole and join_answer(whole[:1], ONE) == ONE
    assert join_answer(ONE[:1], [turn("developer", "Be brief."), *whole])[1:] == whole


# catches: a picture or a tool that no model reads, without a word; a tool named like what is said
def test_what_no_model_would_read_is_refused(tokenizers):
    parts = "{% for x in m.content if x.type == 'text' %}{{ x.text }}{% endfor %}"
    tokenizer = with_template(tokenizers, f"{{% for m in messages %}}{parts}{{% endfor %}}")
    text, picture = dict(type="text", text="what"), dict(type="image", url="x.png")
    rows = [dict(prompt=[turn("user", x)]) for x in ([text], [text, picture])]
    assert collate_prompts(rows[:1], tokenizer)["prompt"] == ["what"]
    with pytest.raises(ValueError, match=r"prompt 1: turn 0 of role 'user' has .*x\.png.* put it"):
        collate_prompts(rows, tokenizer)
    rows[0]["tools"] = [dict(type="function", function=dict(name="what", description="Says."))]
    with pytest.raises(ValueError, match="prompt 0: the chat_template does not show the tools"):
        collate_prompts(rows[:1], tokenizer)


# catches: the user's turn twice, where the answer repeats it behind a system turn of its own
@pytest.mark.parametrize("style", ["ChatML", "Mistral", "generation"])
def test_an_answer_may_bring_a_system_turn_in_front_of_its_prompt(style, tokenizers):
    tokenizer = with_template(tokenizers, TEMPLATES[style][0])
    talk = TALKS["a system turn"]
    for n in (1, 2, 3):  # turns of the prompt
        brought = dict(prompt=TWO[:n], completion=talk)
        wanted = dict(prompt=talk[: n + 1], completion=TWO[n:])
        assert marked_pair(TWO[:n], talk, tokenizer) == marked_pair(*wanted.values(), tokenizer)
        first, second = (
            encode_rows(Dataset.from_list([x]), tokenizer, assistant_only=True)[0]
            for x in (brought, wanted)
        )
        assert first == second and -100 in first["labels"]


# catches: a refusal whose advice does not help; a prompt that is a turn of the answer's too, twice
@pytest.mark.parametrize("answer", [ONE[1:], ONE, [turn("system", "Be brief."), *ONE]])
def test_a_text_prompt_with_turns_for_an_answer_is_refused_with_the_call(answer, tokenizers):
    tokenizer = with_template(tokenizers, CHATML)
    row = dict(prompt=ONE[0]["content"], completion=answer, chosen=answer)
    row["rejected"] = [turn("assistant", "no")]
    dataset = Dataset.from_list([row])
    for read in (encode_rows, encode_pairs):
        with pytest.raises(ValueError, match="^row 0: the prompt is text and the answer") as found:
            read(dataset, tokenizer)
    call = re.search(r"dataset\.map\(.*\)(?=, or)", str(found.value))[0]
    turned = eval(call, dict(dataset=dataset))
    wanted = encode([marked_pair(answer[:-1] or ONE[:1], ONE[1:], tokenizer)], tokenizer)[0].ids
    assert encode_rows(turned, tokenizer)["input_ids"][0] == wanted
    assert encode_pairs(turned, tokenizer)["chosen_ids"][0] == wanted


# catches: white space of an answer that counts for the prompt, where offsets leave it out
def test_trimmed_offsets_lose_no_space():
    words = byte_level(trim=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    how = BpeTrainer(vocab_size=300, special_tokens=["<pad>"], initial_alphabet=alphabet)
    words.train_from_iterator(["def f():\n    return 1\n    b"] * 9, how)
    trimmed, whole = (
        PreTrainedTokenizerFast(tokenizer_object=x, eos_token="<pad>", pad_token="<pad>")
        for x in (words, copy.deepcopy(words))
    )
    whole.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    pairs = [("def f():\n", "    return 1"), ("a \n", " \n  b"), ("a", "  b "), ("a ", "b")]
    rows = [marked_pair(*pair, trimmed) for pair in pairs]
    assert encode(rows, trimmed) == encode(rows, whole)
    assert encode(rows, trimmed)[0].merged  # one token for the line break and three spaces


# catches: a None that Arrow puts where another row has the key, taken for a setting
def test_a_key_that_another_row_has_is_no_setting(tokenizers):
    tokenizer = with_template(
        tokenizers, "{{ 'set' if depth is defined }}{{ tools | tojson if tools }}" + CHATML
    )
    rows = [
        dict(prompt=ONE[:1], chat_template_kwargs=dict(depth=1), tools=[dict(name="a", x=1)]),
        dict(prompt=ONE[:1], chat_template_kwargs=dict(other=2), tools=[dict(name="b")]),
    ]
    batch = collate_prompts([*Dataset.from_list(rows)], tokenizer)
    assert [text.startswith("set") for text in batch["prompt"]] == [True, False]
    assert '[{"name": "b"}]' in batch["prompt"][1] and "null" not in batch["prompt"][1]


# catches: a token that no one learns, or that the prompt keeps, where an answer begins inside it
def test_a_token_of_both_is_the_answers(tokenizers, monkeypatch):

    said: list[str] = []
    monkeypatch.setattr(supervised.logger, "warning", said.append)
    tokenizer = tokenizers["metaspace, first"]
    data = one(prompt="It is (", completion="yes) no")
    row = encode_rows(data, tokenizer)[0]
    joint = encode_prompts(["It is (yes) no"], tokenizer)[0]
    assert row["input_ids"] == [*joint, tokenizer.eos_token_id]
    learned = tokenizer.decode(spoken(row["input_ids"], row["labels"])[0])
    assert learned == "(yes) no<|im_end|>" and "in 1 of 1 rows the answer begins inside" in said[0]
    encode_rows(one(prompt="It is", completion=" (yes) no"), tokenizer)
    assert len(said) == 1


# catches: a tokenizer without offsets that is cut by another rule
def test_without_offsets_the_ids_are_the_same(tokenizers):
    class Slow(PreTrainedTokenizerFast):
        is_fast = False

    for name in ("byte-level", "metaspace, first", "legacy Llama"):
        fast = tokenizers[name]
        fast.chat_template = QWEN3
        slow = copy.copy(fast)
        slow.__class__ = Slow
        rows = [marked_answers(talk, fast) for talk in TALKS.values()]
        rows += [marked_pair("It is (", "yes)", fast), marked_pair("Who", " are you", fast)]
        assert encode(rows, slow) == encode(rows, fast), name


# ---- Through the trainers ----


def scorer(tokenizer, seed=1):
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    return scorer_from(tiny_policy(tokenizer, seed, **sizes), seed)


# catches: EOS twice where a text brings its own (0.348 for 0.375)
def test_a_text_may_bring_its_own_end(letters):
    eos, model = letters.eos_token, scorer(letters)
    plain = score_texts(model, letters, ["a b"], ["c"])
    assert torch.equal(plain, score_texts(model, letters, ["a b"], ["c" + eos]))
    rows = [dict(prompt="a", chosen="b" + end, rejected="c") for end in ("", eos)]
    one, two = encode_pairs(Dataset.from_list(rows), letters)["chosen_ids"]
    assert one == two and one.count(letters.eos_token_id) == 1


# catches: tools and settings of the template that PPO leaves out; a started answer that is closed
def test_what_a_policy_goes_on_from(tokenizers):
    tokenizer = tokenizers["byte-level"]
    tokenizer.chat_template = "{{ tools[0].name if tools }}" + QWEN3
    row = dict(prompt=ONE[:1], tools='[{"name": "late"}]')
    row |= dict(chat_template_kwargs=dict(enable_thinking=False), place=7)
    batch = collate_prompts([row], tokenizer)
    wanted = f"late<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n{THOUGHT}"
    assert batch["prompt"] == [wanted] and batch["columns"] == dict(place=[7])
    assert batch["conversations"] == [ONE[:1]]
    assert batch["prompt_ids"][0].tolist() == encode_prompts([wanted], tokenizer)[0]
    tokenizer.chat_template = CHATML
    started = [*ONE[:1], turn("assistant", "A ")]
    assert prompt_text(started, tokenizer).endswith("assistant\nA ")
    whole = marked_pair(ONE[:1], "A model.", tokenizer)
    for answer in ("model.", [turn("assistant", "model.")]):
        goes_on = marked_pair(started, answer, tokenizer)
        assert goes_on.text == whole.text
        assert goes_on.text[slice(*goes_on.answers[0])] == "model."


# catches: padding that is learned, or read in front of a row; masks that are too short or of another
# kind, None for a column
def test_given_ids_and_their_masks(tokenizers):
    tokenizer = tokenizers["byte-level"]
    labels = lambda only=None, **given: encode_rows(
        one(input_ids=[5, 6, 7], **given), tokenizer, completion_only=only
    )["labels"][0]
    assert labels(attention_mask=[1, 1, 0]) == [5, 6, -100]
    assert labels(attention_mask=[0, 1, 1]) == [6, 7]  # in front it would move the row
    assert labels(completion_mask=None) == labels(labels=None) == [5, 6, 7]
    assert labels(labels=[-100, 6, 7], completion_mask=[0, 0, 1]) == [-100, 6, 7]
    assert labels(completion_mask=[0, 0, 1]) == labels(True, completion_mask=[0, 0, 1])
    both = dict(completion_mask=[0, 0, 1], attention_mask=[1, 1, 0])
    assert labels(False, **both) == [5, 6, -100]  # prompts count too, padding never
    for name in ("labels", "completion_mask", "assistant_masks", "attention_mask"):
        with pytest.raises(ValueError, match=f"row 0: its {name} has 2 entries for 3 ids"):
            labels(**{name: [1, 1]})
    with pytest.raises(ValueError, match="assistant_only_loss is True and .* assistant_masks"):
        encode_rows(Dataset.from_dict(dict(input_ids=[[5, 6]])), tokenizer, assistant_only=True)


# catches: padding that is read as an answer, whose score is then that of a pad token
def test_given_pairs_and_their_masks(letters):
    padded = dict(chosen_input_ids=[2, 3, 1, 0], rejected_input_ids=[0, 2, 4, 1])
    masks = dict(chosen_attention_mask=[1, 1, 1, 0], rejected_attention_mask=[0, 1, 1, 1])
    row = encode_pairs(Dataset.from_list([padded | masks]), letters)[0]
    assert row["chosen_ids"] == [2, 3, 1] and row["rejected_ids"] == [2, 4, 1]
    masks["rejected_attention_mask"] = [1, 1]
    with pytest.raises(ValueError, match="row 0: an attention_mask has 2 entries for 4 ids"):
        encode_pairs(Dataset.from_list([padded | masks]), letters)


# catches: columns taken for splits: advice that is a list of texts
def test_columns_without_a_data_set_are_told_the_call():
    for columns in (dict(prompt=["a"], completion=["b"]), dict(input_ids=[[2, 3]])):
        with pytest.raises(TypeError, match="such as Dataset.from_dict\\(train_dataset\\)"):
            supervised.map_sets(columns, lambda data: data, "train_dataset", several=False)


def test_turns_of_the_older_form_are_the_same_turns(tokenizers):
    tokenizer = with_template(tokenizers, CHATML)
    known = dict(user="human", assistant="gpt", system="system")
    talk = [turn("system", "Be brief"), *TWO]
    older = [{"from": known[x["role"]], "value": x["content"]} for x in talk]
    rows = [
        encode_rows(one(conversations=x), tokenizer, assistant_only=True)[0] for x in (talk, older)
    ]
    assert rows[0] == rows[1] and -100 in rows[0]["labels"]


# catches: ids that are decoded and encoded again: another split, and BOS where none was given
def test_given_ids_are_those_that_are_evaluated(ppo, letters):
    odd = [[letters.eos_token_id, 3, 4], [5, letters.eos_token_id, 6]]
    data, model = Dataset.from_dict(dict(input_ids=odd)), scorer(letters)
    trainer = ppo(model, parts=dict(eval_dataset=data))
    completions = trainer.evaluator.complete(data)
    read = trainer.policy.eval(), letters
    found = complete(*read, odd, response_length=5, seed=trainer.args.seed)
    assert [ids[:3] for ids in found.ids] == odd and found.texts == completions.texts
    wanted = score_ids(trainer.reward_model, found.ids, letters.pad_token_id)
    torch.testing.assert_close(torch.tensor(completions.scores), wanted)
    r = trainer.score(trainer.rollout(dict(input_ids=odd)))
    rows = [
        [*p[m].tolist(), *a[k].tolist()]
        for p, m, a, k in zip(r.prompt_ids, r.prompt_mask.bool(), r.response_ids, r.mask)
    ]
    of_rollout = score_ids(trainer.reward_model, rows, letters.pad_token_id)
    torch.testing.assert_close(r.raw_scores, of_rollout)


# catches: the policy's marks, as text, in what a reward model with its own template reads, and in the
# table of completions
def test_a_reward_model_reads_a_conversation_in_its_own_template(ppo, letters, tokenizers):
    policy, other = copy.deepcopy(letters), copy.deepcopy(tokenizers["byte-level"])
    policy.chat_template = "{% for m in messages %}{{ 'j' + m.content }}{% endfor %}"
    other.chat_template = CHATML
    data = Dataset.from_list([dict(prompt=[turn("user", x)]) for x in "abcdefgh"])
    parts = dict(processing_class=policy, reward_processing_class=other, eval_dataset=data)
    trainer = ppo(scorer(other), data=data, parts=parts)
    r = trainer.score(trainer.rollout(data[:]))
    rows = []
    for talk, response, stopped in zip(data["prompt"], r.responses, r.stopped.tolist()):
        text = other.apply_chat_template([*talk, turn("assistant", response)], tokenize=False)
        text = text.removesuffix("\n") if stopped else text.removesuffix("<|im_end|>\n")
        rows.append(other(text, add_special_tokens=False)["input_ids"])
    assert not all(r.stopped) and any(r.stopped)
    wanted = score_ids(trainer.reward_model, rows, other.pad_token_id)
    torch.testing.assert_close(r.raw_scores, wanted)
    found = trainer.evaluator.complete(data)
    assert found.prompts == [f"user: {x}" for x in "abcdefgh"]
    for both in (policy, other):
        both.chat_template = "{{ tools[0].name if tools }}" + both.chat_template
    of_tools = [[dict(name="bad" if i % 2 else "c")] for i in range(len(data))]
    with_tools = data.add_column("tools", [json.dumps(x) for x in of_tools])
    r = trainer.score(trainer.rollout(with_tools[:]))
    answers = [
        encode([marked_pair(*x[:2], other, x[2], tools=x[3])], other)[0].ids
        for x in zip(data["prompt"], r.responses, r.stopped.tolist(), of_tools)
    ]
    wanted = score_ids(trainer.reward_model, answers, other.pad_token_id)
    torch.testing.assert_close(r.raw_scores, wanted)
    found = trainer.evaluator.complete(with_tools)
    given = data["prompt"][:], found.texts
    how = dict(stopped=found.stopped, settings=[dict(tools=x) for x in of_tools])
    wanted = score_texts(trainer.reward_model, other, *given, **how)
    torch.testing.assert_close(torch.tensor(found.scores), wanted)
    other.chat_template = "{{ raise_exception('h') if messages[0].content == 'h' }}" + CHATML
    with pytest.raises(ValueError, match="prompt 7 for the reward model: the chat_template"):
        ppo(scorer(other), data=data, parts=parts)


# ---- What is said is read: templates in the manner of published ones ----

CALL = "{% for c in m.tool_calls or [] %}{% set f = c.function or c %}"
NAMED = (
    CALL + '<tool_call>{"name": "{{ f.name }}", "arguments": {{ ARGS }}}</tool_call>{% endfor %}'
)
OBJECT, GLUED, EITHER = (
    NAMED.replace("ARGS", "f.arguments" + x)
    for x in (" | tojson", " + ''", " if f.arguments is string else f.arguments | tojson")
)
ITEMS = CALL + "{{ f.name }}{% for k, v in f.arguments.items() %}({{ k }}: {{ v | tojson }})"
ITEMS += "{% endfor %}{% endfor %}"
PLAIN, DUMP = "{{ (m.content or '') + '' }}", "{{ m.content | tojson }}"
ANSWER = "{{ (m.content or '').split('</think>')[-1] }}"
STRING = "{% if m.content is string %}" + ANSWER
PARTS = (
    "{% else %}{% for x in m.content or [] if x.type == 'text' %}{{ x.text | trim }} {% endfor %}"
)
PARTS, STRING = STRING + PARTS + "{% endif %}", STRING + "{% endif %}"
CALLED = "{% if m.tool_calls %}" + OBJECT + "{% else %}{{ m.content | trim }}{% endif %}"
BY_NONE = "{% if m.content is none %}" + GLUED + "{% else %}" + ANSWER + "{% endif %}"
FOUR = ("system", "user", "tool", "assistant")
STYLES = {  # what is written of a turn of these roles; nothing is of others
    "Qwen 2.5": dict.fromkeys(FOUR, PLAIN + OBJECT),
    "Qwen 3": dict.fromkeys(FOUR, STRING + EITHER),
    "Llama 3": dict.fromkeys((*FOUR, "human", "developer"), CALLED) | dict(tool=DUMP),
    "Phi 3": dict.fromkeys(("system", "user", "assistant"), PLAIN),
    "GLM 4": dict.fromkeys(FOUR, PARTS + ITEMS),
    "gpt-oss": dict.fromkeys((*FOUR, "developer"), CALLED) | dict(tool=DUMP),
    "DeepSeek 3": dict.fromkeys(FOUR, PLAIN) | dict(assistant=ANSWER + GLUED),
    "DeepSeek R1": dict.fromkeys(FOUR, PLAIN) | dict(assistant=BY_NONE),  # None does not reach it
    "Gemma 3": dict.fromkeys((*FOUR, "model"), PARTS),
}


def styled(tokenizers, style):
    each = "{% if m.role == 'ROLE' %}<|ROLE|>\n"
    turns = [each.replace("ROLE", x) + says for x, says in STYLES[style].items()]
    end = "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    ends = "<|end|>\n{% endif %}".join([*turns, "{% endfor %}"])
    return with_template(tokenizers, "{% for m in messages %}" + ends + end)


def called(arguments, content=None):
    one = dict(type="function", function=dict(name="clock", arguments=arguments))
    asks = dict(role="assistant", content=content, tool_calls=[one])
    return [ONE[0], asks, turn("tool", "noon"), turn("assistant", "There you are")]


MUTE = {"Phi 3": 1, "Gemma 3": 1, "DeepSeek R1": 1}  # write no calls
blocks = lambda *texts: [dict(type="text", text=x) for x in texts]
CALLS_ALONE = MUTE | {"Llama 3": 1, "gpt-oss": 1}
IN_BLOCKS = [turn("user", blocks("Who are ", "you?")), turn("assistant", blocks("A", " model."))]
GIVEN = dict(a=2, b=None, c="d")
FORMS = {  # a conversation, and what must be read of it; behind it, who cannot
    "plain": (TALKS["a system turn"], ["Be brief.", *(x["content"] for x in TWO)], {}),
    "blanks": ([turn("system", " \n"), ONE[0], turn("assistant", "")], ["Who are you?"], {}),
    "thoughts": ([ONE[0], turn("assistant", "<think>no</think>yes"), *TWO[2:]], ["yes"], {}),
    "blocks": (IN_BLOCKS, ["Who are you?", "A model."], {}),
    "tool blocks": ([*ONE, turn("tool", blocks("noon"))], ["noon"], {"Phi 3": 2}),
    "an object": (called(GIVEN), ["clock", GIVEN], MUTE),
    "JSON": (called(json.dumps(GIVEN)), ["clock", GIVEN], MUTE),
    "text beside a call": (called(GIVEN, "Is it late?"), ["Is it late?", "clock"], CALLS_ALONE),
}
for role in ("human", "gpt", "model", "User", "developer"):
    mute = {x: 0 for x in STYLES if role not in STYLES[x]}
    FORMS[role] = ([turn(role, "no"), *ONE], ["no"], mute)


# catches: a turn, a text or a call that is lost without a word (or found since "no" is elsewhere);
# Python's repr or JSON of blocks; arguments that are encoded twice, or lose a None; thoughts, blanks
# and trimmed texts that are called lost
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("style", STYLES)
def test_what_is_said_is_read_or_named(style, form, tokenizers):
    tokenizer, (talk, said, lost) = styled(tokenizers, style), FORMS[form]
    if style in lost:
        i, role = lost[style], talk[lost[style]]["role"]
        with pytest.raises(ValueError, match=f"it: .* turn {i} of role '{role}' says .*template"):
            render(talk, tokenizer, "it")
        return
    text = render(talk, tokenizer)
    for x in said:
        if isinstance(x, dict):
            items = "".join(f"({k}: {json.dumps(v)})" for k, v in x.items())
            assert (items if style == "GLM 4" else json.dumps(x)) in text
        else:
            assert squeezed(x) in squeezed(text)
    assert "text" not in text and '\\"' not in text


EACH = "{% for m in messages %}{{ '<' + m.role + '>' }}SAYS{{ '<|im_end|>' }}{% endfor %}"
NO_SYSTEM = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('they alternate') }}{% endif %}{% endfor %}"
)


# catches: calls with content null, and texts to a template that reads blocks alone, refused; a
# refusal of the template's own that does not say of which turn; thoughts lost without a word
def test_what_a_template_wants_of_a_turn(tokenizers):
    tokenizer = with_template(tokenizers, EACH.replace("SAYS", "{{ m.content + '' }}" + OBJECT))
    assert "clock" in render(called(GIVEN), tokenizer)
    thinks = dict(TWO[1], reasoning_content="hm")
    assert "hm" not in render([*TWO[:1], thinks, *TWO[2:]], tokenizer)  # templates drop old ones
    with pytest.raises(ValueError, match="turn 1 of role 'assistant' says .*'hm'"):
        render([*TWO[:1], thinks], tokenizer)
    tokenizer.chat_template = EACH.replace("SAYS", "{{ m.reasoning_content }}{{ m.content }}")
    assert "<assistant>hmA model." in render([*TWO[:1], thinks], tokenizer)
    parts = "{% for x in m.content %}{{ x.text }}{% endfor %}"
    tokenizer.chat_template = EACH.replace("SAYS", parts)
    assert "Who are you?<|im_end|><assistant>A model." in render(ONE, tokenizer)
    tokenizer.chat_template = NO_SYSTEM + CHATML
    for i, talk in enumerate((TALKS["a system turn"], [ONE[0], *TWO[2:]])):
        role = talk[i]["role"]
        with pytest.raises(ValueError, match=f"refuses turn {i} of role '{role}' .*: they alt"):
            render(talk, tokenizer)


# catches: what a tool returned that is learned, where it is written inside the turn that called
# (Gemma 4), or in front of an answer that gets no mark of its own (Apertus)
def test_what_a_tool_says_is_not_learned(tokenizers):
    late = "{% if m.tool_calls %}" + CALLED + "{{ messages[loop.index].content }}<|eot_id|>{% elif "
    late += "m.role != 'tool' %}{{ m.content }}<|eot_id|>{% endif %}"
    each = "{% for m in messages %}SAYS{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
    tokenizer = with_template(tokenizers, each.replace("SAYS", late))
    with pytest.raises(ValueError, match="behind turn 1 .*, or turn 2 inside it"):
        marked_answers(called(GIVEN), tokenizer)
    opened = "{% if loop.index0 and messages[loop.index0 - 1].role == 'user' %}<s>{% endif %}"
    tokenizer.chat_template = each.replace("SAYS", opened + CALLED)
    found = marked_pair(called(GIVEN)[:3], called(GIVEN)[3:], tokenizer)
    assert [found.text[a:b] for a, b in found.answers] == ["There you are"]


def cut(talk):
    return [talk[0], turn("assistant", talk[1]["content"][:1])]


THOUGHT_OF = "<think>\nhm\n</think>\n\nA model."
DOORS = {
    "SFT": lambda t, talk: encode_rows(one(messages=talk), t)[:],
    "answers": lambda t, talk: encode_rows(one(messages=talk), t, assistant_only=True)[:],
    "completions": lambda t, talk: encode_rows(one(prompt=talk[:1], completion=talk[1:]), t)[:],
    "pairs": lambda t, talk: encode_pairs(
        one(prompt=talk[:1], chosen=talk[1:], rejected=cut(talk)[1:]), t
    )[:],
    "whole pairs": lambda t, talk: encode_pairs(one(chosen=talk, rejected=cut(talk)), t)[:],
    "PPO": lambda t, talk: collate_prompts([dict(prompt=talk[:1])], t)["prompt"],
    "scores": lambda t, talk: score_texts(scorer(t), t, [talk[:1]], [talk[1:]]).tolist(),
    "judge": lambda t, talk: RewardModelJudge(scorer(t), t)(
        ["?"], [("no", THOUGHT_OF)], conversations=[talk[:1]]
    ),
    "tokens": lambda t, talk: Answers([""], [THOUGHT_OF], [1], {}, [talk[:1]]).split_tokens(t)[0],
}


# catches: a door that does not ask
@pytest.mark.parametrize("door", DOORS)
def test_no_door_loses_a_turn(door, tokenizers):
    tokenizer, read = styled(tokenizers, "Qwen 2.5"), DOORS[door]
    assert read(tokenizer, IN_BLOCKS) == read(tokenizer, ONE)
    with pytest.raises(ValueError, match="turn 0 of role 'human' .* such as 'user'"):
        read(tokenizer, [turn("human", "Is it late?"), ONE[1]])


WITHIN = "{{ m.content.split('</think>')[0].split('<think>')[-1].strip('\n') }}"
IF_ANY = "{% set c = m.content %}{% if '</think>' in c %}{% set c = c.split('</think>') | last %}"
THINKERS = [  # what is written of a turn: of the last answer no thoughts, and by the last two all
    ANSWER,
    IF_ANY + "{% endif %}{{ c | trim }}",
    "{{ m.content.split('</think>\n\n') | last }}",
    "{{ m.content.split('<think>')[0] }}" + ANSWER,
    WITHIN,
    "{% if loop.last %}{{ m.content }}{% else %}" + ANSWER + "{% endif %}",
    "<think>" + WITHIN + "</think>" + ANSWER,
]


# catches: a part of the last answer, or of a question, that is lost without a word at one door, or by
# one way to cut; thoughts refused that are read, those of earlier answers, or of what a policy wrote
@pytest.mark.parametrize("says", THINKERS)
def test_thoughts_in_a_text_are_read_or_named(says, tokenizers):
    tokenizer = with_template(tokenizers, EACH.replace("SAYS", says))
    talk, read = [ONE[0], turn("assistant", THOUGHT_OF)], says in THINKERS[-2:]
    wrong = pytest.raises(ValueError, match="turn 1 of role 'assistant' says .*without thoughts")
    for door, give in DOORS.items():
        with nullcontext() if read or door in ("PPO", "judge", "tokens") else wrong:
            give(tokenizer, talk)
    assert ("hm" in render([*talk, *TWO[2:]], tokenizer)) == (WITHIN in says)
    for marks in ("<>", "[]", "\u25c1\u25b7") if not read else ():
        swap = str.maketrans("<>", marks)
        tokenizer.chat_template = EACH.replace("SAYS", says.translate(swap))
        asks = turn("user", "Who <think><b>are</b></think>\n\n you?".translate(swap))
        with pytest.raises(ValueError, match="turn 0 of role 'user' says"):
            render([asks], tokenizer)


# catches: a template refused that would refuse a mark in place of a text; a run refused whose
# prompts are read, since behind an answer the template leaves out the system's turn
def test_what_is_read_is_not_refused(tokenizers):
    looks = "(m.content.split('. ')[0] + '. ' + m.content.split('. ')[1])"
    tokenizer = with_template(tokenizers, CHATML.replace("m.content", looks))
    assert "Yes. Say no" in render([turn("user", "Yes. Say no")], tokenizer)
    last = "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    last = "{% if m.role == 'user' %}[INST] " + last + "{{ m.content }} [/INST]{% elif m.role == "
    last += "'assistant' %} {{ m.content + eos_token }}{% endif %}"
    tokenizer.chat_template = "{% for m in messages %}" + last + "{% endfor %}"
    talk = TALKS["a system turn"]
    prompts.warn_of_turns(one(prompt=talk[:2]), tokenizer, [1])
    assert "Be brief.Who are you?" in prompt_text(talk[:2], tokenizer)
    with pytest.raises(ValueError, match="turn 0 of role 'system'"):
        render(talk, tokenizer)


# catches: a None of the user's that is dropped, and one that a table added that is read
def test_only_what_a_table_added_is_dropped(tokenizers):
    tokenizer = styled(tokenizers, "Qwen 2.5")
    talks = [called(GIVEN), called(dict(x=1))]
    texts = [json.dumps(GIVEN), json.dumps(dict(x=1))]
    found = lambda rows: [re.findall(r'ts": (\{.*?\})\}<', render(x, tokenizer))[0] for x in rows]
    as_json = [called(x) for x in texts]
    table = lambda talks: Dataset.from_list([dict(prompt=x) for x in talks])["prompt"][:]
    own = prompts.as_data([dict(prompt=x, made=[dict(arguments=dict(x=1))]) for x in talks])
    assert found(talks) == found(own["prompt"]) == found(table(as_json)) == texts
    assert own["made"][0] == [dict(arguments=dict(x=1))]  # no turn, so left as it is
    mixed = [turn("system", "Be brief."), turn("user", blocks("Who are ", "you?"))]
    assert prompts.as_data([dict(prompt=mixed)])["prompt"][0] == [mixed[0], ONE[0]]
    assert found(table(talks)) == ['{"a": 2, "c": "d"}', '{"x": 1}']  # which cannot be told apart
    tools = [dict(name="a", default=None)]
    assert template_settings(dict(tools=json.dumps(tools))) == dict(tools=tools)


# catches: GLM's answers of which only the last one learns to end; an end where a template writes
# none, or the mark that opens every turn
@pytest.mark.parametrize(
    ("user", "assistant", "end"),
    [
        ("<start_of_turn>", "<|start_header_id|>", "<start_of_turn>"),
        ("<|im_start|>user", "<|im_start|>assistant", ""),
        ("user: ", "assistant: ", ""),
    ],
)
def test_every_answer_ends_or_none(user, assistant, end, tokenizers):
    tokenizer = with_template(
        tokenizers,
        f"{{% for m in messages %}}{{{{ ('{user}' if m.role == 'user' else '{assistant}') + m.content"
        f" }}}}{{% endfor %}}{{% if add_generation_prompt %}}{assistant}{{% endif %}}",
    )
    assert said_of(TWO, tokenizer) == ["A model." + end, "There you are"]  # and EOS, as an id


# catches: a pattern that gives up in Rust, whose error is no Exception; half a character in a pair
@pytest.mark.parametrize("text, said", [("a" * 60 + "b", "broke down .*Onig"), ("\ud800", "lone")])
def test_a_text_that_no_tokenizer_reads_is_named(letters, text, said):
    inner = Tokenizer.from_str(letters.backend_tokenizer.to_str())
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"(a|aa|b?a)+$"), "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")
    for use in (encode_prompts, lambda x, _: encode([Marked(text, [(0, 1)]) for text in x], fast)):
        with pytest.raises(ValueError, match=said):
            use(["a", text], fast)


ENDLESS = dict(
    product="{{ 'a' * 10**9 }}",
    power="{{ 9 ** 999999999 }}",
    nested="{% set r = range(99999) %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}",
    macro="{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(40) }}",
)


# catches: a template that fills the memory as it is compiled, or that never ends
@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
def test_a_template_ends(tokenizer, monkeypatch, template):
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with pytest.raises(ValueError, match="prompt 3: the chat_template refuses.*1,000,000 steps"):
        render([dict(role="user", content="hi")], tokenizer, "prompt 3")


# catches: a loop that has lost its length or its end, a small product that is refused
def test_a_template_that_loops_is_as_it_was(tokenizer, monkeypatch):
    loop = "{% for m in messages %}{{ loop.revindex }}{{ m.role }}{{ '=' * 2 }}{{ m.content }}{% endfor %}{{ 3 * 4 }}"
    monkeypatch.setattr(
        tokenizer, "chat_template", loop + "{% for x in none_such %}{% else %}0{% endfor %}"
    )
    turns = [dict(role="user", content="hi"), dict(role="assistant", content="ho")]
    assert render(turns, tokenizer) == "2user==hi1assistant==ho120"
