"""The call that marks a storage so that every access raises an error. CPU builds of torch lack it."""

import ctypes
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

NAME = "_set_storage_data_ptr_access_error_msg"


def compiled() -> Callable[[int, str], None]:
    """The call, or torch's own call if this build has it. Skips the test if there is no compiler."""
    if hasattr(torch._C, NAME):
        return getattr(torch._C, NAME)
    try:
        mark = ctypes.CDLL(str(library("storage_mark"))).mark
    except FileNotFoundError:
        pytest.skip("needs a C++ compiler: this build of torch cannot mark storages")
    except subprocess.CalledProcessError:
        if torch.__version__ >= "2.6":
            raise
        pytest.skip("the storages of torch 2.4 and 2.5 cannot be marked")
    mark.argtypes, mark.restype = [ctypes.c_size_t, ctypes.c_char_p], None
    return lambda storage, sentence: mark(storage, sentence.encode())


def library(name: str) -> Path:
    """The path of the library that is compiled from the file `name`.cpp in this directory.

    Compiling takes 1.3 s of the processor. So the library is kept, like a compiled module, until the
    source or torch changes. Raises FileNotFoundError if there is no compiler.
    """
    source = Path(__file__).with_name(f"{name}.cpp")
    flags = os.environ.get("CXXFLAGS", "")
    parts = source.read_bytes(), torch.__version__.encode(), flags.encode()
    key = hashlib.sha256(b"".join(parts)).hexdigest()[:16]
    made = source.parent / "__pycache__" / f"{name}.{key}.so"
    if not made.exists():
        _compile(source, made, flags)
    return made


def _compile(source: Path, library: Path, flags: str) -> None:
    from torch.utils import cpp_extension

    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise FileNotFoundError("there is no C++ compiler: install g++")
    places = [f"-I{place}" for place in cpp_extension.include_paths()]
    home = cpp_extension.library_paths()[0]
    links = [f"-L{home}", "-lc10", f"-Wl,-rpath,{home}"]
    command = [
        compiler,
        "-std=c++20",
        "-O0",
        "-shared",
        "-fPIC",
        *flags.split(),
        *places,
        str(source),
    ]
    library.parent.mkdir(exist_ok=True)
    draft = library.with_suffix(f".{os.getpid()}")
    subprocess.run([*command, "-o", str(draft), *links], check=True)
    draft.replace(library)  # another worker may load the library now
