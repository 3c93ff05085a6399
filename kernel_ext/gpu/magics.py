"""The magics `%gpu` and `%%gpu`, their completions, and the names that a notebook holds.

Only the code that IPython needs is here: it reads the typed line, calls the runtime and returns the
result. The verbs are defined in `gpu_runtime/verbs.py`.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import inspect
import keyword
import logging
import re
import shlex
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CodeType
from typing import Any, NamedTuple

from IPython.core.completer import (
    CompletionContext,
    SimpleCompletion,
    SimpleMatcherResult,
    context_matcher,
)
from IPython.core.displayhook import DisplayHook
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_cell_magic, magics_class, output_can_be_silenced
from IPython.core.magic_arguments import MagicArgumentParser

import gpu_runtime
from gpu_runtime import GpuError, facts, names, verbs
from gpu_runtime.backends.torch_release import why_torch_moves_nothing
from gpu_runtime.errors import reword
from gpu_runtime.facts import IMPORTANCE
from gpu_runtime.names import ERROR, LAST_ERROR, OUTPUT, VARIABLE, Name, Namespace, registered
from gpu_runtime.notebook import activity
from gpu_runtime.threads import outside_modes
from gpu_runtime.user_frames import running_cell
from gpu_runtime.verbs import Argument, argument, fill, switch, usage_error, with_sizes_joined
from gpu_runtime.version import NEWER_TORCH

from .look_ahead import CellSchedule
from .parking import Parking, hook
from .waiting import OthersWait, WaitLine, quiet_line

# The rendering modules are imported with the first answer, so that loading the extension is fast.

NAMES = ("gpu", "gpuctl")  # `%gpuctl` is for shells in which another extension defines `%gpu`
MAGIC = verbs.MAGIC
OF_EVERY_VERB = (
    switch("--json", "as JSON"),
    argument("-o --output", "NAME", "also store the answer under this name"),
)


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

        verb, words, explained = verbs.typed_verb(words, MAGIC)
        if explained:
            return render.note(verbs.details(verb, MAGIC))
        args = self._parse(verb, words)
        if verb.name == "help":
            return render.note(verbs.help_text(args.verb, MAGIC))
        answer = self._answer(verb, args)
        if args.output:
            self.shell.user_ns[args.output] = answer
        return answer

    def _parse(self, verb: verbs.Verb, words: list[str]) -> argparse.Namespace:
        args = parser_for(verb.synopsis(MAGIC), (*verb.takes(MAGIC), *OF_EVERY_VERB)).parse_args(
            words
        )
        if args.output and (not args.output.isidentifier() or keyword.iskeyword(args.output)):
            raise UsageError(usage_error(f"-o {args.output}: not a name that Python could use"))
        return args

    def _answer(self, verb: verbs.Verb, args: argparse.Namespace) -> Any:
        """The result of `verb` in the form that is displayed."""
        from gpu_runtime.rendering import render

        if verb.plain_in_notebook:
            return getattr(self._runtime(), verb.name)()
        rt = self._opened(verb)
        value = render.with_titles(verb.name, verb.answer(rt, args), rt)
        if args.json:
            return render.Json(render.as_json(value))
        if render.is_frame(value):
            if not len(value) and verb.name != "who":
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

        if words and words[0] in verbs.VERBS:
            typed = usage_error(" ".join(words))
            raise UsageError(f"%%gpu runs a cell; for the verb type:  {MAGIC} {typed}")
        args = parser_for(verbs.CELL_SYNOPSIS, verbs.CELL).parse_args(words)
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
        options = verbs.given(args, "importance", "timeout")
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
            self._show(render.Shown(lease, render.answers.block))

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


_LOADS = re.compile(r"^\s*%?load_ext\s+gpu\b", re.MULTILINE)


class _Loaded:
    """The extension in one shell, with everything that it added to the shell, to remove it later."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.opened: Any = None
        self.by_itself = not running_cell()  # the kernel's configuration loaded it, not a cell
        self.loads_again = False  # while a cell runs that loads it, too
        self._torch_was_told = False
        self.magics = GpuMagics(shell, self.open)
        self.matcher = matcher_for(self.open)
        self._replaced: list[tuple[dict[Any, Any], Any, Any]] = []  # table, key, the former entry
        self._add_magics()
        shell.Completer.custom_matchers.append(self.matcher)
        self._add_formats()
        self.names = registered.current = NotebookNames(shell)
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
        if self.opened is not None and not self.opened._closed:
            return self.opened
        rt = gpu_runtime.runtime()
        if rt is not self.opened:
            self.opened = rt
            line = WaitLine(hasattr(self.shell, "kernel"), rt.settings.gpu_progress_seconds)
            rt.tell_waits(line, line.arrival)
            if self.rt is not None and self.shell.user_ns.get("rt") is self.rt:
                self.shell.user_ns["rt"] = self.rt = rt
        return rt

    @hook
    def before_cell(self, info: Any) -> None:
        """Records that a cell runs, from IPython's `info`. The first cell with `rt` in its text opens the runtime."""
        activity.began(info)
        # IPython prints two lines if the extension is in its list. A notebook has its line for the kernels that do not
        # load the extension by themselves.
        self.loads_again = self.by_itself and bool(_LOADS.search(info.raw_cell or ""))
        if self.loads_again:
            self.shell.extension_manager.loaded.discard("gpu")
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
        if self.loads_again:
            self.loads_again = False
            self.shell.extension_manager.loaded.add("gpu")
        self.names.after_cell(result.execution_count)
        self.look_ahead.after_cell(result)
        _follow_reloads()
        self._tell_of_torch()
        self._tell_of_waits()
        if self.parking is not None and result.error_in_exec is not None:
            self.parking.after_error(result.error_in_exec)

    def _tell_of_torch(self) -> None:
        """Shows one quiet line, once, if this torch cannot move memory. More is known after its import."""
        if self._torch_was_told or (why := why_torch_moves_nothing()) == "":
            return
        self._torch_was_told = True
        if why is not None:
            quiet_line(
                f"Nothing of this notebook is parked or moved: {why}. A newer torch: {NEWER_TORCH}"
            )

    def _tell_of_waits(self) -> None:
        """Shows one quiet line if another process waits for memory that this notebook holds."""
        rt = self.opened
        if rt is None or not hasattr(self.shell, "kernel"):
            return
        with contextlib.suppress(GpuError):  # the next cell looks again
            if rt._others_wait() and (news := self.others_wait.news(rt.status())):
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
        if registered.current is self.names:
            registered.current = Namespace()
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
    loaded = _loaded.get(id(shell))
    if loaded is not None and loaded.loads_again:
        return
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


