"""Bytes from outside, changed at random so that they reach new lines: only errors of our own, no hang, little memory.

python -m tests.core.test_fuzz TARGET DIRECTORY [options of libFuzzer]     (DIRECTORY/inputs are kept)
FUZZ_MINUTES is how long `make soak` fuzzes each target.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import soak

PARTS = b"\0--\0"  # separates the parts of an input
DEEP, DEEP_JSON = b"\x91" * 3000, b'{"cells":' + b"[" * 3000  # MessagePack and JSON
Try = Callable[[bytes], object]


def _parts(data: bytes, count: int) -> list[bytes]:
    return [*data.split(PARTS, count - 1), *[b""] * count][:count]


def frames(directory: Path, ends: contextlib.ExitStack) -> tuple[Try, list[bytes]]:
    """Messages of a client: as they are, or after a greeting. The keeper then serves the next client."""
    from msgspec import Raw

    from gpu_runtime.facts import Section, Ticket
    from gpu_runtime.ledgers.keeper import core, server, wire
    from gpu_runtime.ledgers.liveness import describe_self
    from gpu_runtime.ledgers.pieces import Part, Shared, State, encode

    me, kept = describe_self(), directory / "kept"
    kept.mkdir()
    one = server.Server(kept, ends.enter_context(server.locked(kept)))
    ends.callback(one._memory.close)
    ends.callback(one._selector.close)
    ends.callback(one._listening.close)
    greeting = wire.frame(encode(core.Hello(1, core.PROTOCOL, "", me, b"secret")))

    def connected(data: bytes) -> bytes:
        """What the keeper sends to a client that sends `data` and hangs up."""
        ours, theirs = socket.socketpair()
        with ours:
            theirs.setblocking(False)
            one._next_number += 1
            connection = server._Connection(theirs, one._next_number)
            one._connections[connection.number] = connection
            one._selector.register(theirs, server.selectors.EVENT_READ, connection)
            ours.sendall(data)
            ours.shutdown(socket.SHUT_WR)
            while connection.number in one._connections:
                one._read(connection)
            one.pass_time(time.monotonic())
            return ours.recv(1 << 16)

    def act(data: bytes) -> None:
        is_greeted, *messages = data.split(PARTS)
        connected(greeting + b"".join(map(wire.frame, messages)) if is_greeted == b"G" else data)
        assert connected(greeting), "the keeper serves nobody any more"
        for id in list(one._ends):
            one._end(id)
        one._unseen.clear()
        one._keeper, one._published = core.Keeper(), 0

    part = Raw(encode(Part(Section(me), (Ticket("k", me.id, "use", "m", 1.0, 1.0),), 1)))
    messages: list[core.Request] = [
        core.Hello(1, core.PROTOCOL, "", me, b"x", True, True, True),
        core.Put(2, 2, part, ("k",), Raw(encode(Shared())), ("1.1.1",), ("2.2.2",)),
        core.Pass(2),
        core.Keep(3, "maps", b"x", "1.1.1", True),
        core.Fetch(4, "silences", "1.1.1"),
        core.Ring(5, (me.id,)),
        core.Sign(6),
        core.Leave(7),
    ]
    encoded = [encode(one) for one in messages]
    whole = [greeting, wire.frame(encode(State({}, (), ())))]
    alone = [PARTS.join([b"G", one]) for one in [*encoded, b"\x94\xa4Pass\x01" + DEEP]]
    return act, [*whole, *alone, PARTS.join([b"G", *encoded])]


def _plans(ends: contextlib.ExitStack) -> Callable[[Path], None]:
    """What somebody does with a file of a model: it is planned and registered."""
    from gpu_runtime import GpuError, Runtime

    rt = ends.enter_context(Runtime(devices="sim:1GiB,host:1GiB", ledger="memory:", monitor=False))

    def act(source: Path) -> None:
        for deed in (lambda: rt.plan(str(source)), lambda: rt.register("m", str(source))):
            with contextlib.suppress(GpuError):
                deed()

    return act


def _names(directory: Path) -> Iterator[Path]:
    """New names: a header is not read again as long as the file has its name, time and size."""
    number = 0
    while True:
        number += 1
        yield directory / f"{number}"


def gguf(directory: Path, ends: contextlib.ExitStack) -> tuple[Try, list[bytes]]:
    """A model of llama.cpp: its header is read, and its size estimated."""
    act, names = _plans(ends), _names(directory)

    def planned(data: bytes) -> None:
        file = next(names).with_suffix(".gguf")
        file.write_bytes(data)
        act(file)
        file.unlink()

    def text(words: str) -> bytes:
        return struct.pack("<Q", len(words)) + words.encode()

    numbers = ("block_count", "embedding_length", "attention.head_count", "context_length")
    pairs = [text("general.architecture") + struct.pack("<I", 8) + text("llama")]
    pairs += [text(f"llama.{name}") + struct.pack("<II", 4, 2) for name in numbers]
    pairs.append(text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 1) + text("a"))
    pairs.append(text("llama.attention.head_count_kv") + struct.pack("<IIQII", 9, 4, 2, 1, 1))
    tensor = text("t") + struct.pack("<IQQIQ", 2, 32, 1, 2, 0)
    whole = struct.pack("<4sIQQ", b"GGUF", 3, 1, len(pairs)) + b"".join([*pairs, tensor])
    return planned, [whole + bytes(-len(whole) % 32 + 18), b"GGUF" + struct.pack("<I", 4)]


def safetensors(directory: Path, ends: contextlib.ExitStack) -> tuple[Try, list[bytes]]:
    """A model in a directory: its config, the header of its weights, the index, the list of its modules."""
    act, names = _plans(ends), _names(directory)
    files = ("config.json", "model.safetensors.index.json", "modules.json")

    def planned(data: bytes) -> None:
        folder = next(names)
        folder.mkdir()
        header, rest, *others = _parts(data, 5)
        for name, content in zip(files, others, strict=True):
            if content:
                (folder / name).write_bytes(content)
        weights = folder / "model.safetensors"
        weights.write_bytes(struct.pack("<Q", len(header)) + header + rest)
        if others[1]:
            weights.rename(folder / "a.safetensors")
        act(folder)
        shutil.rmtree(folder)

    header = b'{"t":{"dtype":"F16","shape":[2,2],"data_offsets":[0,8]},"__metadata__":{"a":"b"}}'
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "vocab_size": 2,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "torch_dtype": "float16",
        "text_config": {"sliding_window": 4, "layer_types": ["full_attention"]}, "intermediate_size": 8,
    }  # fmt: skip
    index = b'{"weight_map":{"t":"a.safetensors"}}'
    modules = b'[{"idx":0,"name":"0","path":"","type":"sentence_transformers.models.Transformer"}]'
    written = json.dumps(config).encode()
    return planned, [
        PARTS.join([header, bytes(8), written]),
        PARTS.join([header, bytes(8), written, index, modules]),
        PARTS.join([DEEP_JSON, b"", written]),
        PARTS.join([header, bytes(8), DEEP_JSON, DEEP_JSON, DEEP_JSON]),
    ]


def catalogue(directory: Path, ends: contextlib.ExitStack) -> tuple[Try, list[bytes]]:
    """A file of models, written by hand: it is applied, listed, inspected, and read again."""
    from gpu_runtime import GpuError
    from gpu_runtime.catalog.files import Catalog
    from gpu_runtime.settings import Settings

    names = _names(directory)

    def act(data: bytes) -> None:
        kind, text = (".json", data[1:]) if data[:1] == b"J" else (".yaml", data)
        place = next(names)
        place.mkdir()
        (file := place / f"models{kind}").write_bytes(text)
        catalog = Catalog(Settings(gpu_catalog=str(place / "kept")))
        with contextlib.suppress(GpuError):
            catalog.apply(file)
            for spec in catalog.specs():
                catalog.inspect(spec.name, "yaml")
        with contextlib.suppress(GpuError):
            Catalog(Settings(gpu_catalog=str(file))).specs()
        shutil.rmtree(place)

    resource = b"""apiVersion: model.aispec.org/v1alpha1
