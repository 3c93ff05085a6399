"""The magics `%gpu` and `%%gpu`, which read the typed line, call the runtime and return the result.

Only the code that IPython needs is here. The verbs are defined in `gpu_runtime/verbs.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import keyword
import logging
import re
import shlex
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class, output_can_be_silenced
from IPython.core.magic_arguments import MagicArgumentParser

import gpu_runtime
from gpu_runtime import GpuError, error_pages, facts, verbs
from gpu_runtime.errors import reword
from gpu_runtime.kernel_activity import activity
from gpu_runtime.names import registered
from gpu_runtime.verb_arguments import (
    Argument,
    fill,
    option,
    switch,
    usage_error,
    with_sizes_joined,
)

from .completion import matcher_for
from .look_ahead import CellSchedule
from .namespace import NotebookNames
from .parking import Parking
from .waiting import OthersWait, WaitLine, hook, quiet_line

# The rendering modules are imported with the first answer, so that loading the extension is fast.

NAMES = ("gpu", "gpuctl")  # `%gpuctl` is for shells in which another extension defines `%gpu`
MAGIC = verbs.MAGIC
HELP = ("-h", "--help")
OUTPUT = (  # options of every verb
    switch("--json", "as JSON"),
    option("-o --output", "NAME", "also store the answer under this name"),
)
CELL_SYNOPSIS = "%%gpu [SIZE] [--model M] [--importance I] [--timeout SECONDS] [--retry]"
# Verbs that act differently in a notebook and in a terminal.
IN_NOTEBOOK: dict[str, Callable[[Any], Any]] = {"console": lambda rt: rt.console()}


class Parser(MagicArgumentParser):
    """Reads a verb's arguments. The message of an error shows how the verb is typed."""

    synopsis = ""

    def error(self, message: str) -> None:
        raise UsageError(f"{usage_error(message)}\n  Usage: {self.synopsis}")


def parser_for(synopsis: str, arguments: tuple[Argument, ...]) -> Parser:
    """A parser for these `arguments`, which are typed as the `synopsis` shows."""
    parser = Parser(prog=MAGIC)
    parser.allow_abbrev = False  # IPython's constructor does not accept this option
    parser.synopsis = synopsis
    return fill(parser, arguments)


def split(line: str) -> list[str]:
    """The words of a `line`, without quotes and a final `;` (which hides the output). `2 GiB` is one word.

    Raises UsageError if a quote is not closed.
    """
    try:
        return with_sizes_joined(shlex.split(line.rstrip().removesuffix(";")))
    except ValueError as error:
        raise UsageError(usage_error(f"{error} in: {MAGIC} {line}")) from None


