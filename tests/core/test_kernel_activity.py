"""Whether this process's kernel is running a cell, and since when."""

import pytest

from gpu_runtime.kernel_activity import Activity, State


@pytest.fixture
def kernel():
    class Kernel(Activity):
        now = 1000.04

    one = Kernel(lambda: one.now)
    return one


def test_nothing_is_known_before_a_cell_has_run(kernel):
    """A script runs no cells, so its process must not count as an idle kernel."""
    assert kernel.state == State(busy_since=0.0, idle_since=0.0)


def test_it_is_busy_from_the_start_of_a_cell_to_its_end(kernel):
    kernel.began("a")
    kernel.now += 60
    assert kernel.state == State(busy_since=1000.0)
    kernel.ended("a")
    kernel.now += 60
    assert kernel.state == State(idle_since=1060.0)


def test_a_cell_that_runs_another_is_busy_until_its_own_end(kernel):
    """A cell that runs another cell is busy until its own end. A subshell that answers while a cell
    is running is such a case, too.
    """
    kernel.began("outer")
    kernel.now += 5
    kernel.began("inner")
    kernel.ended("inner")
    assert kernel.state == State(busy_since=1000.0)
    kernel.ended("outer")
    assert kernel.state == State(idle_since=1005.0)


def test_the_end_of_a_cell_counts_even_if_its_start_was_not_recorded(kernel):
    """The cell that loads the extension is an example: its start was not recorded, but its end counts."""
    kernel.ended("%load_ext gpu")
    assert kernel.state == State(idle_since=1000.0)


def test_a_forked_child_runs_no_cell(kernel):
    kernel.began("a")
    kernel.forget()
    assert kernel.state == State()
