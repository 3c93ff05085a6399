"""Tab completion for `%gpu`, `%%gpu`, `df = %gpu` and `rt.use("`: verbs, options, names of models."""

from __future__ import annotations

import re
import shlex
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
from gpu_runtime.names import registered
from gpu_runtime.torch_modes import outside_modes
from gpu_runtime.verb_arguments import Argument

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
    options = {flag: one for one in arguments if one.is_option for flag in one.flags}
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
        return registered.current().variables()
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
