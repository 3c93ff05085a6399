"""The real console, spoken to by a client that has no buttons and forges what they would send."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time

import pytest

from tests.faces import served
from tests.faces.served import OPERATORS, VIEWERS, Conversation, free_port, serving

KERNEL = """
import sys, gpu_runtime
rt = gpu_runtime.runtime()
rt.register("qwen", backend="fake", size="14GiB")
rt.preload("qwen")
print("ready", flush=True)
for line in sys.stdin:
    print(rt.models()["where"].tolist()[0], "|", ", ".join(event.by for event in rt.status().events), flush=True)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("forged")


@pytest.fixture
def kernel(place):
    """Another process, which holds qwen: what it says when it is asked where that lies."""
    environ = served.environ(place) | {"EVICTION_GRACE_SECONDS": "0"}
    process = subprocess.Popen(
        [sys.executable, "-c", KERNEL],
        env=environ,
        cwd=place,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )

    def says():
        process.stdin.write("?\n")
        process.stdin.flush()
        return process.stdout.readline()

    try:
        assert process.stdout.readline() == "ready\n"
        yield says
    finally:
        served.end(process)


@pytest.fixture(scope="module")
def one(place):
    port = free_port()
    environ = {"GPU_CONSOLE_TOKEN": OPERATORS, "GPU_CONSOLE_VIEWER_TOKEN": VIEWERS}
    words = [
        sys.executable,
        "-m",
        "gpu_runtime.cli",
        "console",
        "--port",
        str(port),
        "--no-browser",
    ]
    with serving(words, place, environ, port=port) as server:
        yield server


def components(document, kind):
    """Panel's components of that class: their models, as they stand in the document."""

    def within(thing):
        if isinstance(thing, dict):
            attributes = thing.get("attributes")
            if isinstance(attributes, dict) and attributes.get("class_name") == kind:
                yield thing
            for part in thing.values():
                yield from within(part)
        elif isinstance(thing, list):
            for part in thing:
                yield from within(part)

    return list(within(json.loads(document)))


def data_of(component):
    return component["attributes"]["data"]


async def evicts(server, token):
    """All that a browser sends when somebody evicts qwen in the table and confirms it, whoever they are."""
    path, cookie = server.enter(token)
    page = server.get(path, Cookie=cookie)
    async with Conversation(server, path + "ws", page.session_token, cookie=cookie) as said:
        (tabs,) = components(await said.document(), "Tabs")
        for turn in range(100):
            await said.change(
                data_of(tabs)["id"], "active", turn % len(tabs["attributes"]["children"])
            )
            await asyncio.sleep(
                0.3
            )  # until the page has been told of the model, and has drawn the tab
            document = await said.document()
            rows = {
                id: sheet["id"]
                for sheet in components(document, "Sheet")
                for id, *_ in json.loads(data_of(sheet)["attributes"]["rows"])
                if id.endswith("/qwen")
            }
            if rows:
                break
        for lease, sheet in rows.items():
            await said.forge("data_event", sheet, {"verb": "evict", "id": lease})
        document = await said.document()
        for dialog in components(document, "Dialog"):  # a viewer's page need not have one
            if not data_of(dialog)["attributes"].get("open"):
                await said.change(data_of(dialog)["id"], "open", True)
        for asks in components(document, "Ask"):
            number = data_of(asks)["attributes"].get("question", 0)
            await said.forge("data_event", asks["id"], {"answer": "confirm", "question": number})
        await asyncio.sleep(1.0)  # what was asked is done in a thread of the server's
        return rows


def until(says, expected, seconds):
    end = time.monotonic() + seconds
    while not (answer := says()).startswith(expected) and time.monotonic() < end:
        time.sleep(0.1)  # another process acts
    return answer


def test_a_viewers_forged_eviction_is_refused_and_an_operators_is_done_in_their_name(one, kernel):
    """The same messages: from a viewer's session nothing comes of them, from an operator's qwen steps aside."""
    assert asyncio.run(evicts(one, VIEWERS))
    assert kernel().startswith("sim:0")
    assert asyncio.run(evicts(one, OPERATORS))
    assert "console" in until(kernel, "host", 20)
