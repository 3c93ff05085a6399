"""The `gpu` command. It has the same verbs as `%gpu`, for a terminal.

The command holds no models, except `gpu serve`. Through the ledger, it sends requests to the
processes that hold models. Exit codes: 0 done, 1 failed, 2 not understood.
"""

from __future__ import annotations

import argparse
import codecs
import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn

from . import hub, verbs
from .errors import GpuError, UnknownVerb, in_one_sentence
from .facts import Outcome
from .verbs import CLI, Verb, fill, given, usage_error, with_sizes_joined
from .version import VERSION

DONE, FAILED, NOT_UNDERSTOOD = 0, 1, 2


class _NotUnderstood(Exception):
    """The command line does not match the verb's arguments."""


class _Parser(argparse.ArgumentParser):
    """A parser that reports a wrong command line in one line, with the verb's usage."""

    def error(self, message: str) -> NoReturn:
        """Raises an error with the `message`, which becomes one line of the command's output."""
        raise _NotUnderstood(f"{usage_error(message).rstrip('.')}. Usage: {self.usage}")


def main(argv: Sequence[str] | None = None) -> int:
    """Carries out the words in `argv`, by default the command line. Returns the exit code."""
    words = with_sizes_joined(sys.argv[1:] if argv is None else argv)
    codecs.register_error(__name__, _in_ascii)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # not the stream of a test
            stream.reconfigure(errors=__name__)
    try:
        return _run(words)
    except UnknownVerb as error:  # the lines after the first one describe the suggested verbs
        return _report_failure(str(error).partition("\n")[0], NOT_UNDERSTOOD)
    except _NotUnderstood as error:
        return _report_failure(error, NOT_UNDERSTOOD)
    except GpuError as error:
        return _report_failure(verbs.typed_in(CLI, _in_one_line(str(error))), FAILED)
    except KeyboardInterrupt:
        return _report_failure("interrupted", FAILED)
    except BrokenPipeError:  # `gpu models | head`: the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except (ImportError, OSError, RuntimeError) as error:
        told = in_one_sentence(error)
        if told is None:
            raise
        return _report_failure(told, FAILED)


# What a terminal without these letters shows, such as one with LANG=C. Of any other letter: ?
_ASCII = {
    **{"█": "#", "▓": "=", "▒": "+", "░": "%", "·": "-", "─": "-", "—": "-", "–": "-"},
    **{"│": "|", "…": "...", "×": "x", "→": "->", "≤": "<=", "µ": "u"},
}


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    """The replacement of the letters that the encoding of the stream lacks, and where it goes on."""
    assert isinstance(error, UnicodeEncodeError)  # of a stream that is written
    letters = error.object[error.start : error.end]
    return "".join(_ASCII.get(letter, "?") for letter in letters), error.end


def _in_one_line(text: str) -> str:
    """The lines of an error and its hints as one line. A hint that ends with a command is set off from the next."""
    joined = ""
    for hint in filter(None, re.split(r"\n| {3,}", text)):
        separator = " · " if joined and joined[-1] not in ".:,;?" else " "
        joined += separator + " ".join(hint.split())
    return joined.strip()


def _report_failure(error: object, code: int) -> int:
    """Prints `error` in one line to standard error, and returns `code`."""
    print(f"gpu: {' '.join(str(error).split())}", file=sys.stderr)
    return code


def _run(words: list[str]) -> int:
    if words and words[0] == "--version":
        print(f"gpu-console {VERSION}")
        return DONE
    verb, words, explained = verbs.typed_verb(words, CLI)
    if explained:
        print(verbs.details(verb, CLI))
        return DONE
    args = _parse(verb, words)
    if verb.name == "help":
        print("" if args.verb else "gpu: the GPUs of this machine, shared\n\n", end="")
        print(verbs.help_text(args.verb, CLI))
        return DONE
    return _act(verb, args)


def _parse(verb: Verb, words: list[str]) -> argparse.Namespace:
    parser = _Parser(
        prog=f"gpu {verb.name}", usage=verb.synopsis(CLI), add_help=False, allow_abbrev=False
    )
    fill(parser, verb.arguments).add_argument("--json", action="store_true")
    if "-o" in words or "--output" in words:
        raise _NotUnderstood(
            f"-o stores an answer under a Python name, which a terminal has not. "
            f"To a file:  {CLI} {verb.name} … --json > FILE"
        )
    return parser.parse_args(words)


def _act(verb: Verb, args: argparse.Namespace) -> int:
    """Carries out `verb`, prints the result, and returns the exit code."""
    if verb.name in SERVERS:
        return _print(verb, args, SERVERS[verb.name](args), None)
    with _followed() if verb.needs_runtime else nullcontext() as rt:
        if rt is not None:
            from . import watching

            if elsewhere := watching.elsewhere(rt):
                print(f"gpu: {elsewhere}", file=sys.stderr)
        if verb.name == "top":
            from . import top

            top.run(rt)
            return DONE
        value = verb.answer(rt, args)
        if _is_confirmed(verb, args, value):
            value = verb.answer(rt, args)
        return _print(verb, args, value, rt)


