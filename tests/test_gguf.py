"GGUF in, safetensors out: a model that llama.cpp's tools wrote, trained and saved."

import json

import pytest

pytest.importorskip("gguf", reason="gguf is not installed: it is in the development set")

import torch
from datasets import Dataset
from gguf_files import WORDS, write_gguf
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rlhf_nb.cli import main
from rlhf_nb.cli.plan import planned_config
from rlhf_nb.reward import RewardConfig, RewardTrainer
from rlhf_nb.sft import SFTConfig, SFTTrainer
from rlhf_nb.trainer import PPOConfig, PPOTrainer
from rlhf_nb.training.model_loading import load_policy, load_tokenizer

ASKED = [[dict(role="user", content=text)] for text in ("ab", "c", "de", "fg")] * 2


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def check_alone(folder, kind):
    "transformers loads the folder, in float32, and its weights are not the file's."
    model = kind.from_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text())
    assert model.dtype == torch.float32 and "quantization_config" not in saved
    words = AutoTokenizer.from_pretrained(folder)
    assert words("abc")["input_ids"] == [WORDS.index("ab"), WORDS.index("c")]
    assert words.chat_template and words.pad_token == words.eos_token
    return model


# catches: weights that stay quantized or in half precision, a folder that transformers refuses to
# write, a model that is loaded and not trained
def test_a_policy_goes_through_all_three_trainers(file, small_args, tmp_path):
    name = str(file)
    rows = Dataset.from_dict(dict(prompt=["ab", "c"] * 4, completion=["d", "e"] * 4))
    sft = SFTTrainer(name, small_args(SFTConfig, max_steps=1, learning_rate=1e-2), rows)
    before = {key: x.clone() for key, x in sft.model.state_dict().items()}
    sft.train()
    sft.save_model(str(tmp_path / "sft"))
    model = check_alone(tmp_path / "sft", AutoModelForCausalLM)
    assert any(not torch.equal(x, before[key]) for key, x in model.state_dict().items())

    pairs = Dataset.from_dict(dict(prompt=["ab"] * 4, chosen=["d"] * 4, rejected=["e"] * 4))
    reward = RewardTrainer(name, small_args(RewardConfig, max_steps=1), pairs)
    reward.train()
    reward.save_model(str(tmp_path / "reward"))
    check_alone(tmp_path / "reward", AutoModelForSequenceClassification)

    args = small_args(PPOConfig, total_episodes=4, response_length=3, per_device_train_batch_size=4)
    trainer = PPOTrainer(
        args,
        model=str(file.parent),  # the folder is as good as the file
        reward_model=reward.model,
        train_dataset=Dataset.from_dict(dict(prompt=ASKED)),
    )
    trainer.train()
    trainer.save_model(str(tmp_path / "ppo"))
    check_alone(tmp_path / "ppo", AutoModelForCausalLM)


# catches: an optional library that is asked for late; numbers of numpy where the reason should be
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("architecture", "architecture foobar is not supported.*in its own format"),
        ("cut", "cannot be loaded.*cut off.*copy it again"),
        ("text", "not a GGUF file"),
        ("nothing", "there is no file .*give the GGUF file, or its folder"),
        ("two", "holds 2 GGUF files, such as a.gguf and b.gguf: give one"),
        ("no library", "needs the library gguf: pip install gguf"),
    ],
)
def test_a_file_that_cannot_be_read(file, tmp_path, monkeypatch, what, message):
    path = tmp_path / "a.gguf"
    if what == "architecture":
        write_gguf(path, "foobar")
    elif what == "text":
        path.write_text("a poem")
    elif what != "nothing":
        path.write_bytes(file.read_bytes()[: 2000 if what == "cut" else None])
    if what == "two":
        (tmp_path / "b.gguf").write_bytes(path.read_bytes())
        path = tmp_path
    if what == "no library":
        monkeypatch.setattr("rlhf_nb.base.loading.find_spec", lambda name: None)
    for load in (load_policy, load_tokenizer):
        with pytest.raises((ValueError, OSError), match=message) as error:
            load(str(path))
        assert "\n" not in str(error.value)


def test_a_file_without_a_tokenizer_takes_one_that_is_given(tmp_path):
    path = write_gguf(tmp_path / "bare.gguf", tokenizer=False)
    with pytest.raises(ValueError, match="tokenizer None.*give the tokenizer in its own format"):
        load_tokenizer(str(path))
    assert load_policy(str(path)).config.vocab_size == len(WORDS)


# catches: a plan that wants a config.json, a command that takes folders alone
def test_the_commands_take_a_file(file, tmp_path, capsys):
    assert planned_config(str(file)).hidden_size == 16
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(dict(prompt=talk)) + "\n" for talk in ASKED))
    words = f"""ppo --model_name_or_path {file} --reward_function rlhf_nb.tldr:gold_score --dataset_name {prompts}
        --output_dir {tmp_path / "run"} --dry_run""".split()
    assert main(words) == 0
    assert "peak" in capsys.readouterr().out
