"""The choice of models that may answer: the candidates of a task, the fallbacks of a model, and clouds."""

import asyncio
import os
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_runtime import Runtime
from gpu_runtime.access_keys import AccessKey
from gpu_runtime.errors import BadDocument, BadSetting
from gpu_runtime.serving.choices import (
    Choice,
    Choices,
    CloudGuard,
    candidates,
    chain,
    cloud_of,
    expected_seconds,
    guarded,
)
from gpu_runtime.serving.records import Cost, Costs
from gpu_runtime.serving.requests import Refused
from gpu_runtime.serving.tasks import (
    Profile,
    ServingConfig,
    Task,
    TasksFile,
    default_file,
    read_serving_config,
)
from tests.serving.harness import Clock, Guard, chat, harness
from tests.serving.loops import settle

LOCAL = ("a", "b", "c", "d:local")


def names(
    task: Task,
    *warm: str,
    allow_cloud: bool = True,
    budget: float | None = None,
    loads: dict[str, int] | None = None,
    **costs: Cost,
) -> list[str]:
    return [
        choice.model
        for choice in candidates(
            "t",
            task,
            warm=lambda model: model in warm,
            known=lambda model: model in LOCAL,
            cost=lambda model: costs.get(model, Cost()),
            allow_cloud=allow_cloud,
            budget=budget,
            load=lambda model: (loads or {}).get(model, 0),
        )
    ]


def test_a_warm_candidate_is_tried_first_then_the_written_order_counts():
    """Except with `pin_primary`. A cloud is no warm candidate, and a known local name with a colon is no cloud."""
    assert names(Task(("a", "b", "c"))) == ["a", "b", "c"]
    assert names(Task(("a", "b", "c")), "c") == ["c", "a", "b"]
    assert names(Task(("a", "b", "c"), pin_primary=True), "c") == ["a", "b", "c"]
    assert names(Task(("a", "claude:haiku", "b")), "b") == ["b", "a", "claude:haiku"]
    assert names(Task(("claude:haiku", "a")), "a") == ["claude:haiku", "a"]
    assert names(Task(("a", "d:local")), allow_cloud=False) == ["a", "d:local"]


def test_the_replica_with_the_fewest_calls_goes_first():
    """Then a warm one, then the order of the file. Other tasks do not look at the queues."""
    replicas = Task(("a", "b", "c"), replicas=True)
    assert names(replicas, "c") == ["c", "a", "b"]
    assert names(replicas, "a", "b", loads={"a": 2, "b": 1, "c": 1}) == ["b", "c", "a"]
    assert names(Task(("a", "b")), loads={"a": 2}) == ["a", "b"]


def test_models_slower_than_the_budget_are_left_out():
    """A model that was never measured stays a candidate."""
    slow, quick = Cost(load=40.0, answer=2.0), Cost(load=3.0, answer=2.0)
    assert names(Task(("a", "b", "c"), budget_s=10.0), a=slow, b=quick) == ["b", "c"]
    assert names(Task(("a", "b"), budget_s=10.0), "a", a=slow, b=quick) == ["a", "b"]
    assert names(Task(("a", "b"), budget_s=10.0), budget=50.0, a=slow, b=quick) == ["a", "b"]


def test_the_refusal_of_a_too_short_budget_has_both_numbers():
    with pytest.raises(Refused) as refused:
        slow = Cost(load=40.0, answer=2.0)
        names(Task(("a", "b"), budget_s=1.5), "b", a=slow, b=Cost(answer=2.5))
    assert refused.value.status == 504
    assert refused.value.facts == {"budget_seconds": 1.5, "expected_seconds": 2.5}
    assert "a about 42.0 s (40.0 s to load, 2.0 s to answer), b about 2.5 s." in str(refused.value)


@pytest.mark.parametrize(("cost", "is_warm", "seconds"), [
    (Cost(5.0, 2.0), False, 7.0), (Cost(5.0, 2.0), True, 2.0), (Cost(None, 2.0), True, 2.0),
    (Cost(None, 2.0), False, 2.0), (Cost(5.0, None), False, 5.0), (Cost(5.0, None), True, None),
    (Cost(), False, None),
])  # fmt: skip
def test_no_time_is_assumed_for_a_model_that_was_never_measured(cost, is_warm, seconds):
    """A part that was never measured adds nothing; without any part the time is None."""
    assert expected_seconds(is_warm, cost) == seconds


choices = st.lists(
    st.builds(Choice, st.sampled_from("abcdef"), st.booleans()), min_size=1, max_size=6
)


@given(choices, st.booleans())
def test_the_guard_never_removes_the_first(choices, allow_cloud):
    left = guarded(choices, allow_cloud)
    kept = [one for at, one in enumerate(choices) if allow_cloud or not one.cloud or at == 0]
    assert left == tuple(kept)


