"""Makes the operators of torchvision run beside torch for CPUs, in the environment that runs this file.

    python tests/frameworks/torchvision_for_cpus.py

Package indexes have torchvision only for CUDA. Its operators for CPUs are in the same file as those for CUDA, and that
file is linked to three libraries of CUDA. So three libraries of the same names are built, whose functions do nothing.
The file's search path, which leads to no folder, is replaced by the file's own folder.
"""

import re
import subprocess
import tempfile
from importlib.metadata import distribution
from pathlib import Path

import torch

LIBRARIES = ("libcudart.so.13", "libc10_cuda.so", "libtorch_cuda.so")


def main() -> None:
    operators = Path(str(distribution("torchvision").locate_file("torchvision/_C.so")))
    listed = subprocess.run(
        ["nm", "-D", "--undefined-only", operators], check=True, capture_output=True, text=True
    )
    missing = sorted(set(re.findall(r" U (\w*cuda\w*)", listed.stdout)))
    if torch.version.cuda or not missing:
        return
    functions = (
        f'long f{number}(void) __asm__("{name}"); long f{number}(void) {{ return 0; }}\n'
        for number, name in enumerate(missing)
    )
    with tempfile.TemporaryDirectory() as place:
        source, version = Path(place) / "functions.c", Path(place) / "version"
        source.write_text("".join(functions))
        for name in LIBRARIES:
            version.write_text(f"{name} {{ *; }};\n")
            built = ["-shared", "-fPIC", "-o", str(operators.with_name(name)), str(source)]
            linked = [f"-Wl,-soname,{name}", f"-Wl,--version-script={version}"]
            subprocess.run(["cc", *built, *linked], check=True)
    content = operators.read_bytes()
    if path := re.search(rb"\x00(/__w/[^\x00]*/lib)\x00", content):
        operators.write_bytes(content.replace(path[1], b"$ORIGIN".ljust(len(path[1]), b"\0"), 1))


if __name__ == "__main__":
    main()
