"""Who may answer: a task's candidates, a model's stand-ins, and whether that may be a cloud."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_runtime.errors import BadDocument, BadSetting
from gpu_runtime.serving.requests import Refused
from gpu_runtime.serving.routing.fallback import Choice, CloudGuard, chain, cloud_of, guarded
from gpu_runtime.serving.routing.tasks import (
    Cost,
    Profile,
    ServingConfig,
    Task,
    candidates,
    expected_seconds,
    read_serving_config,
)

LOCAL = ("a", "b", "c", "d:local")


def names(
    task: Task, *warm: str, allow_cloud: bool = True, budget: float | None = None, **costs: Cost
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
        )
    ]


def test_candidates_are_tried_as_written_while_none_is_warm():
    """The first is the best."""
    assert names(Task(("a", "b", "c"))) == ["a", "b", "c"]


def test_a_warm_candidate_saves_the_time_of_a_load():
    """Unless the first one's quality is load-bearing: `pin_primary`."""
    assert names(Task(("a", "b", "c")), "c") == ["c", "a", "b"]
    assert names(Task(("a", "b", "c"), pin_primary=True), "c") == ["a", "b", "c"]


def test_a_cloud_is_no_warm_candidate():
    """It does not take a local primary's place because that is cold; it stands in for it."""
    assert names(Task(("a", "claude:haiku", "b")), "b") == ["b", "a", "claude:haiku"]
    assert names(Task(("claude:haiku", "a")), "a") == ["claude:haiku", "a"]


def test_a_local_name_with_a_colon_is_no_cloud():
    """Ollama calls its models so."""
    assert names(Task(("a", "d:local")), allow_cloud=False) == ["a", "d:local"]


def test_whoever_takes_longer_than_the_budget_is_left_out():
    """What was never seen may try."""
    slow, quick = Cost(load=40.0, answer=2.0), Cost(load=3.0, answer=2.0)
    assert names(Task(("a", "b", "c"), budget_s=10.0), a=slow, b=quick) == ["b", "c"]
    assert names(Task(("a", "b"), budget_s=10.0), "a", a=slow, b=quick) == ["a", "b"]
    assert names(Task(("a", "b"), budget_s=10.0), budget=50.0, a=slow, b=quick) == ["a", "b"]


def test_a_budget_too_short_for_all_is_told_with_both_numbers():
    """The time it is, and the time it would take."""
    with pytest.raises(Refused) as refused:
        names(
            Task(("a", "b"), budget_s=1.5), "b", a=Cost(load=40.0, answer=2.0), b=Cost(answer=2.5)
        )
    assert (refused.value.status, refused.value.facts) == (
        504,
        {"budget_seconds": 1.5, "expected_seconds": 2.5},
    )
    assert str(refused.value).startswith(
        "task:t has a budget of 1.5 s, and would take a about 42.0 s "
        "(40.0 s to load, 2.0 s to answer), b about 2.5 s."
    )


@pytest.mark.parametrize(
    ("cost", "is_warm", "seconds"),
    [
        (Cost(5.0, 2.0), False, 7.0),
        (Cost(5.0, 2.0), True, 2.0),
        (Cost(None, 2.0), True, 2.0),
        (Cost(None, 2.0), False, 2.0),
        (Cost(5.0, None), False, 5.0),
        (Cost(5.0, None), True, None),
        (Cost(), False, None),
    ],
)
def test_nothing_is_made_up_about_a_model_that_was_never_seen(cost, is_warm, seconds):
    """No figure is assumed."""
    assert expected_seconds("a", is_warm, cost) == seconds


choices = st.lists(
    st.builds(Choice, st.sampled_from("abcdef"), st.booleans()), min_size=1, max_size=6
)


@given(choices, st.booleans())
def test_the_guard_never_touches_the_first_and_never_empties_the_list(choices, allow_cloud):
    """A deliberate choice is never blocked."""
    left = guarded(choices, allow_cloud)
    assert left[0] == choices[0]
    assert left == tuple(choices) if allow_cloud else not any(choice.cloud for choice in left[1:])
    assert [choice for choice in left if not choice.cloud or choice is left[0]] == [
        choice for at, choice in enumerate(choices) if not choice.cloud or at == 0
    ]


@given(
    st.lists(st.sampled_from(["a", "b", "c", "claude:x", "openai:y"])),
    st.booleans(),
    st.dictionaries(st.sampled_from("abc"), st.integers(1, 9)),
)
def test_the_chain_is_the_asked_one_then_small_contexts_then_clouds(others, allow_cloud, contexts):
    """Each once; those whose context is not known after those whose is."""
    found = chain("q", others, contexts.get, lambda name: ":" not in name, allow_cloud)
    assert found[0] == Choice("q") and len({choice.model for choice in found}) == len(found)
    local = [contexts.get(choice.model, 99) for choice in found[1:] if not choice.cloud]
    assert local == sorted(local)
    assert [choice.cloud for choice in found] == sorted(choice.cloud for choice in found)
    assert all(choice.because for choice in found[1:])


