"The box that says how to make a run again."

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlhf_nb.ui.html import data_table, duration, element, missing_note, safe_text
from rlhf_nb.ui.run_files import read_json

STAGES = ("sft", "pairs", "reward", "ppo")
SAME = ("command", "versions", "commit", "machine", "threads")


def made_of(folder: Path, results: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    "What made each stage, as their manifests and results.json keep it."
    found = {
        stage: read_json(folder / stage / "manifest.json").get("run", {}).get("made")
        for stage in STAGES
    }
    return {k: made for k, made in {**found, "judge": results.get("made")}.items() if made}


def earlier_stages(made: Mapping[str, Mapping[str, Any]], last: str) -> str:
    "The stages that something else made than the one that is shown; empty where there is none."
    parts = []
    for stage, one in made.items():
        if differ := [name for name in SAME if one.get(name) != made[last].get(name)]:
            parts.append(f"{stage} ({one.get('date')}: other {', '.join(differ)})")
    return "; ".join(parts)


def reproduce_section(
    made: Mapping[str, Mapping[str, Any]],  # of `made_of`
    metrics: Iterable[Mapping[str, Any]],  # lines of metrics.jsonl
) -> str:
    "The command, the versions, the commit, the machine, the date and the time."
    if not made:
        return missing_note("This run kept no record of the command, the versions and the machine.")
    last = "ppo" if "ppo" in made else list(made)[-1]
    one = made[last]
    versions = ", ".join(f"{name} {version}" for name, version in one["versions"].items())
    took = {
        line["stage"]: line["seconds"]
        for line in metrics
        if line.get("event") == "done" and "seconds" in line
    }
    rows: list[tuple[str, Any]] = [
        ("Command", element("code", safe_text(one["command"]))),
        ("Versions", versions),
        ("Commit", one.get("commit") or "the installed package: there is no checkout"),
        ("Machine", f"{one['machine']}; threads of torch: {one['threads']}"),
        ("Date", one["date"]),
        ("Time", f"{duration(sum(took.values()))} for all stages" if took else None),
    ]
    if differ := earlier_stages(made, last):
        rows.append(("Made otherwise", differ))
    return data_table("To make this run again", ["What", f"As stage {last} ran"], rows)
