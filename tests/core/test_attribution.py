"""The name of the person for whom a thread acts."""

import os
import pwd
import threading

from gpu_runtime.attribution import MOST_LETTERS, attributed, on_behalf_of, printable, speaking_for
from gpu_runtime.web import http_server


def test_it_applies_to_its_own_thread_and_ends_with_its_block():
    """A console acts for several people at once, each in a thread of its own. So the name applies
    to one thread, and ends with its `with` block.
    """
    in_other_thread = []
    with on_behalf_of("ann"):
        with on_behalf_of("ben"):
            assert speaking_for() == "ben"
        other = threading.Thread(target=lambda: in_other_thread.append(speaking_for()))
        other.start()
        other.join()
        assert (speaking_for(), in_other_thread) == ("ann", [""])
    assert speaking_for() == ""


def test_a_name_is_one_line_of_bounded_length_and_its_process_is_named_after_it():
    """The name is stored in a page and a log that other users read."""
    assert printable("ann\r\n2026-01-01 ERROR\x1b[31m") == "ann 2026-01-01 ERROR [31m"
    assert len(printable("a" * 10_000)) == MOST_LETTERS
    assert attributed("ann", "ops, pid 7") == "ann (ops, pid 7)"
    assert attributed("", "ops, pid 7") == "ops, pid 7" and attributed("ann", "") == "ann"


def test_a_user_without_a_name_is_called_by_the_number(monkeypatch):
    """Containers have such users. The console, `gpu serve` and `gpu alerts ack` ended in a KeyError."""

    def unknown(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    assert http_server.access_rules().user == str(os.geteuid())
