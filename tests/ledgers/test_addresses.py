"""Which values GPU_LEDGER may have, and the error for every other value."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_runtime.errors import BadSetting
from gpu_runtime.ledgers import open_ledger


@pytest.mark.parametrize("slashes", ["sqlite://", "sqlite:///", "sqlite:////"])
def test_three_slashes_or_more_name_one_directory(tmp_path, slashes):
    """Some tools write an absolute path with four slashes. It names the same directory."""
    ledger = open_ledger(f"{slashes}{tmp_path}/ledger")
    try:
        assert (
            ledger.url == f"sqlite://{tmp_path}/ledger"
            and ledger.directory.parent == tmp_path / "ledger"
        )
    finally:
        ledger.close()


@pytest.mark.parametrize(
    "url, meant",
    [
        ("sqlite:///ledger", "{here}/ledger"),
        ("sqlite:///ledger.db", "{here}/ledger"),
        ("sqlite:///./ledger", "{here}/ledger"),
        ("sqlite:///../ledger", "{above}/ledger"),
        ("sqlite:///~/ledger", "{home}/ledger"),
        ("sqlite://a/ledger", "{here}/a/ledger"),
        ("sqlite:ledger", "{here}/ledger"),
        ("a/ledger", "{here}/a/ledger"),
        ("/var/tmp/ledger", "/var/tmp/ledger"),
        ("~/ledger", "{home}/ledger"),
    ],
)
def test_the_error_for_a_relative_path_shows_the_absolute_url(tmp_path, monkeypatch, url, meant):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadSetting) as error:
        open_ledger(url)
    assert (
        f"sqlite://{meant.format(here=tmp_path, above=tmp_path.parent, home=Path.home())}"
        in str(error.value)
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("url", ["postgres://ops:s3cret@box/db", "", "sqlite:"])
def test_the_error_for_an_unknown_url_lists_the_known_ones(url):
    with pytest.raises(
        BadSetting,
        match="memory:, memory:NAME, sqlite:///ABSOLUTE/DIRECTORY or redis://HOST:PORT/DB",
    ) as error:
        open_ledger(url)
    assert "s3cret" not in str(error.value)
