"""Parking on real older releases of torch, each in an environment of its own.

`make old-torch` makes the environments and runs this file.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[2]
RELEASES = ("2.4.1", "2.6.0", "2.8.0", "2.11.0", "2.12.1")
# What uses the exchange, what a graph saved, the guards, and who refers to a tensor.
FILES = (
    "backends/test_old_torch.py", "backends/test_exchange_proof.py", "backends/test_search.py",
    "backends/test_swap.py", "backends/test_kernel_memory.py", "backends/test_parked_programs.py",
    "owner/test_kernel.py", "owner/test_real_models.py", "owner/test_training.py",
    "owner/test_parts.py", "owner/test_unknown_torch.py",
)  # fmt: skip


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("release", RELEASES)
def test_what_is_parked_comes_back_on_an_older_torch(release):
    python = HERE / ".venv-old-torch" / release / "bin" / "python"
    if not python.with_name("ready").exists():
        pytest.skip(f"the environment of torch {release} is not made: make old-torch")
    places = [str(HERE), str(HERE / "kernel_ext"), str(HERE / "panels")]
    command = [str(python), "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-m", "not soak"]
    done = subprocess.run(
        [*command, *(f"tests/{name}" for name in FILES)],
        cwd=HERE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    sys.stdout.write(done.stdout)
    assert done.returncode == 0, done.stdout[-3000:]
