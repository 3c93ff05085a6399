"""`%gpu` and `%%gpu`: read the line, call the runtime, return a value that renders itself.

The verbs are those of `gpu_runtime.verbs`; here is only how IPython reads them.
"""

from __future__ import annotations

import argparse
import contextlib
import keyword
import re
import shlex
from collections.abc import Callable
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class, output_can_be_silenced
from IPython.core.magic_arguments import MagicArgumentParser

import gpu_runtime
from gpu_runtime import GpuError, facts, verbs
from gpu_runtime.kernel_activity import activity
from gpu_runtime.verb_arguments import Argument, fill

from .completion import matcher_for
from .waiting import Waiting

# What renders is imported with the first answer: loading the extension waits for none of it.

NAMES = ("gpu", "gpuctl")  # the second for where another extension owns the first
MAGIC = verbs.MAGIC


class Parser(MagicArgumentParser):
    """Reads a verb's arguments. Bad syntax says how it is typed."""

    synopsis = ""

    def error(self, message: str) -> None:
        raise UsageError(f"{message}\n  Usage: {self.synopsis}")


def parser_for(synopsis: str, arguments: tuple[Argument, ...]) -> Parser:
    """A parser for these arguments, which are typed as the synopsis says."""
    parser = Parser(prog=MAGIC)
    parser.allow_abbrev = False  # IPython's constructor does not pass it on
    parser.synopsis = synopsis
    return fill(parser, arguments)


def split(line: str) -> list[str]:
    """The words of a line, quotes and all done; a `;` at its end means silence and is not one of them."""
    try:
        return shlex.split(line.rstrip().removesuffix(";"))
    except ValueError as error:
        raise UsageError(f"{error} in: {MAGIC} {line}") from None


@magics_class
class GpuMagics(Magics):
    """The magics of one shell."""

    def __init__(self, shell: Any, runtime: Callable[[], Any]) -> None:
        super().__init__(shell)
        self._runtime = runtime

    @output_can_be_silenced
    @line_cell_magic
    def gpu(self, line: str, cell: str | None = None) -> Any:
        words = split(line)
        return self.line(words) if cell is None else self.cell(words, cell)

    # -- %gpu -----------------------------------------------------------------------------------------------------

    def line(self, words: list[str]) -> Any:
        """One verb's answer. Raises UnknownVerb, UsageError for bad syntax, and whatever the runtime does."""
        from gpu_runtime.rendering import render

        if not words or words[0].startswith("-") and words[0] not in ("-h", "--help"):
            words = ["status", *words]
        name, *rest = ["help" if word in ("-h", "--help") else word for word in words[:1]] + words[
            1:
        ]
        verb = verbs.find(name, MAGIC)
        if "-h" in rest or "--help" in rest:
            return render.note(verbs.details(verb, MAGIC))
        args = self._read(verb, rest)
        if verb.name == "help":
            about = (
                verbs.details(verbs.find(args.verb, MAGIC), MAGIC)
                if args.verb
                else verbs.overview(MAGIC)
            )
            return render.note(about)
        answer = self._answer(verb, args)
        if args.output:
            self.shell.user_ns[args.output] = answer
        return answer

    def _read(self, verb: verbs.Verb, words: list[str]) -> argparse.Namespace:
        args = parser_for(verb.synopsis(MAGIC), (*verb.takes(MAGIC), *OUTPUT)).parse_args(words)
        if args.output and (not args.output.isidentifier() or keyword.iskeyword(args.output)):
            raise UsageError(f"-o {args.output}: not a name that Python could use")
        return args

    def _answer(self, verb: verbs.Verb, args: argparse.Namespace) -> Any:
        from gpu_runtime.rendering import plain, render
        from gpu_runtime.rendering.progress import NotebookProgress, TerminalProgress

        if verb.name in IN_NOTEBOOK:
            return IN_NOTEBOOK[verb.name](self._runtime())
        rt = self._opened(verb)
        progress: Any = contextlib.nullcontext()
        if verb.loads:
            terminal = getattr(self.shell, "kernel", None) is None
            progress = args.progress = (TerminalProgress if terminal else NotebookProgress)(
                args.name
            )
        with progress:
            value = render.with_titles(verb.name, verb.act(rt, args), rt)
        if args.json:
            return render.Json(plain.as_json(value))
        if render.is_frame(value):
            if value.empty:
                self._show(render.hint(render.nothing(verb.name)))
            return value
        around = rt.status() if isinstance(value, facts.Plan) else None
        return render.shown(verb.name, value, subject=getattr(args, "name", ""), around=around)

    def _opened(self, verb: verbs.Verb) -> Any:
        """The runtime; None where it does not open and the verb can do without."""
        try:
            return self._runtime()
        except GpuError:
            if verb.needs_runtime:
                raise
            return None

    # -- %%gpu ----------------------------------------------------------------------------------------------------

    def cell(self, words: list[str], body: str) -> None:
        """Runs the cell with room of its own and, if asked, a model held; says what it took."""
        from gpu_runtime.rendering import render

        from .cell import Compiled

        if words and words[0] in verbs.VERBS:
            raise UsageError(f"%%gpu runs a cell; for the verb type:  {MAGIC} {' '.join(words)}")
        args = parser_for(CELL_SYNOPSIS, verbs.CELL).parse_args(words)
        compiled = Compiled(self.shell, body)
        rt = self._runtime()
        given = {
            name: value
            for name in ("importance", "timeout")
            if (value := getattr(args, name)) is not None
        }
        leased = args.size is not None or args.model is None
        # Entered by plain `with`, which alone lets go of a model at whatever instruction the stop button strikes.
        with (
            rt.use(args.model, **given) if args.model else contextlib.nullcontext() as model,
            (
                rt.lease(args.size, purpose="cell", **given) if leased else contextlib.nullcontext()
            ) as lease,
        ):
            if args.model:
                with self._named("model", model):
                    del model  # the cell may be the last to know it
                    compiled.run()
            else:
                compiled.run()
        if lease is not None:
            self._show(render.block_report(lease))

    @contextlib.contextmanager
    def _named(self, name: str, value: Any) -> Any:
        """The value under a name of the user's while the cell runs; what stood there comes back."""
        names = self.shell.user_ns
        missing = object()
        before = names.get(name, missing)
        names[name] = value
        try:
            yield
        finally:
            if names.get(name) is value:  # unless the cell gave the name another meaning
                names.pop(name) if before is missing else names.__setitem__(name, before)

    def _show(self, shown: Any) -> None:
        from IPython.display import display

        display(shown)


