"""The thoughts of a model are `reasoning_content`, and its answer is the content."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_runtime.serving.engines.chat_template import TAGS, Thoughts
from gpu_runtime.serving.engines.registry import EchoAdapter
from tests.serving.harness import harness

LAST = "{{ messages[-1].content }}"  # a fake model answers with its prompt
OPENS = f"{LAST}{{{{ '' if add_generation_prompt }}}}<think>\n"  # the template opens them


def read(pieces: list[str], begun: bool) -> tuple[str, str]:
    reader = Thoughts(TAGS[0], begun)
    read = [*(reader.feed(piece) for piece in pieces), reader.rest()]
    return "".join(thought for thought, _ in read), "".join(answer for _, answer in read)


@pytest.mark.parametrize(
    ("text", "begun", "expected"),
    [
        ("<think>\n17 is\nprime.\n</think>\n\nYes. ", False, ("17 is\nprime.", "Yes. ")),
        ("17 is prime.</think>Yes.", True, ("17 is prime.", "Yes.")),
        ("\n<think></think>Yes.", False, ("", "Yes.")),
        ("17 is pri", True, ("17 is pri", "")),  # the limit of tokens was reached
        (" a < b, <think> is a tag", False, ("", " a < b, <think> is a tag")),
        ("<thi", False, ("", "<thi")),
        ("<think>x</think>a</think>b", False, ("x", "a</think>b")),
    ],
)
@given(cuts=st.sets(st.integers(0, 40)))
def test_the_pieces_of_a_text_may_end_anywhere(text, begun, expected, cuts):
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[a:b] for a, b in zip(places, places[1:], strict=False)]
    assert read(pieces, begun) == expected


async def test_a_template_may_open_the_thoughts():
    """JSON that a grammar forces is the answer, even if the template has opened the thoughts."""

    class AfterPrompt(EchoAdapter):
        """Answers with the prompt up to its last tag, as a model continues its prompt."""

        def __init__(self, value: Any, spec: Any) -> None:
            super().__init__(lambda prompt: prompt.rpartition("<think>")[0], spec)

    async with harness(
        qwen=4,
        options={"qwen": {"chat_template": OPENS}},
        make_adapter=lambda value, spec, http: AfterPrompt(value, spec),
    ) as k:
        found = (await k.chat("qwen", "17 is prime. </think>\nYes.")).json["choices"][0]["message"]
        assert (found["reasoning_content"], found["content"]) == ("17 is prime.", "Yes.")
        forced = await k.chat("qwen", '{"a": 1}', response_format={"type": "json_object"})
        assert forced.json["choices"][0]["message"]["content"] == '{"a": 1}'
