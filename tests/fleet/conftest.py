"""What all tests of a fleet have in common."""

import pytest

from .ray_cluster import ENVIRONMENT


@pytest.fixture(autouse=True)
def token(monkeypatch):
    """Ray reads how it checks connections only once in a process, so each test that may import it sets both.

    Tests elsewhere must not: they would connect to the hosts of a fleet that another process tests.
    """
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, ENVIRONMENT[name])
