"""The request log has one line for each call, however the call ends."""

import asyncio
import json
import logging
import os
from types import SimpleNamespace

import pytest

from gpu_runtime.errors import BadDocument, BadSetting
from gpu_runtime.ledgers import host_config
from gpu_runtime.serving import records, server, tasks
from gpu_runtime.serving.records import CallRecord
from gpu_runtime.serving.requests import Refused
from tests.clock import Clock
from tests.serving.harness import harness
from tests.serving.loops import in_loop, settle, until


@pytest.fixture
def lines(tmp_path):
    """A function that returns the lines of the log so far."""
    handlers, level = list(records.log.handlers), records.log.level
    file = tmp_path / "requests.jsonl"
    records.open_log(str(file))
    yield lambda: [json.loads(line) for line in file.read_text().splitlines()]
    for handler in set(records.log.handlers) - set(handlers):
        records.log.removeHandler(handler)
        handler.close()
    records.log.setLevel(level)


def test_each_outcome_has_one_line(lines):

    @in_loop
    async def story():
        never = asyncio.Event()
        scripts = {"qwen": [None, None, (RuntimeError("it broke"),), never, never]}
        async with harness(qwen=4, scripts=scripts) as k:
            records.request_id.set("req-1")
            await k.chat("qwen", "one two three", x_client_id="bot")
            async for _ in (await k.chat("qwen", "one two", stream=True)).events:
                k.clock.now += 0.5
            with pytest.raises(Refused):
                await k.chat("qwem")
            async for _ in (await k.chat("qwen", stream=True)).events:
                pass
            reply = await k.chat("qwen", stream=True)
            await reply.aclose()
            call = asyncio.ensure_future(k.chat("qwen"))
            await until(lambda: len(k.log) >= 9)
            call.cancel()
            await settle()

    story()
    found = lines()
    outcomes = [line["outcome"] for line in found]
    assert outcomes == ["answered", "answered", "refused", "broken_off", "cancelled", "cancelled"]
    answered, streamed, refused, broken, *_ = found
    assert answered.pop("time") > 0 and answered.pop("queue_seconds") >= 0
    assert answered == {
        "id": "req-1", "kind": "chat", "client": "bot", "asked": "qwen", "model": "qwen",
        "loaded": True, "prompt_tokens": 3, "completion_tokens": 3, "answer_seconds": 0.0,
        "seconds": 0.0, "outcome": "answered",
    }  # fmt: skip
    assert streamed["first_seconds"] == 0.0 and streamed["seconds"] > 1.0
    assert streamed["loaded"] is False and streamed["completion_tokens"] == 2
    assert (refused["status"], refused["code"]) == (404, "model_not_found")
    assert refused["asked"] == "qwem"
    assert broken["error"] == "it broke"


async def test_a_stream_is_counted_exactly_and_shows_its_usage_only_on_request():
    """Calls that got no whole answer are in no histogram."""
    scripts = {"qwen": [None, None, (RuntimeError("it broke"),)]}
    async with harness(qwen=4, scripts=scripts) as k:
        for more in ({}, {"stream_options": {"include_usage": True}}):
            events = [e async for e in (await k.chat("qwen", stream=True, **more)).events]
            assert bool(events[-1].get("usage")) == bool(more)
            assert len([e for e in events if not e["choices"]]) == len(more)
        async for _ in (await k.chat("qwen", stream=True)).events:
            pass
        name = "gpuconsole_call_answer_tokens"
        tokens = {
            (sample.name, sample.value)
            for metric in k.gateway.figures.collect()
            for sample in metric.samples
            if sample.name in (f"{name}_count", f"{name}_sum", "gpuconsole_call_seconds_count")
        }
        assert {
            (f"{name}_count", 2),
            (f"{name}_sum", 6),
            ("gpuconsole_call_seconds_count", 2),
        } == tokens


def test_a_line_is_written_once_and_its_seconds_are_rounded(lines):
    clock = Clock()
    record = CallRecord(clock, "chat", "ann")
    clock.now += 1 / 3
    record.write()
    record.write()
    [line] = lines()
    assert (line["seconds"], line["client"], line["outcome"]) == (0.333, "ann", "cancelled")


def test_the_names_of_opentelemetry(lines, monkeypatch):
    """GPU_SERVE_LOG_NAMES=genai. What has no name there keeps its own."""
    monkeypatch.setattr(records, "_names", {})  # and is restored after the test
    records.open_log(None, "genai")
    record = CallRecord(Clock(), "completions", "ann")
    record.note(asked="fast", model="qwen", prompt_tokens=3, completion_tokens=2, code="busy")
    record.write()
    [line] = lines()
    assert line.pop("time") > 0
    assert line == {
        "gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "gpu-console",
        "gen_ai.request.model": "fast", "gen_ai.response.model": "qwen",
        "gen_ai.usage.input_tokens": 3, "gen_ai.usage.output_tokens": 2, "error.type": "busy",
        "client": "ann", "id": "", "outcome": "cancelled", "seconds": 0.0,
    }  # fmt: skip


async def test_without_the_setting_nothing_is_written():
    assert not records.log.isEnabledFor(logging.INFO)
    async with harness(qwen=4) as k:
        await k.chat("qwen")


def test_messages_are_shown_from_the_chosen_level_on(capsys):
    """Each message is shown once, also if the server begins twice in a process or a library logs to the root."""
    log = logging.getLogger("gpu_runtime")
    before = log.handlers[:], log.level, log.propagate
    for level, shown in (("info", ["qwen could not answer"]), ("warning", [])):
        with server.messages_shown(level):
            log.info("%s could not answer", "qwen")
            log.debug("too fine")
        lines = capsys.readouterr().err.splitlines()
        assert [line.partition(" INFO ")[2] for line in lines] == shown
    assert (log.handlers, log.level, log.propagate) == before


def test_a_rotated_log_is_opened_again(lines, tmp_path):
    """SIGHUP creates the file at once. A line finds the new file also without SIGHUP."""
    file = tmp_path / "requests.jsonl"
    file.rename(tmp_path / "requests.1")
    records.reopen_log()
    assert lines() == []
    records.log.info("{}")
    assert lines() == [{}]
    file.unlink()
    records.log.info('{"a": 1}')
    assert lines() == [{"a": 1}]


def test_a_log_that_cannot_be_written_stops_the_server_at_its_start(tmp_path):
    settings = SimpleNamespace(gpu_tasks=None, gpu_serve_cors=None, gpu_serve_log_names="own")
    settings.gpu_serve_log = str(tmp_path / "a" / "b")
    with pytest.raises(BadSetting, match="GPU_SERVE_LOG"):
        server.run(SimpleNamespace(settings=settings, status=None))


@pytest.mark.parametrize("kind", ["a pipe", "a device", "a directory"])
def test_what_is_no_file_is_refused_as_a_setting(tmp_path, kind):
    """Opening a pipe for the log waited for ever."""
    path = {"a device": "/dev/full", "a directory": str(tmp_path)}.get(kind, str(tmp_path / "pipe"))
    if kind == "a pipe":
        os.mkfifo(path)
    with pytest.raises(BadSetting, match=f"GPU_SERVE_LOG.*({kind}, not a file|Is {kind})"):
        records.open_log(path)
    with pytest.raises(BadSetting, match=f"GPU_CONFIG_FILE.*it is {kind}, not a file"):
        host_config.read(path)
    with pytest.raises(BadDocument, match=f"it is {kind}, not a file"):
        tasks.read_serving_config(path)
    assert records.log.level == logging.WARNING, "no line is written"
