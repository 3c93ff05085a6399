"""The tests of the PyTorch backends pass while a mode of the user's is open at each call."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = (
    "test_contract.py test_kernel_memory.py test_parts.py test_several_devices.py test_shadows.py "
    "test_swap.py test_torch_backend.py test_transformers_backend.py"
)


MODES = ["set_default_device", "set_default_dtype", "inference_mode", "deterministic"]


@pytest.mark.soak
@pytest.mark.parametrize("mode", [*MODES, "function mode", "dispatch mode"])
def test_the_backends_pass_all_their_tests_in_each_mode_of_the_user(mode):
    """See `users_mode` in conftest.py, which opens the mode. It takes a minute for each mode."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "--timeout=600"]
    command += ["-m", "not processes and not soak", "--hypothesis-profile=quick"]
    command += ["-k", "not llama_cpp and not llama-server"]
    command += [HERE / name for name in FILES.split()]
    environment = {**os.environ, "BACKENDS_IN_MODE": mode}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
