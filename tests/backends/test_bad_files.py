"""Files of models that never end, are too large or nest too deep: one sentence each, in a process of 300 MiB."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny_models

MOST_BYTES = 300 * 2**20
DEEP = b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
SMALL = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def header(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def gguf(tensors: int, pairs: list[bytes], rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, len(pairs)) + b"".join(pairs) + rest


def huge(directory: Path, name: str, start: bytes) -> Path:
    """A terabyte, of which only the `start` is on the disk."""
    with (directory / name).open("wb") as file:
        file.write(start)
        file.truncate(10**12)
    return directory


def folder(directory: Path, **files: bytes) -> Path:
    for name, data in {"config_json": json.dumps(SMALL).encode(), **files}.items():
        (directory / name.replace("_json", ".json").replace("_st", ".safetensors")).write_bytes(
            data
        )
    return directory


def linked(directory: Path, name: str, target: str = "/dev/zero") -> Path:
    """A file that is a link to the `target`, or a pipe without one."""
    path = folder(directory) / name
    path.unlink(missing_ok=True)
    path.symlink_to(target) if target else os.mkfifo(path)
    return directory


def changed(directory: Path, file: str = "config.json", **fields: object) -> Path:
    tiny_models.causal_lm(directory)
    config = json.loads((directory / file).read_text())
    (directory / file).write_text(json.dumps({**config, **fields}))
    return directory


def file(directory: Path, name: str, data: bytes) -> Path:
    (directory / name).write_bytes(data)
    return directory / name


LIST = struct.pack("<I", 9)  # the metadata type of a list
LAYERS = string(b"llama.block_count") + struct.pack("<II", 4, 10**9)
LLAMA = string(b"general.architecture") + struct.pack("<I", 8) + string(b"llama")
TENSOR = string(b"t") + struct.pack("<IIQ", 0, 0, 0)


def empty_strings(n: int) -> bytes:
    """An entry whose value is a list of a million empty strings."""
    return string(b"k%d" % n) + LIST + struct.pack("<IQ", 8, 10**6) + bytes(8 * 10**6)


BAD = {  # name -> makes it in a directory, and returns the source
    "weights that never end": lambda d: linked(d, "model.safetensors"),
    "a config that never ends": lambda d: linked(d, "config.json"),
    "an index that never ends": lambda d: linked(d, "model.safetensors.index.json"),
    "a tokenizer that never ends": lambda d: linked(tiny_models.causal_lm(d), "tokenizer.json"),
    "weights from a pipe": lambda d: linked(d, "model.safetensors", ""),
    "a config from a pipe": lambda d: linked(d, "config.json", ""),
    "a terabyte of config": lambda d: huge(folder(d), "config.json", b"{"),
    "a terabyte of tokenizer": lambda d: huge(tiny_models.causal_lm(d), "tokenizer.json", b"{"),
    "a large header": lambda d: huge(folder(d), "model.safetensors", struct.pack("<Q", 90 * 2**20)),
    "a deep config": lambda d: folder(d, config_json=DEEP, model_st=header(b"{}")),
    "a deep index": lambda d: folder(d, **{"model.safetensors.index_json": DEEP}),
    "a deep header": lambda d: folder(d, model_st=header(DEEP)),
    "a header of empty lists": lambda d: folder(
        d, model_st=header(b'{"a":[' + b"[]," * 5_000_000 + b"[]]}")
    ),
    "a number of a million digits": lambda d: folder(
        d, config_json=b'{"a":' + b"9" * 10**6 + b"}", model_st=header(b"{}")
    ),
    "a billion layers": lambda d: changed(d, num_hidden_layers=10**9),
    "a billion labels": lambda d: changed(d, num_labels=10**9),
    "a billion layers below": lambda d: changed(d, text_config={"num_hidden_layers": 10**9}),
    "a GGUF file that never ends": lambda d: linked(d, "m.gguf") / "m.gguf",
    "a million tensors": lambda d: file(d, "m.gguf", gguf(10**6, [], TENSOR * 10**6)),
    "a billion layers in GGUF": lambda d: file(d, "m.gguf", gguf(0, [LLAMA, LAYERS])),
    "lists of empty strings": lambda d: file(
        d, "m.gguf", gguf(0, [empty_strings(n) for n in range(7)])
    ),
}
TRIED = """
import json, os, resource, sys
import torch, transformers
from gpu_runtime import GpuError, Runtime

def highest():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def told_of(source):
    rt = Runtime(devices="sim:1GiB,host:1GiB", ledger="memory:")
    before, told = highest(), []
    for act in (lambda: rt.plan(source), lambda: rt.register("m", source), lambda: rt.preload("m")):
        try:
            act()
        except GpuError as error:
            told.append(" ".join(str(error).split()))
    return told, highest() - before

for name, source in json.loads(sys.argv[1]).items():
    child = os.fork()
    if not child:
        print(json.dumps([name, *told_of(source)]), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """For each bad file its path, what was said about it, and the bytes of memory that it took."""
    places = {name: tmp_path_factory.mktemp("bad") for name in BAD}
    sources = {name: str(make(places[name])) for name, make in BAD.items()}
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path_factory.mktemp("state"))}
    words = [sys.executable, "-c", TRIED, json.dumps(sources)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {name: (places[name], told, more) for name, told, more in lines}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.processes
def test_a_bad_file_is_one_sentence_and_takes_little_memory(found, name):
    """`plan` read 12 GB of such a file, and others held a server until it was killed."""
    place, told, more = found[name]
    assert any(str(place) in line for line in told), told
    assert more < MOST_BYTES, more
