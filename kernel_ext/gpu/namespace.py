"""The names that hold objects in a notebook: its variables, its outputs and the last error.

This module also records which cell made each variable. IPython keeps an output in several places: in `Out`, as `_7`, in
its list of hidden names, perhaps as `_`, and as the result of the last cell. This module treats these places as one
name, and releases them together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from gpu_runtime import names
from gpu_runtime.names import ERROR, LAST_ERROR, OUTPUT, VARIABLE, Name, Namespace

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
            one = id(values.get(variable))
            known, cell = self._bound.get(variable, (0, ""))
            what = names.describe(values.get(variable))
            found.append(Name(variable, VARIABLE, what, cell if known == one else ""))
        found += (name for name, _ in self._outputs())
        errors = names.functions_of(self._errors())
        return [*found, *names.frame_names(), Name(LAST_ERROR, ERROR, errors and f"in {errors}")]

    def held(self, name: Name) -> list[Any]:
        """The objects to which `name` refers, with one entry for each reference."""
        if name.kind == OUTPUT:
            return [
                _value(one) for known, places in self._outputs() if known == name for one in places
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
            if not _OF_IPYTHON.fullmatch(name) and hidden.get(name, nothing) is not value
        ]

    # -- releasing objects

    def release(self, names_: Sequence[Name]) -> None:
        """Removes the references of each name in `names_` that is an output or the last error."""
        wanted = set(names_)
        for name, places in self._outputs():
            if name in wanted:
                _drop(places)
        super().release(names_)

    def delete(self, variable: str) -> None:
        """Deletes a `variable`, and every output that is the same object as the variable."""
        one = id(self._variables.pop(variable, None))
        for _, places in self._outputs():
            if id(_value(places[0])) == one:
                _drop(places)

    # -- outputs

    def _outputs(self) -> list[tuple[Name, list[_Reference]]]:
        """Each output, with all places in which IPython keeps this output."""
        found: dict[int, list[_Reference]] = {}
        for reference in self._references():
            found.setdefault(id(_value(reference)), []).append(reference)
        outputs = []
        for places in found.values():
            labels = dict.fromkeys(place.label for place in places if place.label)
            numbers = [label[4:-1] for label in labels if label.startswith("Out[")]
            shown = sorted((label for label in labels if label[1:] not in numbers), key=_order)
            what = names.describe(_value(places[0]))
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
                if name in _RECENT or re.fullmatch(r"_\d+", name):
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


def _order(label: str) -> tuple[bool, bool, str]:
    """A sort key for the labels of an output, which gives the order `Out[7]`, `_7`, `_`."""
    return not label.startswith("Out"), label in _RECENT, label


def _value(reference: _Reference) -> Any:
    if isinstance(reference.container, dict):
        return reference.container.get(reference.key)
    return getattr(reference.container, reference.key, None)


def _drop(places: Sequence[_Reference]) -> None:
    """Removes an output from all `places`. The names of the last outputs (`_`) become empty texts."""
    for _, container, key in places:
        if not isinstance(container, dict):
            setattr(container, key, "" if key in _RECENT else None)
        elif key in _RECENT:
            container[key] = ""
        else:
            container.pop(key, None)