# -- the cell of a `%%gpu` magic, which runs in the user's namespace as IPython would run it
#
# `shell.run_cell` is not used: it shows tracebacks itself, so each traceback would be shown twice.

_AWAIT = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT


class CellSyntaxError(GpuError):
    """Raised, not printed, when a cell is not valid Python, so that nbval and other programs notice it."""


class Compiled:
    """A cell that is ready to run: the code of its statements, and of its last expression, which is displayed."""

    def __init__(self, shell: InteractiveShell, cell: str) -> None:
        """Compiles the `cell`. Raises CellSyntaxError, and GpuError if the cell uses `await` at its top level."""
        self._shell = shell
        # An empty line replaces the magic's line, so that tracebacks have the notebook's line numbers.
        source = "\n" + shell.transform_cell(cell)
        # Some versions of the shell increase `execution_count` before a cell runs, others after it. So the
        # cell's number is read from the file name under which IPython compiled the running cell.
        number = running_cell(shell.execution_count)
        name = shell.compile.cache(source, number, raw_code="%%gpu\n" + cell)
        try:
            self._code = self._compile_all(source, name, cell)
        except SyntaxError as error:
            raise _not_python(shell, error) from None

    def _compile_all(self, source: str, name: str, cell: str) -> list[CodeType]:
        tree = self._shell.transform_ast(self._shell.compile.ast_parse(source, name))
        ends_in_expression = tree.body and isinstance(tree.body[-1], ast.Expr)
        last = tree.body.pop() if ends_in_expression else None
        code = [self._compile(tree, name, "exec")]
        if last is None:
            return code
        if DisplayHook.semicolon_at_end_of_expression(cell):
            return [*code, self._compile(ast.Module([last], []), name, "exec")]
        return [*code, self._compile(ast.Interactive([last]), name, "single")]

    def _compile(self, tree: ast.AST, name: str, mode: str) -> CodeType:
        with self._shell.compile.extra_flags(_AWAIT):
            code = self._shell.compile(tree, name, mode)
        if code.co_flags & inspect.CO_COROUTINE:
            raise GpuError(
                "%%gpu cannot run a cell that awaits at its top level.\n"
                '  In a plain cell it works:  with rt.lease("8GiB", purpose="…"): await …'
            )
        return code

    def run(self) -> None:
        """Runs the cell. If the cell raises an error, the traceback begins at the cell's own line."""
        try:
            for code in self._code:
                exec(code, self._shell.user_ns)
        except BaseException as error:
            if not hasattr(error, "_render_traceback_"):
                _show_own_lines(self._shell, error, tuple(self._code))
            raise


