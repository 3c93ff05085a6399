"""Every setting in one table: its name, default, bounds and meaning.

The value of a setting is taken from the argument, if the caller gives it; else from the environment
variable with the same name in capitals; else from the default. Importing this module loads
pydantic, which takes 0.1 s. So the package imports this module only when the first runtime opens.
"""

from __future__ import annotations

import difflib
import os
import re
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    BeforeValidator,
    Field,
    PrivateAttr,
    SecretStr,
    ValidationError,
    field_validator,
)
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from .arguments import Rule, plain, read
from .errors import BadSetting
from .facts import PlacementRules, Rules
from .safe_text import MOST_QUOTED
from .units import GIB, MIB, parse_seconds


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("true is not a number")
    return value


def _no_nul(value: Any) -> Any:
    if isinstance(value, str) and ("\0" in value or len(value) > _LONGEST):
        raise ValueError("it is no text that the operating system takes")
    return value


_LONGEST = 4096  # characters of one setting
# In Python, True equals 1. Without this check, True would be accepted as 100 %.
Number = BeforeValidator(_no_bool)
Fraction = Annotated[float, Number, Field(ge=0, le=1, allow_inf_nan=False)]
Seconds = Annotated[float, BeforeValidator(parse_seconds)]


class SettingRow(NamedTuple):
    """One setting as `gpu config` shows it."""

    name: str
    value: str  # passwords masked
    default: str
    source: str  # "default", "environment" or "argument"
    doc: str


