"""A private ledger in a place where any user may make directories. No other user can put a
directory of theirs in its place.

If home directories are on a network, the default ledger is in /var/tmp, under a name that anybody
can guess.
"""

import contextlib
import os
import shutil
import stat
import tempfile
from pathlib import Path

import pytest

from gpu_runtime import files
from gpu_runtime.errors import LedgerUnavailable
from gpu_runtime.files import local_state, weak_step
from gpu_runtime.ledgers import access, open_ledger
from gpu_runtime.ledgers.access import default_url, require_private
from tests.impostor import NOBODY

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's files")


@pytest.fixture
def fallback(monkeypatch):
    """The place of this user's ledger in a directory like /var/tmp. Home directories are on a
    network.
    """
    public = Path(tempfile.mkdtemp(prefix="gpu-", dir="/tmp"))
    public.chmod(0o1777)
    real = files.file_system_of

    def file_system_of(path: Path, mounts: str | None = None) -> str:
        return real(path, mounts) if path.is_relative_to(public) else "nfs4"

    monkeypatch.setattr(files, "file_system_of", file_system_of)
    monkeypatch.setattr(files, "FALLBACK", public)
    yield public / f"gpu-console-{os.geteuid()}"
    shutil.rmtree(public)


def test_the_fallback_directory_is_this_users_alone(fallback):
    before = os.umask(0)
    try:
        open_ledger(default_url("one-card")).close()
    finally:
        os.umask(before)
    about = fallback.stat()
    assert (about.st_uid, stat.S_IMODE(about.st_mode)) == (os.geteuid(), 0o700)


@needs_root
@pytest.mark.parametrize("user", [0, 1000])
def test_root_prepares_the_ledger_of_another_user_and_nobody_else_does(tmp_path, monkeypatch, user):
    os.chown(tmp_path, NOBODY, NOBODY)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    refused = pytest.raises(LedgerUnavailable, match="belongs to another user")
    with refused if user else contextlib.nullcontext():
        access.prepare(tmp_path)


def _is_made(place: Path) -> None:
    place.mkdir()
    place.chmod(0o777)
    os.chown(place, NOBODY, NOBODY)


def _is_a_link(place: Path) -> None:
    mine = place.parent / "mine"
    mine.mkdir(mode=0o700)
    place.symlink_to(mine)
    os.chown(place, NOBODY, NOBODY, follow_symlinks=False)


def _has_a_part(place: Path) -> None:
    (place / "ledger").mkdir(parents=True)
    os.chown(place / "ledger", NOBODY, NOBODY)


def _is_shared(place: Path) -> None:
    """Another user made the directory. The file `.shared` in it marks it as a ledger for a group of
    that user's choice.
    """
    _is_made(place)
    (place / ".shared").touch()
    os.chown(place / ".shared", NOBODY, NOBODY)


@needs_root
@pytest.mark.parametrize("squatted", [_is_made, _is_a_link, _has_a_part, _is_shared])
def test_a_fallback_directory_that_another_user_made_first_is_refused(fallback, squatted):
    """The other user could read the journal and replace the book. The error names the directory and
    the setting.
    """
    squatted(fallback)
    with pytest.raises(LedgerUnavailable, match=r"belongs to uid 65534\.\n.*GPU_LEDGER=") as error:
        open_ledger(default_url("one-card"))
    assert str(fallback) in error.value.why
    for name in fallback.parent.rglob("*"):
        if name != fallback:
            assert name.name in ("mine", "ledger", ".shared"), "nothing was written there"


def test_a_fallback_directory_that_others_may_write_is_refused(fallback):
    fallback.mkdir()
    fallback.chmod(0o777)
    with pytest.raises(LedgerUnavailable, match="can be changed by other users"):
        open_ledger(default_url("one-card"))


@needs_root
def test_the_owners_files_of_a_redis_ledger_lie_in_no_directory_of_another_user(fallback):
    pytest.importorskip("redis")
    _is_made(fallback)
    with pytest.raises(LedgerUnavailable, match="belongs to uid 65534"):
        open_ledger("redis://127.0.0.1:1/0")


@needs_root
def test_a_named_ledger_below_another_users_directory_is_refused(fallback):
    """Only root may open such a ledger. A directory that all users may write is accepted, as a
    container's volume often is one.
    """
    theirs = fallback.with_name("theirs")
    _is_made(theirs)
    require_private(theirs / "ledger")
    os.seteuid(12345)
    try:
        with pytest.raises(LedgerUnavailable, match="belongs to uid"):
            require_private(theirs / "ledger")
        require_private(Path("/tmp/ledger"))
    finally:
        os.seteuid(0)


def test_a_circle_of_links_is_an_error(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(OSError, match="too many links"):
        weak_step(tmp_path / "a" / "ledger")


def test_on_a_local_home_the_state_directory_is_used(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert local_state() == tmp_path / "gpu-console"
