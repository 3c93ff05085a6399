"""Decides where the log lines of `gpu_runtime` appear in a notebook.

Without a handler, Python writes warnings to the standard error stream. A notebook shows this stream under the cell that
ran last. The lines of background threads are about the host and other notebooks. These lines go to the kernel's own
log, which is the terminal or the log file of Jupyter. Lines of the user's own calls stay in the cell.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

LOGGER = logging.getLogger("gpu_runtime")


class LogLines(logging.Handler):
    """Handles the log lines of one kernel."""

    def __init__(self, kernel_log: Any) -> None:
        """`kernel_log` is the logger of the kernel."""
        super().__init__(logging.WARNING)
        self._kernel_log = kernel_log
        LOGGER.addHandler(self)

    def remove(self) -> None:
        """Removes this handler. Log lines then appear again as they did before the handler was added."""
        LOGGER.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a line of the main thread to the cell, and a line of any other thread to the kernel's log.

        If the user has set up logging, only the user's handlers show the lines of the main thread.
        """
        if record.thread != threading.main_thread().ident:
            self._kernel_log.handle(record)
        elif LOGGER.handlers == [self] and not logging.getLogger().handlers and logging.lastResort:
            logging.lastResort.handle(record)