class Settings(BaseSettings):
    """All settings. `Settings.load` creates this object and reports an error in one sentence."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", env_ignore_empty=True, validate_default=False
    )

    gpu_memory_max_percent: Fraction = Field(
        0.90, description="The part of each GPU's memory that models may claim, 0 to 1."
    )
    cpu_memory_max_percent: Fraction = Field(
        0.50,
        description="The part of RAM that models may claim while they are off the GPU, 0 to 1.",
    )
    inference_memory_limit_gb: Annotated[float | None, Number] = Field(
        None,
        gt=0,
        le=2**20,
        allow_inf_nan=False,
        description="A further limit on this process's models, in GiB. Unset: none.",
    )
    inference_gpu_index: Annotated[int | None, Number] = Field(
        None,
        ge=0,
        description="The only GPU to use, by its number in status. Unset: the planner chooses.",
    )

    inference_gpu_layers: Annotated[int | None, Number] = Field(
        None,
        ge=-1,
        description="Layers on the GPU of a llama.cpp model that does not set its own gpu_layers: -1 all, "
        "0 CPU only.",
    )
    inference_backend: str | None = Field(
        None,
        description="The backend if the model's catalogue entry has none. Unset: found from its source.",
    )

    gpu_devices: str = Field(
        "auto",
        description="The devices: auto, cuda, some of them as cuda:0,2 or cuda:UUID, rocm, metal, or "
        "simulated ones such as sim:2x24GiB,host:64GiB or sim:24GiB+12GiB.",
    )
    development_cpu_only: bool = Field(
        False, description="Simulate the devices even if there is a GPU."
    )
    gpu_ledger: str | None = Field(
        None,
        description="Where the book is stored: keeper:///DIRECTORY, redis://HOST:PORT/DB or memory:. "
        "Unset: the machine's shared ledger, else one of the user's own.",
    )

    gpu_catalog: str | None = Field(
        None,
        description="Where the model catalogue is: a directory or a file. Unset: the user's own.",
    )
    gpu_config_file: str = Field(
        "/etc/gpu-console/config.toml",
        description="The machine-wide configuration: the shared ledger, and users' caps.",
    )

    enable_memory_governor: bool = Field(
        True, description="Off: models load without a request for room, and are never moved."
    )
    enable_cpu_offload: bool = Field(
        True,
        description="On: models evicted from the GPU move to RAM. Off: they are dropped, if their source "
        "can restore them.",
    )
    gpu_policy: Literal["lru", "cost_aware", "keep_score"] = Field(
        "keep_score", description="Which model is evicted first: keep_score, lru or cost_aware."
    )
    gpu_placement: Literal["best-fit", "most-free", "fewest-evictions"] = Field(
        "best-fit",
        description="Which GPU a model is loaded to: best-fit, most-free or fewest-evictions.",
    )
    gpu_split_margin_mb: Annotated[int, Number] = Field(
        512,
        ge=0,
        description="MiB that stay free on each GPU when a model is split in proportion to the free memory.",
    )
    gpu_split_overhead: Fraction = Field(
        0.0,
        description="What each GPU of a split model needs beyond its share, as a part of it; Helix: 0.1.",
    )
    gpu_fraction_factor: Annotated[float | None, Number] = Field(
        None,
        gt=0,
        le=1000,
        allow_inf_nan=False,
        description="Claim a model's weights times this instead of the estimate; NDIF: 3. Unset: the "
        "estimate.",
    )
    fraction_largest_possible: Fraction = Field(
        0.8,
        description="With GPU_FRACTION_FACTOR: a model that would claim this part of a GPU or more claims "
        "the whole GPU.",
    )
    gpu_shadows: Literal["auto", "private", "never"] = Field(
        "auto",
        description="Whether an unchanged copy of a model on a GPU stays in RAM while RAM has room, so that "
        "the model leaves its GPU without a copy: auto (one for all processes of a user), private or never.",
    )
    gpu_relief: Literal["auto", "always", "never"] = Field(
        "auto",
        description="When pressure evicts idle models: auto (while requests wait, or unleased memory fills a GPU), "
        "always or never.",
    )
    gpu_most_wait: Seconds | None = Field(
        None,
        description="How long other models of equal importance may keep a model waiting. Unset: five times what "
        "bringing it to the GPU takes, at least 3 s.",
    )
    gpu_prefetch: Literal["auto", "never"] = Field(
        "auto",
        description="Whether waiting cells' models are loaded while a cell runs: auto or never.",
    )
    gpu_progress_seconds: Seconds = Field(
        0.5, description="A load or restore that takes longer shows its progress in the notebook."
    )
    gpu_park: Literal["asked", "idle", "never"] = Field(
        "asked",
        description="When the memory of an idle notebook leaves its GPU for RAM: asked (another process "
        "needs it, or someone parks it), idle (also after GPU_PARK_IDLE_SECONDS) or never.",
    )
    gpu_return_at_exit: Seconds = Field(
        30.0,
        description="How long a signal handler or an exit function of a parked notebook waits for its "
        "memory to return from host memory.",
    )
    gpu_park_idle_seconds: Seconds = Field(
        600.0, description="With GPU_PARK=idle: how long a notebook is idle before it is parked."
    )
    gpu_park_turn_seconds: Seconds = Field(
        30.0,
        description="How long cells that follow one another keep the GPU while another process waits for "
        "it; never less than five times what leaving and returning takes.",
    )
    gpu_who_names: Literal["own", "all"] = Field(
        "own",
        description="To whom %gpu who shows the names of this process's variables: own (its own user) or "
        "all (operators too).",
    )
    eviction_grace_seconds: Seconds = Field(
        5.0,
        description="A model used within this time is not evicted by pressure or by other processes.",
    )
    eviction_idle_threshold_seconds: Seconds = Field(
        120.0, description="Under MODERATE pressure, models idle for longer than this are evicted."
    )
    eviction_idle_high_seconds: Seconds = Field(
        30.0, description="The same under HIGH pressure; never more than under MODERATE."
    )
    pressure_check_interval_seconds: Annotated[Seconds, Field(gt=0)] = Field(
        15.0, description="How often pressure is checked."
    )

    gpu_console_token: Annotated[SecretStr | None, Field(min_length=16)] = Field(
        None,
        description="The console's token, of 16 characters or more. Unset: a new one at each start.",
    )
    gpu_console_viewer_token: Annotated[SecretStr | None, Field(min_length=16)] = Field(
        None,
        description="Another token, for people who may look and not act. Unset: there is none.",
    )
    gpu_console_operators: str | None = Field(
        None,
        description="The users who may act if the console has a login: names, separated by commas, or *.",
    )
    gpu_console_viewers: str | None = Field(
        None,
        description="The users who may only look there: names, separated by commas, or *. No other user is admitted.",
    )
    gpu_console_read_only: bool = Field(
        False, description="The console has no buttons, for any user."
    )

    gpu_engine_ports: str = Field(
        "8300-8399", description="The ports of engines that run as servers, at 127.0.0.1."
    )
    gpu_engine_start_seconds: Annotated[Seconds, Field(gt=0)] = Field(
        600.0, description="How long such a server may take to start and load its model."
    )
    gpu_tasks: str | None = Field(
        None,
        description="The file of tasks, clients and substitutes for serving. Unset: the user's own tasks.yaml.",
    )
    gpu_serve_queue: Annotated[int, Number] = Field(
        256, ge=1, description="How many calls may wait in the queue; further ones are refused."
    )
    gpu_serve_breaker_failures: Annotated[int, Number] = Field(
        5, ge=1, description="How many faults of an engine in a row open the breaker of its model."
    )
    gpu_serve_breaker_seconds: Annotated[Seconds, Field(gt=0)] = Field(
        30.0, description="How long an open breaker keeps calls away from its model."
    )
    gpu_serve_grace_seconds: Annotated[Seconds, Field(ge=0)] = Field(
        30.0, description="How long running answers may take when the server gets SIGTERM."
    )
    gpu_serve_log: str | None = Field(
        None,
        description="The file for one line of JSON per call, or - for standard error. Unset: none.",
    )
    gpu_serve_keys: str | None = Field(
        None, description="The file of keys for programs. Unset: the user's own keys.json."
    )
    gpu_serve_cors: str | None = Field(
        None, description="The origins of web pages that may call gpu serve, with commas, or *."
    )
    model_boss_allow_cloud_fallback: bool = Field(
        True,
        description="Whether a cloud may answer in place of a local model, until changed over HTTP.",
    )

    gpu_trust_remote_code: bool = Field(
        False, description="Let models run code from their own directory when they load."
    )

    _arguments: frozenset[str] = PrivateAttr(frozenset())
    _plain_text = field_validator("*", mode="before")(_no_nul)

    @classmethod
    def load(cls, **overrides: Any) -> Settings:
        """The settings: the `overrides` that are not None, else the environment, else defaults.

        Raises BadSetting for an unknown name, a wrong type or a value out of range.
        """
        given = {name: value for name, value in overrides.items() if value is not None}
        for name in overrides:
            if name not in cls.model_fields:
                raise _unknown(name, given.get(name))
        given = {name: _plain(name, value) for name, value in given.items()}
        try:
            settings = cls(**given)
        except ValidationError as error:
            raise _bad_setting(error, given) from None
        settings._arguments = frozenset(given)
        return settings

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        *_: Any,
        **__: Any,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Reads arguments (`init_settings`) first, then the environment (`env_settings`).

        No .env file is read, because a machine's settings must be visible in its environment.
        `settings_cls` is not used.
        """
        return (init_settings, env_settings)

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
        rows = []
        for name, field in type(self).model_fields.items():
            row = SettingRow(
                name=name.upper(),
                value=_show(getattr(self, name)),
                default=_show(field.default),
                source=self._source(name),
                doc=field.description or "",
            )
            rows.append(row)
        return tuple(rows)

    def _source(self, name: str) -> str:
        if name in self._arguments:
            return "argument"
        return "environment" if name in self.model_fields_set else "default"


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
    if isinstance(value, SecretStr):
        return "***"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else masked(str(value))


