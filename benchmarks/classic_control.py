"""Our functions outside of language: PPO on CartPole-v1 and Acrobot-v1 with CleanRL's settings.

    pip install gymnasium==1.4.0
    python benchmarks/classic_control.py                   five seeds each, 100 s of a core each
    python benchmarks/classic_control.py --seeds 1 --steps 20000   does it run? 10 seconds

`train` is a whole PPO in sixty lines, on the package's functions. A row is a piece of an episode:
128 steps of an environment are cut where an episode ends, by its time limit too, and what follows
counts 0, or V of the next state (`bootstrap`) where the 128 steps cut it off. Settings and figures
are those that CleanRL publishes for `ppo.py` (docs.cleanrl.dev/rl-algorithms/ppo), three seeds:
490.04 +- 6.12 and -86.36 +- 1.32: the mean return of a run's last 100 episodes, and of these the
mean and the deviation (divided by n) over the runs.
"""

from __future__ import annotations

import json
import statistics
import time
from multiprocessing import Pool
from pathlib import Path

import common
import torch
from torch import nn
from torch.distributions import Categorical
from torch.nn.utils.rnn import pad_sequence

from rlhf_nb.gae import gae, returns_from
from rlhf_nb.losses import policy_loss, value_loss
from rlhf_nb.masks import whiten

PUBLISHED = {"CartPole-v1": (490.04, 6.12), "Acrobot-v1": (-86.36, 1.32)}
ENVS, LENGTH, EPOCHS, MINI_BATCHES = 4, 128, 4, 4
RATE, GAMMA, LAM, CLIP, ENTROPY, VF, NORM = 2.5e-4, 0.99, 0.95, 0.2, 0.01, 0.5, 0.5


def network(inputs: int, outputs: int, gain: float) -> nn.Sequential:
    "64 and 64 with tanh, orthogonal weights, biases 0."
    layers = [nn.Linear(inputs, 64), nn.Linear(64, 64), nn.Linear(64, outputs)]
    for layer, scale in zip(layers, (2**0.5, 2**0.5, gain)):
        nn.init.orthogonal_(layer.weight, scale)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


def train(world: str, seed: int, steps: int) -> list[tuple[int, float]]:
    "(step, return) of every finished episode."
    import gymnasium

    torch.manual_seed(seed)
    envs = [gymnasium.make(world) for _ in range(ENVS)]
    state = [env.reset(seed=seed * 1000 + i)[0] for i, env in enumerate(envs)]
    inputs, actions = len(state[0]), int(envs[0].action_space.n)
    actor, critic = network(inputs, actions, 0.01), network(inputs, 1, 1.0)
    weights = [*actor.parameters(), *critic.parameters()]
    adam = torch.optim.Adam(weights, lr=RATE, eps=1e-5)
    earned, episodes, updates = [0.0] * ENVS, [], steps // (ENVS * LENGTH)
    for update in range(updates):
        adam.param_groups[0]["lr"] = RATE * (1 - update / updates)
        open_rows: list[list] = [[] for _ in range(ENVS)]
        rows, ends = [], []  # pieces of episodes, and the states behind those that were cut off
        for t in range(LENGTH):
            now = torch.as_tensor([list(s) for s in state], dtype=torch.float32)
            with torch.no_grad():
                chosen = Categorical(logits=actor(now)).sample()
            for i, env in enumerate(envs):
                state[i], reward, terminated, truncated, _ = env.step(int(chosen[i]))
                open_rows[i].append((now[i], chosen[i], reward))
                earned[i] += float(reward)
                if done := terminated or truncated:
                    episodes.append((update * ENVS * LENGTH + ENVS * (t + 1), earned[i]))
                    earned[i], (state[i], _) = 0.0, env.reset()
                if done or t == LENGTH - 1:
                    rows.append(open_rows[i])
                    ends.append(None if done else torch.as_tensor(state[i], dtype=torch.float32))
                    open_rows[i] = []
        states, moves, rewards = (
            pad_sequence([torch.stack([torch.as_tensor(x[k]) for x in row]) for row in rows], True)
            for k in range(3)
        )
        lengths = torch.tensor([[len(row)] for row in rows])
        mask = torch.arange(states.shape[1]) < lengths
        with torch.no_grad():
            values = critic(states)[..., 0]
            old = Categorical(logits=actor(states)).log_prob(moves)
            after = torch.stack([torch.zeros(()) if s is None else critic(s)[0] for s in ends])
        advantages = gae(rewards, values, mask, GAMMA, LAM, bootstrap=after)
        returns = returns_from(advantages, values, mask)
        flat = [x[mask] for x in (states, moves, old, values, advantages, returns)]
        for _ in range(EPOCHS):
            for picked in torch.randperm(ENVS * LENGTH).chunk(MINI_BATCHES):
                s, a, logprobs, v, advantage, target = (x[picked] for x in flat)
                real = torch.ones_like(a, dtype=torch.bool)
                policy = Categorical(logits=actor(s))
                pull = policy_loss(
                    policy.log_prob(a), logprobs, whiten(advantage, real), real, CLIP
                )
                fit = value_loss(critic(s)[:, 0], v, target, real, CLIP)
                loss = (pull + VF * fit - ENTROPY * policy.entropy().sum()) / len(picked)
                adam.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(weights, NORM)
                adam.step()
    return episodes


def last_100(episodes: list[tuple[int, float]]) -> float:
    return statistics.fmean(earned for _, earned in episodes[-100:]) if episodes else float("nan")


def run(world: str, seed: int, steps: int) -> dict:
    "One seed, and what is kept of it: 50 points of the curve, each the mean of 100 episodes."
    torch.set_num_threads(1)
    began = time.perf_counter()
    episodes = train(world, seed, steps)
    at = [steps * (k + 1) // 50 for k in range(50)]
    curve = [round(last_100([x for x in episodes if x[0] <= step]), 2) for step in at]
    kept = dict(last_100=round(last_100(episodes), 2), episodes=len(episodes), curve=curve)
    print(world, seed, kept["last_100"], f"{time.perf_counter() - began:.0f} s", flush=True)
    return dict(world=world, seed=seed, seconds=round(time.perf_counter() - began), **kept)


def main() -> None:
    parser = common.described_parser(__doc__)
    parser.add_argument("--worlds", nargs="+", default=list(PUBLISHED), choices=list(PUBLISHED))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--steps", type=int, default=500_000)
    parser.add_argument("--at_once", type=int, default=2, help="runs side by side")
    parser.add_argument("--output", type=Path, default=common.HERE / "results/classic_control.json")
    args = parser.parse_args()
    if common.installed("gymnasium") is None:
        parser.error("it plays Gymnasium's worlds: pip install gymnasium==1.4.0")
    jobs = [(world, seed, args.steps) for seed in args.seeds for world in args.worlds]
    with Pool(args.at_once) as pool:
        runs = pool.starmap(run, jobs, chunksize=1)
    kept = dict(environment=common.environment(args.at_once > 1), steps=args.steps, runs=runs)
    kept["gymnasium"], kept["published"] = common.installed("gymnasium"), PUBLISHED
    for world in args.worlds:
        ours = [x["last_100"] for x in runs if x["world"] == world]
        mean, spread = statistics.fmean(ours), statistics.pstdev(ours)
        theirs = "{:.2f} +- {:.2f}".format(*PUBLISHED[world])
        print(f"{world}: {mean:.2f} +- {spread:.2f} over {len(ours)} seeds; CleanRL {theirs}")
    if args.steps == 500_000:
        args.output.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