@given(
    st.lists(st.sampled_from(["a", "b", "c", "claude:x", "openai:y"])),
    st.booleans(),
    st.dictionaries(st.sampled_from("abc"), st.integers(1, 9)),
)
def test_the_chain_is_the_requested_model_then_small_contexts_then_clouds(
    others, allow_cloud, contexts
):
    found = chain("q", others, contexts.get, lambda name: ":" not in name, lambda: allow_cloud)
    assert found[0] == Choice("q") and len({choice.model for choice in found}) == len(found)
    local = [contexts.get(choice.model, 99) for choice in found[1:] if not choice.cloud]
    assert local == sorted(local)
    assert [choice.cloud for choice in found] == sorted(choice.cloud for choice in found)
    assert all(choice.because for choice in found[1:])


def test_a_clouds_address_and_key_are_environment_variables_of_its_name():
    """A known provider needs only a key in the environment. A provider with its own address needs no key."""
    known = cloud_of("claude:sonnet", {"CLAUDE_API_KEY": "k"})
    assert known.base_url == "https://api.anthropic.com/v1"
    ours = cloud_of("our-box:qwen:8b", {"OUR_BOX_BASE_URL": "http://10.0.0.5:8000/v1/"})
    assert (ours.base_url, ours.model, ours.key) == ("http://10.0.0.5:8000/v1", "qwen:8b", "")
    assert cloud_of("openai:x", {"CLAUDE_API_KEY": "k"}) == "no OPENAI_API_KEY is set"
    assert "no http address" in cloud_of("file:x", {"FILE_BASE_URL": "file:///etc"})


def test_the_guard_survives_restarts_and_is_seeded_once(tmp_path):
    path = tmp_path / "state" / "serving.json"
    assert CloudGuard(path, True).allowed and not CloudGuard(path, False).allowed
    CloudGuard(path, True).allow(False)
    assert not CloudGuard(path, True).allowed
    CloudGuard(path, False).allow(True)
    assert CloudGuard(path, False).allowed


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"allowCloudFallback": "yes"}', '{"allow": true}']
)
def test_an_unreadable_guard_allows_no_cloud(tmp_path, text):
    path = tmp_path / "serving.json"
    path.write_text(text)
    assert not CloudGuard(path, True).allowed


@pytest.mark.parametrize("value", ["false", 0, None, {}])
def test_the_guard_is_true_or_false(tmp_path, value):
    with pytest.raises(BadSetting, match="true or false"):
        CloudGuard(tmp_path / "serving.json", True).allow(value)


def test_the_file_has_tasks_clients_fallbacks_and_names(tmp_path):
    file = tmp_path / "tasks.yaml"
    file.write_text("""
tasks:
  classify: {candidates: [qwen-4b, claude:haiku], keep_alive_s: 120, pin_primary: true, budget_s: 10}
clients:
  bot: {system: Be brief., importance: low, thinking: false, defaults: {temperature: 0.2}, cooldown_s: 5}
fallback:
  qwen-32b: [qwen-4b, claude:sonnet]
  "*": [qwen-4b]
aliases: {gpt: qwen}
preload: [qwen, phi]
""")
    config = read_serving_config(file)
    more = {"defaults": {"temperature": 0.2}, "cooldown_s": 5.0}
    bot = Profile("Be brief.", importance="low", thinking=False, **more)
    assert config == ServingConfig(
        {"classify": Task(("qwen-4b", "claude:haiku"), 120.0, True, 10.0)},
        {"bot": bot},
        {"qwen-32b": ("qwen-4b", "claude:sonnet"), "*": ("qwen-4b",)},
        aliases={"gpt": "qwen"},
        preload=("qwen", "phi"),
    )
    assert config.fallbacks("qwen-32b") == ("qwen-4b", "claude:sonnet")
    assert config.fallbacks("x") == ("qwen-4b",)
    assert read_serving_config(tmp_path / "none.yaml") == ServingConfig()
    assert read_serving_config(None) == ServingConfig()


