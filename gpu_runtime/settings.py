"""Every setting in one table: its name, default, bounds and meaning.

The value of a setting is taken from the argument, if the caller gives it; else from the environment
variable with the same name in capitals; else from the default. Empty variables count as unset. No
.env file is read, because a machine's settings must be visible in its environment.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .arguments import TEXT, TRUTH, Rule, number_in_file, plain
from .errors import BadSetting
from .facts import PLACEMENTS, PlacementRules, Rules
from .safe_text import MOST_QUOTED
from .scheduler.policies import POLICIES
from .units import GIB, MIB, parse_seconds


class SettingRow(NamedTuple):
    """One setting as `gpu config` shows it."""

    name: str
    value: str  # passwords masked
    default: str
    source: str  # "default", "environment" or "argument"
    doc: str


class Secret:
    """A token. Its text is never shown: `str` and `repr` give `***`."""

    def __init__(self, text: str) -> None:
        """Keeps the `text`."""
        self._text = text

    def get_secret_value(self) -> str:
        """The text."""
        return self._text

    def __repr__(self) -> str:
        return "***"


# -- the kinds of settings -----------------------------------------------------------------------


class _Setting(NamedTuple):
    """What is known of one setting. `rule` converts a value, and says what is expected."""

    default: Any
    doc: str
    rule: Rule


def _setting(default: Any, doc: str, expected: str, read: Callable[[Any], Any]) -> Any:
    return _Setting(default, doc, Rule(expected, read))


def _text(default: str | None, doc: str) -> Any:
    return _setting(default, doc, "text", TEXT.read)


def _truth(default: bool, doc: str) -> Any:
    return _setting(default, doc, "true or false", TRUTH.in_file)


def _choice(default: str, doc: str, expected: str) -> Any:
    choices = re.split(", | or ", expected)
    return _setting(default, doc, expected, {choice: choice for choice in choices}.__getitem__)


def _number(default: float | None, doc: str, expected: str, **bounds: float) -> Any:
    return _setting(default, doc, expected, number_in_file(float, **bounds))


def _fraction(default: float, doc: str) -> Any:
    return _number(default, doc, f"a number from 0 to 1, such as {default:g}", least=0, most=1)


def _whole(default: int | None, doc: str, expected: str, *, least: int) -> Any:
    return _setting(default, doc, expected, number_in_file(int, least=least))


def _seconds(default: float | None, doc: str, *, above: float = -1, text: str = "2m") -> Any:
    def read(value: Any) -> float:
        seconds = parse_seconds(value)
        if seconds <= above:
            raise ValueError
        return seconds

    bound = " above 0" if above == 0 else ""
    example = 10 if default is None else default
    return _setting(default, doc, f"seconds{bound}, such as {example:g} or '{text}'", read)


def _secret(doc: str) -> Any:
    def read(value: Any) -> Secret:
        text = value.get_secret_value() if hasattr(value, "get_secret_value") else value
        if len(TEXT.read(text)) < 16:
            raise ValueError
        return Secret(text)

    words = "text of 16 characters or more, as from `openssl rand -hex 24`"
    return _setting(None, doc, words, read)


class Settings:
    """All settings. `Settings.load` creates this object and reports an error in one sentence."""

    # fmt: off
    gpu_memory_max_percent: float = _fraction(0.90, "The part of each card's memory that models may claim, 0 to 1.")
    cpu_memory_max_percent: float = _fraction(0.50,
        "The part of RAM that models may claim while they are off the card, 0 to 1.")
    inference_memory_limit_gb: float | None = _number(None,
        "A further limit on this process's models, in GiB. Unset: none.", "a number of GiB above 0, such as 16",
        above=0, most=2**20)
    inference_gpu_index: int | None = _whole(None,
        "The only card to use, by its number in status. Unset: the planner chooses.", "the index of a card, such as 0",
        least=0)

    inference_gpu_layers: int | None = _whole(None,
        "Layers on the card of a llama.cpp model that does not set its own gpu_layers: -1 all, 0 CPU only.",
        "-1 (all), 0 (CPU only) or a number of layers", least=-1)
    inference_backend: str | None = _text(None,
        "The backend if the model's catalogue entry has none. Unset: found from its source.")

    gpu_devices: str = _text("auto",
        "The devices: auto, cuda, some of them as cuda:0,2 or cuda:UUID, rocm, metal, or simulated ones such as "
        "sim:2x24GiB,host:64GiB or sim:24GiB+12GiB.")
    development_cpu_only: bool = _truth(False, "Simulate the devices even if there is a card.")
    gpu_ledger: str | None = _text(None,
        "Where the book is stored: keeper:///DIRECTORY, redis://HOST:PORT/DB or memory:. Unset: the machine's shared "
        "ledger, else one of the user's own.")

    gpu_catalog: str | None = _text(None,
        "Where the model catalogue is: a directory or a file. Unset: the user's own.")
    gpu_config_file: str = _text("/etc/gpu-console/config.toml",
        "The machine-wide configuration: the shared ledger, and users' caps.")

    enable_memory_governor: bool = _truth(True,
        "Off: models load without a request for room, and nothing leaves for others.")
    enable_cpu_offload: bool = _truth(True,
        "On: models evicted from the card move to RAM. Off: they are dropped, if their source can restore them.")
    gpu_policy: str = _choice("keep_score", f"Which model is evicted first: {', '.join(POLICIES)}.",
        ", ".join(POLICIES))
    gpu_placement: str = _choice("best-fit",
        f"Which card a model is loaded to: {', '.join(PLACEMENTS)}.",
        ", ".join(PLACEMENTS))
    gpu_split_margin_mb: int = _whole(512,
        "MiB that stay free on each card when a model is split in proportion to the free memory.",
        "a whole number of MiB, such as 512", least=0)
    gpu_split_overhead: float = _fraction(0.0,
        "What each card of a split model needs beyond its share, as a part of it; Helix: 0.1.")
    gpu_fraction_factor: float | None = _number(None,
        "Claim a model's weights times this instead of the estimate; NDIF: 3. Unset: the estimate.",
        "a number above 0, such as 3", above=0, most=1000)
    fraction_largest_possible: float = _fraction(0.8,
        "With GPU_FRACTION_FACTOR: a model that would claim this part of a card or more claims the whole card.")
    gpu_shadows: str = _choice("auto",
        "Whether an unchanged copy of a model on a card stays in RAM while RAM has room, so that the model leaves its "
        "card without a copy: auto (one for all processes of a user), private or never.", "auto, private or never")
    gpu_relief: str = _choice("auto",
        "When pressure evicts idle models: auto (while requests wait, or unleased memory fills a card), always or "
        "never.", "auto, always or never")
    gpu_most_wait: float | None = _seconds(None,
        "How long other models of equal importance may keep a model waiting. Unset: five times what bringing it to "
        "the card takes, at least 3 s.", text="1m")
    gpu_fairness: str = _choice("off",
        "Whose request is first among those of equal importance: off (as without users), or day (of the user with "
        "fewer card-hours in the last day). Set it for all users.", "off or day")
    gpu_prefetch: str = _choice("auto", "Whether waiting cells' models are loaded while a cell runs: auto or never.",
        "auto or never")
    gpu_progress_seconds: float = _seconds(0.5,
        "A load or restore that takes longer shows its progress in the notebook.")
    gpu_park: str = _choice("asked",
        "When the memory of an idle notebook leaves its card for RAM: asked (another process needs it, or someone "
        "parks it), idle (also after GPU_PARK_IDLE_SECONDS) or never.", "asked, idle or never")
    gpu_return_at_exit: float = _seconds(30.0,
        "How long a signal handler or an exit function of a parked notebook waits for its memory to return from RAM.")
    gpu_park_idle_seconds: float = _seconds(600.0,
        "With GPU_PARK=idle: how long a notebook is idle before it is parked.")
    gpu_park_turn_seconds: float = _seconds(30.0,
        "How long cells that follow one another keep the card while another process waits for it; never less than five "
        "times what leaving and returning takes.")
    gpu_park_dir: str | None = _text(None,
        "A directory on a local disk, to which parked memory of notebooks, and models whose load is slower than the "
        "disk, move when RAM is short; notebooks also when they are idle for long. Unset: all stays in RAM.")
    gpu_park_disk_gb: float | None = _number(None,
        "The most GiB on this disk, of all notebooks and models together. Unset: what is free but a tenth of "
        "the disk.", "a number of GiB above 0, such as 200", above=0, most=2**20)
    gpu_park_encrypt: bool = _truth(False,
        "With GPU_PARK_DIR: parked memory is encrypted on the disk, with a key that only the process has. It needs "
        "the extra encrypt.")
    gpu_hibernate_seconds: float = _seconds(3600.0,
        "With GPU_PARK_DIR: how long a parked notebook is idle before its memory moves to the disk.")
    gpu_who_names: str = _choice("own",
        "To whom %gpu who shows the names of this process's variables: own (its own user) or all (operators too).",
        "own or all")
    eviction_grace_seconds: float = _seconds(5.0,
        "A model used within this time is not evicted by pressure or by other processes.")
    eviction_idle_threshold_seconds: float = _seconds(120.0,
        "Under MODERATE pressure, models idle for longer than this are evicted.")
    eviction_idle_high_seconds: float = _seconds(30.0,
        "The same under HIGH pressure; never more than under MODERATE.")
    pressure_check_interval_seconds: float = _seconds(15.0, "How often pressure is checked.", above=0, text="1m")

    gpu_console_token: Secret | None = _secret(
        "The console's token, of 16 characters or more. Unset: a new one at each start.")
    gpu_console_viewer_token: Secret | None = _secret(
        "Another token, for people who may look and not act. Unset: there is none.")
    gpu_console_operators: str | None = _text(None,
        "The users who may act if the console has a login: names, separated by commas, or *.")
    gpu_console_viewers: str | None = _text(None,
        "The users who may only look there: names, separated by commas, or *. No other user is admitted.")
    gpu_console_operator_groups: str | None = _text(None,
        "Groups of JupyterHub whose members are operators of the console, beside the hub's admins: names, separated "
        "by commas.")
    gpu_console_user_names: str = _text("{name}",
        "The name on this machine of JupyterHub's user {name}; in The Littlest JupyterHub jupyter-{name}.")
    gpu_console_hours: str = _choice(
        "own",
        "Whose hours a member of a hub sees on the console's tab Hours: own, or all (also a sum for each other user).",
        "own or all",
    )
    gpu_console_read_only: bool = _truth(False, "The console has no buttons, for any user.")

    gpu_alerts: str | None = _text(None,
        "The file of those who are told of problems: one webhook's URL or mail address a line. Unset: the user's own "
        "alerts.txt.")

    gpu_engine_ports: str = _text("8300-8399", "The ports of engines that run as servers, at 127.0.0.1.")
    gpu_engine_start_seconds: float = _seconds(600.0, "How long such a server may take to start and load its model.",
        above=0, text="10m")
    gpu_tasks: str | None = _text(None,
        "The file of tasks, clients and substitutes for serving. Unset: the user's own tasks.yaml.")
    gpu_serve_queue: int = _whole(256, "How many calls may wait in the queue; further ones are refused.",
        "a whole number of calls above 0, such as 256", least=1)
    gpu_serve_breaker_failures: int = _whole(5,
        "How many faults of an engine in a row open the breaker of its model.",
        "a whole number of failures above 0, such as 5", least=1)
    gpu_serve_breaker_seconds: float = _seconds(30.0, "How long an open breaker keeps calls away from its model.",
        above=0, text="1m")
    gpu_serve_grace_seconds: float = _seconds(30.0, "How long running answers may take when the server gets SIGTERM.",
        text="1m")
    gpu_serve_log: str | None = _text(None,
        "The file for one line of JSON per call, or - for standard error. Unset: none.")
    gpu_serve_log_names: str = _choice("own",
        "The names of its fields: own, or genai (OpenTelemetry's, where its conventions for generative AI have one).",
        "own or genai")
    gpu_serve_keys: str | None = _text(None, "The file of keys for programs. Unset: the user's own keys.json.")
    gpu_serve_cors: str | None = _text(None, "The origins of web pages that may call gpu serve, with commas, or *.")
    model_boss_allow_cloud_fallback: bool = _truth(True,
        "Whether a cloud may answer in place of a local model, until changed over HTTP.")

    gpu_trust_remote_code: bool = _truth(False, "Let models run code from their own directory when they load.")
    # fmt: on

    def __init__(self, given_by: Mapping[str, str] | None = None, **values: Any) -> None:
        """Uses these `values`, else the defaults. `given_by` has the sources of the values, by name."""
        # A dataclass of so many fields takes 3 ms of each import.
        defaults = {name: setting.default for name, setting in _SETTINGS.items()}
        vars(self).update(defaults, **values, given_by=given_by or {})

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"cannot assign to {name}: settings are read once, when a runtime opens"
        )

    @classmethod
    def load(cls, **overrides: Any) -> Settings:
        """The settings: the `overrides` that are not None, else the environment, else defaults. Raises BadSetting."""
        given = {name: value for name, value in overrides.items() if value is not None}
        for name in overrides:
            if name not in NAMES:
                raise _unknown(name, given.get(name))
        # Sorted in reverse, capitals come last. So they win over a variable in small letters.
        exported = {
            name.lower(): text for name, text in sorted(os.environ.items(), reverse=True) if text
        }
        values, given_by = {}, {}
        for name in NAMES:
            if name in given:
                values[name], given_by[name] = _read(name, name, given[name]), "argument"
            elif name in exported:
                value = _read(name, name.upper(), exported[name])
                values[name], given_by[name] = value, "environment"
        return cls(**values, given_by=given_by)

    def rules(self) -> Rules:
        """The numbers that decisions use."""
        limit_gb = self.inference_memory_limit_gb
        idle_moderate = self.eviction_idle_threshold_seconds
        return Rules(
            grace_seconds=self.eviction_grace_seconds,
            idle_moderate_seconds=idle_moderate,
            idle_high_seconds=min(self.eviction_idle_high_seconds, idle_moderate),
            relief=self.gpu_relief,
            most_wait_seconds=self.gpu_most_wait,
            offload=self.enable_cpu_offload,
            limit_bytes=None if limit_gb is None else int(limit_gb * GIB),
        )

    def placement(self) -> PlacementRules:
        """The placement rules for every model. A model's own cards and layout are added later."""
        return PlacementRules(
            policy=self.gpu_placement,
            margin_bytes=self.gpu_split_margin_mb * MIB,
            overhead=self.gpu_split_overhead,
            factor=self.gpu_fraction_factor or 0.0,
            largest_fraction=self.fraction_largest_possible,
        )

    def sources(self) -> tuple[SettingRow, ...]:
        """Every setting, its value, its default, and where the value is from."""
        return tuple(
            SettingRow(
                name=name.upper(),
                value=_show(getattr(self, name)),
                default=_show(setting.default),
                source=self.given_by.get(name, "default"),
                doc=setting.doc,
            )
            for name, setting in _SETTINGS.items()
        )


