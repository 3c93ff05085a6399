"""Recipes: how an engine's server is started for a lease, when it is ready, and how requests reach it.

A recipe starts no process. `backend.py` starts the servers, checks their health, restarts them and
ends them, in the same way for all engines.

To add an engine, write its class in `recipes.py` (see `Recipe`), and one line in the registry
`ENGINES` in `gpu_runtime/facts/engines.py`.
"""

from __future__ import annotations

import importlib
import itertools
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from ...facts import ENGINES, Evidence, ModelSpec, Shares
from ..formats import sources

USUAL_CONTEXT = 8192  # tokens, unless the options set a length or the model supports fewer
LEAST, MOST = 0.01, 0.99  # bounds of the fraction of a card that an engine may take
RESERVED_FLAGS = (  # the lease decides these
    *("--gpu-memory-utilization", "--tensor-split", "--main-gpu", "--device", "--split-mode"),
    *("-ts", "-mg", "-sm", "--mem-fraction-static"),
)
_PLACEHOLDER = re.compile(r"\{(tensor_parallel|gpu_memory_utilization|port)\}")
_VALUE = re.compile(r"(?!-)|-\d")  # the next word is a value unless it looks like a flag

# Sends a request with method, path and JSON body. Returns the status (0: no answer) and the body of
# the answer: the value if it is JSON, else the text.
SendRequest = Callable[[str, str, Any], tuple[int, Any]]

# Maps a kind of call, such as "chat", to the names of the fields that a server reads in such a call.
RequestFields = Mapping[str, frozenset[str]]
_ROUTES = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/embeddings": "embeddings",
}


class LaunchOrder(NamedTuple):
    """Everything that a recipe needs to know to start a server."""

    spec: ModelSpec
    shares: Shares
    totals: Mapping[str, int]  # total bytes of each device
    source: str  # the file or directory, or the engine's own name for the model
    port: int
    simulated: bool  # True: the cards are simulated, so the server computes on the CPU
    # Requests must carry this key. It is passed in the environment, because every user of the
    # machine can read command lines.
    key: str
    config: Mapping[str, Any] = {}  # the model's config, as far as its source shows it
    # The descriptor of a socket bound to the port, or -1 if the engine cannot inherit a socket.
    socket_fd: int = -1


class Command(NamedTuple):
    """A command line, and more environment variables for the process that it starts."""

    words: tuple[str, ...]
    environment: dict[str, str] = {}


class StateChange(NamedTuple):
    """An order to sleep or to wake, to the server of `order`, which has until `until` (monotonic seconds)."""

    order: LaunchOrder
    send: SendRequest  # carries the key
    # Runs a command in the server's environment. Returns its exit status, None if it had to be ended.
    run: Callable[[tuple[str, ...]], int | None]
    until: float