def _show_own_lines(
    shell: InteractiveShell, error: BaseException, codes: tuple[CodeType, ...]
) -> None:
    """Removes the frames before the cell's own frame from the traceback that IPython shows."""

    def render() -> list[str]:
        """The lines of the traceback, from the cell's own frame on."""
        # `error` stores this function. If this function used `error` too, the two would form a
        # reference cycle, and the traceback would keep the user's tensors alive.
        shown = sys.exc_info()[1] or sys.last_value
        trace = shown.__traceback__
        while trace is not None and trace.tb_frame.f_code not in codes:
            trace = trace.tb_next
        return shell.InteractiveTB.structured_traceback(
            type(shown), shown, trace or shown.__traceback__, tb_offset=0
        )

    with contextlib.suppress(AttributeError):  # an exception with __slots__ is shown in full
        error._render_traceback_ = render  # type: ignore[attr-defined]


def _not_python(shell: InteractiveShell, error: SyntaxError) -> CellSyntaxError:
    lines: Any = shell.SyntaxTB.structured_traceback(type(error), error, [])
    failure = CellSyntaxError(str(error), lineno=error.lineno)
    failure._render_traceback_ = lambda: lines  # type: ignore[method-assign]
    return failure


# -- completions

_LINE = re.compile(
    r"^\s*(?:[\w.\[\]'\", ]+=\s*)?(?P<magic>%%?)(?:gpu|gpuctl)\s(?P<typed>.*)$", re.DOTALL
)
# A call on `rt` with an open string: `rt.use("` and the like.
_CALL = re.compile(
    r"""\brt\.(?:use|load|preload|restore|evict|move|pin|unpin|plan|why|forget|spec|here)\(\s*"""
    r"""(?:name(?:_or_size)?\s*=\s*)?["'](?P<typed>[^"'\n]*)$"""
)
_EVERYWHERE = ("--json", "-o")
_NOTHING: SimpleMatcherResult = {"completions": [], "suppress": False}


def matcher_for(runtime: Callable[[], Any]) -> Callable[[CompletionContext], SimpleMatcherResult]:
    """A matcher for IPython's completer. `runtime()` returns the runtime with the models."""

    @context_matcher(identifier="gpu_matcher")
    @outside_modes
    def gpu_matcher(context: CompletionContext) -> SimpleMatcherResult:
        """The completions of a line with one of the magics, and of a model's name in `rt.use("`; else none."""
        call = _CALL.search(context.text_until_cursor.rpartition("\n")[2])
        if call is not None:
            return _completed(call["typed"], model_names(runtime()))
        found = _LINE.match(context.text_until_cursor)
        is_cell = found is not None and found["magic"] == "%%"
        if found is None or (is_cell and context.cursor_line > 0):
            return _NOTHING
        *before, fragment = re.split(r"\s+", found["typed"])
        offered = candidates(before, fragment, is_cell, runtime)
        if offered is None:
            return _NOTHING
        return _completed(fragment, offered, shlex.quote)

    return gpu_matcher


def _completed(
    fragment: str, offered: Iterable[str], typed: Callable[[str], str] = str
) -> SimpleMatcherResult:
    """The words among `offered` that begin with `fragment`, as a result for IPython.

    `typed` returns a word as it is typed, such as with quotes. IPython's other matchers are suppressed,
    since files and Python names would be wrong at this place.
    """
    matching = [word for word in offered if word.startswith(fragment)]
    return {
        "completions": [SimpleCompletion(text=typed(word), type="magic") for word in matching],
        "matched_fragment": fragment,
        "suppress": True,
        "ordered": True,
    }


def candidates(
    before: list[str], fragment: str, cell: bool, runtime: Callable[[], Any]
) -> Iterable[str] | None:
    """The words that may replace the `fragment` after the words `before`, of `%%gpu` if `cell`.

    None if another matcher should complete the word, for example the path of a file.
    """
    if cell:
        arguments, typed = verbs.CELL, before
    elif not before:
        return [*(verb.name for verb in verbs.verbs(verbs.MAGIC)), *_EVERYWHERE]
    else:
        verb = verbs.VERBS.get(before[0])
        arguments, typed = (verb.takes(verbs.MAGIC), before[1:]) if verb else ((), before)
    options = {flag: option for option in arguments if option.is_option for flag in option.flags}
    option = options.get(typed[-1]) if typed else None
    if option is not None and option.takes_value:
        return values(option, runtime)
    if fragment.startswith("-"):
        return sorted([*options, *(() if cell else _EVERYWHERE)])
    positionals = [argument for argument in arguments if not argument.is_option]
    position = _positionals_typed(typed, options)
    if position < len(positionals):
        return values(positionals[position], runtime)
    return sorted(flag for flag in options if flag not in typed)


