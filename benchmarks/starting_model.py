"""The fine-tuned model that comes with the package, from which `rlhf-nb demo --quick` starts.

    python benchmarks/starting_model.py    # about seven minutes on one core

It imitates 48,000 posts of the training split six times, with a seed of its own. Which stories
are training, validation or test stories is the same for every seed, so no test post of a later run
is one that it has read. Writes rlhf_nb/cli/starting_model/.
"""

import tempfile
import time
from pathlib import Path

import torch
from common import described_parser

from rlhf_nb.checkpoint import save_policy
from rlhf_nb.cli.demo_run import STARTING_MODEL, DemoSettings
from rlhf_nb.cli.demo_stages import quiet, sft_args, world_of
from rlhf_nb.exercises.museum import train_silently
from rlhf_nb.sft import SFTTrainer
from rlhf_nb.training.model_loading import tiny_policy

SEED = 1000


def main() -> None:
    parser = described_parser(__doc__)
    parser.add_argument("--posts", type=int, default=48_000)
    parser.add_argument("--epochs", type=float, default=6)
    parser.add_argument("--output", type=Path, default=STARTING_MODEL)
    options = parser.parse_args()
    torch.set_num_threads(1)
    start = time.process_time()
    with tempfile.TemporaryDirectory() as folder, quiet():
        settings = DemoSettings(output_dir=folder, seed=SEED, posts=options.posts)
        world, tokenizer = world_of(settings)
        args = sft_args(settings, Path(folder), options.epochs)
        policy = tiny_policy(tokenizer, SEED)
        columns = world["train"].select_columns(["prompt", "completion"])
        train_silently(SFTTrainer(policy, args, columns, processing_class=tokenizer))
        options.output.mkdir(parents=True, exist_ok=True)
        save_policy(policy, tokenizer, options.output)
    size = sum(path.stat().st_size for path in options.output.iterdir())
    print(f"{options.output}: {size:,} bytes after {time.process_time() - start:.0f} s of one core")


if __name__ == "__main__":
    main()
