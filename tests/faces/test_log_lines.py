"""The log lines of background threads do not appear in a cell."""

import logging
import threading

import pytest
from gpu.magics import LOGGER, LogLines

LINE = "CRITICAL memory pressure! Usage: 94.1%. Forcing aggressive eviction."


@pytest.fixture
def written(monkeypatch):
    """What appears in the kernel's log, and what in the cell."""
    written: dict[str, list[str]] = {"kernel": [], "cell": []}

    def to(name):
        handler = logging.Handler()
        handler.emit = lambda record: written[name].append(record.getMessage())
        return handler

    monkeypatch.setattr(logging, "lastResort", to("cell"))
    kernel_log = logging.Logger("kernel")
    kernel_log.addHandler(to("kernel"))
    lines = LogLines(kernel_log)
    yield written
    lines.remove()
    assert not any(isinstance(one, LogLines) for one in LOGGER.handlers)


def in_thread(act):
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


def test_a_line_of_the_monitor_appears_in_the_kernels_log_only(written):
    """It appeared under whichever cell had run last."""
    in_thread(lambda: LOGGER.error("%s", LINE))
    in_thread(lambda: LOGGER.info("nobody sees this"))
    assert written == {"kernel": [LINE], "cell": []}


def test_a_line_of_the_users_own_call_appears_in_the_cell(written, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest has its own
    LOGGER.warning("qwen is dropped, since it could not be moved")
    assert written == {"kernel": [], "cell": ["qwen is dropped, since it could not be moved"]}


def test_a_user_who_has_set_up_logging_reads_each_line_once(written, monkeypatch):
    mine = logging.Handler()
    mine.emit = lambda record: written.setdefault("mine", []).append(record.getMessage())
    monkeypatch.setattr(logging.getLogger(), "handlers", [mine])
    LOGGER.warning("here")
    in_thread(lambda: LOGGER.warning("beside"))
    assert written == {"kernel": ["beside"], "cell": [], "mine": ["here", "beside"]}
