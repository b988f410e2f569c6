"""What the tests of the training share: one thread, no network, a small world, and models too small
to wait for."""

from __future__ import annotations

import copy
import gc
import os
import random
import sys

for name, value in dict(
    OMP_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    HF_DATASETS_DISABLE_PROGRESS_BARS="1",
    MPLBACKEND="Agg",
).items():
    os.environ.setdefault(name, value)

import pytest

# What DeepSpeed compiles is kept: `make dev` compiles it, any first run does where that was not.
if sys.prefix != sys.base_prefix:
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", os.path.join(sys.prefix, "torch_extensions"))

# A quarter of a minute or more each, the longest first (`--durations=0` tells), and what is long among
# the slow. They begin, so that at the end no worker waits for one of them; the Makefile keeps this
# order (--no-loadscope-reorder).
LONG = """test_docs test_kept_explorers test_preflight_bugs test_checks test_trained
test_published_faults test_two_processes test_killed test_preflight_healthy test_pages test_trimming
test_engines test_replay test_cli test_trainer test_memory test_demo test_token_rewards test_write_the_loop test_estimators
test_docstrings test_your_own test_preflight test_resume test_sft test_dashboard test_evaluate
test_scripts test_package test_adapters test_two_processes_killed test_reward test_recipes_launch
test_two_processes_supervised test_network test_two_processes_parts""".split()
# A test that uses one of these is slow: the site takes a minute and a half to build.
SLOW_FIXTURES = {"builds"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))
    for item in items:
        if SLOW_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.slow)
    gc.freeze()  # what the files imported; import_and_freeze in forks.py says why


@pytest.fixture(scope="session")
def world():
    "160 posts to train on and a few held out."
    from rlhf_nb.world import mini_tldr

    return mini_tldr(0, 160, 20, 40)


@pytest.fixture(scope="session")
def tokenizer(world):
    from rlhf_nb.training.model_loading import train_tokenizer

    return train_tokenizer(
        p + c for p, c in zip(world["train"]["prompt"], world["train"]["completion"])
    )


@pytest.fixture(scope="session")
def tiny(tokenizer):
    "Makes a policy of one layer: `tiny(seed)`."
    from rlhf_nb.training.model_loading import tiny_policy

    def make(seed: int = 0, **sizes):
        return tiny_policy(
            tokenizer,
            seed,
            **dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2) | sizes,
        )

    return make


@pytest.fixture
def small_args(tmp_path):
    "Of a run on the CPU without reports and saves: `small_args(SFTConfig, max_steps=1)`."

    def make(config, **changes):
        from small_runs import QUIET

        own = dict(output_dir=str(tmp_path / "run"), save_strategy="no")
        return config(**QUIET | own | changes)

    return make


@pytest.fixture(scope="session")
def letters():
    "A tokenizer of single letters: <pad> is 0, <eos> is 1, a to j are 2 to 11."
    from small_models import letter_tokenizer

    return letter_tokenizer("abcdefghij")


@pytest.fixture
def padded_outside(letters):
    "As of Llama 3: a tokenizer whose pad id, 12, is one beyond the 12 rows of every model here."
    tokenizer = copy.deepcopy(letters)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    assert tokenizer.pad_token_id == 12
    return tokenizer


@pytest.fixture(scope="session")
def imports():
    from forks import import_and_freeze

    import_and_freeze()


@pytest.fixture
def ppo(letters, small_args, imports):
    """Makes a trainer: `ppo(reward, data=, model=, kind=, parts=, ...settings)`; `ppo.trained(...)`
    trains it too. One update is 8 rows, 5 tokens each, read twice; a third of the rows stop."""
    from datasets import Dataset
    from ppo_fixtures import PROMPTS, SIZES
    from small_runs import RUN, likes_c

    from rlhf_nb.trainer import PPOConfig, PPOTrainer
    from rlhf_nb.training.model_loading import tiny_policy

    def make(reward=likes_c, *, data=None, model=None, kind=PPOTrainer, parts=None, **changes):
        settings = RUN | dict(total_episodes=24, num_ppo_epochs=2)
        args = small_args(PPOConfig, **settings | changes)
        data = Dataset.from_dict(dict(prompt=PROMPTS)) if data is None else data
        parts = dict(
            processing_class=letters, eval_dataset=Dataset.from_dict(dict(prompt=PROMPTS[:5]))
        ) | (parts or {})
        return kind(
            args,
            model=model or tiny_policy(letters, 0, **SIZES),
            reward_model=reward,
            train_dataset=data,
            **parts,
        )

    def trained(*given, **how):
        trainer = make(*given, **how)
        trainer.train()
        return trainer

    make.trained = trained
    return make


@pytest.fixture
def steps():
    "Optimizer steps, as torch counts them."
    from torch.optim.optimizer import register_optimizer_step_post_hook

    seen = []
    handle = register_optimizer_step_post_hook(lambda optimizer, *_: seen.append(optimizer))
    yield seen
    handle.remove()


@pytest.fixture(scope="module")
def seed() -> int:
    "Another one each time; a failure prints it."
    drawn = random.SystemRandom().getrandbits(31)
    print(f"seed {drawn}")
    return drawn
