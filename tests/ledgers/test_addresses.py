"""Which values GPU_LEDGER may have, the error for every other value, and the ledger's directory."""

import grp
import os
import pwd
import sqlite3
import stat
import sys
import time
from pathlib import Path

import pytest

from gpu_runtime import files
from gpu_runtime.errors import BadSetting, GpuError, LedgerUnavailable
from gpu_runtime.facts import SCHEMA
from gpu_runtime.files import config_home, state_home
from gpu_runtime.ledgers import access, open_ledger, setup
from gpu_runtime.ledgers.access import default_url
from gpu_runtime.ledgers.keeper.ledger import KeeperLedger
from gpu_runtime.ledgers.liveness import OwnerFile, boot_id, describe_self
from tests.clock import PATIENCE, finished

from .conftest import put


@pytest.mark.parametrize("slashes", ["keeper://", "keeper:///", "keeper:////", "sqlite://"])
def test_three_slashes_or_more_name_one_directory(tmp_path, slashes, caplog):
    """Some tools write an absolute path with four slashes. Version 0.2 kept an SQLite file there."""
    ledger = open_ledger(f"{slashes}{tmp_path}/ledger")
    try:
        assert (
            ledger.url == f"keeper://{tmp_path}/ledger"
            and ledger.directory.parent == tmp_path / "ledger"
        )
        assert ("is read as keeper" in caplog.text) == (slashes == "sqlite://")
    finally:
        ledger.close()


