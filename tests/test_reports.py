"""What a run tells to others: reporting integrations with tables, the model card, the hub that is
away."""

import json
import logging
import textwrap
from pathlib import Path

import forks
import pandas as pd
import pytest
import yaml
from ppo_fixtures import logs
from transformers import Trainer

# A process of its own for each: these libraries keep global state, threads and hooks.
RUN = textwrap.dedent(
    """
    import sys
    sys.path.insert(0, {tests!r})
    from datasets import Dataset
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from ppo_fixtures import PROMPTS, SIZES, likes_c
    from rlhf_nb.training.model_loading import tiny_policy
    from rlhf_nb.trainer import PPOConfig, PPOTrainer
    inner = Tokenizer(models.WordLevel({{word: i for i, word in enumerate(["<pad>", "<eos>", *"abcdefghij"])}}, unk_token="<pad>"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    letters = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", padding_side="left")
    args = PPOConfig({out!r}, use_cpu=True, report_to={to!r}, run_name="a run", save_strategy="no", disable_tqdm=True, logging_steps=1, per_device_train_batch_size=8, total_episodes=24,
                     response_length=5, temperature=1.0, num_sample_generations=3, seed=0)
    trainer = PPOTrainer(args, letters, tiny_policy(letters, 0, **SIZES), reward_model=likes_c, train_dataset=Dataset.from_dict(dict(prompt=PROMPTS)), eval_dataset=Dataset.from_dict(dict(prompt=PROMPTS[:5])))
    trainer.train()
    """
)


def report(tmp_path: Path, to: str, **env) -> Path:
    "Run three updates that report to one library; the folder in which it ran."
    program = RUN.format(tests=str(Path(__file__).parent), out=str(tmp_path / "run"), to=to)
    quiet = dict(
        OMP_NUM_THREADS="1",
        HF_HUB_OFFLINE="1",
        DO_NOT_TRACK="1",
        http_proxy="http://127.0.0.1:9",
        https_proxy="http://127.0.0.1:9",
    )  # a door that is shut
    (tmp_path / "program.py").write_text(program)
    done = forks.run(tmp_path / "program.py", folder=tmp_path, **quiet | env)
    assert done.returncode == 0, done.stdout[-3000:]
    return tmp_path


def last_table(tmp_path: Path) -> pd.DataFrame:
    return pd.read_csv(
        tmp_path / "run" / "completions" / "update-00003-sample.csv", keep_default_na=False
    )


# ---- Reporting ----


