"""The expected duration of a call, from the durations of earlier calls."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_runtime.serving.records import SHORTEST_PROMPT, Cost, Costs, Timing
from gpu_runtime.serving.requests import read_call
from tests.serving.harness import Clock, chat


def call(prompt: int = 0, **fields: Any) -> Any:
    """A chat with about so many tokens in its prompt."""
    return read_call("chat", chat("qwen", "x" * 4 * prompt, **fields))


def test_a_load_and_an_answer_count_with_the_median_of_the_last_ones():
    costs = Costs()
    assert costs.expect("qwen", call()) == Cost()
    for seconds in (9.0, 1.0, 2.0, 3.0, 4.0, 5.0):
        costs.add_load("qwen", seconds)
    assert costs.expect("qwen", call()) == Cost(load=3.0)
    costs = Costs()
    for seconds in [60.0] * 30 + [1.0] * 19 + [60.0]:
        costs.add_answer("qwen", "chat", seconds, answer=100)
    assert costs.expect("qwen", call()).answer == pytest.approx(1.0)


def test_a_model_in_host_memory_is_expected_as_soon_as_its_returns_were():
    """A call with a budget of 10 s was refused for the cold start of an engine that wakes in 2 s, or the reverse."""
    in_ram: set[str] = set()
    costs = Costs(in_ram.__contains__)
    costs.add_load("qwen", 40.0)
    in_ram.add("qwen")
    assert costs.load_seconds("qwen") == 40.0, "no return was measured"
    for _ in range(5):
        costs.add_load("qwen", 2.0, from_ram=True)
    assert costs.load_seconds("qwen") == 2.0
    in_ram.clear()
    assert costs.load_seconds("qwen") == 40.0


def test_one_long_answer_says_little_about_a_short_one():
    """An answer of 400 tokens took 32 s. A call for 10 tokens still fits a budget of 3 s."""
    costs = Costs()
    costs.add_answer("qwen", "chat", 32.0, answer=400)
    assert costs.expect("qwen", call(max_tokens=10)).answer < 1.5
    assert costs.expect("qwen", call(max_tokens=400)).answer == pytest.approx(32.0)
    assert costs.expect("qwen", call()).answer == pytest.approx(32.0)
    assert costs.expect("qwen", call(max_tokens=10_000)).answer == pytest.approx(32.0)


def test_a_long_prompt_takes_long_and_a_short_one_shows_the_overhead_only():
    """The 50 ms of a prompt of 3 tokens must not make 16 s of a prompt of 1,000."""
    costs = Costs()
    costs.add_answer("qwen", "chat", 3.0, prompt=1000, answer=100, first=2.0)
    assert costs.expect("qwen", call(1000, max_tokens=100)).answer == pytest.approx(3.0)
    assert costs.expect("qwen", call(4000, max_tokens=100)).answer == pytest.approx(9.0)
    assert costs.expect("qwen", call(1000, max_tokens=10)).answer == pytest.approx(2.1)
    costs = Costs()
    costs.add_answer("qwen", "chat", 0.05, prompt=3, answer=1, first=0.05)
    assert costs.expect("qwen", call(3)).answer == pytest.approx(0.05)
    assert costs.expect("qwen", call(1000)).answer < 1.0


def test_each_kind_of_call_and_each_task_has_its_own_figures():
    costs = Costs()
    costs.add_answer("qwen", "chat", 10.0, answer=1000, asked="task:write")
    costs.add_answer("qwen", "chat", 0.1, answer=10, asked="task:classify")
    body = chat("task:classify", "")
    assert costs.expect("qwen", read_call("chat", body)).answer < 0.5
    assert costs.expect("qwen", read_call("completions", {"model": "q", "prompt": ""})) == Cost()
    costs.add_answer("bge", "embeddings", 2.0, prompt=1000)
    texts = read_call("embeddings", {"model": "bge", "input": ["x" * 4000] * 2})
    assert costs.expect("bge", texts).answer == pytest.approx(4.0)
    costs.add_answer("sdxl", "images", 8.0, answer=2)
    images = read_call("images", {"model": "sdxl", "prompt": "a fox", "n": 4})
    assert costs.expect("sdxl", images).answer == pytest.approx(16.0, rel=0.2)


TOKENS = st.integers(0, 9999)
ANSWER = st.tuples(TOKENS, TOKENS, st.floats(0, 1e3), st.none() | st.floats(0, 1))


@given(
    st.lists(ANSWER, min_size=1, max_size=5), st.integers(0, 500), st.none() | st.integers(1, 9999)
)
def test_an_expected_time_is_never_negative_and_grows_with_the_prompt(answers, prompt, asked):
    costs = Costs()
    for length, tokens, seconds, part in answers:
        first = None if part is None else part * seconds
        costs.add_answer("qwen", "chat", seconds, prompt=length, answer=tokens, first=first)
    fields = {} if asked is None else {"max_tokens": asked}
    expected = costs.expect("qwen", call(prompt, **fields)).answer
    longer = costs.expect("qwen", call(prompt + SHORTEST_PROMPT, **fields)).answer
    assert 0 <= expected <= longer


def test_an_answer_is_measured_while_it_is_made():
    clock, costs = Clock(), Costs()
    stream = Timing(costs, clock, "qwen", call(100))
    clock.now += 2.0
    for _ in range(11):
        stream.note({"choices": [{}]})
        clock.now += 0.1
    stream.note({"choices": [], "usage": {}})
    stream.succeeded()
    assert costs.expect("qwen", call(100, max_tokens=11)).answer == pytest.approx(3.1)
    whole = Timing(costs, clock, "phi", call(100))
    clock.now += 2.0
    whole.succeeded({"usage": {"completion_tokens": 50}})
    assert costs.expect("phi", call(100, max_tokens=50)).answer == pytest.approx(2.0)