def _positionals_typed(words: list[str], options: dict[str, Argument]) -> int:
    count, is_value = 0, False
    for word in words:
        if is_value:
            is_value = False
        elif word.startswith("-"):
            is_value = word == "-o" or (word in options and options[word].takes_value)
        else:
            count += 1
    return count


def values(argument: Argument, runtime: Callable[[], Any]) -> Iterable[str] | None:
    """The possible values of `argument`; None if it is the path of a file, which another matcher completes."""
    if argument.completes == "files":
        return None
    if argument.completes == "models":
        return model_names(runtime())
    if argument.completes == "held":
        return [*model_names(runtime()), *notebook_names(runtime())]
    if argument.completes == "kernels":
        return notebook_names(runtime())
    if argument.completes == "catalog":
        return runtime().catalog_names()
    if argument.completes == "variables":
        return registered.current.variables()
    if argument.completes == "devices":
        return [view.device.id for view in runtime().status().cards]
    return {
        "verbs": [verb.name for verb in verbs.verbs(verbs.MAGIC)],
        "importances": list(IMPORTANCE),
        "formats": ["yaml", "json"],
        "report": ["user", "notebook", "model", "card", "waits", "time"],
        "presets": ["24GB", "16GB", "8GB", "4GB"],
        "backends": ["torch", "transformers", "fake"],
    }.get(argument.completes, [])


def model_names(rt: Any) -> list[str]:
    """The names of the models that `rt` knows, and of the models of other processes as `name@pid`."""
    snapshot = rt.status()
    mine = {*(spec.name for spec in snapshot.specs), *rt.catalog_names()}
    others = set()
    for section in snapshot.sections.values():
        for lease in section.leases:
            if lease.kind != "model":
                continue
            if section.owner.id == snapshot.owner.id:
                mine.add(lease.name)
            else:
                others.add(f"{lease.name}@{section.owner.pid}")
    return [*sorted(mine), *sorted(others)]


def notebook_names(rt: Any) -> list[str]:
    """The file names of the notebooks of this host; the paths of those that share a file name."""
    owners = [section.owner for section in rt.status().sections.values()]
    files = {owner.notebook: owner.file for owner in owners if owner.notebook}
    of_all = list(files.values())
    return sorted(file if of_all.count(file) == 1 else path for path, file in files.items())


# -- the names that hold objects in a notebook: its variables, its outputs and the last error
#
# It is also recorded which cell made each variable. IPython keeps an output in several places: in `Out`, as `_7`, in
# its list of hidden names, perhaps as `_`, and as the result of the last cell. These places are one name, and are
# released together.

_OF_IPYTHON = re.compile(r"_\d+|_i*|_i\d+|__+|_[iod]h|__.*__|In|Out|exit|quit|get_ipython")
_RECENT = ("_", "__", "___")  # the last three outputs


class _Reference(NamedTuple):
    """One place in which IPython keeps an output."""

    label: str  # as it is typed; empty for a place that nobody types
    container: Any  # a dict, or an object with attributes
    key: Any


