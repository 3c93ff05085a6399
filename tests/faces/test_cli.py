"""The `gpu` command: the verbs of the table, one line for each failure, and the exit codes."""

import argparse
import io
import os
import re
import sys
from unittest.mock import Mock

import pytest

import gpu_runtime
from gpu_runtime import cli, verbs
from gpu_runtime.facts import Outcome
from gpu_runtime.settings import NAMES
from gpu_runtime.verbs import given
from tests.clock import finished

from .test_magics import SHOWN

GIB = 2**30


@pytest.fixture
def gpu(models, monkeypatch, capsys):
    """Runs the command in this process, which holds two models. Returns the exit code, the output and the errors."""
    closed = []
    monkeypatch.setattr(models, "close", lambda: closed.append(True))

    def run(*words):
        code = cli.main(list(words))
        out, err = capsys.readouterr()
        return code, out, err

    run.closed = closed
    yield run
    monkeypatch.undo()


IN_TERMINAL = {verb.name for verb in verbs.verbs(verbs.CLI)} | {"", "-h"}
ANSWERS = {
    **{
        tuple(words.split()): shown.replace("%gpu", "gpu")
        for words, shown in SHOWN.items()
        if words.partition(" ")[0] in IN_TERMINAL
    },
    ("models",): "NAME",
    ("models", "--json"): '"where": "sim:0"',
    ("leases",): "DEVICE",
    ("evictions",): "offloaded",
    ("alerts",): "Nobody is told.",
    ("report",): "Nothing was recorded in this time",
    ("report", "--csv"): "user,card_h,in_use_gib_h",
    ("report", "--text"): "recorded 0 ms of 7 d",
    ("fragmentation",): "ALLOCATED BYTES",
    ("backtest", "--policy", "lru"): "WAIT VS LRU",
    ("catalog",): "no backend tgi here",
    ("plan", "org/far"): "It would not be loaded: its backend tgi is not part of this version",
    ("help", "evict"): "a model; another process's as NAME@PID",
    ("help", "plan"): "    NAME|SIZE|PATH  a model, ",
    ("console", "-h"): "gpu console [--host HOST] [--port N] [--socket PATH] [--read-only]",
    ("exporter", "-h"): "gpu exporter [--host HOST] [--port N] [--socket PATH]",
    ("mcp", "-h"): "gpu mcp [--read-only]",
    ("serve", "-h"): "gpu serve [--host HOST] [--port N] [--socket PATH] [--read-only]",
    ("autoload", "-h"): "gpu autoload [--remove]",
    ("uninstall", "-h"): "gpu uninstall [--prefix DIR] [--yes]",
    (
        "box",
        "-h",
    ): "gpu box [ACTION] [--prefix DIR] [--group G] [--pythons V] [--from FILE] [--dry-run]",
    ("park", "-h"): "gpu park [NOTEBOOK] [--checkpoint] [--yes]",
    ("hibernate", "-h"): "gpu hibernate [NOTEBOOK]",
    ("unpark", "-h"): "gpu unpark [NOTEBOOK] [--checkpoint]",
    ("who", "-h"): "gpu who [NOTEBOOK]",
    ("fleet", "-h"): "gpu fleet [ACTION] [HOST] [--undo] [--create NAME@HOST] [--on CARDS]",
    ("ledger", "-h"): "gpu ledger init --group G DIR",
    ("top", "-h"): "gpu top",
    ("keys", "-h"): "gpu keys ACTION [NAME] [--role R] [--models NAMES]",
}


@pytest.mark.parametrize("words", ANSWERS, ids=" ".join)
def test_a_verb_answers_on_standard_output(gpu, words):
    code, out, err = gpu(*words)
    assert (code, err) == (0, "") and ANSWERS[words] in out


@pytest.mark.parametrize("words", ANSWERS, ids=" ".join)
def test_a_verb_answers_in_a_terminal_that_has_only_ascii(gpu, monkeypatch, words):
    """With LANG=C and without Python's UTF-8 mode, `gpu status` was a UnicodeEncodeError."""
    written = io.BytesIO()
    with monkeypatch.context() as patch:
        terminal = io.TextIOWrapper(written, encoding="ascii")
        patch.setattr(sys, "stdout", terminal)
        code = cli.main(list(words))
        terminal.flush()
    assert code == 0 and written.getvalue().isascii()
    assert b"?" not in written.getvalue().replace(b"gpu?", b"")


def test_every_verb_of_the_table_is_tested_here():
    tried = {words[0] for words in ANSWERS if words}
    assert {verb.name for verb in verbs.verbs(verbs.CLI)} == tried - {"-h"}