class Recipe:
    """How one engine is started for a lease, and how requests reach it. Each engine has a subclass."""

    INHERITS_SOCKET = False  # whether the server can listen on a socket that it inherits
    LAYOUT: str  # the default layout; "balanced" for tensor parallelism
    KEYED = True  # whether the server rejects requests without the key
    # The cards on which a server can give its bytes back, and take them again, without ending: the
    # beginning of their ids. A model with the option `sleep=False` does not use it.
    SLEEPS_ON: str | None = None
    MEASURED_ASLEEP = False  # whether the RAM of its processes is what it takes while it sleeps
    OWN_TEMPLATE = False  # whether requests may set switches of the model's own chat template
    # Whether it reads CUDA_VISIBLE_DEVICES itself and fails at a UUID. Other engines get UUIDs.
    CARDS_BY_NUMBER = False
    LISTS_FIELDS = False  # whether its OpenAPI document lists the fields that it reads

    def health_path(self, spec: ModelSpec) -> str:
        """A path that needs no key, at which the server answers 200 once it is ready.

        Engines that are ready before they have loaded the model do this in `prepare`.
        """
        return "/health"

    def evidence(self, spec: ModelSpec) -> Evidence:
        """What the source of `spec` shows about the model's size. Raises NotAModel, LoadFailed.

        The size includes the context, for which the engine reserves memory when it starts, if its
        length is known.
        """
        found = sources.AbsentBackend(spec.backend).evidence(spec)
        all_fields = {**found.config, **(found.config.get("text_config") or {})}
        supported = all_fields.get("max_position_embeddings")
        usual = min(supported, USUAL_CONTEXT) if isinstance(supported, int) else 0
        tokens = spec.options.get("context_length") or usual
        config = dict(found.config)
        if tokens:
            config["context_at_load"] = tokens
        return msgspec.structs.replace(found, at_load=True, config=config)

    def missing(self) -> str:
        """A sentence about what must be installed first; empty if nothing is missing."""
        raise NotImplementedError

    def source(self, spec: ModelSpec) -> str:
        """What the engine opens for `spec`: an absolute path, or its own name for the model."""
        path = os.path.expanduser(spec.source)
        return os.path.abspath(path) if os.path.exists(path) else spec.source

    def command(self, order: LaunchOrder) -> Command:
        """The command that starts the server for `order`. The method has no side effects."""
        raise NotImplementedError

    def model(self, order: LaunchOrder) -> str:
        """The name of the model of `order` in requests."""
        return order.spec.name

    def template(self, order: LaunchOrder) -> str | None:
        """The model's own chat template, for a server whose requests may set the template's switches.

        A request sets switches, such as one for thinking, in its field `chat_template_kwargs`.
        Empty if the server of `order` ignores this field; None if the template is not known here.
        """
        return sources.template(order.source, order.spec.name) if self.OWN_TEMPLATE else ""

    def prepare(self, order: LaunchOrder, send: SendRequest) -> None:
        """Does the work that remains once the server of `order` is ready, such as a load.

        `send` sends a request to the server. Raises LoadFailed.
        """

    def request_fields(self, order: LaunchOrder, send: SendRequest) -> RequestFields:
        """The fields that the server reads, as far as they can be found out with `send`.

        A server ignores other fields without an error, or only logs them.
        """
        return fields_in_openapi(send) if self.LISTS_FIELDS else {}

    def misplaced(self, order: LaunchOrder, send: SendRequest) -> str:
        """Why the model is not on the cards of `order` as ordered, for an error; empty if it is.

        The default is empty, because most engines use the cards that they get, or fail.
        """
        return ""

    def sleeps(self, device: str) -> bool:
        """Whether a server on the card `device` can sleep; see SLEEPS_ON."""
        return self.SLEEPS_ON is not None and device.startswith(self.SLEEPS_ON)

    def sleep(self, change: StateChange) -> str:
        """Puts the server to sleep: its weights go to host memory, its cache is lost.

        Returns why it does not sleep; empty once it sleeps.
        """
        raise NotImplementedError

    def wake(self, change: StateChange) -> str:
        """Wakes the server. Returns why it is not awake; empty once it can be used."""
        raise NotImplementedError


def told(send: SendRequest, path: str, body: Any = None) -> str:
    """Sends a POST to `path`. Returns what is wrong with the answer; empty for a status from 200 to 299."""
    status, answer = send("POST", path, body)
    if not status:
        return f"it did not answer POST {path} in time"
    return "" if status // 100 == 2 else f"it answered {status} to POST {path}: {answer}"[:300]


def utilization(order: LaunchOrder) -> float:
    """The part of each card of `order` that an engine may take, from 0.01 to 0.99.

    vLLM takes the same part of every card, so the card with the smallest part decides. This part is
    rounded down, so that vLLM takes no more than its share.
    """
    part = min(share.bytes / order.totals[share.device] for share in order.shares)
    rounded_down = math.floor(part * 10_000) / 10_000
    return min(MOST, max(LEAST, rounded_down))