@pytest.mark.parametrize(("text", "line", "field", "problem"), [
    ("tasks:\n  a: {candidates: []}", 2, "tasks.a.candidates", "length >= 1"),
    ("tasks: {b: {candidates: [x]}, a: {}}", 1, "tasks.a", "missing required field `candidates`"),
    ("tasks:\n  a:\n    candidates:\n    - x\n    - 7", 5, "tasks.a.candidates[1]", "`str`"),
    ("tasks:\n a:\n  candidates: [x]\n  budget_s: -1", 4, "tasks.a.budget_s", "> 0"),
    ("tasks:\n a:\n  candidates: [x]\n  pin: true", 2, "tasks.a", "unknown field `pin`"),
    ("tasks: 7", 1, "tasks", "one entry for each name"),
    ("clients: {}\ntask: {}", 2, "", "unknown field `task`; known: tasks"),
    ("- tasks", 1, "", "sections such as tasks"),
    ("fallback:\n  qwen: phi", 2, "fallback.qwen", "Expected `array`"),
    ("clients: {bot: {importance: supreme}}", 1, "clients.bot.importance", "none of urgent"),
    ("clients:\n  bot:\n    defaults:\n      temperature: 9", 4, "clients.bot.defaults.temperature", "from 0 to 2"),
    ("clients: {bot: {defaults: {messages: []}}}", 1, "clients.bot.defaults.messages", "only a call can set it"),
    ("tasks:\n a: {candidates: [x]}\n a: {candidates: [y]}", 3, "tasks.a", "appears here twice"),
    ("aliases: {a: x}\npreload: [x]\naliases: {b: x}", 3, "aliases", "appears here twice"),
    ("preload: qwen\n", 1, "preload", "it must be a list of models"),
    ("aliases:\n  gpt: 7\n", 2, "aliases.gpt", "Expected `str`"),
    ("aliases:\n  a: b\n  b: qwen\n", 2, "aliases.a", "b is an alias too"),
    ("preload: [x]\n---\naliases: {b: x}", 3, "", "a second one begins here"),
    ("\ntasks: ]", 2, "", "not YAML"),
    ("!!python/object/apply:os.system [true]", 1, "", "is not supported"),
])  # fmt: skip
def test_an_error_in_the_file_is_named(tmp_path, text, line, field, problem):
    file = tmp_path / "tasks.yaml"
    file.write_text(text)
    with pytest.raises(BadDocument) as bad:
        read_serving_config(file)
    assert (bad.value.line, bad.value.field) == (line, field)
    assert problem in bad.value.problem and str(file) in str(bad.value)


def test_a_file_that_a_setting_names_and_that_is_missing_is_logged(tmp_path, caplog):
    tasks = TasksFile(tmp_path / "taks.yaml", Clock())
    assert tasks.content() == ServingConfig() and "there is no file" in caplog.text
    caplog.clear()
    assert TasksFile(default_file(), Clock()).content() and not caplog.text


def test_names_that_may_be_mistakes_are_logged_once_for_each_content(tmp_path, caplog):
    """A model may be added to the catalogue later, so an unknown name does not stop the server."""
    file, clock = tmp_path / "tasks.yaml", Clock()
    config = """
tasks: {a: {candidates: [qwen, gone, claude:haiku, who:knows]}}
clients: {bot: {model: "task:a"}}
fallback: {qwen: [task:b], "*": [phi]}
aliases: {gpt: qwen, phi: gpt4}
preload: [gpt, gone]
"""
    file.write_text(config)
    with closing(Runtime(devices="sim:24GiB", ledger="memory:")) as rt:
        for name in ("qwen", "phi"):
            rt.register(name, backend="fake", size="1 GiB")
        choices = Choices(rt, ServingConfig, Guard(True), Costs(), {})
        tasks = TasksFile(file, clock, choices.doubts)
        for _ in range(2):
            tasks.content()
        assert [message.partition("tasks.yaml, ")[2] for message in caplog.messages] == [
            "tasks.a.candidates: there is no model 'gone' now",
            "tasks.a.candidates: there is no model 'who:knows' now",
            "fallback.qwen: there is no model 'task:b' now",
            "aliases.phi: there is no model 'gpt4' now",
            "preload: there is no model 'gone' now",
            "aliases.phi: this hides the model 'phi'; calls get gpt4",
        ]
        caplog.clear()
        file.write_text("preload: [gone]")
        clock.advance(2)
        tasks.content()
        assert "preload: there is no model 'gone' now" in caplog.text


def test_a_changed_file_is_read_again_and_a_mistake_changes_nothing(tmp_path, caplog):
    """A removed file counts only when a reload is requested."""
    file, clock = tmp_path / "tasks.yaml", Clock()

    def write(name: str) -> None:
        file.write_text(name)
        stamp = int(clock.now) + len(name)
        os.utime(file, (stamp, stamp))

    write("tasks: {a: {candidates: [x]}}")
    tasks = TasksFile(file, clock)
    write("tasks: {b: {candidates: [x, y]}}")
    assert set(tasks.content().tasks) == {"a"}
    clock.now += 1
    assert set(tasks.content().tasks) == {"b"}
    write("tasks: {c: {candidates: []}}")
    clock.now += 1
    with caplog.at_level("WARNING", logger="gpu_runtime"):
        assert set(tasks.content().tasks) == {"b"}
        clock.now += 1
        assert set(tasks.content().tasks) == {"b"}
    [record] = caplog.records
    assert "the earlier content stays" in record.getMessage() and "tasks.c" in record.getMessage()
    file.unlink()
    clock.now += 1
    assert set(tasks.content().tasks) == {"b"}
    tasks.reload()
    assert tasks.content() == ServingConfig()


# -- aliases, replicas and models that are loaded at the start -------------------------------------
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