# catches: metrics that reach only the console, names that lost their group, a table that never
# comes
def test_tensorboard_gets_metrics_and_tables(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    report(tmp_path, "tensorboard", TENSORBOARD_LOGGING_DIR=str(tmp_path / "events"))
    folder = next((tmp_path).rglob("events.out.tfevents*")).parent
    found = EventAccumulator(str(folder)).Reload()
    tags = found.Tags()
    assert {
        "train/objective/kl",
        "train/objective/scores",
        "train/policy/grad_norm",
        "train/sample_score",
    } <= set(tags["scalars"])
    assert [event.step for event in found.Scalars("train/objective/scores")] == [1, 2, 3]
    texts = found.Tensors(next(tag for tag in tags["tensors"] if tag.startswith("completions")))
    said = texts[-1].tensor_proto.string_val[0].decode()
    assert len(texts) == 3
    assert said.splitlines()[0] == "| query | model response | score |"
    assert len(said.splitlines()) == 7
    assert last_table(tmp_path)["query"][2] in said


# catches: a run that needs the network, a table that is not logged, steps that W&B refuses
@pytest.mark.slow
def test_wandb_offline_gets_metrics_and_tables(tmp_path):
    pytest.importorskip("wandb")
    report(
        tmp_path,
        "wandb",
        WANDB_MODE="offline",
        WANDB_DIR=str(tmp_path),
        WANDB_ERROR_REPORTING="false",
        WANDB_SILENT="true",
        WANDB_CONSOLE="off",
    )
    tables = sorted(tmp_path.rglob("completions-sample_*.table.json"))
    assert len(tables) == 3
    content = [json.loads(path.read_text()) for path in tables]
    wanted = last_table(tmp_path)
    assert any(
        table["columns"] == list(wanted.columns)
        and [row[1] for row in table["data"]] == wanted["model response"].tolist()
        for table in content
    )
    stored = b"".join(path.read_bytes() for path in tmp_path.rglob("*.wandb"))
    for name in (b"train/objective/kl", b"train/objective/scores", b"sample/score"):
        assert name in stored or name.split(b"/", 1)[1] in stored


# catches: a sink that is called before it has begun, or in another process than the first
def test_an_evaluation_before_the_training_reports_too(ppo, tmp_path):
    pytest.importorskip("tensorboard")
    assert ppo(report_to="tensorboard").evaluate()["eval_stopped"] >= 0


# ---- The card ----


# catches: a card of a run that was never trained, results that vanish with Trainer's own last log,
# paths and secrets that go out with it
def test_the_card_states_recipe_data_seeds_and_results(ppo, tmp_path):
    trainer = ppo.trained(seed=11, kl_coef=0.07, num_sample_generations=1, hub_token="hf_secret")
    trainer.save_model(str(tmp_path / "saved"))
    card = (tmp_path / "saved" / "README.md").read_text()
    head = yaml.safe_load(card.split("---")[1])
    assert head["library_name"] == "transformers" and "ppo" in head["tags"]
    for line in (
        "| kl_coef | 0.07 |",
        "| seed | 11 (order of the data: 11) |",
        "| training | 24 prompts, columns prompt |",
        "| evaluation | 5 prompts, columns prompt |",
        "| reward: likes_c, weight 1 | a function |",
        "| episode | 24 |",
        f"| objective/scores | {logs(trainer)[-1]['objective/scores']:.4g} |",
        "| sample_score |",
        "| torch |",
        "| batch_size | 8 |",
    ):
        assert line in card, line
    assert "hf_secret" not in card and str(tmp_path) not in card
    ppo.trained(seed=11, kl_coef=0.07).save_model(str(tmp_path / "again"))
    assert (
        next(line for line in card.splitlines() if "sha256" in line)
        in (tmp_path / "again" / "README.md").read_text()
    )
    checkpointed = ppo.trained(save_strategy="steps", save_steps=1, total_episodes=8)
    assert (
        "| kl_coef |"
        in (Path(checkpointed.args.output_dir) / "checkpoint-1" / "README.md").read_text()
    )


# ---- The hub ----


# catches: a night of training before the first word about a hub that is away, or a page of a
# library's own errors
def test_a_hub_that_is_away_is_told_at_the_start(ppo):
    with pytest.raises(ConnectionError, match="hub could not be .* Nothing is lost.*hf auth"):
        ppo(push_to_hub=True, hub_model_id="someone/something")


def found_on_the_hub(self, token=None, private=None):
    self.hub_model_id, self.push_in_progress = "someone/something", None


# catches: a run that dies in its last line because the hub is gone by then
def test_a_hub_that_goes_away_costs_nothing(ppo, monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(Trainer, "init_hf_repo", found_on_the_hub)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    trainer = ppo(
        push_to_hub=True, hub_model_id="someone/something", save_strategy="steps", save_steps=2
    )
    logging.getLogger("rlhf_nb.training.hub").propagate = True
    trainer.train()
    with caplog.at_level("WARNING"):
        trainer.save_model()
    said = [record.getMessage() for record in caplog.records if "not pushed" in record.getMessage()]
    assert len(said) == 1
    assert "training is not affected" in said[0]
    assert (Path(trainer.args.output_dir) / "model.safetensors").is_file()
    assert (Path(trainer.args.output_dir) / "checkpoint-2" / "manifest.json").is_file()
    assert trainer.state.global_step == 3
    with pytest.raises(Exception, match="(?i)offline|reach|connect"):
        trainer.push_to_hub()  # asked by hand, the error is the user's to see


# catches: an upload that is handed the folder under the name it has while it is written
@pytest.mark.parametrize("strategy", ["every_save", "checkpoint", "all_checkpoints"])
def test_a_push_during_training_gets_finished_folders(ppo, monkeypatch, strategy):
    pushed = []

    class Api:
        def upload_folder(self, *, folder_path, **more):
            pushed.append(
                (Path(folder_path).name, sorted(path.name for path in Path(folder_path).iterdir()))
            )
            return type("Done", (), dict(done=lambda self: True, result=lambda self: None))()

    monkeypatch.setattr("transformers.trainer.hf_api", Api)
    monkeypatch.setattr(Trainer, "init_hf_repo", found_on_the_hub)
    trainer = ppo(
        push_to_hub=True,
        hub_model_id="someone/something",
        hub_strategy=strategy,
        save_strategy="steps",
        save_steps=3,
        hub_always_push=True,
    )
    monkeypatch.setattr(trainer, "_finish_current_push", lambda: None)
    trainer.train()
    names = [name for name, _ in pushed]
    assert (
        names == ["run"]
        if strategy == "every_save"
        else names == ["run", "checkpoint-3"] and "manifest.json" in pushed[1][1]
    )
    assert "model.safetensors" in pushed[0][1]
