"""Both of two processes: they train, and then do each update again. python replay_worker.py FOLDER.
The wrong programs: a rank that takes another rank's episodes, a shuffle that is not the rank's."""

import sys
from pathlib import Path
from unittest import mock

from datasets import Dataset
from small_runs import OF_RANKS, SAVED, TOLD, likes_a
from worker_runs import RANK, adapter, arguments, leave

import rlhf_nb.trainer
from rlhf_nb.diagnose.replay import Source, replay
from rlhf_nb.rollout import Rollout
from rlhf_nb.trainer import PPOConfig, PPOTrainer
from rlhf_nb.training.model_loading import load_tokenizer

folder = Path(sys.argv[1])


def trained(kind, **parts):
    how = dict(num_mini_batches=2, total_episodes=16, normalize_scores=True)
    args = arguments(PPOConfig, folder / kind, **OF_RANKS | SAVED | how)
    data = Dataset.from_dict(dict(prompt=TOLD))
    base = str(folder / "base")
    trainer = PPOTrainer(args, load_tokenizer(base), base, None, likes_a, data, **parts)
    trainer.train()
    return trainer


own = rlhf_nb.trainer.mini_batches
for kind in ("plain", "lora"):
    parts = {}
    if kind == "lora":
        parts = dict(peft_config=adapter("CAUSAL_LM"), value_peft_config=adapter("SEQ_CLS"))
    trainer = trained(kind, **parts)
    for run in (folder / kind, trainer):
        assert replay(run, 1).same
    if kind == "plain":
        first = lambda source, rank, ranks: Rollout.load(source.rollouts[0])
        common = lambda n, epochs, parts, seed: own(n, epochs, parts, seed - RANK)
        with mock.patch.object(Source, "rollout", first):
            assert not replay(folder / kind, 1).same
        with mock.patch.object(rlhf_nb.trainer, "mini_batches", common):
            assert not replay(folder / kind, 1).same
leave("right: two ranks, replayed")
