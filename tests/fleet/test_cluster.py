"""What a person reads if there is no Ray, no token, or no cluster."""

from __future__ import annotations

import importlib.util
import sys

import pytest

import gpu_runtime
from gpu_runtime import FleetUnavailable, cli


def test_without_the_extra_the_error_names_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(FleetUnavailable, match=r"pip install 'gpu-console\[fleet\]'"):
        gpu_runtime.fleet()
    assert cli.main(["fleet"]) == 1
    assert "gpu-console[fleet]" in capsys.readouterr().err


def test_without_a_token_nothing_connects(monkeypatch):
    """The check comes before the import of Ray, which reads the setting only once."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs Ray: pip install 'gpu-console[fleet]'")
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with pytest.raises(FleetUnavailable, match="RAY_AUTH_MODE=token"):
        gpu_runtime.fleet()


@pytest.mark.parametrize("address", ["", None, 7])
def test_an_address_is_text(address):
    with pytest.raises(FleetUnavailable, match="is a text"):
        gpu_runtime.fleet(address)