@contextmanager
def _followed() -> Iterator[Any]:
    """A runtime that holds no models, for the ledger in use; see `watching`. It is closed at the end of the block."""
    from . import watching

    rt = watching.followed()
    try:
        yield rt
    finally:
        watching.close(rt)
        watching.default().close()


def _is_confirmed(verb: Verb, args: argparse.Namespace, value: Any) -> bool:
    """Whether a person at a terminal has read what the outcome `value` says, and confirms."""
    if verb.name == "uninstall":
        question = value if isinstance(value, str) else ""
    else:
        asks = verb.name == "park" and args.checkpoint and not value.done
        question = value.because if asks else ""
    is_asked = sys.stdin is not None and sys.stdin.isatty()  # None: it was closed
    if not question or args.yes or args.json or not is_asked:
        return False
    print(verbs.typed_in(CLI, question))
    does = "park" if verb.name == "park" else "remove"
    try:
        args.yes = input(f"Type yes to {does} it: ").strip().lower() == "yes"
    except EOFError:  # Ctrl-D
        print()
    return args.yes


def _print(verb: Verb, args: argparse.Namespace, value: Any, rt: Any) -> int:
    """Prints the result `value`, and returns the exit code."""
    from gpu_runtime.rendering import render

    if args.json:
        text = render.as_json(render.with_titles(verb.name, value, rt))
    else:
        text = verbs.printed(verb.name, value, rt, getattr(args, "name", "") or "")
    print(text, flush=True)  # if the pipe is closed, BrokenPipeError is raised here and not at exit
    return FAILED if isinstance(value, Outcome) and not value.done else DONE


# -- the verbs that run a server -----------------------------------------------------------------


@contextmanager
def _needs(what: str, extra: str) -> Iterator[None]:
    """A block of imports. If a library is missing, GpuError names it, and the `extra` that `what` needs."""
    try:
        yield
    except ImportError as error:
        raise GpuError(
            f"{what} needs {error.name}, which is not installed.\n"
            f"  Install it:  pip install 'gpu-console[{extra}]'"
        ) from None


def _console(args: argparse.Namespace) -> str:
    with _needs("the console", "console"):
        from gpu_panels import server
    where = given(args, "host", "port", "socket_path", "read_only")
    serve = partial(server.run, browser=not args.no_browser, **where)
    if hub.is_service() and args.socket_path is None:
        from gpu_panels import hub_gate

        hub_gate.run(read_only=args.read_only)
    elif args.fleet is None:
        if hub.is_service():
            print(hub.ALL_ARE_OPERATORS, file=sys.stderr)
        if args.socket_path is None and (tile := hub.tile_path()):
            print(
                f"Your browser is not on this machine? Open the console's tile in JupyterLab, or  {tile}"
            )
        serve()
    else:
        import gpu_runtime

        with gpu_runtime.fleet(args.fleet) as fleet:
            from gpu_panels import fleet_console

            serve(page=fleet_console.page_of(fleet))
    return "The console has ended."


def _server() -> Any:
    """The module of `gpu serve`. Raises GpuError if something that it needs is missing."""
    if sys.version_info < (3, 11):
        raise GpuError("serving needs Python 3.11 or newer. All other verbs run here.")
    with _needs("serving", "serve"):
        from .serving import server
    return server


def _exporter(args: argparse.Namespace) -> str:
    server = _server()
    with _followed() as rt:
        server.run_exporter(rt, rt.settings, **given(args, "host", "port", "socket_path"))
    return "gpu exporter has ended."


def _serve(args: argparse.Namespace) -> str:
    server = _server()
    where = given(args, "host", "port", "socket_path", "read_only", "log_level")
    if args.fleet is not None:
        from .serving import fleet_server

        fleet_server.run(args.fleet, **where)
        return "gpu serve has ended."
    from . import runtime

    rt = runtime()
    try:
        server.run(rt, console=_console_beside(rt), **where)
    finally:
        rt.close()
    return "gpu serve has ended."


def _mcp(args: argparse.Namespace) -> str:
    with _needs("an agent's server", "mcp"):
        from gpu_panels import mcp_server
    mcp_server.run(read_only=args.read_only)
    return ""


def _console_beside(rt: Any) -> Any:
    """The console that runs beside `gpu serve`. Without Panel, prints a line and returns None."""
    try:
        from gpu_panels.server import with_console
    except ImportError as error:
        print(
            f"gpu: serving without the console: it needs {error.name}, which is not installed. "
            "Install it: pip install 'gpu-console[console]'",
            file=sys.stderr,
        )
        return None
    return with_console(rt)


SERVERS: dict[str, Callable[[argparse.Namespace], str]] = {
    "console": _console,
    "exporter": _exporter,
    "mcp": _mcp,
    "serve": _serve,
}


if __name__ == "__main__":
    sys.exit(main())