def test_every_verb_without_an_act_has_one_in_each_face():
    """The table of verbs imports no face. So the command itself runs `console`, `serve` and `top`."""
    rows = [verb for verb in verbs.VERBS.values() if verb.act is None]
    without = {verb.name for verb in rows if not hasattr(gpu_runtime.Runtime, verb.name)}
    assert without | {"console"} == {*cli.SERVERS, "top", "help"}, "a Runtime has a console too"
    in_notebooks = {name for name in cli.SERVERS if verbs.MAGIC in verbs.VERBS[name].places}
    assert in_notebooks == {verb.name for verb in verbs.VERBS.values() if verb.plain_in_notebook}


def test_fragmentation_in_a_terminal_shows_the_allocators_of_all_processes(rt, monkeypatch, capsys):
    """The command has an empty allocator of its own. This is not shown as if it were the card's."""
    monkeypatch.setattr(rt, "close", lambda: None)
    assert cli.main(["fragmentation"]) == 0
    assert "No process holds memory on a card yet" in capsys.readouterr().out
    monkeypatch.undo()


def test_a_table_is_aligned_and_its_sizes_are_for_people(gpu):
    _, out, _ = gpu("models")
    header, *lines = out.splitlines()
    assert header.split() == [
        "NAME", "BACKEND", "WHERE", "BYTES", "IDLE", "USES", "IMPORTANCE", "OWNER",
    ]  # fmt: skip
    where = {line.split()[0]: line[header.index("WHERE") :].split()[0] for line in lines}
    assert where == {"llama": "RAM", "qwen": "sim:0", "phi:4b": "disk", "org/far": "disk"}
    assert "14.0 GiB" in out


@pytest.mark.parametrize(("words", "code", "message"), [
    ("inspect nobody", 1, "Known: org/far, phi:4b. Add it to the catalogue: gpu apply -f FILE"),
    ("report --by week", 1, "it must be one of user, notebook, model, card, waits, time"),
    ("report --text --by card", 1, "by='card' cannot be used: it must be left out with the text"),
    ("report --since yesterday", 1, "'yesterday' is not a duration"),
    ("evict", 1, "type one of the two: a NAME, or --all-idle"),
    ("apply -f none.yaml", 1, "none.yaml: it cannot be read (No such file or directory)."),
    ("console --socket /tmp/console", 1, "needs a directory that is yours alone (mode 0700)"),
    ("console --host 203.0.113.1", 1, "nothing can listen on 203.0.113.1"),
    ("evcit", 2, "no verb is called 'evcit'. Did you mean evict?"),
    ("load x", 2, "load (registers a model and loads it) works in a notebook only: %gpu load NAME"),
    ("evict writer@99", 1, "NAME@PID is a model of another process"),
    ("hibernate", 1, "A notebook: gpu hibernate NOTEBOOK · In its own first cell: %load_ext gpu"),
    ("pin", 2, "required: NAME. Usage: gpu pin NAME"),
    ("status -o x", 2, "a terminal has not. To a file: gpu status … --json > FILE"),
    ("ledger init", 2, "required: --group, DIR. Usage: gpu ledger init --group G DIR"),
    ("box mend", 2, "invalid choice: 'mend'"),
    ("ledger share --group g /x", 2, "invalid choice: 'share'"),
    ("console --port 70000", 2, "'70000' is not a port"),
    ("--frobnicate", 2, "unrecognized arguments: --frobnicate"),
    ("evict qwen --timeout soon", 2, "Write it like 30, '10m' or '2h'. Usage: gpu evict"),
    ("plan -3GiB", 1, "'-3GiB' is not a size"),
])  # fmt: skip
def test_a_failure_is_one_line_on_standard_error(gpu, words, code, message):
    """The exit code is 1 for a failure, and 2 for a command line that cannot be understood."""
    returned, out, err = gpu(*words.split())
    assert (returned, out) == (code, "") and message in err
    assert err.startswith("gpu: ") and err.count("\n") == 1


def test_without_panel_the_console_names_the_package_to_install(gpu, monkeypatch):
    monkeypatch.setitem(sys.modules, "panel", None)
    monkeypatch.delitem(sys.modules, "gpu_panels.server", raising=False)
    monkeypatch.delattr("gpu_panels.server", raising=False)
    code, out, err = gpu("console")
    assert (code, out) == (1, "")
    assert err.startswith("gpu: the console needs panel, which is not installed")
    assert err.endswith("pip install 'gpu-console[console]'\n")


def test_a_setting_of_a_wrong_type_is_one_line(gpu, environment):
    environment.setenv("GPU_MEMORY_MAX_PERCENT", "lots")
    why = "it must be a number from 0 to 1, such as 0.9."
    assert gpu("config")[::2] == (1, f"gpu: GPU_MEMORY_MAX_PERCENT='lots' cannot be used: {why}\n")


