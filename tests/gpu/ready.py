"""Prints what this machine has for the tests on a real card, and what it lacks.

    python -m tests.gpu.ready          # exit status 1 if a package is missing or torch finds no card
    python -m tests.gpu.ready --quiet  # only "ready", or what is missing

It needs no package itself. The facts are part of the report of a run.
"""

import importlib.util
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable

# name of the module -> what pip installs
NEEDED = {
    "torch": "torch",
    "transformers": "transformers",
    "accelerate": "accelerate",
    "safetensors": "safetensors",
    "tokenizers": "tokenizers",
    "numpy": "numpy",
    "pandas": "pandas",
    "psutil": "psutil",
    "yaml": "pyyaml",
    "filelock": "filelock",
    "pynvml": "nvidia-ml-py",
    "msgspec": "msgspec",
    "pytest": "pytest",
    "pytest_timeout": "pytest-timeout",
    "hypothesis": "hypothesis",
}
GIB = 1 << 30


def missing() -> list[str]:
    """The packages that pip must install here."""
    return [package for name, package in NEEDED.items() if importlib.util.find_spec(name) is None]


def why_not() -> str:
    """Why the tests cannot run with this Python; empty if they can."""
    lacking = missing()
    if lacking:
        return f"{sys.executable} lacks packages.\n  Install them:  pip install {' '.join(lacking)}"
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a CPU build"
    return "" if torch.cuda.is_available() else f"torch {torch.__version__} finds no card"


def _driver() -> str:
    import pynvml

    pynvml.nvmlInit()
    return str(pynvml.nvmlSystemGetDriverVersion())


def _torch() -> str:
    import torch

    return f"{torch.__version__}, CUDA {torch.version.cuda}"


def _exchange() -> str:
    import torch

    if hasattr(torch.UntypedStorage, "_swap_data_ptr_"):
        return "torch's own"
    from gpu_runtime.backends.pytorch.swap import why_not

    return why_not([torch.device("cuda")]) or "ours, since torch is older than 2.12"


def _cards() -> str:
    import torch

    cards = []
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        name = torch.cuda.get_device_name(number)
        cards.append(f"{name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free")
    return "; ".join(cards)


def _own_process() -> str:
    """Whether the driver lists this process under the number that it has here."""
    import pynvml
    import torch

    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    card = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    processes = pynvml.nvmlDeviceGetComputeRunningProcesses(card)
    listed = {process.pid: process.usedGpuMemory for process in processes}
    if os.getpid() not in listed:
        return f"not listed by the driver, which lists {len(listed)}: as in a container"
    size = listed[os.getpid()]
    return "listed without bytes" if size is None else f"listed with {size / GIB:.2f} GiB"


def _room() -> str:
    places = ("/dev/shm", tempfile.gettempdir())
    rooms = [f"{place} {shutil.disk_usage(place).free / GIB:.1f} GiB free" for place in places]
    return ", ".join(rooms)


def _host() -> str:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return f"{os.cpu_count()} processors, {pages / GIB:.1f} GiB of memory"


# The first use of the card takes seconds.
FACTS: dict[str, Callable[[], str]] = {
    "python": lambda: f"{platform.python_version()} on {platform.machine()}",
    "host": _host,
    "room": _room,
    "driver": _driver,
    "torch": _torch,
    "exchange": _exchange,
    "cards": _cards,
    "this process": _own_process,
}


def fact(name: str) -> str:
    """The fact called `name`; if it cannot be read, the error."""
    try:
        return FACTS[name]()
    except Exception as error:  # one fact less must not end the report
        return f"unknown ({type(error).__name__}: {error})"


def main(words: list[str]) -> int:
    why = why_not()
    if "--quiet" in words:
        print(why or "ready")
    elif why:
        print(why)
    else:
        for name in FACTS:
            print(f"{name + ':':14}{fact(name)}", flush=True)
    return bool(why)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