@pytest.mark.parametrize(
    "url, meant",
    [
        ("keeper:///ledger", "{here}/ledger"),
        ("keeper:///ledger.db", "{here}/ledger"),
        ("keeper:///./ledger", "{here}/ledger"),
        ("keeper:///../ledger", "{above}/ledger"),
        ("keeper:///~/ledger", "{home}/ledger"),
        ("keeper://a/ledger", "{here}/a/ledger"),
        ("keeper:ledger", "{here}/ledger"),
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
        f"keeper://{meant.format(here=tmp_path, above=tmp_path.parent, home=Path.home())}"
        in str(error.value)
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("url", ["postgres://ops:s3cret@box/db", "", "keeper:"])
def test_the_error_for_an_unknown_url_lists_the_known_ones(url):
    with pytest.raises(
        BadSetting,
        match="memory:, memory:NAME, keeper:///ABSOLUTE/DIRECTORY or redis://HOST:PORT/DB",
    ) as error:
        open_ledger(url)
    assert "s3cret" not in str(error.value)


def test_each_ledger_has_a_service_of_its_own():
    names = {setup.unit_name(Path(place)) for place in ("/srv/gpu", "/srv/gpu2", "/gpu", "/srv-2")}
    assert "gpu-console-srv-gpu.service" in names and len(names) == 4


IN_ASCII = """
import sys
from pathlib import Path
from gpu_runtime.ledgers import host_config, setup
ledger, file = Path(sys.argv[1]), sys.argv[2]
setup._write_configuration(Path(file), f"keeper://{ledger}", host_config.read(file))
assert host_config.read(file).ledger == f"keeper://{ledger}"
setup.forget(ledger, file)
"""


def test_the_configuration_keeps_its_letters_in_every_locale(tmp_path):
    """They were read as those of the locale, and written in UTF-8."""
    config = tmp_path / "config.toml"
    config.write_text("# f\xfcr \u4e2d\n[users.ann]\nkeep = false\n", encoding="utf-8")
    before = config.read_bytes()
    ascii = {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = [sys.executable, "-c", IN_ASCII, str(tmp_path / "ledger"), str(config)]
    done = finished(command, env=os.environ | ascii)
    assert (done.returncode, done.stderr, config.read_bytes()) == (0, "", before)


@pytest.mark.parametrize("name", ["with blank", "100%", "a$b", "a'b"])
def test_a_path_that_a_unit_or_cron_would_read_otherwise_is_refused(tmp_path, name):
    with pytest.raises(BadSetting, match="without blanks, quotes"):
        setup.require_suitable(
            tmp_path / name / "ledger", grp.getgrgid(os.getegid()).gr_name, str(tmp_path / "none")
        )


def test_a_network_file_system_is_refused_by_name(tmp_path, monkeypatch):
    """Home directories on NFS are common. The default ledger must work there, too."""
    mounts = tmp_path / "mountinfo"
    mounts.write_text("1 0 0:9 / / rw - nfs4 srv rw\n")
    monkeypatch.setattr(files, "_MOUNTS", mounts)
    with pytest.raises(LedgerUnavailable, match=r"network file system \(nfs4\)"):
        open_ledger(f"keeper://{tmp_path}/ledger")
    assert not (tmp_path / "ledger").exists()
    assert default_url("sim") == f"keeper:///var/tmp/gpu-console-{os.geteuid()}/ledger/sim"


def test_another_mount_may_have_any_bytes_as_its_name(tmp_path, monkeypatch):
    """Such as a disk with a name in Latin 1, or what a user mounts by FUSE. No ledger could be opened meanwhile."""
    mounts = tmp_path / "mountinfo"
    mounts.write_bytes(
        b"1 0 8:1 / / rw - ext4 /dev/a rw\n2 1 0:9 / /media/caf\xe9 rw - vfat b rw\n"
        b"3 1 0:8 / /home/eve/a\r\x0cb\xc2\xa0c\xe2\x80\xa8d\\040e rw - fuse.sshfs b rw\n"
    )
    monkeypatch.setattr(files, "_MOUNTS", mounts)
    assert files.file_system_of(tmp_path) == "ext4"
    assert files.file_system_of(Path(os.fsdecode(b"/media/caf\xe9/x"))) == "vfat"
    assert files.file_system_of(Path("/home/eve/a\r\x0cb\xa0c\u2028d e/x")) == "fuse.sshfs"


@pytest.mark.parametrize("home", [None, "relative"])
def test_a_user_without_a_home_has_one_ledger(home, monkeypatch):
    """As an unknown user in a container. Each working directory had one of its own, or none."""
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    for name in ("HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, home) if home else monkeypatch.delenv(name, raising=False)
    state = f"/var/tmp/gpu-console-{os.geteuid()}"
    assert default_url() == f"keeper://{state}/ledger" and str(state_home()) == state
    assert str(config_home()) == f"/var/tmp/gpu-console-config-{os.geteuid()}"
    with pytest.raises(BadSetting, match="for this path: keeper:///"):
        open_ledger("keeper://~/ledger")


def test_the_default_is_in_the_state_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_url() == f"keeper://{tmp_path}/gpu-console/ledger"


def test_the_error_names_a_path_that_is_no_directory(tmp_path):
    (tmp_path / "ledger").touch()
    with pytest.raises(LedgerUnavailable, match="cannot be written.*\n.*GPU_LEDGER"):
        open_ledger(f"keeper://{tmp_path}/ledger")


def test_files_are_private_to_their_user_and_work_at_a_long_path(tmp_path):
    """The path of a socket is limited to 107 bytes. The path of a home directory can be longer."""
    a, b = (open_ledger(f"keeper://{tmp_path}/{'x' * 120}") for _ in range(2))
    put(a, "qwen")
    b.ring([a.owner.id])
    assert a.wait(PATIENCE)
    for path in a.directory.rglob("*"):
        if not path.is_symlink():
            assert stat.S_IMODE(path.stat().st_mode) == (0o600 if path.is_file() else 0o700), path
    a.close()
    b.close()


def test_books_of_old_boots_are_removed(tmp_path):
    """A directory is removed if its name is the id of another boot and it is unchanged for a day."""
    boots = [tmp_path / f"{number}3570074-f799-4d7e-a08f-84fbbe7bb98d" for number in range(3)]
    for boot in (*boots, tmp_path / "notes"):
        boot.mkdir()
        (boot / "samples").touch()
    long_ago = time.time() - 3 * 86400
    for boot in (boots[0], boots[1], tmp_path / "notes"):
        for path in (boot / "samples", boot):
            os.utime(path, (long_ago, long_ago))
    (boots[1] / "samples").touch()
    open_ledger(f"keeper://{tmp_path}").close()
    assert [path.exists() for path in (*boots, tmp_path / "notes")] == [False, True, True, True]


def test_beside_a_notebook_of_version_0_2_no_second_book_is_begun(tmp_path):
    """That version held a lock on a file of its own, and kept the book in an SQLite file."""
    place = tmp_path / boot_id()
    access.prepare(place)
    older = OwnerFile(place / "owners", describe_self())
    with pytest.raises(LedgerUnavailable, match=f"0.2 keeps a book .* pid {os.getpid()}"):
        KeeperLedger(tmp_path, patience_seconds=0.1)
    with pytest.raises(GpuError, match=f"0.2 keeps a book .* pid {os.getpid()}"):
        setup.require_suitable(tmp_path, "root", "/no/file")
    older.release(remove=True)
    open_ledger(f"sqlite://{tmp_path}").close()
    with sqlite3.connect(f"file:{place}/CURRENT?mode=ro", uri=True) as db:
        [found] = db.execute("SELECT host, rev, schema, body FROM book").fetchall()
    assert found == (place.name, 1, SCHEMA + 1, b""), "version 0.2 says: upgrade this environment"