IN_NOTEBOOK = {
    "console": lambda rt: rt.console()
}  # verbs that do something else than in a terminal
OUTPUT = (
    Argument(("--json",), {"action": "store_true", "help": "as JSON"}),
    Argument(
        ("-o", "--output"), {"metavar": "NAME", "help": "also store the answer under this name"}
    ),
)
CELL_SYNOPSIS = "%%gpu [SIZE] [--model M] [--importance I] [--timeout SECONDS]"
GpuMagics.gpu.__doc__ = f"""The GPUs of this machine, shared: who holds what, what would happen, and why.

{verbs.overview(MAGIC)}
"""


# -- loading and unloading ----------------------------------------------------------------------------------------


class Unopened:
    """Stands in a notebook for the runtime until something needs it.

    Opening takes a moment and fixes the devices and the ledger; so it waits for the first use, and `%env GPU_DEVICES=…`
    may come after `%load_ext`. The runtime itself takes this one's place before the first cell that names it runs.
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
    """What one shell got from us, so that it can be taken back."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.opened: Any = None
        self.magics = GpuMagics(shell, self.open)
        self.matcher = matcher_for(self.open)
        tables = shell.magics_manager.magics
        self.before = {
            (kind, name): tables[kind].get(name) for kind in ("line", "cell") for name in NAMES
        }
        shell.register_magics(self.magics)
        for kind in ("line", "cell"):
            tables[kind]["gpuctl"] = tables[kind]["gpu"]
        shell.Completer.custom_matchers.append(self.matcher)
        formatter = shell.display_formatter.mimebundle_formatter
        self.formats = {kind: formatter.type_printers.get(kind) for kind in _SHOWN}
        for kind in _SHOWN:  # so that rt.status() shows itself as %gpu does
            formatter.for_type(
                kind, lambda value, include=None, exclude=None: _bundle(self.open, value)
            )
        self.rt: Any = Unopened(self.open) if "rt" not in shell.user_ns else None
        if self.rt is not None:
            shell.user_ns["rt"] = self.rt
        shell.events.register("pre_run_cell", self.before_cell)
        shell.events.register("post_run_cell", self.after_cell)

    def open(self) -> Any:
        """The runtime of this process; from the first time on it is also the notebook's `rt`."""
        rt = gpu_runtime.runtime()
        if rt is not self.opened:
            self.opened = rt
            rt.tell_waits(Waiting(notebook=hasattr(self.shell, "kernel")))
            if self.rt is not None and self.shell.user_ns.get("rt") is self.rt:
                self.shell.user_ns["rt"] = self.rt = rt
        return rt

    def before_cell(self, info: Any) -> None:
        activity.began(info)
        if (
            self.opened is None
            and self.rt is not None
            and re.search(r"\brt\b", info.raw_cell or "")
        ):
            with contextlib.suppress(
                GpuError
            ):  # a hook's error would only be printed; the cell itself will raise it
                self.open()

    def after_cell(self, result: Any) -> None:
        activity.ended(result.info)

    def take_back(self) -> None:
        tables = self.shell.magics_manager.magics
        for (kind, name), before in self.before.items():
            tables[kind].pop(name, None)
            if before is not None:
                tables[kind][name] = before
        self.shell.magics_manager.registry.pop(GpuMagics.__name__, None)
        with contextlib.suppress(ValueError):
            self.shell.Completer.custom_matchers.remove(self.matcher)
        formatter = self.shell.display_formatter.mimebundle_formatter
        for kind, before in self.formats.items():
            formatter.type_printers.pop(kind, None)
            if before is not None:
                formatter.type_printers[kind] = before
        self.shell.events.unregister("pre_run_cell", self.before_cell)
        self.shell.events.unregister("post_run_cell", self.after_cell)
        activity.forget()
        if self.rt is not None and self.shell.user_ns.get("rt") is self.rt:
            del self.shell.user_ns["rt"]


_SHOWN = (facts.Snapshot, facts.Plan, facts.Outcome, facts.Health)
_loaded: dict[int, _Loaded] = {}  # by the shell's identity


def _bundle(opens: Callable[[], Any], value: Any) -> dict[str, Any]:
    from gpu_runtime.rendering import render

    around = opens().status() if isinstance(value, facts.Plan) else None
    return render.shown("", value, around=around)._repr_mimebundle_()


def load(shell: Any) -> None:
    """Gives the shell the magics, the completions and `rt`. Says nothing."""
    unload(shell)
    _loaded[id(shell)] = _Loaded(shell)


def unload(shell: Any) -> None:
    """Takes back all that `load` gave. The runtime itself, and the models in it, belong to the user and stay."""
    loaded = _loaded.pop(id(shell), None)
    if loaded is not None:
        loaded.take_back()
