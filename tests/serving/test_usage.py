"""Usage and jobs are counted and kept over a restart of the server."""

import asyncio
import os
import time
from datetime import UTC, datetime
from typing import Any

import pytest
from starlette.testclient import TestClient

from gpu_runtime.access_keys import AccessKey
from gpu_runtime.serving import records
from gpu_runtime.serving.api.app import application
from gpu_runtime.serving.api.openai import Jobs
from gpu_runtime.serving.records import Usage
from gpu_runtime.serving.requests import Refused
from gpu_runtime.serving.store import KEPT_DAYS, Store
from gpu_runtime.web.auth import Visitor
from tests.serving.app_client import Gateway, with_visitor
from tests.serving.harness import chat, harness
from tests.serving.loops import until

DAY = 86_400.0
JOB = {"endpoint": "/v1/chat/completions", "body": chat("echo", "hi")}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "serving.sqlite"


def facts(model: str, read: int = 1, written: int = 1) -> dict[str, Any]:
    return {"model": model, "prompt_tokens": read, "completion_tokens": written}


async def test_every_call_that_reached_a_model_is_counted(path):
    """A stream that its client left counts as far as it came. A refused call counts nothing."""
    keys = {"bot": AccessKey("0" * 64)}
    async with harness(qwen=4, scripts={"qwen": []}, keys=lambda: keys) as k:
        await k.gateway.answer("chat", chat("qwen", "one two three"), "key:bot")
        stream = await k.gateway.answer("chat", chat("qwen", "one two", stream=True), "key:bot")
        assert [event async for event in stream.events]
        left = await k.gateway.answer("chat", chat("qwen", stream=True), "ann")
        await anext(left.events)
        await left.aclose()
        with pytest.raises(Refused):
            await k.gateway.answer("chat", chat("qwen", top_k=-9), "ann")
        rows = {row["client"]: row for row in k.gateway.usage.of(1)}
        bot = {"client": "key:bot", "model": "qwen", "calls": 2}
        assert rows["key:bot"] == {**bot, "prompt_tokens": 5, "answer_tokens": 5}
        assert rows["ann"]["calls"] == 1 and len(rows) == 2


async def test_usage_survives_a_restart_and_days_are_added(path):
    now = [time.time() - 3 * DAY]
    for _ in range(3):
        store = Store(path)
        usage = Usage(store, lambda: now[0])
        usage.add("key:bot", facts("qwen", 5, 2))
        usage.add("key:bot", facts("qwen", 5, 2))
        usage.add("ann", facts("phi"))
        assert [row["calls"] for row in usage.of(1)] == [1, 2], "also before it is written"
        await usage.close()
        store.close()
        now[0] += DAY
    store = Store(path)
    seen = Usage(store, lambda: now[0] - DAY)
    assert [row["calls"] for row in seen.of(30)] == [3, 6]
    assert [row["calls"] for row in seen.of(1)] == [1, 2]
    assert seen.of(30, "ann")[0]["model"] == "phi"
    ages = (KEPT_DAYS - 1, KEPT_DAYS + 1, 9000)
    old = [datetime.fromtimestamp(time.time() - age * DAY, UTC).date().isoformat() for age in ages]
    store.add_usage([(day, "old", "qwen", 1, 2, 3) for day in old])
    store.close()
    store = Store(path)
    kept = [row[0] for row in store.usage("1970-01-01") if row[1] == "old"]
    assert kept == old[:1], "days of long ago are forgotten"
    store.close()


async def test_usage_is_written_again_and_again_while_the_server_runs(path, monkeypatch):
    """A server that is killed loses the last second of its usage, not the last day."""
    monkeypatch.setattr(records, "WRITE_SECONDS", 0.0)
    store = Store(path)
    usage = Usage(store)
    for calls in (1, 2, 3):
        usage.add("ann", facts("qwen"))
        await until(lambda n=calls: [row[3] for row in store.usage("2000-01-01")] == [n])
    await usage.close()
    store.close()


def test_the_usage_of_a_month_is_read_again_after_some_seconds():
    """All pages of the console share the rows. A day ends at midnight in UTC."""
    now = [1_763_596_740.0]  # 23:59 UTC
    usage = Usage(None, lambda: now[0])
    usage.add("ann", facts("qwen"))
    first = usage.recent()
    usage.add("ann", facts("qwen"))
    now[0] += 4.9
    assert usage.recent() is first and [row["calls"] for row in first] == [1]
    now[0] += 0.1
    assert [row["calls"] for row in usage.recent()] == [2]
    assert usage.of(1) and not usage.of(1, "bob")
    now[0] += 120.0
    assert usage.of(1) == [] and [row["calls"] for row in usage.of(2)] == [2]


