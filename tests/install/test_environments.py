# ruff: noqa: F811 - fixtures
"""The page on environments: each of its rows is run, or names the tests that run it."""

import os

import pytest

from tests.install.conftest import pip

from .boxes import BoxKernel, environment
from .conftest import CORE, ROOT
from .test_box import core, machine  # noqa: F401 - fixtures

PAGE = (ROOT / "docs/guides/environments.md").read_text()
ALL_TESTS = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
# The tests of each situation, in the order of the page.
SHOWN_BY = (
    "test_two_users_take_turns_on_a_card_that_is_too_small_and_compute_as_if_alone",
    "test_a_member_sees_the_own_notebooks_and_the_sum_of_each_other_user",
    "test_the_culler_stops_idle_servers_but_none_with_values_that_exist_nowhere_else",
    "test_an_installation_changes_no_package_of_the_user",
    "test_two_versions_share_a_card",
    "test_beside_a_notebook_of_version_0_2_no_second_book_is_begun",
    "test_an_upgrade_and_a_downgrade_disturb_none_of_twelve_notebooks",
    "test_after_an_upgrade_under_a_kernel_each_verb_says_so_and_nothing_is_lost",
    "test_a_user_outside_the_group_is_told_once_what_to_ask_for",
)


def table(heading: str) -> list[list[str]]:
    """The rows of the table below this heading of the page."""
    part = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split(" | ") for line in part.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def test_each_situation_has_a_test_that_requires_what_it_says():
    rows = table("Situations of a shared machine")
    assert len(rows) == len(SHOWN_BY)
    for (_, _, says), test in zip(rows, SHOWN_BY, strict=True):
        body = ALL_TESTS.partition(f"def {test}(")[2].partition("\ndef ")[0]
        assert body, f"{test} is gone"
        assert says.strip("`") in body, f"{test} does not require {says}"


INSTALLED = pytest.mark.parametrize("installed", ("own", "box"))
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can install for all users")


@pytest.mark.install
@pytest.mark.processes
@AS_ROOT
@pytest.mark.parametrize("libraries", [[], ["torch"]], ids=["none", "newest"])
@INSTALLED
def test_a_kernel_of_each_environment_does_what_the_page_says(
    machine, wheel, tmp_path, libraries, installed
):
    """`make matrix` runs it with other versions."""
    needs = CORE if installed == "own" else []
    python = environment(tmp_path / "env", ["ipykernel", *needs, *libraries])
    if installed == "box":
        machine.install()
    else:
        pip("install", "-q", "--no-deps", "--no-index", wheel, cwd=machine.root, python=python)
    with BoxKernel(python, machine.root) as kernel:
        if installed == "own":
            assert kernel.run("%load_ext gpu") == ""
        assert "healthy" in kernel.run("%gpu health")
        if libraries:
            kernel.run("import torch; x = torch.ones(2_000_000)")
            assert "leaves when this cell has ended" in kernel.run("%gpu park")
            kernel.run("rt.register('m', lambda: torch.nn.Linear(1024, 1024))")
            assert "m is on sim:0" in kernel.run("rt.preload('m')")
            assert "offloaded to RAM" in kernel.run("rt.evict('m')")
            assert kernel.run("print(float(x.sum()))").endswith("2000000.0\n")
        else:
            told = kernel.run("rt.register('m', lambda: 1)")
            assert "needs torch" in told and "pip install 'torch>=2.4'" in told
        console = kernel.run("%gpu console")
        assert "the console needs panel" in console and "pip install" in console
        assert ("in a terminal:  gpu console" in console) == (installed == "box")
        assert kernel.log == []
        assert "gc.freeze" not in kernel.log_file.read_text()  # of why a kernel was not parked
    bar = python.parents[1] / "share/jupyter/labextensions/gpu-console/package.json"
    assert bar.exists() == (installed == "own")


@pytest.mark.install
@pytest.mark.processes
@AS_ROOT
def test_a_kernel_of_the_box_has_the_console_if_its_environment_has_panel(machine, tmp_path):
    """The packages are those that the error names without Panel."""
    machine.install()
    named = ["panel", "panel-material-ui", "jupyter-bokeh"]
    python = environment(tmp_path / "env", ["ipykernel", *named])
    with BoxKernel(python, machine.root) as kernel:
        shown = kernel.run("made = rt.console(); print(type(made))\n%gpu console")
        assert "gpu_panels.inline.Inline" in shown and "sim:0" in shown
        assert kernel.log == []
