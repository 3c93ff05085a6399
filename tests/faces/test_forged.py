"""The real console with a client that has no buttons. The client forges the messages that buttons send."""

import asyncio
import json
import subprocess
import sys

import pytest

from tests.clock import scaled, until
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
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("forged")


@pytest.fixture
def kernel(folder):
    """Another process, which holds qwen. The fixture returns a function that reports where qwen is and who acted."""
    environ = served.environ(folder) | {"EVICTION_GRACE_SECONDS": "0"}
    process = subprocess.Popen(
        [sys.executable, "-c", KERNEL], env=environ, cwd=folder, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip

    def ask():
        process.stdin.write("?\n")
        process.stdin.flush()
        return process.stdout.readline()

    try:
        assert process.stdout.readline() == "ready\n"
        yield ask
    finally:
        served.end(process)


@pytest.fixture(scope="module")
def server(folder):
    port = free_port()
    environ = {"GPU_CONSOLE_TOKEN": OPERATORS, "GPU_CONSOLE_VIEWER_TOKEN": VIEWERS}
    words = [
        sys.executable, "-m", "gpu_runtime.cli", "console", "--port", str(port), "--no-browser",
    ]  # fmt: skip
    with serving(words, folder, environ, port=port) as server:
        yield server


def components(document, kind):
    """The models of that Panel component's class, as they are in the document."""

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
    """Sends everything that a browser sends when a visitor selects qwen in the table, clicks Evict and confirms."""
    path, cookie = server.enter(token)
    page = server.get(path, Cookie=cookie)
    async with Conversation(server, path + "ws", page.session_token, cookie=cookie) as client:
        (tabs,) = components(await client.document(), "Tabs")
        for turn in range(100):
            await client.change(
                data_of(tabs)["id"], "active", turn % len(tabs["attributes"]["children"])
            )
            await asyncio.sleep(
                scaled(0.3)
            )  # until the page has received the model and drawn the tab
            document = await client.document()
            rows = {
                id: table["id"]
                for table in components(document, "Table")
                for id, *_ in json.loads(data_of(table)["attributes"].get("rows", "[]"))
                if id.endswith("/qwen")
            }
            if rows:
                break
        for lease, table in rows.items():
            await client.forge("data_event", table, {"verb": "evict", "id": lease})
        document = await client.document()
        for dialog in components(document, "Dialog"):  # a viewer's page may have none
            if not data_of(dialog)["attributes"].get("open"):
                await client.change(data_of(dialog)["id"], "open", True)
        for form in components(document, "ConfirmationForm"):
            number = data_of(form)["attributes"].get("question", 0)
            await client.forge("data_event", form["id"], {"answer": "confirm", "question": number})
        await asyncio.sleep(scaled(1.0))  # the action runs in a thread of the server
        return rows


def test_a_viewers_forged_eviction_is_refused_and_an_operators_is_done(server, kernel):
    """Both sessions send the same messages."""
    assert asyncio.run(evicts(server, VIEWERS))
    assert kernel().startswith("sim:0")
    assert asyncio.run(evicts(server, OPERATORS))
    until(lambda: kernel().startswith("host"))
    assert "console" in kernel()