@magics_class
class GpuMagics(Magics):
    """The magics of one shell."""

    def __init__(self, shell: Any, runtime: Callable[[], Any]) -> None:
        """`runtime` returns the runtime, and opens it if necessary."""
        super().__init__(shell)
        self._runtime = runtime
        # Called after an out-of-memory error. It makes room on the card, and returns a sentence about
        # the memory that was evicted. The sentence is empty if nothing was evicted.
        self.make_room: Callable[[BaseException], str] = lambda error: ""

    @output_can_be_silenced
    @line_cell_magic
    def gpu(self, line: str, cell: str | None = None) -> Any:
        words = split(line)
        try:
            return self.line(words) if cell is None else self.cell(words, cell)
        except Exception as error:
            reword(error)
            raise

    # -- %gpu ------------------------------------------------------------------------------------

    def line(self, words: list[str]) -> Any:
        """The result of the verb in `words`. Raises UnknownVerb, UsageError, and the errors of the runtime."""
        from gpu_runtime.rendering import render

        if words and words[0] in HELP:
            words = ["help", *words[1:]]
        elif not words or words[0].startswith("-"):
            words = ["status", *words]
        verb = verbs.find(words[0], MAGIC)
        if any(word in HELP for word in words[1:]):
            return render.note(verbs.details(verb, MAGIC))
        args = self._parse(verb, words[1:])
        if verb.name == "help":
            return render.note(_help(args.verb))
        answer = self._answer(verb, args)
        if args.output:
            self.shell.user_ns[args.output] = answer
        return answer

    def _parse(self, verb: verbs.Verb, words: list[str]) -> argparse.Namespace:
        args = parser_for(verb.synopsis(MAGIC), (*verb.takes(MAGIC), *OUTPUT)).parse_args(words)
        if args.output and (not args.output.isidentifier() or keyword.iskeyword(args.output)):
            raise UsageError(usage_error(f"-o {args.output}: not a name that Python could use"))
        return args

    def _answer(self, verb: verbs.Verb, args: argparse.Namespace) -> Any:
        """The result of `verb` in the form that is displayed."""
        from gpu_runtime.rendering import render

        if verb.name in IN_NOTEBOOK:
            return IN_NOTEBOOK[verb.name](self._runtime())
        rt = self._opened(verb)
        assert verb.act is not None  # only the verbs of IN_NOTEBOOK have no act
        value = render.with_titles(verb.name, verb.act(rt, args), rt)
        if args.json:
            return render.Json(render.as_json(value))
        if render.is_frame(value):
            if value.empty and verb.name != "who":
                self._show(render.hint(render.nothing(verb.name)))
            return value
        has_names = isinstance(value, facts.Plan) or verb.name == "why"
        around = rt.status() if has_names else None
        return render.shown(
            verb.name, value, subject=getattr(args, "name", "") or "", around=around
        )

    def _opened(self, verb: verbs.Verb) -> Any:
        """The runtime; None if it cannot be opened and `verb` does not need it."""
        try:
            return self._runtime()
        except GpuError:
            if verb.needs_runtime:
                raise
            return None

    # -- %%gpu -----------------------------------------------------------------------------------

    def cell(self, words: list[str], body: str) -> None:
        """Runs the cell `body` with the lease and the model that `words` request, and shows what the lease used.

        With `--retry` the cell runs once more after an out-of-memory error, if room was made. Raises UsageError.
        """
        from gpu_runtime.rendering import render

        from .cell import Compiled

        if words and words[0] in verbs.VERBS:
            typed = usage_error(" ".join(words))
            raise UsageError(f"%%gpu runs a cell; for the verb type:  {MAGIC} {typed}")
        args = parser_for(CELL_SYNOPSIS, verbs.CELL).parse_args(words)
        compiled = Compiled(self.shell, body)
        if not args.retry:
            return self._run(compiled, args)
        news = ""
        try:
            return self._run(compiled, args)
        except Exception as error:
            news = self.make_room(error)
            if not news:
                raise
        self._show(render.hint(news))
        return self._run(compiled, args)

    def _run(self, compiled: Any, args: argparse.Namespace) -> None:
        from gpu_runtime.rendering import render

        rt = self._runtime()
        options = {"importance": args.importance, "timeout": args.timeout}
        options = {name: value for name, value in options.items() if value is not None}
        leased = args.size is not None or args.model is None
        # The stop button can interrupt at any instruction. In that case only a plain `with` is certain
        # to release the model.
        with (
            rt.use(args.model, **options) if args.model else contextlib.nullcontext() as model,
            (
                rt.lease(args.size, purpose="cell", **options)
                if leased
                else contextlib.nullcontext()
            ) as lease,
        ):
            if args.model:
                with self._named("model", model):
                    del model  # then the cell's variable may be the last reference to the model
                    compiled.run()
            else:
                compiled.run()
        if lease is not None:
            self._show(render.block_report(lease))

    @contextlib.contextmanager
    def _named(self, name: str, value: Any) -> Iterator[None]:
        """A context manager in which the user's variable `name` has this `value`. Its end restores the old value."""
        names = self.shell.user_ns
        missing = object()
        before = names.get(name, missing)
        names[name] = value
        try:
            yield
        finally:
            if names.get(name) is value:  # else the cell assigned another value
                if before is missing:
                    names.pop(name)
                else:
                    names[name] = before

    def _show(self, shown: Any) -> None:
        from IPython.display import display

        display(shown)


def _help(verb: str | None) -> str:
    if verb and (page := error_pages.page(verb, MAGIC)):
        return page
    if verb:
        return verbs.details(verbs.find(verb, MAGIC), MAGIC)
    return verbs.overview(MAGIC)


