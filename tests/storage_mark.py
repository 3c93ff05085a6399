"""The call that marks a storage so that every access raises an error. CPU builds of torch lack it."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

SOURCE = Path(__file__).with_suffix(".cpp")
NAME = "_set_storage_data_ptr_access_error_msg"


def compiled(directory: Path) -> Callable[[int, str], None]:
    """The call, compiled into `directory`, or torch's own call if this build has it.

    Skips the test if there is no compiler.
    """
    if hasattr(torch._C, NAME):
        return getattr(torch._C, NAME)
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler: this build of torch cannot mark storages")
    library = directory / "storage_mark.so"
    places = [f"-I{place}" for place in cpp_extension.include_paths()]
    home = cpp_extension.library_paths()[0]
    links = [f"-L{home}", "-lc10", f"-Wl,-rpath,{home}"]
    command = [compiler, "-std=c++20", "-O0", "-shared", "-fPIC", *places, str(SOURCE)]
    subprocess.run([*command, "-o", str(library), *links], check=True)
    mark = ctypes.CDLL(str(library)).mark
    mark.argtypes, mark.restype = [ctypes.c_size_t, ctypes.c_char_p], None
    return lambda storage, sentence: mark(storage, sentence.encode())
