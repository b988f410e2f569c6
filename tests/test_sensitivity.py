"The runs behind the lab on what to tune: what is planned, what is kept, and the one setting that is a class."

from __future__ import annotations

import json
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import sensitivity

RESULTS = BENCHMARKS / "results"


# catches: runs that are kept and were not planned, or lack what the page reads
def test_the_kept_sensitivity_runs():
    found = json.loads((RESULTS / "sensitivity.json").read_text())
    jobs = sensitivity.plan()
    assert len({job.name for job in jobs}) == len(jobs)
    for setting, values in sensitivity.VALUES.items():
        assert 3 <= len(values) <= 5 and sensitivity.RECIPE[setting] in values
    planned = {(job.setting, job.value, job.seed) for job in jobs}
    runs = {(run["setting"], run["value"], run["seed"]) for run in found["runs"]}
    assert runs <= planned and len(runs) == len(found["runs"])
    assert {"torch", "machine", "commit"} <= set(found["environment"]) and found["command"]
    for run in found["runs"]:
        assert [row["temperature"] for row in run["verdict"]] == [0.01, 1.0]
        assert all(row["posts"] == 400 for row in run["verdict"])


# catches: "not whitened" that is whitened, or that leaves the padding in
def test_advantages_that_are_not_whitened(ppo):
    import torch

    trainer = ppo(total_episodes=8)
    rollout = trainer.score(trainer.rollout(next(iter(trainer.get_train_dataloader()))))
    whitened = trainer.advantages(rollout)
    trainer.__class__ = type("Plain", (sensitivity.NotWhitened,), {})
    plain = trainer.advantages(rollout)
    raw = (whitened.returns - whitened.values)[whitened.mask]
    torch.testing.assert_close(plain.advantages[plain.mask], raw)
    torch.testing.assert_close(
        whitened.advantages[whitened.mask], (raw - raw.mean()) / raw.std(), atol=0.3, rtol=0.2
    )
    assert not plain.advantages[~plain.mask].any()
