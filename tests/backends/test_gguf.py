"""GGUF headers. Sizes are exact for every type, no weights are read, and a false header gives one clear error."""

import os
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Type
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpu_runtime.backends.formats import gguf as ours
from gpu_runtime.backends.formats import sources
from gpu_runtime.errors import LoadFailed, NotAModel
from gpu_runtime.estimation import cache_layers, footprint, kv_cache_bytes


def write(
    path: Path,
    kinds: list[Type] = (Type.Q4_K, Type.F32),
    *,
    arch: str = "llama",
    vocabulary: int = 1000,
    rows: int = 4,
    **numbers: object,
) -> Path:
    """Writes a file with the `gguf` package, with a tensor of `rows` × 512 weights for each of `kinds`."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(32)
    writer.add_embedding_length(4096)
    writer.add_head_count(32)
    writer.add_head_count_kv(8)
    writer.add_context_length(8192)
    for key, value in numbers.items():
        if isinstance(value, int):
            writer.add_key_value(f"{arch}.{key}", value, gguf.GGUFValueType.UINT32)
        else:
            writer.add_array(f"{arch}.{key}", value)
    writer.add_token_list([f"token{n}" for n in range(vocabulary)])
    writer.add_token_types([1] * vocabulary)
    for number, kind in enumerate(kinds):
        block, size = GGML_QUANT_SIZES[kind]
        shape = (rows, 512 // block * size)
        zeros, kinds_ = np.zeros(shape, np.uint8), dict(raw_shape=shape, raw_dtype=kind)
        writer.add_tensor(f"blk.{number}.weight", zeros, **kinds_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def real_bytes(path: Path) -> int:
    """Bytes of the tensors as the `gguf` package reads them."""
    return sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", list(GGML_QUANT_SIZES), ids=lambda kind: kind.name)
def test_every_type_is_exact(tmp_path, kind):
    """All types of the `gguf` package. One that is missing would be estimated from the file's size."""
    path = write(tmp_path / "m.gguf", [kind])
    assert ours.read(path, "m").weight_bytes == real_bytes(path)
    assert ours.BLOCKS[int(kind)] == (kind.name, *GGML_QUANT_SIZES[kind])


def test_a_file_of_many_types_is_exact(tmp_path):
    """Quantised models have norms in full precision, and a head of a larger type than their layers."""
    layers = [*[Type.Q4_K] * 20, *[Type.Q5_K] * 4]
    path = write(tmp_path / "m.gguf", [Type.Q6_K, Type.F32, *layers, Type.BF16])
    found = sources.evidence(str(path), "m")
    assert (found.weight_bytes, found.source) == (real_bytes(path), "GGUF header")
    assert footprint("m", found).bytes == real_bytes(path)


HALVES = ("attention.key_length", "attention.value_length")
PATTERN = {"attention.sliding_window_pattern": [True] * 31 + [False]}
PATTERN |= {"attention.sliding_window": 1024}


@pytest.mark.parametrize(
    ("arch", "numbers", "values"),
    [
        ("llama", {}, 32 * 8192 * 8 * 128 * 2),
        ("llama", dict.fromkeys(HALVES, 64), 32 * 8192 * 8 * 64 * 2),
        ("llama", {"attention.sliding_window": 4096}, 32 * 4096 * 8 * 128 * 2),
        ("gemma2", {"attention.sliding_window": 4096}, 16 * (4096 + 8192) * 8 * 128 * 2),
        ("gpt-oss", {"attention.sliding_window": 128}, 16 * (128 + 8192) * 8 * 128 * 2),
        ("gemma3n", PATTERN, (31 * 1024 + 8192) * 8 * 128 * 2),
        ("deepseek2", {"attention.kv_lora_rank": 512, "rope.dimension_count": 64}, 32 * 8192 * 576),
        ("llama", {"rope.dimension_count": 128}, 32 * 8192 * 8 * 128 * 2),
        ("bert", {}, 0),
    ],
)
def test_the_metadata_gives_the_size_of_the_cache(tmp_path, arch, numbers, values):
    config = sources.evidence(str(write(tmp_path / "m.gguf", arch=arch, **numbers)), "m").config
    assert kv_cache_bytes(cache_layers(config), tokens=8192) == 2 * values


def test_activations_are_those_of_a_batch(tmp_path):
    """llama.cpp computes scores for all of 512 tokens at once, the peak with a large vocabulary."""
    path = write(tmp_path / "m.gguf", vocabulary=30_000, feed_forward_length=11008)
    found = footprint("m", sources.evidence(str(path), "m"), options=dict(context_length=8192))
    active = found.parts[-1]
    assert (active.name, active.detail) == ("activations", "512 tokens read in one pass")
    mask = 8192 // 2  # of float16
    assert active.bytes == 512 * 4 * max(30_000 + 2 * 4096, 3 * 11008 + 4 * 4096 + mask)


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def test_only_the_header_is_read_and_once(tmp_path):
    """The test's file has 64 GiB but is sparse. Almost none of it is read."""
    path = write(tmp_path / "m.gguf", vocabulary=150_000)
    os.truncate(path, 64 << 30)
    before = bytes_read()
    assert ours.read(path, "m").weight_bytes == 4 * 512 * 4 + 4 * 288
    assert bytes_read() - before < 8 << 20
    path = write(tmp_path / "m.gguf", vocabulary=150_000)
    first = ours.read(path, "m")
    before = bytes_read()
    assert ours.read(path, "m") == first
    assert bytes_read() - before < 64 << 10
    write(path, [Type.Q8_0] * 2)
    assert ours.read(path, "m").weight_bytes == real_bytes(path)


