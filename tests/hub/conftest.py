"""The browser, the people and the hub of these tests."""

import pytest

from tests.browser.conftest import chromium  # noqa: F401

DEVICES = "sim:48MiB,host:2GiB"
PREFIX = "/hubs/one/"
CONFIGURE = """
from gpu_runtime import hub
hub.configure(c, port={service_port}, operator_groups=["gpu-admins"], park_after="5 s")
"""


@pytest.fixture(scope="module")
def box():
    """A hub below a prefix. Ann, bob and ops are real users of this machine; ops is an admin of the hub."""
    from .box import (
        people,
        require_hub,
        running_hub,
    )  # the tests of a card are collected without nbformat

    require_hub()
    with people(), running_hub(DEVICES, prefix=PREFIX, more=CONFIGURE) as running:
        try:
            yield running
        finally:
            print(running.log()[-20_000:])  # pytest shows it if a test has failed
