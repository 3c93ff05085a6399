"""Which ledgers a process has open, by its files under /proc."""

import os
from pathlib import Path

import pytest

from gpu_runtime.ledgers import open_ledger, reader
from gpu_runtime.ledgers.liveness import boot_id

from .conftest import share

HERE = os.getpid()


@pytest.fixture
def ledger(tmp_path):
    """A ledger that this process has open."""
    opened = open_ledger(f"keeper://{tmp_path}/ledger")
    yield opened
    opened.close()


@pytest.mark.parametrize("shared", [False, True])
def test_an_open_ledger_is_found_and_a_closed_one_is_not(tmp_path, shared):
    """The owners' files of a shared ledger are beside the directory of the boot. In an earlier version such a ledger
    was not found, so JupyterLab showed nothing of it.
    """
    url = f"keeper://{share(tmp_path / 'ledger') if shared else tmp_path / 'ledger'}"
    opened = open_ledger(url)
    found = [one for one in reader.of_process(HERE) if one.url == url]
    opened.close()
    assert [one.directory for one in found] == [Path(opened.directory)]
    assert url not in [one.url for one in reader.of_process(HERE)]


def test_two_ledgers_of_one_process_are_both_found(tmp_path, ledger):
    with_second = open_ledger(f"keeper://{tmp_path}/second")
    try:
        urls = {one.url for one in reader.of_process(HERE)}
        assert {f"keeper://{tmp_path}/ledger", f"keeper://{tmp_path}/second"} <= urls
    finally:
        with_second.close()


def test_a_process_that_has_ended_has_no_ledger():
    assert reader.of_process(2**22 + 1) == () and reader.family(2**22 + 1) == (2**22 + 1,)


def proc_with(place: Path, pid: int, target: Path, environment: bytes = b"") -> Path:
    """A directory like /proc with one process. That process has the file `target` open."""
    (place / f"{pid}/fd").mkdir(parents=True)
    (place / f"{pid}/fd/5").symlink_to(target)
    (place / f"{pid}/environ").write_bytes(environment)
    return place


@pytest.mark.parametrize(("setting", "is_found"), [
    (b"GPU_LEDGER=redis://ops:secret@box:6379/0?owners=PLACE", True),
    (b"GPU_LEDGER=redis://box:6379/0?owners=/elsewhere", False),
    (b"HOME=/root", False),
])  # fmt: skip
def test_a_ledger_in_redis_is_found_by_the_setting_of_its_process(tmp_path, setting, is_found):
    """The files of such a ledger do not contain its URL, since the URL may have a password."""
    owners = tmp_path / "redis"
    setting = setting.replace(b"PLACE", bytes(owners))
    opened = owners / "redis-box-6379-0" / boot_id() / "owners"
    proc = proc_with(tmp_path / "proc", 41, opened, b"A=1\0" + setting + b"\0")
    found = reader.of_process(41, proc)
    assert [one.url for one in found] == ([setting.partition(b"=")[2].decode()] if is_found else [])


def test_files_of_an_earlier_boot_are_no_ledger_in_use(tmp_path):
    opened = tmp_path / "ledger/00000000-0000-0000-0000-000000000000/owners"
    assert reader.of_process(41, proc_with(tmp_path / "proc", 41, opened)) == ()


def test_only_processes_of_this_user_are_looked_at(tmp_path, monkeypatch):
    proc = proc_with(tmp_path / "proc", 41, tmp_path)
    (proc / str(HERE)).mkdir()
    (proc / "meminfo").write_text("")
    assert list(reader.processes_of_this_user(proc)) == [41]
    monkeypatch.setattr(os, "geteuid", lambda: 2**31 - 1)
    assert list(reader.processes_of_this_user(proc)) == []


def test_a_kernel_below_a_launcher_script_is_found(tmp_path):
    for pid, children in ((7, "8 9 "), (8, "10"), (9, ""), (10, "")):
        (tmp_path / f"{pid}/task/{pid}").mkdir(parents=True)
        (tmp_path / f"{pid}/task/{pid}/children").write_text(children)
    assert reader.family(7, tmp_path) == (7, 8, 9, 10)