async def test_servers_side_by_side_add_to_one_file(path):
    """Both servers see the usage of both. The jobs in the file belong to the first server."""
    first, second = Store(path), Store(path)
    one, two = Usage(first), Usage(second)
    for usage in (one, two, two):
        usage.add("ann", facts("qwen"))
    await asyncio.gather(one.close(), two.close())
    for store in (first, second):
        assert [row["calls"] for row in Usage(store).of(1)] == [3]
    assert (first.keeps_jobs, second.keeps_jobs) == (True, False)
    second.put_job("job-1", {"id": "job-1"})
    assert second.jobs() == first.jobs() == []
    first.close()
    second.close()
    third = Store(path)
    assert third.keeps_jobs
    third.close()
    assert os.stat(path).st_mode & 0o777 == 0o600


async def test_usage_of_a_failed_write_is_written_later(path, monkeypatch):
    """The disk was full for one write. Those calls were lost."""
    store = Store(path)
    usage = Usage(store)
    usage.add("ann", facts("qwen", 5, 2))
    with monkeypatch.context() as patch:
        patch.setattr(store, "write", lambda act: False)
        await usage.close()
    assert [row["calls"] for row in usage.of(1)] == [1]  # it is shown meanwhile
    usage.add("ann", facts("qwen", 1, 1))
    await usage.close()
    assert [row[2:] for row in store.usage("2000-01-01")] == [("qwen", 2, 6, 3)]
    store.close()


async def test_usage_of_a_failed_write_is_written_at_the_end(path, monkeypatch):
    """The disk was full for the last write before the server ended. Those calls were lost."""
    store, tried = Store(path), []
    usage = Usage(store)
    monkeypatch.setattr(records, "WRITE_SECONDS", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(store, "write", lambda act: tried.append(act))
        usage.add("ann", facts("qwen", 5, 2))
        await until(lambda: tried and usage._new)
    await usage.close()
    assert [row[2:] for row in store.usage("2000-01-01")] == [("qwen", 1, 5, 2)]
    store.close()


def test_a_file_that_is_no_database_is_set_aside(path, caplog):
    path.write_bytes(b"no database" * 200)
    store = Store(path)
    assert "set aside" in caplog.text
    rows = [("2999-01-01", "ann", "qwen", 1, 2, 3)]
    assert store.add_usage(rows)
    assert store.usage("2998-01-01") == rows
    store.close()


async def test_a_file_that_cannot_be_written_does_not_stop_the_server(tmp_path, caplog):
    (tmp_path / "file").touch()
    store = Store(tmp_path / "file" / "serving.sqlite")
    assert "cannot be written" in caplog.text and not store.keeps_jobs
    usage = Usage(store)
    usage.add("ann", facts("qwen"))
    assert [row["calls"] for row in usage.of(1)] == [1]
    store.put_job("job-1", {"id": "job-1"})
    await usage.close()
    assert [row["calls"] for row in usage.of(1)] == [1]
    store.close()


def test_usage_is_shown_and_a_key_sees_its_own(runtime):
    rt, gateway = runtime(monitor=False), Gateway()
    for client in ("key:bot", "ann"):
        gateway.usage.add(client, facts("qwen", 7, 3))
    app = application(rt, lambda: gateway)
    key = Visitor("key:bot", False, may_call=True, api_only=True)
    for visitor, seen in ((Visitor("ann", True), ["ann", "key:bot"]), (key, ["key:bot"])):
        answer = TestClient(with_visitor(app, visitor)).get("/usage?days=1").json()
        assert [row["client"] for row in answer["data"]] == seen
    assert answer["data"][0]["prompt_tokens"] == 7


async def test_jobs_survive_a_restart(path):
    """A job that ran while the server ended has failed. Results that are too old are forgotten."""
    wall = [1000.0]
    store = Store(path)
    jobs, gateway = Jobs(lambda: wall[0], store), Gateway()
    done = jobs.start(gateway, JOB, "ann")
    await done.task
    wall[0] += 1.0
    running = jobs.start(gateway, {**JOB, "body": chat("slow")}, "ann")
    dropped = jobs.start(gateway, JOB, "ann")
    await jobs.end(dropped.id)
    await until(lambda: len(store.jobs()) == 2)
    await jobs.close()
    store.close()
    wall[0] += 3000.0
    store = Store(path)
    later = Jobs(lambda: wall[0], store)
    assert later.find(done.id).as_json() == done.as_json() and done.result
    lost = later.find(running.id)
    assert (lost.status, lost.error["code"]) == ("failed", "ended")
    assert lost.ended == wall[0], "its client has the usual time to read why"
    assert [row["id"] for row in later.of("ann")] == [running.id, done.id]
    with pytest.raises(Refused):
        later.find(dropped.id)
    wall[0] += 4000.0
    await later.start(gateway, JOB, "ann").task
    assert len(store.jobs()) == 1
    store.close()