GpuMagics.gpu.__doc__ = f"""The GPUs of this machine, shared: holders, dry runs, and decisions.

{verbs.overview(MAGIC)}
"""


# -- loading and unloading -----------------------------------------------------------------------


class Unopened:
    """The notebook's `rt` until the runtime is opened, which the first cell with `rt` in its text does.

    Opening takes a moment, and fixes the devices and the ledger. So `%env GPU_DEVICES=…` works after `%load_ext`.
    """

    def __init__(self, opens: Callable[[], Any]) -> None:
        self._opens = opens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opens(), name)

    def __dir__(self) -> list[str]:
        return dir(self._opens())

    def __repr__(self) -> str:
        return repr(self._opens())


class _Loaded:
    """The extension in one shell, with everything that it added to the shell, to remove it later."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.opened: Any = None
        self.wait_line: WaitLine | None = None
        self.magics = GpuMagics(shell, self.open)
        self.matcher = matcher_for(self.open)
        self._replaced: list[tuple[dict[Any, Any], Any, Any]] = []  # table, key, the former entry
        self._add_magics()
        shell.Completer.custom_matchers.append(self.matcher)
        self._add_formats()
        self.names = registered.front_end = NotebookNames(shell)
        self.rt: Any = Unopened(self.open) if "rt" not in shell.user_ns else None
        if self.rt is not None:
            shell.user_ns["rt"] = self.rt
        self.look_ahead = CellSchedule(shell)
        self.others_wait = OthersWait()
        shell.events.register("pre_run_cell", self.before_cell)
        shell.events.register("post_run_cell", self.after_cell)
        kernel = getattr(shell, "kernel", None)
        can_park = hasattr(kernel, "pre_handler_hook")  # of ipykernel, not of a terminal or a test
        self.parking = Parking(shell, self.open, quiet_line) if can_park else None
        self.log_lines = LogLines(kernel.log) if can_park else None
        if self.parking is not None:
            self.magics.make_room = self.parking.make_room_to_retry

    def _will_replace(self, table: dict[Any, Any], keys: Iterable[Any]) -> None:
        self._replaced += [(table, key, table.get(key)) for key in keys]

    def _add_magics(self) -> None:
        tables = [self.shell.magics_manager.magics[kind] for kind in ("line", "cell")]
        for table in tables:
            self._will_replace(table, NAMES)
        self.shell.register_magics(self.magics)
        for table in tables:
            table["gpuctl"] = table["gpu"]

    def _add_formats(self) -> None:
        """Makes IPython show the result of `rt.status()` as the result of `%gpu` is shown."""
        formatter = self.shell.display_formatter.mimebundle_formatter
        self._will_replace(formatter.type_printers, _SHOWN)
        for kind in _SHOWN:
            formatter.for_type(
                kind, lambda value, include=None, exclude=None: _bundle(self.open, value)
            )

    def open(self) -> Any:
        """The runtime of this process. The notebook's `rt` refers to it, unless the user has set `rt`."""
        rt = gpu_runtime.runtime()
        if rt is not self.opened:
            self.opened = rt
            line = WaitLine(hasattr(self.shell, "kernel"), rt.settings.gpu_progress_seconds)
            rt.tell_waits(line, line.arrival)
            self.wait_line = line
            if self.rt is not None and self.shell.user_ns.get("rt") is self.rt:
                self.shell.user_ns["rt"] = self.rt = rt
        return rt

    @hook
    def before_cell(self, info: Any) -> None:
        """Records that a cell runs, from IPython's `info`. The first cell with `rt` in its text opens the runtime."""
        activity.began(info)
        names_rt = re.search(r"\brt\b", info.raw_cell or "")
        if self.opened is None and self.rt is not None and names_rt:
            # An error in this hook would only be printed. The cell will raise the same error.
            with contextlib.suppress(GpuError):
                self.open()
        self.look_ahead.before_cell(info)

    @hook
    def after_cell(self, result: Any) -> None:
        """Records that a cell ended with IPython's `result`, and which variables the cell assigned."""
        activity.ended(result.info)
        if self.wait_line is not None:
            self.wait_line.cell_ended()
        self.names.after_cell(result.execution_count)
        self.look_ahead.after_cell(result)
        _follow_reloads()
        self._tell_of_waits()
        if self.parking is not None and result.error_in_exec is not None:
            self.parking.after_error(result.error_in_exec)

    def _tell_of_waits(self) -> None:
        """Shows one quiet line if another process waits for memory that this notebook holds."""
        rt = self.opened
        if rt is None or not hasattr(self.shell, "kernel"):
            return
        with contextlib.suppress(GpuError):  # the next cell looks again
            news = self.others_wait.news(rt.status())
            if news:
                quiet_line(news)

    def remove(self) -> None:
        """Removes everything that the extension added, and restores what the additions replaced."""
        for table, key, before in self._replaced:
            table.pop(key, None)
            if before is not None:
                table[key] = before
        self.shell.magics_manager.registry.pop(GpuMagics.__name__, None)
        with contextlib.suppress(ValueError):  # the user has removed it from the list
            self.shell.Completer.custom_matchers.remove(self.matcher)
        self.shell.events.unregister("pre_run_cell", self.before_cell)
        self.shell.events.unregister("post_run_cell", self.after_cell)
        if self.parking is not None:
            self.parking.remove()
        if self.log_lines is not None:
            self.log_lines.remove()
        rules = getattr(sys.modules.get("IPython.extensions.autoreload"), "UPDATE_RULES", [])
        if _RELOADS in rules:
            rules.remove(_RELOADS)
        activity.forget()
        if registered.front_end is self.names:
            registered.front_end = None
        self.look_ahead.remove()
        if self.rt is not None and self.shell.user_ns.get("rt") is self.rt:
            del self.shell.user_ns["rt"]