def fields_in_openapi(send: SendRequest) -> RequestFields:
    """The request fields in the server's own OpenAPI document; empty if it publishes none."""
    status, document = send("GET", "/openapi.json", None)
    if status != 200 or not isinstance(document, dict):
        return {}
    found = {}
    for path, kind in _ROUTES.items():
        names = _properties(document, document.get("paths", {}).get(path, {}))
        if names:
            found[kind] = names
    return found


def _properties(document: dict[str, Any], route: dict[str, Any]) -> frozenset[str]:
    """The properties of the JSON bodies of a POST `route` in an OpenAPI `document`."""
    content = route.get("post", {}).get("requestBody", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema", {})
    names: set[str] = set()
    for option in schema.get("anyOf") or schema.get("oneOf") or [schema]:
        name = option.get("$ref", "").rpartition("/")[2]
        model = document.get("components", {}).get("schemas", {}).get(name, option)
        names.update(model.get("properties", ()))
    return frozenset(names)


def recipe(name: str) -> Recipe:
    """The recipe of the engine `name`. Raises KeyError if no engine has that name."""
    recipes = importlib.import_module(".recipes", __package__)
    found: Recipe = getattr(recipes, ENGINES[name].recipe)()
    return found


# -- the arguments that users add (`runtime_args`) ------------------------------------------------


def group_flags(words: tuple[str, ...]) -> Iterator[tuple[str, str | None, tuple[str, ...]]]:
    """For each flag in `words`: the flag, its value or None, and the words of both together.

    >>> list(group_flags(("--seed", "1", "-ngl", "-1")))
    [('--seed', '1', ('--seed', '1')), ('-ngl', '-1', ('-ngl', '-1'))]
    >>> list(group_flags(("--fast", "--top=5")))
    [('--fast', None, ('--fast',)), ('--top', '5', ('--top=5',))]
    """
    index = 0
    while index < len(words):
        word = words[index]
        flag, equals, value = word.partition("=")
        following = words[index + 1 : index + 2]
        if equals:
            yield flag, value, (word,)
            index += 1
        elif flag.startswith("-") and following and _VALUE.match(following[0]):
            yield flag, following[0], (word, *following)
            index += 2
        else:
            yield flag, None, (word,)
            index += 1


def is_placeholder(value: str | None) -> bool:
    """Whether the `value` of a flag has a placeholder, which is replaced when the engine starts.

    >>> is_placeholder("{tensor_parallel}"), is_placeholder('{"image": 10}')
    (True, False)
    """
    return value is not None and _PLACEHOLDER.search(value) is not None


def user_arguments(order: LaunchOrder) -> tuple[str, ...]:
    """The `runtime_args` of the model of `order`, without the flags whose values the lease decides.

    The placeholders `{tensor_parallel}` (the number of cards), `{gpu_memory_utilization}` (the part
    of each card) and `{port}` are replaced.
    """
    words = tuple(str(word) for word in order.spec.options.get("runtime_args", ()))
    groups = (group for flag, _, group in group_flags(words) if flag not in RESERVED_FLAGS)
    return filled(order, itertools.chain.from_iterable(groups))


def filled(order: LaunchOrder, words: Iterable[str]) -> tuple[str, ...]:
    """The `words` with the values of `order` in place of their placeholders."""
    values = {
        "tensor_parallel": str(len(order.shares)),
        "gpu_memory_utilization": f"{utilization(order):g}",
        "port": str(order.port),
    }
    return tuple(_PLACEHOLDER.sub(lambda found: values[found[1]], word) for word in words)


def has_flag(words: tuple[str, ...], *flags: str) -> bool:
    """Whether one of the `flags` is in the user's `words`. If so, the recipe leaves out its own flag.

    >>> has_flag(("--ctx-size=512",), "--ctx-size", "-c")
    True
    """
    return any(word.partition("=")[0] in flags for word in words)
