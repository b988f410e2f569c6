"""Both of two processes: they train, and then do each update again. python replay_worker.py FOLDER.
The wrong programs: a rank that takes another rank's episodes, a shuffle that is not the rank's."""

import os
import sys
from pathlib import Path
from unittest import mock

from datasets import Dataset
from peft import LoraConfig
from small_runs import OF_RANKS, QUIET, SAVED, TOLD, likes_a

import rlhf_nb.trainer
from rlhf_nb.diagnose.replay import Source, replay
from rlhf_nb.rollout import Rollout
from rlhf_nb.trainer import PPOConfig, PPOTrainer
from rlhf_nb.training.model_loading import load_tokenizer

folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
lora = lambda task: LoraConfig(r=2, target_modules=["query_key_value"], task_type=task)


def trained(kind, **parts):
    args = PPOConfig(
        str(folder / kind),
        num_mini_batches=2,
        total_episodes=16,
        normalize_scores=True,
        **QUIET | OF_RANKS | SAVED,
    )
    data = Dataset.from_dict(dict(prompt=TOLD))
    base = str(folder / "base")
    trainer = PPOTrainer(args, load_tokenizer(base), base, None, likes_a, data, **parts)
    trainer.train()
    return trainer


own = rlhf_nb.trainer.mini_batches
for kind in ("plain", "lora"):
    parts = {}
    if kind == "lora":
        parts = dict(peft_config=lora("CAUSAL_LM"), value_peft_config=lora("SEQ_CLS"))
    trainer = trained(kind, **parts)
    for run in (folder / kind, trainer):
        assert replay(run, 1).same
    if kind == "plain":
        first = lambda source, rank, ranks: Rollout.load(source.rollouts[0])
        common = lambda n, epochs, parts, seed: own(n, epochs, parts, seed - rank)
        with mock.patch.object(Source, "rollout", first):
            assert not replay(folder / kind, 1).same
        with mock.patch.object(rlhf_nb.trainer, "mini_batches", common):
            assert not replay(folder / kind, 1).same
if rank == 0:
    print("right: two ranks, replayed", flush=True)
trainer.accelerator.wait_for_everyone()
# All is asserted; gloo's threads now and then abort a process that takes itself apart.
os._exit(0)
