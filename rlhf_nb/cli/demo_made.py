"On what a run of the demo was made: versions, commit, machine and date."

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1]


def commit_of(package: Path = PACKAGE) -> str | None:
    "The commit of the checkout that the package runs from; None where it was installed."
    root = package.parent
    if not (root / ".git").exists():
        return None
    ask = ["git", "-C", str(root)]
    try:
        head = subprocess.run(
            [*ask, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, timeout=10
        )
        changed = subprocess.run(
            [*ask, "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):  # no git here
        return None
    if head.returncode or changed.returncode:
        return None
    return head.stdout.strip() + (", with local changes" if changed.stdout.strip() else "")


def processor() -> str:
    "The name of the CPU, where the system gives one."
    path = Path("/proc/cpuinfo")
    if path.is_file():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def threads_of_torch() -> int:
    "How many it takes now."
    import torch

    return torch.get_num_threads()


def made_by(
    command: str,  # what one types
) -> dict[str, Any]:
    "What makes a stage, and when. It adds no folder, no user and no host to the command."
    from rlhf_nb.training.reporting import software

    versions: Mapping[str, str] = {**software(), "python": platform.python_version()}
    return dict(
        command=command,
        versions=dict(versions),
        commit=commit_of(),
        machine=f"{processor()}, {os.cpu_count()} CPUs, {platform.system()} {platform.machine()}",
        threads=threads_of_torch(),
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )
