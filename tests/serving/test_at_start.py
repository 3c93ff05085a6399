"""Aliases, replicas and models that are loaded at the start, as `tasks.yaml` names them."""

import asyncio

import pytest

from gpu_runtime.access_keys import AccessKey
from gpu_runtime.serving.requests import Refused
from gpu_runtime.serving.tasks import ServingConfig, Task
from tests.serving.harness import chat, harness
from tests.serving.loops import settle

ALONE = {"sequences": 1, "context_length": 64}


async def test_an_alias_is_another_name_of_a_model():
    """A key needs the model itself. The alias is listed for those who may call its model."""
    aliases = {"gpt-4o": "qwen", "best": "task:write"}
    config = ServingConfig(tasks={"write": Task(("phi",))}, aliases=aliases)
    models = {"bot": ("qwen",), "web": ("g*",)}
    keys = {name: AccessKey(name * 32, models=may) for name, may in models.items()}
    async with harness(config, qwen=4, phi=4, keys=lambda: keys) as k:
        reply = await k.chat("gpt-4o")
        assert (reply.model, reply.json["model"]) == ("qwen", "qwen")
        assert (await k.chat("best")).model == "phi"
        assert (await k.gateway.answer("chat", chat("gpt-4o"), "key:bot")).model == "qwen"
        with pytest.raises(Refused, match="may not call 'qwen'"):
            await k.gateway.answer("chat", chat("gpt-4o"), "key:web")
        seen = {who: [row["id"] for row in k.gateway.models(who)] for who in ("key:bot", "key:web")}
        assert seen == {"key:bot": ["qwen", "gpt-4o"], "key:web": []}


async def test_models_are_loaded_at_the_start(caplog):
    config = ServingConfig(preload=("nothing", "small", "phi"), aliases={"small": "qwen"})
    async with harness(config, qwen=4, phi=4, other=4) as k:
        await k.gateway.preload()
        assert {name for name, where in k.where().items() if "sim" in where} == {"qwen", "phi"}
        assert "nothing was not loaded at the start" in caplog.text


async def test_calls_side_by_side_go_to_different_replicas():
    config = ServingConfig(tasks={"write": Task(("one", "two"), replicas=True)})
    free = asyncio.Event()
    scripts = {"one": [free, free, free], "two": [free, free, free]}
    options = {"one": ALONE, "two": ALONE}
    async with harness(config, one=4, two=4, scripts=scripts, options=options) as k:
        calls = []
        for _ in range(4):
            calls.append(asyncio.ensure_future(k.chat("task:write")))
            await settle()
        assert [k.gateway.queue.calls_of(name) for name in ("one", "two")] == [2, 2]
        free.set()
        models = [(await call).model for call in calls]
        assert sorted(models) == ["one", "one", "two", "two"]
        assert "shortest queue of 2 replicas" in (await calls[1]).because
