"""`gpu mcp`, used through the official client: agents read, propose and confirm, with the rights of their user."""

import asyncio
import re
import sys

import pytest
from gpu_panels.mcp_server import server
from mcp import Client, StdioServerParameters, stdio_client

from gpu_runtime import Runtime
from tests.faces.served import environ

READING = {"status", "leases", "who", "why", "plan", "report"}


@pytest.fixture
def rt(tmp_path):
    """The runtime of a process that holds two models. The agent's own process holds none."""
    with Runtime(**where(tmp_path), eviction_grace_seconds=0.0) as rt:
        rt.register("writer", backend="fake", size="6GiB")
        rt.register("kept", backend="fake", size="2GiB", keep=True)
        rt.preload("writer")
        rt.preload("kept")
        yield rt


def where(tmp_path):
    return {"devices": "sim:24GiB,host:64GiB", "ledger": f"keeper://{tmp_path}/ledger"}


@pytest.fixture
def agent(rt, tmp_path):
    with Runtime(**where(tmp_path), monitor=False) as mine:
        mine.guest = True
        yield mine


def talk(made, *calls: tuple[str, dict]) -> list[tuple[bool, str]]:
    """The answers to the `calls`: whether each is an error, and its text. `CODE` is the code of the answer before."""

    async def story():
        answers: list[tuple[bool, str]] = []
        async with Client(made) as client:
            for name, arguments in calls:
                code = re.search(r"code is (\w+)", answers[-1][1]) if answers else None
                given = {k: code[1] if v == "CODE" and code else v for k, v in arguments.items()}
                result = await client.call_tool(name, given)
                answers.append((result.is_error, "".join(one.text for one in result.content)))
        return answers

    return asyncio.run(story())


def test_an_agent_reads_what_a_terminal_shows(agent):
    made = server(agent)
    answers = talk(
        made,
        ("status", {}),
        ("leases", {}),
        ("why", {"name": "writer"}),
        ("plan", {"name_or_size": "30GiB"}),
        ("report", {}),
        ("report", {"by": "user"}),
    )
    assert not any(failed for failed, _ in answers)
    status, leases, why, plan, text, table = [words for _, words in answers]
    assert "writer" in status and "6.0 GiB" in leases and "was loaded" in why
    assert (
        "30.0 GiB does not fit" in plan and "recorded" in text and "Nothing was recorded" in table
    )


def test_an_action_takes_a_proposal_and_its_confirmation(agent, rt):
    proposed, confirmed, again = talk(
        server(agent),
        ("propose", {"action": "evict", "name": "writer"}),
        ("confirm", {"code": "CODE"}),
        ("confirm", {"code": "CODE"}),
    )
    assert "Evict writer?" in proposed[1] and "frees 6.0 GiB on sim:0" in proposed[1]
    assert not confirmed[0] and again[0], "a code is used once"
    assert not rt.here("writer")
    by = {event.by for event in rt.status().events}
    assert any("an agent" in name for name in by)


def test_a_proposal_alone_does_nothing(agent, rt):
    talk(server(agent), ("propose", {"action": "evict", "name": "writer"}))
    assert rt.here("writer")


def test_what_has_changed_since_the_proposal_is_not_done(agent, rt, monkeypatch):
    """The model has left meanwhile. The same holds for a code that is too old."""
    made = server(agent)
    evict = ("propose", {"action": "evict", "name": "writer"})
    [(_, text)] = talk(made, evict)
    rt.evict("writer")
    code = re.search(r"code is (\w+)", text)[1]
    [(failed, words)] = talk(made, ("confirm", {"code": code}))
    assert failed and "Nothing was done." in words
    rt.preload("writer")
    [(_, text)] = talk(made, evict)
    monkeypatch.setattr("gpu_panels.mcp_server.VALID_SECONDS", -1.0)
    code = re.search(r"code is (\w+)", text)[1]
    assert talk(made, ("confirm", {"code": code}))[0][0] and rt.here("writer")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (("confirm", {"code": "12345678"}), "no code of a proposal"),
        (("propose", {"action": "evict", "name": "nobody"}), "no process holds"),
        (("propose", {"action": "rm -rf", "name": "writer"}), "evict"),
        (("propose", {"action": "evict", "name": "writer; gpu evict kept"}), "no process holds"),
        (("plan", {"name_or_size": "\x1b[2J"}), ""),
        (("report", {"since": "for ever"}), "for ever"),
    ],
)
def test_a_wrong_call_is_an_error_with_words(agent, call, words):
    [(failed, text)] = talk(server(agent), call)
    assert failed and words in text and "\x1b" not in text and "Traceback" not in text


def test_an_agent_that_only_reads_has_no_tool_that_acts(agent):
    """A client shows `confirm` to its user, because the tool says that it is destructive."""

    async def tools(made):
        async with Client(made) as client:
            return {one.name: one.annotations for one in (await client.list_tools()).tools}

    assert asyncio.run(tools(server(agent, read_only=True))).keys() == READING
    every = asyncio.run(tools(server(agent)))
    assert every.keys() == READING | {"propose", "confirm"}
    acting = {name for name, about in every.items() if about.destructive_hint}
    assert acting == {"confirm"}
    assert all(every[name].read_only_hint for name in every.keys() - acting)


@pytest.mark.processes
def test_a_client_starts_the_command(tmp_path):
    words = ["-m", "gpu_runtime.cli", "mcp"]
    command = StdioServerParameters(command=sys.executable, args=words, env=environ(tmp_path))

    async def story():
        async with Client(stdio_client(command)) as client:
            assert client.server_info.name == "gpu-console"
            result = await client.call_tool("status", {})
            return "".join(one.text for one in result.content)

    assert "sim:0" in asyncio.run(story())