def test_the_parts_of_a_split_model_are_one(tmp_path):
    """The model can be given by one of its files, or by their directory."""
    parts = [write(tmp_path / f"m-0000{n}-of-00002.gguf", [Type.Q8_0] * n) for n in (1, 2)]
    whole = sum(map(real_bytes, parts))
    for path in (*parts, tmp_path):
        assert sources.evidence(str(path), "m").weight_bytes == whole
    parts[1].unlink()
    alone = "m-00002-of-00002.gguf cannot be loaded: m-00001-of-00002.gguf is a part of the same"
    with pytest.raises(LoadFailed, match=alone):
        ours.read(parts[0], "m")


def test_no_model_or_several_are_refused(tmp_path):
    """The first is a mistake of the catalogue: `gpu serve` opens no breaker for such errors."""
    for name in ("a", "b"):
        write(tmp_path / f"{name}.gguf")
    with pytest.raises(NotAModel, match="holds 2 models; name the file: a.gguf, b.gguf"):
        sources.evidence(str(tmp_path), "m")
    path = tmp_path / "m.gguf"
    path.write_text("no model")
    with pytest.raises(LoadFailed, match="it does not begin as a GGUF file") as error:
        ours.read(path, "m")
    assert error.value.mistake


# -- files with false headers ----------------------------------------------------------------------
def test_a_file_with_an_unknown_type_is_estimated_by_its_size(tmp_path):
    """The parts of such an estimate are marked as estimates. The metadata of the file is still used."""
    path = write(tmp_path / "m.gguf", [Type.F32], vocabulary=1)
    data = bytearray(path.read_bytes())
    at = data.index(b"blk.0.weight") + len("blk.0.weight") + 4 + 2 * 8
    data[at : at + 4] = struct.pack("<I", 999)
    path.write_bytes(data)
    found = sources.evidence(str(path), "m")
    assert (found.weight_bytes, found.file_bytes, found.file_format) == (None, len(data), "gguf")
    assert [part.source for part in footprint("m", found).parts] == ["file size", "file size"]
    assert cache_layers(found.config)


def test_a_git_lfs_pointer_gives_the_size_of_its_file(tmp_path):
    """A clone that was made without LFS has only pointers, which contain the sizes."""
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:{:064}\nsize 4000000000\n"
    (tmp_path / "m.gguf").write_text(pointer.format(0))
    assert footprint("m", sources.evidence(str(tmp_path / "m.gguf"), "m")).bytes == 4_400_000_000
    (tmp_path / "m.gguf").rename(tmp_path / "m.safetensors")
    (tmp_path / "config.json").write_text("{}")
    for source in (tmp_path, tmp_path / "m.safetensors"):
        assert footprint("m", sources.evidence(str(source), "m")).bytes == 5_200_000_000


def refused(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(LoadFailed) as error:
        ours.read(path, "m")
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    return str(error.value)


def test_a_truncated_file_is_one_clear_error(tmp_path):
    whole = write(tmp_path / "whole.gguf", vocabulary=3).read_bytes()
    for end in range(len(whole) - 1, 0, -29):
        refused(tmp_path / "m.gguf", whole[:end])
    assert "ends in the middle of its header" in refused(tmp_path / "m.gguf", whole[:40])
    said = refused(tmp_path / "m.gguf", whole[:-96])
    assert "it is truncated: blk.1.weight would end 96 bytes past the end of the file" in said


HEAD = b"GGUF" + struct.pack("<I", 3)
KEY = struct.pack("<Q", 1) + b"k"
BIG = struct.pack("<Q", 2**63)
ENTRY = HEAD + bytes(8) + struct.pack("<Q", 1) + KEY  # one entry of metadata begins
TENSOR = HEAD + struct.pack("<QQ", 1, 0) + KEY  # one tensor begins
SMALL = KEY + struct.pack("<IQIQ", 1, 8, 0, 0)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"GGML" + bytes(60), "does not begin as a GGUF file"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(60), "big-endian"),
        (HEAD + BIG + bytes(60), "entries in"),
        (HEAD + bytes(8) + struct.pack("<Q", 2**40) + bytes(60), "entries in"),
        (HEAD + bytes(8) + struct.pack("<Q", 1) + BIG, "in the middle of its header"),
        (ENTRY + struct.pack("<IIQ", 9, 8, 2**60) + bytes(60), "declares an array"),
        (ENTRY + struct.pack("<IIQ", 9, 8, 40) + BIG * 9, "in the middle"),
        (TENSOR + struct.pack("<I", 2**31) + bytes(90), "2147483648 dimensions"),
        (TENSOR + struct.pack("<IQQIQ", 2, 2**63, 2**63, 0, 0) + bytes(90), "truncated"),
        (TENSOR + struct.pack("<IQIQ", 1, 33, 2, 0) + bytes(90), "not whole blocks of Q4_0"),
        (HEAD + struct.pack("<QQ", 2, 0) + 2 * SMALL + bytes(90), "overlap"),
    ],
)
def test_a_hostile_header_costs_one_error_and_no_memory(tmp_path, data, said):
    assert said in refused(tmp_path / "m.gguf", data)


CHANGE = st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(changes=st.lists(CHANGE, min_size=1, max_size=6))
def test_changed_bytes_cause_at_most_a_load_error(tmp_path, changes):
    """A changed header gives a plausible size or LoadFailed, and no other error."""
    path = tmp_path / "sound.gguf"
    data = bytearray((path if path.exists() else write(path, vocabulary=3)).read_bytes())
    for place, value in changes:
        data[int(place * 700)] = value
    (tmp_path / "changed.gguf").write_bytes(data)
    try:
        assert 0 <= (ours.read(tmp_path / "changed.gguf", "m").weight_bytes or 0) <= len(data)
    except LoadFailed:
        pass
