"""A text is cut at its first stop string, however it arrives."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gpu_runtime.stop_text import StopText, held_back

WORDS = st.integers(1, 3).flatmap(
    lambda size: st.lists(st.text("ab", min_size=size, max_size=size), max_size=3)
)


@given(st.text("ab", max_size=12), WORDS, st.lists(st.integers(0, 12), max_size=5))
def test_a_text_is_cut_at_its_first_stop_string_in_whatever_pieces_it_arrives(text, stops, cuts):
    """What may begin a stop string is held back, and nothing else is."""
    stop, sent, seen = StopText(stops), "", ""
    for start, end in pairwise(sorted({0, len(text), *(at for at in cuts if at < len(text))})):
        sent, seen = sent + stop.feed(text[start:end]), text[:end]
        if not stop.hit:
            assert len(seen) - len(sent) == held_back(seen, stops)
    found = [text.find(word) for word in stops if word in text]
    assert (sent + stop.rest(), stop.hit) == (text[: min(found, default=len(text))], bool(found))


@given(st.text("ab", max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_the_longest_end_that_may_begin_a_word_is_held_back(text, words):
    ends = [text[at:] for at in range(len(text))]
    begins = [end for end in ends if any(word.startswith(end) and word != end for word in words)]
    assert held_back(text, words) == max(map(len, begins), default=0)
