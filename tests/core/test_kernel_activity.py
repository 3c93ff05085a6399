"""Whether this process's kernel is running a cell, and since when."""

from hypothesis import given
from hypothesis import strategies as st

from gpu_runtime.notebook import Activity, State
from tests.clock import Clock

STEPS = st.lists(
    st.tuples(st.sampled_from("abc"), st.booleans(), st.sampled_from((0.0, 0.04, 60.0))),
    max_size=8,
)


@given(STEPS)
def test_it_is_busy_since_its_oldest_running_cell_else_idle_since_the_last_end(steps):
    """Cells run in one another, and subshells beside them. The end of a cell counts even if its start was
    not recorded: the cell that loads the extension. A script, which runs no cells, is no idle kernel.
    """
    clock = Clock()
    kernel, running, ended, woken = Activity(clock), {}, 0.0, []
    kernel.watchers.add(lambda: woken.append(kernel.running))
    assert kernel.state == State()
    for cell, begins, later in steps:
        clock.advance(later)
        if begins:
            kernel.began(cell)
            running[cell] = clock()
            assert woken.pop() and not woken, "each start wakes the watchers, which see the cell"
        else:
            kernel.ended(cell)
            running.pop(cell, None)
            ended = clock()
        oldest = min(running.values(), default=0.0)
        assert kernel.running == bool(running) and not woken
        idle = 0.0 if running else round(ended, 1)
        assert kernel.state == State(round(oldest, 1), idle), "in tenths of a second"
    kernel.forget()  # as a forked child does
    assert kernel.state == State() and not kernel.running
