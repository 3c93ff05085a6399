"""How many calls a model runs at once."""

import pytest

from gpu_runtime.facts import ModelSpec
from gpu_runtime.serving.queue import calls_at_once


@pytest.mark.parametrize(("backend", "sequences", "calls"), [
    ("vllm", None, 256), ("vllm", 8, 8), ("transformers", None, 1), ("transformers", 2, 1),
    ("llama_cpp", 4, 1), ("ollama", 4, 4),
])  # fmt: skip
def test_the_option_sequences_counts_where_the_engine_computes_them_together(
    backend, sequences, calls
):
    options = {"sequences": sequences} if sequences else {}
    assert calls_at_once(ModelSpec("qwen", backend, options=options)) == calls


def test_llama_cpp_pythons_server_runs_one_call_at_a_time(tmp_path, monkeypatch):
    """If two streams ran at once, it would cut the first one off."""
    spec = ModelSpec("qwen", "llama-server", options={"sequences": 4})
    monkeypatch.setenv("PATH", str(tmp_path))
    assert calls_at_once(spec) == 1
    command = tmp_path / "bin" / "llama-server"
    command.parent.mkdir()
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(command.parent))
    assert calls_at_once(spec) == 4