def test_the_runtime_is_closed_whatever_happens(gpu):
    """After each command, no owner of the command is left in the book."""
    gpu("status")
    gpu("evict", "nobody")
    assert gpu.closed == [True, True]


def test_an_interrupt_is_one_line(gpu, monkeypatch):
    monkeypatch.setattr(gpu_runtime, "runtime", Mock(side_effect=KeyboardInterrupt))
    assert gpu("status") == (1, "", "gpu: interrupted\n")


def test_config_lists_every_setting(gpu):
    _, out, _ = gpu("config")
    assert {line.split()[0] for line in out.splitlines()[1:]} == {name.upper() for name in NAMES}


def command(environment, *words, **more):
    return finished([sys.executable, "-m", "gpu_runtime.cli", *words], env=environment, **more)


def test_a_request_to_another_process_goes_through_the_ledger(child_environment):
    """The command shows this process's model with its pid, and has it evicted."""
    ledger, qwen = child_environment["GPU_LEDGER"], f"qwen@{os.getpid()}"
    cards = {"devices": "sim:24GiB,host:64GiB", "ledger": ledger}
    with gpu_runtime.Runtime(**cards, eviction_grace_seconds=0.0) as rt:
        rt.register("qwen", backend="fake", size="14GiB")
        rt.preload("qwen")
        seen = command(child_environment, "status")
        assert re.search(rf"qwen +14\.0 GiB +sim:0 +pid {os.getpid()}\b", seen.stdout), seen
        evicted = command(child_environment, "evict", qwen)
        assert (evicted.returncode, evicted.stderr) == (0, "")
        assert rt.models()["where"].tolist() == ["host"]
        with rt.use("qwen"):
            refused = command(child_environment, "evict", qwen, "--timeout", "3")
        assert refused.returncode == 1 and refused.stderr.count("\n") == 1
        assert "in use" in refused.stderr


def test_status_imports_neither_torch_nor_pandas(child_environment):
    """People put `gpu status` into a prompt or a loop, so it must be fast. An import of torch takes a second."""
    code = (
        "import sys; from gpu_runtime.cli import main; code = main(['status']);"
        "print(code, [m for m in ('torch', 'transformers', 'pandas', 'IPython', 'panel') if m in sys.modules])"
    )
    done = finished([sys.executable, "-c", code], env=child_environment)
    assert done.stdout.splitlines()[-1] == "0 []", done.stderr


def test_a_closed_pipe_is_no_error(child_environment):
    shell = f"set -o pipefail; {sys.executable} -m gpu_runtime.cli help | head -c 1; echo ${{PIPESTATUS[0]}}"
    done = finished(["bash", "-c", shell], env=child_environment)
    assert done.stderr == "" and done.stdout.splitlines()[-1].endswith("0")


@pytest.mark.parametrize("gap", ["  ", " "])
def test_what_a_notebook_must_type_stays_a_magic_in_a_terminal(gap):
    """`gpu park never` in a terminal means another process, and is refused there."""
    advice = f"Type in that notebook:{gap}%gpu park never      or here:{gap}%gpu status"
    shown = verbs.typed_in(verbs.CLI, advice)
    assert shown == f"Type in that notebook:{gap}%gpu park never      or here:{gap}gpu status"


def test_a_timeout_of_zero_is_a_timeout():
    """`--timeout 0` is a time-out that a person has typed, although 0.0 equals False in Python."""
    args = argparse.Namespace(timeout=0.0, limit=None, undo=False)
    assert given(args, "timeout", "limit", "undo") == {"timeout": 0.0}


@pytest.mark.parametrize("words, code", [("yes", 0), ("no", 1), ("", 1)])
def test_parking_by_the_driver_is_confirmed_at_a_terminal(gpu, rt, monkeypatch, words, code):
    """A person reads the hazards and confirms. A script has no terminal and must type `--yes`."""
    calls = []

    def park(who, **given):
        calls.append(given)
        hazards = "may hang. To park it all the same:  %gpu park --checkpoint 41 --yes"
        return Outcome("park", who, "yes" in given, "parked" if "yes" in given else hazards)

    monkeypatch.setattr(rt, "park", park)
    unasked, out, _ = gpu("park", "--checkpoint", "41")
    assert (unasked, calls) == (1, [{"checkpoint": True}]) and "may hang" in out
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda prompt: words)
    assert gpu("park", "--checkpoint", "41", "--json")[0] == 1 and len(calls) == 2
    answered, out, _ = gpu("park", "--checkpoint", "41")
    assert answered == code and "may hang" in out and ("yes" in calls[-1]) is (words == "yes")
    assert "%gpu" not in out