kind: Model
metadata: {name: qwen3:8b}
spec: {memory: 10GB, runtime: vllm, context_length: 8k, concurrency: 2, args: [--tp, "2"], gpus: [0]}
"""
    mapping = (
        b"models:\n  phi: &a\n    path: phi.gguf\n    gpu_layers: -1\n  two: {<<: *a, memory: 1}\n"
    )
    rows = b"J" + json.dumps({"models": [{"name": "m", "memory": 4, "runtime": "ollama"}]}).encode()
    return act, [resource, mapping, rows, b"J" + DEEP_JSON, DEEP_JSON]


def bodies(directory: Path, ends: contextlib.ExitStack) -> tuple[Try, list[bytes]]:
    """A request to `gpu serve`: the body of an example, with values replaced by parts of the input, or as it is."""
    from gpu_runtime.serving.api.app import application
    from tests.serving.app_client import OPERATOR, Exchange, with_visitor
    from tests.serving.harness import Harness
    from tests.serving.test_wrong_bodies import BODIES, TEMPLATE

    loop = asyncio.new_event_loop()
    made = Harness(qwen=4, options={"qwen": {"chat_template": TEMPLATE}})
    ends.callback(loop.close)
    ends.callback(made.rt.close)
    ends.callback(lambda: loop.run_until_complete(made.gateway.close()))
    app = with_visitor(application(made.rt, lambda: made.gateway), OPERATOR)
    paths = list(BODIES)

    async def status_of(path: str, body: bytes) -> int:
        there = Exchange(made.rt, made.gateway, path, body, app=app)
        await asyncio.wait_for(there.done, 20)
        return there.status

    def places(body: Any) -> Iterator[tuple[Any, Any]]:
        keys = range(len(body)) if isinstance(body, list) else list(body)
        for key in keys:
            yield body, key
            if isinstance(body[key], (list, dict)) and body[key]:
                yield from places(body[key])

    def act(data: bytes) -> None:
        path = paths[data[0] % len(paths) if data else 0]
        if data[1:2] == b"R":
            body = data[2:]
        else:
            example = json.loads(json.dumps({"model": "qwen", **BODIES[path]}))
            for change in data[1:].split(PARTS):
                found = list(places(example))
                if change and found:
                    holder, key = found[change[0] % len(found)]
                    try:
                        holder[key] = json.loads(change[1:])
                    except (ValueError, RecursionError):
                        holder[key] = change[1:].decode(errors="replace")
            body = json.dumps(example).encode()
        status = loop.run_until_complete(status_of(path, body))
        assert 200 <= status < 500, f"{status} for {body!r}"
        assert all(one.failures == 0 for one in made.gateway.state().breakers.values())

    whole = [
        bytes([number]) + b"R" + json.dumps({"model": "qwen", **BODIES[path]}).encode()
        for number, path in enumerate(paths)
    ]
    changed = [bytes([number]) + PARTS.join([b"\0null", b"\5[{}]"]) for number in range(len(paths))]
    return act, [*whole, *changed, b"\0R" + DEEP_JSON]


def notebook(directory: Path, ends: contextlib.ExitStack) -> tuple[Try, list[bytes]]:
    """The file of a notebook whose next cells are read ahead: as it is, or with the input as the code of cells."""
    from gpu.look_ahead import Scan, code_cells

    file = directory / "a.ipynb"

    def act(data: bytes) -> None:
        if data[:1] != b"{":
            texts = data.decode(errors="replace").split(PARTS.decode())
            cells = [{"cell_type": "code", "source": text} for text in texts]
            data = json.dumps({"cells": cells}).encode()
        file.write_bytes(data)
        scan = Scan(["qwen", "phi"], {"name": "qwen", "some": ["phi", 1], "many": {"a": "qwen"}})
        for cell in code_cells(str(file)):
            scan.read(cell.code)

    code = [
        b"with rt.use('qwen') as m, rt.use(name): m(1)",
        b"%gpu load qwen\n%%time\nfor n in sorted(some): rt.preload(n)",
        b"def f(a, *b, **c):\n    return [rt.use(x) for x in a if (y := x)]\nf(['phi'])",
        b"async def g():\n    match name:\n        case {'a': x, **y}: await rt.load(x)\n!ls\nx = %gpu who\n?x",
    ]
    cell = {"cell_type": "code", "id": "a", "source": ["x = 1\n", "rt.use('phi')"], "outputs": []}
    file_of_one = json.dumps({"cells": [cell], "metadata": {}}).encode()
    return act, [file_of_one, *code, PARTS.join(code), DEEP_JSON]


TARGETS = {one.__name__: one for one in (frames, gguf, safetensors, catalogue, bodies, notebook)}


@pytest.mark.parametrize("target", TARGETS)
def test_known_inputs_are_answered_or_refused(target, tmp_path):
    with contextlib.ExitStack() as ends:
        act, seeds = TARGETS[target](tmp_path, ends)
        for data in [*seeds, b""]:
            act(data)


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("target", TARGETS)
def test_fuzz(target, tmp_path):
    """A crash, an input of 60 s, or 2 GiB of memory ends the run; libFuzzer then prints the input."""
    pytest.importorskip("atheris")
    seconds = round(60 * float(os.environ.get("FUZZ_MINUTES", "10")))
    module = [sys.executable, "-m", "tests.core.test_fuzz", target, str(tmp_path)]
    command = [*module, f"-max_total_time={seconds}"]
    ran = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert ran.returncode == 0, f"{ran.stdout[-3000:]}\n{ran.stderr[-5000:]}"
    inputs = next(
        int(line.split()[1]) for line in ran.stderr.splitlines() if line.startswith("Done ")
    )
    soak.add("none", **{f"inputs of the fuzzer for {target}": inputs})


def main() -> None:
    """Fuzzes one target until libFuzzer ends the process."""
    import atheris

    target, directory, *options = sys.argv[1:]
    inputs, scratch = Path(directory, "inputs"), Path(directory, "scratch")
    inputs.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    with atheris.instrument_imports(include=["gpu_runtime", "gpu", "yaml"]):
        act, seeds = TARGETS[target](scratch, contextlib.ExitStack())
    for number, seed in enumerate(seeds):
        (inputs / f"seed-{number}").write_bytes(seed)
    usual = ["-timeout=60", "-rss_limit_mb=2048", "-max_len=4096", f"-artifact_prefix={directory}/"]
    atheris.Setup([target, *usual, *options, str(inputs)], lambda data: act(bytes(data)))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