class NotebookNames(Namespace):
    """The names of one shell."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._bound: dict[str, tuple[int, str]] = {}  # variable -> id of its object, cell

    @property
    def _variables(self) -> dict[str, Any]:
        return self._shell.user_ns

    # -- which cell made a variable

    def after_cell(self, count: int | None) -> None:
        """Records which variables were assigned by the cell with the execution number `count`."""
        cell = f"In [{count}]" if count else ""
        known, bound = self._bound, {}
        for name, value in list(self._variables.items()):
            before = known.get(name)
            if before is not None and before[0] == id(value):
                bound[name] = before
            else:
                bound[name] = (id(value), cell)
        self._bound = bound

    # -- what the search reads

    def names(self) -> list[Name]:
        """The variables, the outputs, the functions that run, the threads, and the last error."""
        values = self._variables
        found = []
        for variable in self.variables():
            identity = id(values.get(variable))
            known, cell = self._bound.get(variable, (0, ""))
            what = names.describe(values.get(variable))
            found.append(Name(variable, VARIABLE, what, cell if known == identity else ""))
        found += (name for name, _ in self._outputs())
        errors = names.functions_of(self._errors())
        return [*found, *names.frame_names(), Name(LAST_ERROR, ERROR, errors and f"in {errors}")]

    def held(self, name: Name) -> list[Any]:
        """The objects to which `name` refers, with one entry for each reference."""
        if name.kind == OUTPUT:
            return [
                _value_at(place)
                for known, places in self._outputs()
                if known == name
                for place in places
            ]
        return super().held(name)

    def shared(self) -> list[Any]:
        """Objects through which all names can be reached: the shell, its namespaces, and other objects of IPython."""
        shell = self._shell
        found = [shell, shell.user_ns, shell.user_ns_hidden, shell.displayhook, self]
        return [
            *found,
            getattr(shell, "kernel", None),
            shell.user_ns.get("_oh"),
            shell.history_manager,
        ]

    def variables(self) -> list[str]:
        """The user's variables, as `%who` lists them, and the user's variables that begin with one underscore."""
        hidden, nothing = self._shell.user_ns_hidden, object()
        return [
            name
            for name, value in list(self._variables.items())
            if isinstance(name, str)  # `globals()[1] = …` is possible
            if not _OF_IPYTHON.fullmatch(name) and hidden.get(name, nothing) is not value
        ]

    # -- releasing objects

    def release(self, names_: Sequence[Name]) -> None:
        """Removes the references of each name in `names_` that is an output or the last error."""
        wanted = set(names_)
        for name, places in self._outputs():
            if name in wanted:
                _drop_places(places)
        super().release(names_)

    def delete(self, variable: str) -> None:
        """Deletes a `variable`, and every output that is the same object as the variable."""
        identity = id(self._variables.pop(variable, None))
        for _, places in self._outputs():
            if id(_value_at(places[0])) == identity:
                _drop_places(places)

    # -- outputs

    def _outputs(self) -> list[tuple[Name, list[_Reference]]]:
        """Each output, with all places in which IPython keeps this output."""
        found: dict[int, list[_Reference]] = {}
        for reference in self._references():
            found.setdefault(id(_value_at(reference)), []).append(reference)
        outputs = []
        for places in found.values():
            labels = dict.fromkeys(place.label for place in places if place.label)
            numbers = [label[4:-1] for label in labels if label.startswith("Out[")]
            shown = sorted(  # in the order `Out[7]`, `_7`, `_`
                (label for label in labels if label[1:] not in numbers),
                key=lambda label: (not label.startswith("Out"), label in _RECENT, label),
            )
            what = names.describe(_value_at(places[0]))
            cell = f"In [{numbers[0]}]" if numbers else ""
            title = ", ".join(shown) or "a deleted output"
            outputs.append((Name(title, OUTPUT, what, cell), places))
        return outputs

    def _references(self) -> Iterator[_Reference]:
        shell = self._shell
        values, hidden = shell.user_ns, shell.user_ns_hidden
        outs = values.get("_oh", {})
        for number in list(outs):
            yield _Reference(f"Out[{number}]", outs, number)
        for container in (values, hidden):
            for name in list(container):
                if name in _RECENT or re.fullmatch(r"_\d+", str(name)):
                    # IPython keeps outputs under hidden names too, also after `del Out[n]`. Users do
                    # not know these names, so they are not shown.
                    yield _Reference(name if container is values else "", container, name)
        for name in _RECENT:
            if hasattr(shell.displayhook, name):
                yield _Reference("", shell.displayhook, name)
        if getattr(shell, "last_execution_result", None) is not None:
            yield _Reference("", shell.last_execution_result, "result")

    def _errors(self) -> list[BaseException]:
        """The errors that Python and IPython keep."""
        result = getattr(self._shell, "last_execution_result", None)
        kept = [getattr(result, "error_in_exec", None), getattr(result, "error_before_exec", None)]
        return names.last_errors([*kept, getattr(self._shell.InteractiveTB, "evalue", None)])


def _value_at(reference: _Reference) -> Any:
    if isinstance(reference.container, dict):
        return reference.container.get(reference.key)
    return getattr(reference.container, reference.key, None)


def _drop_places(places: Sequence[_Reference]) -> None:
    """Removes an output from all `places`. The names of the last outputs (`_`) become empty texts."""
    for _, container, key in places:
        if not isinstance(container, dict):
            setattr(container, key, "" if key in _RECENT else None)
        elif key in _RECENT:
            container[key] = ""
        else:
            container.pop(key, None)
