"""Files that anybody may have written are read up to their limits, and not beyond."""

import json

import pytest

from gpu_runtime import files
from gpu_runtime.files import BadFile, count_fault, json_object, read_limited


def nested(depth: int) -> bytes:
    return b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


def test_a_file_of_exactly_the_limits_is_read(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    path.write_bytes(b"12345")
    assert read_limited(path, 5) == b"12345"
    with pytest.raises(BadFile, match="5 B, and at most 4 B"):
        read_limited(path, 4)
    monkeypatch.setattr(files, "DEEPEST", 3)
    path = tmp_path / "config.json"
    for depth in (2, 3):
        path.write_bytes(nested(depth))
        assert json_object(path) == json.loads(nested(depth))
    path.write_bytes(nested(4))
    with pytest.raises(BadFile, match="levels deep"):
        json_object(path)


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("num_hidden_layers", 10_000),
        ("depths", 10_000),
        ("num_experts", 1_000_000),
        ("num_attention_heads", 1_000_000),
        ("vocab_size", 10**12),
    ],
)
def test_a_config_has_counts_up_to_their_limit_wherever_they_are(name, most):
    """Other numbers are no counts of parts, so they have no limit here."""
    for config in (lambda value: {name: value}, lambda value: {"x": {"y": {name: [1, value]}}}):
        assert count_fault(config(most)) == ""
        fault = count_fault(config(most + 1))
        assert fault.startswith(f"its {name} is ") if most < 10**12 else fault == ""