_SETTINGS = {name: value for name, value in vars(Settings).items() if isinstance(value, _Setting)}
NAMES = tuple(_SETTINGS)


def masked(text: Any) -> Any:
    """`text` with the passwords in its URLs replaced by ***. Any other value is unchanged.

    >>> masked("redis://ops:s3cret@box:6379/0?password=s3cret")
    'redis://ops:***@box:6379/0?password=***'
    """
    if not isinstance(text, str):
        return text
    text = re.sub(r"(//[^:@/\s]*:)\S*@", r"\1***@", text)  # greedy: a password may itself hold an @
    return re.sub(r"(?i)([?&](?:password|token|secret|key)=)[^&\s]*", r"\1***", text)


def _show(value: Any) -> str:
    """The `value` in the form that the environment uses; `unset` for None.

    >>> _show(True), _show(120.0), _show(None)
    ('true', '120', 'unset')
    """
    if value is None:
        return "unset"
    if isinstance(value, Secret):
        return "***"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else masked(str(value))


def _read(name: str, written: str, value: Any) -> Any:
    """The `value` of the setting `name`, converted. Raises BadSetting with the name as `written`."""
    rule = _SETTINGS[name].rule
    try:
        value = value if name in _SECRET else _scalar(value)
        return rule.read(value)
    except Exception:
        # `masked` is not called with an object that was refused: its class may define `__class__`.
        shown = "***" if name in _SECRET else masked(value) if type(value) is str else value
        raise BadSetting(written, shown, rule.expected) from None


def _scalar(value: Any) -> Any:
    """Returns `value` if it is text, a number or a truth value. Raises if it is not."""
    value = plain(os.fspath(value) if isinstance(value, os.PathLike) else value)
    if type(value) not in (str, int, float, bool):
        raise ValueError
    return value


def _unknown(name: str, value: Any) -> BadSetting:
    known = [*NAMES, *_OF_RUNTIME]
    nearest = difflib.get_close_matches(name[:MOST_QUOTED].lower(), known, n=1, cutoff=0.0)
    shown = "***" if nearest[0] in _SECRET else masked(value)
    return BadSetting(name, shown, f"a known setting, such as {nearest[0]}")


_OF_RUNTIME = ("devices", "ledger", "catalog", "policy", "clock", "probe", "monitor")  # keywords
_SECRET = {"gpu_console_token", "gpu_console_viewer_token"}
