"""The `gpu` command: the same verbs as `%gpu`, for a terminal.

It holds no models. What needs a kernel it asks of that kernel, through the ledger. Exit codes: 0 done, 1 failed, 2 not
understood.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from . import verbs
from .errors import GpuError, UnknownVerb
from .facts import Outcome, Plan
from .verbs import CLI, Verb

DONE, FAILED, NOT_UNDERSTOOD = 0, 1, 2


class _NotUnderstood(Exception):
    pass


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, in our words."""

    def error(self, message: str) -> NoReturn:
        raise _NotUnderstood(f"{message}. Usage: {self.usage}")


def main(argv: Sequence[str] | None = None) -> int:
    """Does what was typed, and returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(words)
    except (_NotUnderstood, UnknownVerb) as error:
        return _complain(error, NOT_UNDERSTOOD)
    except GpuError as error:
        return _complain(verbs.typed_in(CLI, " ".join(str(error).split())), FAILED)
    except KeyboardInterrupt:
        return _complain("interrupted", FAILED)
    except BrokenPipeError:  # `gpu models | head`: whoever read has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE


def _complain(error: object, code: int) -> int:
    print(f"gpu: {' '.join(str(error).split())}", file=sys.stderr)
    return code


def _run(words: list[str]) -> int:
    if words and words[0] in ("-h", "--help"):
        words = ["help", *words[1:]]
    elif words and words[0] == "--version":
        from importlib.metadata import version

        print(f"gpu-console {version('gpu-console')}")
        return DONE
    if not words or words[0].startswith("-"):
        words = ["status", *words]
    verb = verbs.find(words[0], CLI)
    if "-h" in words[1:] or "--help" in words[1:]:
        print(verbs.details(verb, CLI))
        return DONE
    args = _read(verb, words[1:])
    if verb.name == "help":
        print(
            verbs.details(verbs.find(args.verb, CLI), CLI)
            if args.verb
            else f"gpu: the GPUs of this machine, shared\n\n{verbs.overview(CLI)}"
        )
        return DONE
    return _act(verb, args)


def _read(verb: Verb, words: list[str]) -> argparse.Namespace:
    parser = _Parser(
        prog=f"gpu {verb.name}", usage=verb.synopsis(CLI), add_help=False, allow_abbrev=False
    )
    verbs.fill(parser, verb.arguments).add_argument("--json", action="store_true")
    if "-o" in words or "--output" in words:
        raise _NotUnderstood(
            f"-o stores an answer under a Python name, which a terminal has not. "
            f"To a file:  {CLI} {verb.name} … --json > FILE"
        )
    return parser.parse_args(words)


def _act(verb: Verb, args: argparse.Namespace) -> int:
    if not verb.needs_runtime:
        return _print(verb, args, verb.act(None, args), None)
    import gpu_runtime

    rt = gpu_runtime.runtime()
    rt.guest = True
    try:
        if not verb.loads:
            value = verb.act(rt, args)
        else:
            from gpu_runtime.rendering.progress import TerminalProgress

            with TerminalProgress(args.name) as args.progress:
                value = verb.act(rt, args)
        around = rt.status() if isinstance(value, Plan) and not args.json else None
        return _print(verb, args, value, around)
    finally:
        rt.close()


def _print(verb: Verb, args: argparse.Namespace, value: Any, around: Any) -> int:
    from gpu_runtime.rendering import render

    if args.json:
        print(render.as_json(value))
    elif render.is_frame(value):
        print(
            render.frame_text(value)
            if len(value)
            else verbs.typed_in(CLI, render.nothing(verb.name, CLI))
        )
    else:
        print(
            render.shown(
                verb.name, value, subject=getattr(args, "name", ""), around=around, prompt=CLI
            )
        )
    sys.stdout.flush()  # so that a reader that went away is noticed here, and not at exit
    return FAILED if isinstance(value, Outcome) and not value.done else DONE


if __name__ == "__main__":
    sys.exit(main())