def _follow_reloads() -> None:
    """Lets `%autoreload` move governed modules to the new class of a changed file.

    It moves the objects whose class is exactly the old one. A governed module has a subclass of it.
    """
    autoreload = sys.modules.get("IPython.extensions.autoreload")
    rules = getattr(autoreload, "UPDATE_RULES", None)
    if rules is None or _RELOADS in rules:
        return
    rules.insert(0, _RELOADS)  # the first rule that fits is the only one


def _is_governed(old: Any, new: Any) -> bool:
    return isinstance(old, type) and isinstance(new, type) and bool(_governed_classes(old))


def _update_class(old: type, new: type) -> None:
    governed = _governed_classes(old)
    sys.modules["IPython.extensions.autoreload"].update_class(old, new)
    for kind in governed:
        vars(kind)["_gpu_reloaded"](new)


def _governed_classes(base: type) -> list[type]:
    return [kind for kind in type.__subclasses__(base) if "_gpu_reloaded" in vars(kind)]


_RELOADS = (_is_governed, _update_class)
_SHOWN = (facts.Snapshot, facts.Plan, facts.Outcome, facts.Health, facts.Schedule)
_loaded: dict[int, _Loaded] = {}  # id(shell) -> the extension in it


def _bundle(opens: Callable[[], Any], value: Any) -> dict[str, Any]:
    from gpu_runtime.rendering import render

    around = opens().status() if isinstance(value, facts.Plan) else None
    return render.shown("", value, around=around)._repr_mimebundle_()


def load(shell: Any) -> None:
    """Adds the magics, the completions and `rt` to the `shell`. Prints nothing."""
    unload(shell)
    _loaded[id(shell)] = _Loaded(shell)


def unload(shell: Any) -> None:
    """Removes what `load` added. The runtime and its models stay."""
    loaded = _loaded.pop(id(shell), None)
    if loaded is not None:
        loaded.remove()


LOGGER = logging.getLogger("gpu_runtime")


class LogLines(logging.Handler):
    """Handles the log lines of one kernel."""

    def __init__(self, kernel_log: Any) -> None:
        """`kernel_log` is the logger of the kernel."""
        super().__init__(logging.WARNING)
        self._kernel_log = kernel_log
        LOGGER.addHandler(self)

    def remove(self) -> None:
        LOGGER.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a line of the main thread to the cell, of another thread to the kernel's log.

        If the user has set up logging, only the user's handlers show the lines of the main thread.
        """
        if record.thread != threading.main_thread().ident:
            self._kernel_log.handle(record)
        elif LOGGER.handlers == [self] and not logging.getLogger().handlers and logging.lastResort:
            logging.lastResort.handle(record)
