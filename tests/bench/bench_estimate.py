"""Measures the estimate of a 70B model's footprint from files that are not in the page cache.

The files have real headers, and holes in place of weights. Before each round the files are dropped from the cache
(`POSIX_FADV_DONTNEED`). Directory entries stay cached.
"""

import json
import math
import os
import struct
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from gpu_runtime.backends.formats import sources
from gpu_runtime.estimation import footprint

from .results import Row
from .timing import medians, seconds

LAYERS, HIDDEN, INNER, KV, VOCABULARY, SHARDS = 80, 8192, 28672, 1024, 128256, 30  # Llama 3 70B
CONFIG = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", num_hidden_layers=LAYERS,
    hidden_size=HIDDEN, intermediate_size=INNER, num_attention_heads=64, num_key_value_heads=8,
    vocab_size=VOCABULARY, max_position_embeddings=131072, torch_dtype="bfloat16",
)  # fmt: skip
WEIGHT_BYTES = 2 * (
    LAYERS * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * KV + 3 * HIDDEN * INNER + 2 * HIDDEN)
    + 2 * VOCABULARY * HIDDEN
    + HIDDEN
)


def tensors() -> dict[str, tuple[int, ...]]:
    layer = {
        "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (KV, HIDDEN),
        "self_attn.v_proj": (KV, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER), "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }  # fmt: skip
    found = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for number in range(LAYERS):
        found |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    return found | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}


def shards(directory: Path) -> None:
    """Makes a sharded checkpoint. Its files have the declared length, and contain only headers."""
    names = tensors()
    rows = list(names.items())
    each = -(-len(rows) // SHARDS)
    index = {}
    for number in range(SHARDS):
        file, header, end = f"model-{number + 1:05}-of-{SHARDS:05}.safetensors", {}, 0
        for name, shape in rows[number * each : (number + 1) * each]:
            size = 2 * math.prod(shape)
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (end, end + size)}
            end, index[name] = end + size, file
        text = json.dumps(header).encode()
        (directory / file).write_bytes(struct.pack("<Q", len(text)) + text)
        os.truncate(directory / file, 8 + len(text) + end)
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": WEIGHT_BYTES}, "weight_map": index})
    )
    (directory / "config.json").write_text(json.dumps(CONFIG))


def gguf(path: Path) -> None:
    """Makes one Q4_K file of the same model. Its vocabulary and its merges are as many as those of Llama 3."""

    def text(word: str) -> bytes:
        return struct.pack("<Q", len(word)) + word.encode()

    def strings(key: str, words: list[str]) -> bytes:
        return text(key) + struct.pack("<IIQ", 9, 8, len(words)) + b"".join(map(text, words))

    numbers = {
        "block_count": LAYERS, "embedding_length": HIDDEN, "feed_forward_length": INNER,
        "attention.head_count": 64, "attention.head_count_kv": 8, "context_length": 131072,
    }  # fmt: skip
    pairs = [
        text("general.architecture") + struct.pack("<I", 8) + text("llama"),
        *(text(f"llama.{key}") + struct.pack("<II", 4, value) for key, value in numbers.items()),
        strings("tokenizer.ggml.tokens", [f"token{n}" for n in range(VOCABULARY)]),
        strings("tokenizer.ggml.merges", [f"left{n} right{n}" for n in range(280_000)]),
    ]
    table, end = [], 0
    for name, shape in tensors().items():
        table.append(
            text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), 12, end)
        )
        end += math.prod(shape) // 256 * 144
    head = (
        b"GGUF" + struct.pack("<IQQ", 3, len(table), len(pairs)) + b"".join(pairs) + b"".join(table)
    )
    path.write_bytes(head)
    os.truncate(path, -(-len(head) // 32) * 32 + end)


def rows(rounds: int = 15) -> Iterator[Row]:
    """The estimates for shards and for one GGUF file, each with an empty cache and then with a warm one."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as home:
        directory, file = Path(home) / "shards", Path(home) / "m.gguf"
        directory.mkdir()
        shards(directory)
        gguf(file)
        os.sync()

        def estimate(source: Path) -> None:
            evidence = sources.evidence(str(source), "llama")
            found = footprint("llama", evidence, options={"context_length": 8192})
            part = 144 / 256 / 2 if source == file else 1
            assert found.parts[0].bytes == WEIGHT_BYTES * part, found

        def cold(source: Path) -> float:
            _forget(source)
            return seconds(partial(estimate, source))

        ways = [partial(way, source) for source in (directory, file) for way in (cold, estimate)]
        taken = medians(rounds, *ways)
    for (first, again), words in (
        (taken[:2], f"{SHARDS} safetensors shards, cold"),
        (taken[2:], "one GGUF file, 400,000 strings in its header, cold"),
    ):
        yield Row(
            f"footprint of a 70B model from {words}", f"{first * 1e3:.0f} ms (warm {again * 1e3:.0f})", "≤ 50 ms",
            first <= 0.05
        )  # fmt: skip


def _forget(source: Path) -> None:
    for path in source.iterdir() if source.is_dir() else [source]:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
