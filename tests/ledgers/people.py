"""Real users of this machine, and processes of these users. The users are made for a test and
removed after it.
"""

import os
import shutil
import subprocess

import pytest

from tests import forked
from tests.clock import PATIENCE

COMMANDS = ("groupadd", "useradd", "userdel", "groupdel")

# All modules are imported while the process is still root, because the interpreter may be in a
# directory that other users cannot read.
CHILD = """
import os, sys, fcntl, struct, time
import email.parser, tomllib  # which are imported later, by importlib.metadata and for the configuration
from pathlib import Path
from gpu_runtime import Runtime
from gpu_runtime.facts import Book, Lease, Section, Share, Ticket, encode
from gpu_runtime.ledgers import open_ledger
from gpu_runtime.ledgers.keeper.ledger import KeeperLedger
from gpu_runtime.attribution import name_of
from msgspec.structs import replace
from tests.ledgers.conftest import lease, names, put, section
uid, gids = {uid}, {gids}
os.setgroups(gids); os.setresgid(gids[0], gids[0], gids[0]); os.setresuid(uid, uid, uid); os.umask(0o077)
os.environ.update(HOME="/nonexistent", LOGNAME="root", USER="root", XDG_STATE_HOME={state!r})
os.chdir("/")
here = dict(globals())
def answer(line):
    try: return repr(eval(line, here))
    except SyntaxError: exec(line, here); return "None"
for line in sys.stdin:
    try: said = answer(line)
    except Exception as error: said = f"{{type(error).__name__}}: {{error}}"
    print(said.replace(chr(10), " "), flush=True)
"""


class Person(forked.Answering):
    """A process of another user, under umask 077. It evaluates lines of Python."""

    def __init__(self, user: str, uid: int, gids: list[int], state: str) -> None:
        self.user = user
        super().__init__(CHILD.format(uid=uid, gids=gids, state=state))


def require_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make users to test with")
    for command in COMMANDS:
        if not shutil.which(command):
            pytest.skip(f"this machine has no {command}")


def run_command(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=PATIENCE)