def test_a_clouds_address_and_key_come_from_the_environment_under_its_own_name():
    """Known providers need only a key; an address of one's own needs none."""
    assert (
        cloud_of("claude:sonnet", {"CLAUDE_API_KEY": "k"}).base_url
        == "https://api.anthropic.com/v1"
    )
    ours = cloud_of("our-box:qwen:8b", {"OUR_BOX_BASE_URL": "http://10.0.0.5:8000/v1/"})
    assert (ours.base_url, ours.model, ours.key) == ("http://10.0.0.5:8000/v1", "qwen:8b", "")
    assert cloud_of("openai:x", {"CLAUDE_API_KEY": "k"}) == "no OPENAI_API_KEY is set"
    assert (
        cloud_of("file:x", {"FILE_BASE_URL": "file:///etc"}) == "FILE_BASE_URL is no http address"
    )


def test_the_guard_survives_restarts_and_is_seeded_once(tmp_path):
    """What was said over HTTP holds, whatever the environment says at the next start."""
    path = tmp_path / "state" / "serving.json"
    assert CloudGuard(path, True).allowed and not CloudGuard(path, False).allowed
    CloudGuard(path, True).allow(False)
    assert not CloudGuard(path, True).allowed
    CloudGuard(path, False).allow(True)
    assert CloudGuard(path, False).allowed


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"allowCloudFallback": "yes"}', '{"allow": true}']
)
def test_a_guard_that_cannot_be_read_lets_nothing_out(tmp_path, text):
    """Somebody had said something, and nobody knows what."""
    path = tmp_path / "serving.json"
    path.write_text(text)
    assert not CloudGuard(path, True).allowed


@pytest.mark.parametrize("value", ["false", 0, None, {}])
def test_the_guard_is_true_or_false(tmp_path, value):
    """A word is not."""
    with pytest.raises(BadSetting, match="true or false"):
        CloudGuard(tmp_path / "serving.json", True).allow(value)


def test_the_file_says_tasks_clients_and_stand_ins(tmp_path):
    """As its docstring and the README show it."""
    file = tmp_path / "tasks.yaml"
    file.write_text("""
tasks:
  classify: {candidates: [qwen-4b, claude:haiku], keep_alive_s: 120, pin_primary: true, budget_s: 10}
clients:
  bot: {system: Be brief., importance: low, thinking: false, defaults: {temperature: 0.2}, cooldown_s: 5}
fallback:
  qwen-32b: [qwen-4b, claude:sonnet]
  "*": [qwen-4b]
""")
    said = read_serving_config(file)
    assert said == ServingConfig(
        {"classify": Task(("qwen-4b", "claude:haiku"), 120.0, True, 10.0)},
        {
            "bot": Profile(
                "Be brief.",
                importance="low",
                thinking=False,
                defaults={"temperature": 0.2},
                cooldown_s=5.0,
            )
        },
        {"qwen-32b": ("qwen-4b", "claude:sonnet"), "*": ("qwen-4b",)},
    )
    assert said.stand_ins("qwen-32b") == ("qwen-4b", "claude:sonnet") and said.stand_ins("x") == (
        "qwen-4b",
    )
    assert (
        read_serving_config(tmp_path / "none.yaml") == read_serving_config(None) == ServingConfig()
    )


@pytest.mark.parametrize(
    ("text", "field", "problem"),
    [
        ("tasks: {a: {candidates: []}}", "tasks[...].candidates", "length >= 1"),
        ("tasks: {a: {}}", "tasks[...]", "missing required field `candidates`"),
        ("tasks: {a: {candidates: [x], budget_s: -1}}", "tasks[...].budget_s", "> 0"),
        ("tasks: {a: {candidates: [x], pin: true}}", "tasks[...]", "unknown field `pin`"),
        ("task: {}", "", "unknown field `task`"),
        ("clients: {bot: {importance: supreme}}", "clients.bot.importance", "none of urgent"),
        (
            "clients: {bot: {defaults: {temperature: 9}}}",
            "clients.bot.defaults.temperature",
            "from 0 to 2",
        ),
        (
            "clients: {bot: {defaults: {messages: []}}}",
            "clients.bot.defaults.messages",
            "only a call can set it",
        ),
        ("tasks: [", "", "no YAML"),
        ("!!python/object/apply:os.system [true]", "", "no YAML"),
    ],
)
def test_what_is_wrong_with_the_file_is_named(tmp_path, text, field, problem):
    """File, field and problem."""
    file = tmp_path / "tasks.yaml"
    file.write_text(text)
    with pytest.raises(BadDocument) as bad:
        read_serving_config(file)
    assert bad.value.field == field and problem in bad.value.problem and str(file) in str(bad.value)
