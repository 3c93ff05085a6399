"""What belongs to the user of a process: generators, defaults, filters, handlers and settings."""

import decimal
import faulthandler
import gc
import hashlib
import locale
import logging
import os
import random
import resource
import signal
import socket
import sys
import threading
import warnings
from pathlib import Path
from typing import Any


def state() -> dict[str, Any]:
    """The state of the user's in this process, by name. All values can be compared and printed."""
    import numpy
    import torch

    def digest(value: object) -> str:
        return hashlib.sha256(repr(value).encode()).hexdigest()

    numpys = numpy.random.get_state()
    found = {
        "random": digest(random.getstate()),
        "numpy.random": digest((numpys[1].tolist(), numpys[2:])),
        "torch's generator": digest(torch.get_rng_state().tolist()),
        "torch.default_dtype": str(torch.get_default_dtype()),
        "torch.default_device": str(torch.get_default_device()),
        "torch.num_threads": torch.get_num_threads(),
        "torch.num_interop_threads": torch.get_num_interop_threads(),
        "torch.grad": torch.is_grad_enabled(),
        "torch.inference": torch.is_inference_mode_enabled(),
        "torch.autocast": torch.is_autocast_enabled("cpu"),
        "torch.deterministic": torch.are_deterministic_algorithms_enabled(),
        "torch.deterministic_warns": torch.is_deterministic_algorithms_warn_only_enabled(),
        "torch.precision": torch.get_float32_matmul_precision(),
        "torch.printoptions": repr(vars(torch._tensor_str.PRINT_OPTS)),
        "torch.warn_always": torch.is_warn_always_enabled(),
        "torch.anomaly": torch.is_anomaly_enabled(),
        "torch.flush_denormal": float(torch.tensor(1e-310, dtype=torch.float64) * 1),
        "numpy.err": repr(sorted(numpy.geterr().items())),
        "numpy.printoptions": repr(sorted(numpy.get_printoptions().items(), key=str)),
        "locale": locale.setlocale(locale.LC_ALL),
        "cwd": os.getcwd(),
        "umask": _field("Umask"),
        "blocked signals": _field("SigBlk"),
        "trace": repr((sys.gettrace(), sys.getprofile(), threading._trace_hook)),
        "hooks": repr((sys.excepthook, sys.displayhook, sys.unraisablehook, threading.excepthook)),
        "switch interval": sys.getswitchinterval(),
        "recursion limit": sys.getrecursionlimit(),
        "longest int": sys.get_int_max_str_digits(),
        "gc": repr((gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), gc.get_debug())),
        "sys.path": repr(sys.path),
        "sys.argv": repr(sys.argv),
        "streams": repr((sys.stdin, sys.stdout, sys.stderr)),
        "decimal": repr(decimal.getcontext()),
        "socket time-out": socket.getdefaulttimeout(),
        "root logger": repr((logging.root.level, logging.root.handlers, logging.root.disabled)),
        "faulthandler": faulthandler.is_enabled(),
        "itimer": repr(signal.getitimer(signal.ITIMER_REAL)),
    }
    found |= {f"environment {name}": value for name, value in os.environ.items()}
    found |= {f"filter {number}": repr(one) for number, one in enumerate(warnings.filters)}
    found["warnings"] = repr((warnings.showwarning, warnings.formatwarning))
    limits = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    found |= {f"limit {name}": resource.getrlimit(getattr(resource, name)) for name in limits}
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        found[f"signal {number}"] = repr(signal.getsignal(number))
    return found


def _field(name: str) -> str:
    """The field `name` of this process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(line for line in lines if line.startswith(f"{name}:"))


def changed(before: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What differs now: each name with its values before and now."""
    now = state()
    pairs = {name: (before.get(name), now.get(name)) for name in sorted(before | now)}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