def _plain(name: str, value: Any) -> Any:
    """Returns `value` if it is text, a number or a truth value. Raises BadSetting if it is not."""
    return value if type(value) is SecretStr else read(name, value, Rule(_expected(name), _scalar))


def _scalar(value: Any) -> Any:
    value = plain(os.fspath(value) if isinstance(value, os.PathLike) else value)
    if type(value) not in (str, int, float, bool):
        raise ValueError
    return value


def _unknown(name: str, value: Any) -> BadSetting:
    known = [*Settings.model_fields, *_OF_RUNTIME]
    nearest = difflib.get_close_matches(name[:MOST_QUOTED].lower(), known, n=1, cutoff=0.0)
    shown = "***" if nearest[0] in _SECRET else masked(value)
    return BadSetting(name, shown, f"a known setting, such as {nearest[0]}")


def _bad_setting(error: ValidationError, given: dict[str, Any]) -> BadSetting:
    """The first problem of `error` as a sentence, with the setting's name and value as written.

    `given` are the arguments. A setting that is not in `given` is from the environment, so its name
    is in capitals.
    """
    problem = error.errors()[0]
    field = str(problem["loc"][0])
    name = field if field in given else field.upper()
    value = "***" if field in _SECRET else masked(problem["input"])
    return BadSetting(name, value, _expected(field))


def _expected(field: str) -> str:
    """The expected kind of value of a setting, in words.

    >>> _expected("gpu_policy"), _expected("cpu_memory_max_percent")
    ('lru, cost_aware or keep_score', 'a number from 0 to 1, such as 0.5')
    """
    if field in _WORDS:
        return _WORDS[field]
    default = Settings.model_fields[field].default
    if isinstance(default, bool):
        return "true or false"
    if field.endswith("_percent") or field in ("gpu_split_overhead", "fraction_largest_possible"):
        return f"a number from 0 to 1, such as {default:g}"
    if field.endswith("_seconds"):
        return f"seconds, such as {default:g} or '2m'"
    return "text"


_OF_RUNTIME = ("devices", "ledger", "catalog", "policy", "clock", "probe", "monitor")  # keywords
_SECRET = {"gpu_console_token", "gpu_console_viewer_token"}
_WORDS = {
    **dict.fromkeys(_SECRET, "text of 16 characters or more, as from `openssl rand -hex 24`"),
    "gpu_policy": "lru, cost_aware or keep_score",
    "gpu_placement": "best-fit, most-free or fewest-evictions",
    "gpu_split_margin_mb": "a whole number of MiB, such as 512",
    "gpu_fraction_factor": "a number above 0, such as 3",
    "gpu_relief": "auto, always or never",
    "gpu_shadows": "auto, private or never",
    "gpu_prefetch": "auto or never",
    "gpu_most_wait": "seconds, such as 10 or '1m'",
    "inference_memory_limit_gb": "a number of GiB above 0, such as 16",
    "gpu_engine_start_seconds": "seconds above 0, such as 600 or '10m'",
    "gpu_serve_queue": "a whole number of calls above 0, such as 256",
    "gpu_serve_breaker_failures": "a whole number of failures above 0, such as 5",
    "gpu_serve_grace_seconds": "seconds, such as 30 or '1m'",
    "gpu_serve_breaker_seconds": "seconds above 0, such as 30 or '1m'",
    "inference_gpu_index": "the index of a GPU, such as 0",
    "inference_gpu_layers": "-1 (all), 0 (CPU only) or a number of layers",
    "pressure_check_interval_seconds": "seconds above 0, such as 15 or '1m'",
}
