"""Settings: where a value comes from, which values are rejected, and the rules that decisions use."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_runtime import Runtime
from gpu_runtime.errors import BadSetting
from gpu_runtime.facts import PlacementRules, Rules
from gpu_runtime.settings import Settings, masked
from gpu_runtime.verbs import PRESETS, preset

DEFAULTS = {
    "GPU_MEMORY_MAX_PERCENT": "0.9", "CPU_MEMORY_MAX_PERCENT": "0.5",
    "INFERENCE_MEMORY_LIMIT_GB": "unset", "INFERENCE_GPU_INDEX": "unset",
    "INFERENCE_GPU_LAYERS": "unset", "INFERENCE_BACKEND": "unset", "GPU_DEVICES": "auto",
    "DEVELOPMENT_CPU_ONLY": "false", "GPU_LEDGER": "unset", "GPU_CATALOG": "unset",
    "GPU_CONFIG_FILE": "/etc/gpu-console/config.toml", "ENABLE_MEMORY_GOVERNOR": "true",
    "ENABLE_CPU_OFFLOAD": "true", "GPU_POLICY": "keep_score", "GPU_PLACEMENT": "best-fit",
    "GPU_SPLIT_MARGIN_MB": "512", "GPU_SPLIT_OVERHEAD": "0", "GPU_FRACTION_FACTOR": "unset",
    "FRACTION_LARGEST_POSSIBLE": "0.8", "GPU_RELIEF": "auto", "GPU_SHADOWS": "auto",
    "GPU_MOST_WAIT": "unset", "GPU_FAIRNESS": "off", "GPU_PREFETCH": "auto", "GPU_PROGRESS_SECONDS": "0.5",
    "GPU_PARK": "asked", "GPU_PARK_IDLE_SECONDS": "600", "GPU_PARK_TURN_SECONDS": "30",
    "GPU_PARK_DIR": "unset", "GPU_PARK_DISK_GB": "unset", "GPU_PARK_ENCRYPT": "false", "GPU_HIBERNATE_SECONDS": "3600",
    "GPU_RETURN_AT_EXIT": "30", "GPU_WHO_NAMES": "own", "EVICTION_GRACE_SECONDS": "5",
    "EVICTION_IDLE_THRESHOLD_SECONDS": "120", "EVICTION_IDLE_HIGH_SECONDS": "30",
    "PRESSURE_CHECK_INTERVAL_SECONDS": "15", "GPU_CONSOLE_TOKEN": "unset",
    "GPU_CONSOLE_VIEWER_TOKEN": "unset", "GPU_CONSOLE_OPERATORS": "unset",
    "GPU_CONSOLE_VIEWERS": "unset", "GPU_CONSOLE_READ_ONLY": "false", "GPU_CONSOLE_HOURS": "own",
    "GPU_CONSOLE_OPERATOR_GROUPS": "unset", "GPU_CONSOLE_USER_NAMES": "{name}",
    "GPU_ENGINE_PORTS": "8300-8399", "GPU_ENGINE_START_SECONDS": "600", "GPU_TASKS": "unset",
    "GPU_SERVE_QUEUE": "256", "GPU_SERVE_BREAKER_FAILURES": "5", "GPU_SERVE_BREAKER_SECONDS": "30",
    "GPU_SERVE_GRACE_SECONDS": "30", "GPU_SERVE_LOG": "unset", "GPU_SERVE_LOG_NAMES": "own", "GPU_SERVE_KEYS": "unset",
    "GPU_SERVE_CORS": "unset", "MODEL_BOSS_ALLOW_CLOUD_FALLBACK": "true",
    "GPU_TRUST_REMOTE_CODE": "false", "GPU_ALERTS": "unset",
}  # fmt: skip


@pytest.fixture
def environment(environment):
    """Removes the isolated GPU_CONFIG_FILE, so that the tests read the defaults and no file."""
    environment.delenv("GPU_CONFIG_FILE")
    return environment


def row(settings: Settings, name: str):
    return next(row for row in settings.sources() if row.name == name)


def test_the_defaults_are_those_of_the_documents(environment):
    """The defaults are the numbers of the Semantik governor."""
    assert {row.name: row.value for row in Settings.load().sources()} == DEFAULTS
    assert Settings.load().rules() == Rules()
    assert all(row.doc.endswith(".") for row in Settings.load().sources())


def test_an_argument_wins_over_the_environment_and_that_over_the_default(environment):
    """The table of settings shows the source of each value: default, environment or argument."""
    assert row(Settings.load(), "GPU_MEMORY_MAX_PERCENT")[1:4] == ("0.9", "0.9", "default")
    environment.setenv("GPU_MEMORY_MAX_PERCENT", "0.8")
    assert row(Settings.load(), "GPU_MEMORY_MAX_PERCENT")[1:4] == ("0.8", "0.9", "environment")
    settings = Settings.load(gpu_memory_max_percent=0.7)
    assert row(settings, "GPU_MEMORY_MAX_PERCENT")[1:4] == ("0.7", "0.9", "argument")
    assert settings.gpu_memory_max_percent == 0.7


def test_only_the_environment_sets_values_and_an_empty_one_unsets(environment, tmp_path):
    """`Runtime(devices=None)` and `GPU_DEVICES=` set nothing, so the next source counts."""
    environment.setenv("GPU_DEVICES", "sim:1x8GiB")
    assert Settings.load(gpu_devices=None).gpu_devices == "sim:1x8GiB"
    environment.setenv("GPU_DEVICES", "")
    assert Settings.load().gpu_devices == "auto"
    # A file `.env` in a notebook's folder must not change the settings of the machine.
    (tmp_path / ".env").write_text("GPU_POLICY=cost_aware\n")
    environment.chdir(tmp_path)
    assert Settings.load().gpu_policy == "keep_score"


@pytest.mark.parametrize(("name", "text", "value"), [
    ("enable_memory_governor", "off", False), ("enable_cpu_offload", "false", False),
    ("development_cpu_only", "1", True), ("gpu_trust_remote_code", "true", True),
    ("inference_memory_limit_gb", "16.5", 16.5), ("inference_gpu_index", "1", 1),
    ("eviction_idle_threshold_seconds", "2m", 120.0),
    ("pressure_check_interval_seconds", "0.5", 0.5), ("gpu_policy", "cost_aware", "cost_aware"),
    ("gpu_console_read_only", "yes", True), ("gpu_console_operators", "ann, bob", "ann, bob"),
    ("gpu_ledger", "memory:", "memory:"),
])  # fmt: skip
def test_text_in_the_environment_becomes_a_value(environment, name, text, value):
    """A setting is read from the environment variable with its name in capitals."""
    environment.setenv(name.upper(), text)
    assert getattr(Settings.load(), name) == value


@pytest.mark.parametrize(("name", "value", "expected"), [
    ("gpu_memory_max_percent", "90", "a number from 0 to 1, such as 0.9"),
    ("gpu_memory_max_percent", "-0.1", "a number from 0 to 1, such as 0.9"),
    ("gpu_memory_max_percent", "nan", "a number from 0 to 1, such as 0.9"),
    ("cpu_memory_max_percent", "half", "a number from 0 to 1, such as 0.5"),
    ("inference_memory_limit_gb", "0", "a number of GiB above 0, such as 16"),
    ("inference_memory_limit_gb", "16GB", "a number of GiB above 0, such as 16"),
    ("inference_gpu_index", "-1", "the index of a card, such as 0"),
    ("inference_gpu_index", "1.5", "the index of a card, such as 0"),
    ("development_cpu_only", "maybe", "true or false"),
    ("enable_memory_governor", "2", "true or false"),
    ("enable_cpu_offload", "none", "true or false"),
    ("gpu_trust_remote_code", "ja", "true or false"),
    ("gpu_policy", "mru", "lru, cost_aware, keep_score"),
    ("gpu_placement", "worst", "best-fit, most-free, fewest-evictions"),
    ("gpu_split_margin_mb", "-1", "a whole number of MiB, such as 512"),
    ("gpu_split_overhead", "1.5", "a number from 0 to 1, such as 0"),
    ("gpu_fraction_factor", "0", "a number above 0, such as 3"),
    ("gpu_relief", "sometimes", "auto, always or never"),
    ("eviction_grace_seconds", "-5", "seconds, such as 5 or '2m'"),
    ("eviction_idle_threshold_seconds", "soon", "seconds, such as 120 or '2m'"),
    ("eviction_idle_high_seconds", "30 parsecs", "seconds, such as 30 or '2m'"),
    ("pressure_check_interval_seconds", "0", "seconds above 0, such as 15 or '1m'"),
])  # fmt: skip
def test_a_bad_value_is_rejected_in_one_sentence(environment, name, value, expected):
    """The error has the setting as the user wrote it, the value, and what is expected."""
    environment.setenv(name.upper(), value)
    with pytest.raises(BadSetting) as error:
        Settings.load()
    assert str(error.value) == f"{name.upper()}={value!r} cannot be used: it must be {expected}."

    environment.delenv(name.upper())
    with pytest.raises(BadSetting) as error:
        Settings.load(**{name: value})
    assert (error.value.setting, error.value.value, error.value.expected) == (name, value, expected)


@pytest.mark.parametrize(("name", "value"), [
    ("gpu_devices", 3), ("gpu_ledger", 7), ("gpu_memory_max_percent", True),
    ("inference_gpu_index", True), ("eviction_grace_seconds", [5]),
])  # fmt: skip
def test_a_wrong_type_is_rejected(name, value):
    with pytest.raises(BadSetting) as error:
        Settings.load(**{name: value})
    assert error.value.setting == name


def test_an_unknown_name_is_rejected_and_loaded_settings_do_not_change():
    """A misspelt setting must not be ignored silently."""
    with pytest.raises(BadSetting, match="a known setting, such as gpu_memory_max_percent"):
        Settings.load(gpu_memory_max_precent=0.9)
    with pytest.raises(BadSetting, match="a known setting, such as gpu_policy"):
        Settings.load(GPU_POLICY="lru")
    # If settings could change, a decision and its explanation could use different numbers.
    with pytest.raises(Exception, match="cannot assign"):
        Settings.load().gpu_policy = "cost_aware"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("short", "value"), [("devices", "sim:2GiB"), ("ledger", "memory:"), ("policy", "cost_aware")]
)
def test_a_keyword_of_a_runtime_may_have_the_name_of_its_setting(short, value):
    """Given twice, nobody knows which one is meant."""
    given = {"gpu_devices": "sim:1GiB", "gpu_ledger": "memory:"} | {f"gpu_{short}": value}
    with Runtime(**given) as rt:
        assert getattr(rt.settings, f"gpu_{short}") == value
    with pytest.raises(BadSetting, match=f"gpu_{short} is given too"):
        Runtime(**given, **{short: value})


def test_rules_have_the_numbers_that_decisions_use():
    """The rules are made from the settings. Whatever is set, the idle time at HIGH is never longer than at MODERATE."""
    settings = Settings.load(
        eviction_grace_seconds=1,
        eviction_idle_threshold_seconds=20,
        gpu_relief="always",
        enable_cpu_offload=False,
        inference_memory_limit_gb=1.5,
        gpu_most_wait="1m",
        gpu_placement="most-free",
        gpu_split_margin_mb=3,
        gpu_split_overhead=0.1,
        gpu_fraction_factor=2,
        fraction_largest_possible=0.7,
    )
    assert settings.rules() == Rules(
        grace_seconds=1.0, idle_moderate_seconds=20.0, idle_high_seconds=20.0, relief="always",
        offload=False, limit_bytes=1_610_612_736, most_wait_seconds=60.0,
    )  # fmt: skip
    assert settings.placement() == PlacementRules(
        policy="most-free", margin_bytes=3 * 2**20, overhead=0.1, factor=2.0, largest_fraction=0.7
    )
    assert Settings.load().placement() == PlacementRules()
    assert Settings.load(eviction_idle_high_seconds=10).rules() == Rules(idle_high_seconds=10.0)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_loaded(environment, name):
    """The output of `gpu config --preset` is accepted when a user exports it."""
    for variable, value in preset(name).items():
        environment.setenv(variable, value)
    exported = {row.name for row in Settings.load().sources() if row.source == "environment"}
    assert exported == set(preset(name))


def test_presets_are_those_of_the_document():
    """On smaller cards a smaller part is for models, and idle models are evicted sooner."""
    assert preset("8 gb") == {
        "GPU_MEMORY_MAX_PERCENT": "0.85",
        "ENABLE_CPU_OFFLOAD": "true",
        "EVICTION_IDLE_THRESHOLD_SECONDS": "60",
    }
    assert preset("4GB")["EVICTION_IDLE_THRESHOLD_SECONDS"] == "30"
    with pytest.raises(
        BadSetting, match="preset='12GB' cannot be used: it must be one of 24GB, 16GB, 8GB, 4GB"
    ):
        preset("12GB")


@pytest.mark.parametrize("name", ["24GB+", "48GB", "80GB", "141 GB", "32GiB", "24g"])
def test_larger_cards_have_the_preset_of_the_largest(name):
    """The heading of that preset in the document is `24GB+ VRAM`."""
    assert preset(name) == preset("24GB")


@pytest.mark.parametrize("name", ["", "GB", "20GB", "-8GB", "8.5GB", "²GB", "9" * 5000 + "GB"])
def test_other_sizes_have_no_preset(name):
    with pytest.raises(BadSetting, match="larger cards use 24GB") as error:
        preset(name)
    assert len(str(error.value)) < 300


def test_passwords_are_never_shown(environment):
    """Neither the table nor an error message shows a password."""
    environment.setenv("GPU_LEDGER", "redis://ops:s3cret@box:6379/0")
    assert row(Settings.load(), "GPU_LEDGER").value == "redis://ops:***@box:6379/0"
    with pytest.raises(BadSetting) as error:
        Settings.load(gpu_leger="redis://ops:s3cret@box:6379/0")
    assert "s3cret" not in str(error.value)
    assert masked("keeper:////var/lib/gpu/book") == "keeper:////var/lib/gpu/book"


@pytest.mark.parametrize("name", ["gpu_console_token", "gpu_console_viewer_token"])
def test_a_token_is_never_shown(environment, name):
    """`gpu doctor` prints the table of settings. A token is neither there, nor in a repr or an error message."""
    token = "4f1c8a90b2d74e6f9a3b"
    environment.setenv(name.upper(), token)
    settings = Settings.load()
    assert row(settings, name.upper()).value == "***"
    assert getattr(settings, name).get_secret_value() == token
    assert token not in repr(settings) and token not in str(settings)
    for wrong in ({name: token[:15]}, {name + "s": token}):
        with pytest.raises(BadSetting) as error:
            Settings.load(**wrong)
        assert token[:15] not in str(error.value) and token[:15] not in repr(error.value.facts)
    environment.setenv(name.upper(), token[:15])
    with pytest.raises(BadSetting, match="of 16 characters or more") as error:
        Settings.load()
    assert token[:15] not in str(error.value)


@given(
    password=st.text(st.characters(categories=("L", "N", "P", "S")), min_size=1).map(
        lambda text: f"<{text}>"
    )
)
def test_no_password_survives_masking(password):
    """A password may contain any characters, even @ or /."""
    assert masked(f"redis://ops:{password}@box:6379/0") == "redis://ops:***@box:6379/0"


@given(st.floats())
def test_a_fraction_is_a_number_from_0_to_1(number):
    """A likely mistake is a percentage, such as 90."""
    for fraction in (number, abs(number) % 1, 0.0, 1.0):
        if 0 <= fraction <= 1:
            assert Settings.load(gpu_memory_max_percent=fraction).gpu_memory_max_percent == fraction
        else:
            with pytest.raises(BadSetting):
                Settings.load(gpu_memory_max_percent=fraction)
