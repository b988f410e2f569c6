"""Text becomes ids in one way: the ids of the joint text, and exactly what the assistant says, for
the tokenizers and templates that people bring."""

import copy
import re
from itertools import product
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer, WordLevelTrainer
from transformers import PreTrainedTokenizerFast

import rlhf_nb
from rlhf_nb.encoding import encode, encode_prompts, marked_answers, marked_pair, prompt_text
from rlhf_nb.evaluate import complete
from rlhf_nb.models import scorer_from, tiny_policy
from rlhf_nb.reward import encode_pairs, score_ids, score_texts
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
            if not encode([marked_pair(**renamed(pairs[i]), tokenizer=tokenizer)], tokenizer)[0][2]:
                assert of_ppo["prompt_ids"][i][kept].tolist() == ids[:begins], (name, style)
    assert tried >= 200, tried


def renamed(pair):
    return dict(prompt=pair["prompt"], answer=pair["completion"])


# catches: a tokenizer that is called where BOS, EOS and what a template wrote are not known
def test_one_module_alone_calls_a_tokenizer_on_text():
    calls = re.compile(
        r"\b(tokenizer|processing_class)\((?!\))|\.apply_chat_template\(|tokenizer\.encode\("
    )
    found = {
        path.name
        for path in Path(rlhf_nb.__file__).parent.rglob("*.py")
        if calls.search(path.read_text("utf-8"))
    }
    assert found == {"encoding.py"}


# ---- What a template does not show ----


# catches: fewer labels in silence, where a template drops what was said before, or max_length does
def test_answers_that_are_not_learned_are_counted(tokenizers, monkeypatch):
    from rlhf_nb.training import supervised

    said: list[str] = []
    monkeypatch.setattr(supervised.logger, "warning", said.append)
    tokenizer = tokenizers["byte-level"]
    tokenizer.chat_template = CHATML.replace("in messages", "in messages[-2:]")
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


# catches: an end mark that is guessed
def test_a_template_that_cannot_tell_is_named(tokenizers):
    tokenizer = copy.deepcopy(tokenizers["byte-level"])
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}"
        "{{ ' END' if loop.last else ' GO ON' }}{% endif %}{% endfor %}"
    )
    with pytest.raises(ValueError, match=r"writes ' END' behind the last answer.*generation"):
        marked_answers(TWO, tokenizer)


# catches: the user's last turn and headers that are learned, where an answer changes how the template
# writes what stands before it
def test_a_prompt_that_the_answer_changes(tokenizers):
    tokenizer = copy.deepcopy(tokenizers["byte-level"])
    tokenizer.chat_template = (
        "{% set said = messages | selectattr('role', 'equalto', 'assistant') | list %}"
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if said and m == said[-1] %}"
        "{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    found = marked_pair(TWO[:3], TWO[3:], tokenizer)
    assert [found.text[a:b] for a, b in found.answers] == [THOUGHT + "There you are"]
    assert found.text.count(THOUGHT) == 1 and prompt_text(TWO[:3], tokenizer).count(THOUGHT) == 1
    every = marked_answers(TWO, tokenizer)
    assert every.text == found.text and every.answers[-1:] == found.answers


# catches: a None that Arrow puts where another row has the key, taken for a setting
def test_a_key_that_another_row_has_is_no_setting(tokenizers):
    tokenizer = copy.deepcopy(tokenizers["byte-level"])
    tokenizer.chat_template = (
        "{{ 'set' if depth is defined }}{{ tools | tojson if tools }}" + CHATML
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
    from rlhf_nb.training import supervised

    said: list[str] = []
    monkeypatch.setattr(supervised.logger, "warning", said.append)
    tokenizer = tokenizers["metaspace, first"]
    data = Dataset.from_list([dict(prompt="It is (", completion="yes) no")])
    row = encode_rows(data, tokenizer)[0]
    joint = encode_prompts(["It is (yes) no"], tokenizer)[0]
    assert row["input_ids"] == [*joint, tokenizer.eos_token_id]
    learned = tokenizer.decode(spoken(row["input_ids"], row["labels"])[0])
    assert learned == "(yes) no<|im_end|>" and "in 1 of 1 rows the answer begins inside" in said[0]
    encode_rows(Dataset.from_list([dict(prompt="It is", completion=" (yes) no")]), tokenizer)
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


# catches: ids that are decoded and encoded again: another split, and BOS where none was given
def test_given_ids_are_those_that_are_evaluated(ppo, letters):
    odd = [[letters.eos_token_id, 3, 4], [5, letters.eos_token_id, 6]]
    data, model = Dataset.from_dict(dict(input_ids=odd)), scorer(letters)
    trainer = ppo(model, parts=dict(eval_dataset=data))
    completions, scores = trainer.completed(data, progress=False)
    read = trainer.policy.eval(), letters
    found = complete(*read, odd, response_length=5, seed=trainer.args.seed)
    assert [ids[:3] for ids in found.ids] == odd and found.texts == completions.texts
    wanted = score_ids(trainer.reward_model, found.ids, letters.pad_token_id)
    torch.testing.assert_close(torch.tensor(scores), wanted)
    r = trainer.score(trainer.rollout(dict(input_ids=odd)))
    rows = [
        [*p[m].tolist(), *a[k].tolist()]
        for p, m, a, k in zip(r.prompt_ids, r.prompt_mask.bool(), r.response_ids, r.mask)
    ]
    of_rollout = score_ids(trainer.reward_model, rows, letters.pad_token_id)
    torch.testing.assert_close(r.raw_scores, of_rollout)


# catches: the policy's marks, as text, in what a reward model with its own template reads
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
    trainer.completed(data, progress=False)
    other.chat_template = None
    with pytest.raises(ValueError, match="a prompt for the reward model is a conversation"):
        ppo(scorer(other), data=data, parts=parts)
