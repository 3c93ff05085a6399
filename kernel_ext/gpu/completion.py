"""Tab behind `%gpu`, `%%gpu` and `df = %gpu`: verbs, options, and the names of models."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from IPython.core.completer import (
    CompletionContext,
    SimpleCompletion,
    SimpleMatcherResult,
    context_matcher,
)

from gpu_runtime import verbs
from gpu_runtime.facts import IMPORTANCE
from gpu_runtime.verb_arguments import Argument

_LINE = re.compile(
    r"^\s*(?:[\w.\[\]'\", ]+=\s*)?(?P<magic>%%?)(?:gpu|gpuctl)\s(?P<typed>.*)$", re.DOTALL
)
_EVERYWHERE = ("--json", "-o")
_NOTHING: SimpleMatcherResult = {"completions": [], "suppress": False}


def matcher_for(runtime: Callable[[], Any]) -> Callable[[CompletionContext], SimpleMatcherResult]:
    """A matcher that knows the models of that runtime."""

    @context_matcher(identifier="gpu_matcher")
    def gpu_matcher(context: CompletionContext) -> SimpleMatcherResult:
        found = _LINE.match(context.text_until_cursor)
        if not found or (found["magic"] == "%%" and context.cursor_line > 0):
            return _NOTHING
        *before, fragment = re.split(r"\s+", found["typed"])
        offered = candidates(before, fragment, found["magic"] == "%%", runtime)
        if offered is None:
            return _NOTHING
        fits = [
            SimpleCompletion(text=word, type="magic")
            for word in offered
            if word.startswith(fragment)
        ]
        # Even where nothing fits: a file or a Python name would be wrong here.
        return {
            "completions": fits,
            "matched_fragment": fragment,
            "suppress": True,
            "ordered": True,
        }

    return gpu_matcher


def candidates(
    before: list[str], fragment: str, cell: bool, runtime: Callable[[], Any]
) -> Iterable[str] | None:
    """What may stand in the place of the fragment; None where others know better (files)."""
    if cell:
        arguments, rest = verbs.CELL, before
    elif not before:
        return [*(verb.name for verb in verbs.verbs(verbs.MAGIC)), *_EVERYWHERE]
    else:
        verb = verbs.VERBS.get(before[0])
        arguments, rest = (verb.takes(verbs.MAGIC), before[1:]) if verb else ((), before)
    options = {
        flag: argument for argument in arguments if argument.is_option for flag in argument.flags
    }
    asked = options.get(rest[-1]) if rest else None
    if asked is not None and asked.takes_value:
        return values(asked, runtime)
    if fragment.startswith("-"):
        return sorted([*options, *(() if cell else _EVERYWHERE)])
    place = _position(rest, options)
    positionals = [argument for argument in arguments if not argument.is_option]
    if place < len(positionals):
        return values(positionals[place], runtime)
    return sorted(flag for flag in options if flag not in rest)


def _position(words: list[str], options: dict[str, Argument]) -> int:
    """How many positional arguments stand there already."""
    count, skip = 0, False
    for word in words:
        if skip:
            skip = False
        elif word.startswith("-"):
            skip = word == "-o" or (word in options and options[word].takes_value)
        else:
            count += 1
    return count


def values(argument: Argument, runtime: Callable[[], Any]) -> Iterable[str] | None:
    if argument.completes == "files":
        return None
    if argument.completes == "models":
        return model_names(runtime())
    if argument.completes == "catalog":
        return runtime().catalog_names()
    if argument.completes == "devices":
        return [view.device.id for view in runtime().status().devices if not view.device.is_host]
    return {
        "verbs": [verb.name for verb in verbs.verbs(verbs.MAGIC)],
        "importances": list(IMPORTANCE),
        "formats": ["yaml", "json"],
        "presets": ["24GB", "16GB", "8GB", "4GB"],
        "backends": ["torch", "transformers", "fake"],
    }.get(argument.completes, [])


def model_names(rt: Any) -> list[str]:
    """Models of this process and of the catalogue by their names, and those that others hold as `name@pid`."""
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
