"""The browser of these tests."""

import shutil

import pytest

from .chromium import CHROMIUM, running


@pytest.fixture(scope="module", autouse=True)
def chromium():
    """Chromium, for all tests of a module. Without it they are skipped."""
    pytest.importorskip("playwright")
    if not shutil.which(CHROMIUM):
        pytest.skip("needs Chromium")
    with running() as browser:
        yield browser
