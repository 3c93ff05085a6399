"""Fixtures of all tests.

No test sees settings from outside or downloads a model. The state directory of the tests is new and empty.
"""

import gc
import inspect
import os
import shutil
import sys
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

from gpu_runtime import files
from gpu_runtime.ledgers.keeper import ledger as keeper_ledger
from gpu_runtime.settings import NAMES
from tests import forked, isolation, soak
from tests.clock import pytest_timeout_set_timer  # noqa: F401 - a hook
from tests.serving.loops import in_loop

_began = time.monotonic()

# The ordinary run judges a change, so it tries the same examples each time. `make soak` searches for new ones.
settings.register_profile("ordinary", deadline=None, derandomize=True, max_examples=40)
settings.register_profile(
    "soak", deadline=None, max_examples=int(os.environ.get("SOAK_EXAMPLES", 10_000)), stateful_step_count=100,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
# `make check` tries a few; `make test` tries them all. A mutant is killed by the first example that fails: the smallest
# one is not looked for.
_ORDINARY, _HEALTHY = settings.get_profile("ordinary"), list(HealthCheck)
settings.register_profile(
    "quick", _ORDINARY, max_examples=10, stateful_step_count=10, suppress_health_check=_HEALTHY
)
settings.register_profile(
    "mutants", _ORDINARY, phases=[Phase.explicit, Phase.generate], suppress_health_check=_HEALTHY
)
settings.load_profile("ordinary")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A MonkeyPatch to set environment variables. The environment contains no setting of gpu-console yet."""
    for name in NAMES:
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("GPU_CONFIG_FILE", isolation.CONFIG_FILE)
    return monkeypatch


@pytest.fixture(scope="session", autouse=True)
def _keepers_are_forked() -> Iterator[None]:
    """Forks the keepers of this process from one that has imported their code.

    A new interpreter takes 0.15 s of the processor for it, and a thousand tests start a keeper.
    Kernels, commands and `ledgers/test_keeper_process.py` start keepers as users do.
    """
    here, spawn = os.getpid(), keeper_ledger.spawn

    def start(arguments: list[str], log: int, **inherited: int):
        chosen = forked.KEEPERS.keeper if os.getpid() == here else spawn
        return chosen(arguments, log, **inherited)

    keeper_ledger.spawn = start
    yield
    keeper_ledger.spawn = spawn


@pytest.fixture(scope="session")
def mark() -> Callable[[int, str], None]:
    """torch's call that marks a storage, so that each later access raises an error with a given sentence.

    CPU builds of torch lack the call, so it is compiled here for them.
    """
    from tests import storage_mark

    return storage_mark.compiled()


@pytest.fixture
def guards(mark: Callable[[int, str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a test mark storages, which otherwise only CUDA builds of torch can do."""
    import torch

    from tests import storage_mark

    monkeypatch.setattr(torch._C, storage_mark.NAME, mark, raising=False)


# Tests in these places start real processes, browsers or servers.
PROCESSES = (
    "browser/", "clients/", "frameworks/", "hub/", "install/", "simulation/", "stories/", "backends/test_contract.py",
    "backends/test_engine_server.py", "backends/test_file_guard.py", "backends/test_interrupts.py",
    "backends/test_model_processes.py", "backends/test_diffusers.py", "backends/test_programs.py",
    "core/test_additions.py", "core/test_docs.py", "core/test_imports.py", "faces/test_cli.py", "faces/test_gate.py",
    "faces/test_login.py",
    "faces/test_unsafe_options.py", "faces/test_launcher.py", "faces/test_notebook.py",
    "ledgers/test_keeper_process.py", "ledgers/test_redis.py", "ledgers/test_shared.py",
    "owner/test_checkpoints.py", "owner/test_engines.py", "owner/test_torn_ledger.py",
    "fleet/test_fleet.py", "fleet/test_fleet_serving.py", "fleet/test_fleet_storm.py", "fleet/test_wished_models.py",
    "serving/test_headless.py",
    "serving/test_official_clients.py", "serving/test_openapi.py",
)  # fmt: skip


# The longest files start first, so that no worker is left alone with one of them at the end. Each
# takes more than 15 seconds. Most of them wait for processes.
LONGEST = (
    "browser/test_served.py", "stories/test_history.py", "simulation/test_simulation.py",
    "browser/test_two_notebooks.py",
    "stories/test_parking.py", "stories/test_look_ahead.py", "stories/test_sampler.py",
    "backends/test_contract.py", "core/test_docs.py", "backends/test_interrupts.py",
    "browser/test_lab.py", "browser/test_true_numbers.py", "backends/test_swap.py",
    "stories/test_views_in_chromium.py", "stories/test_kernel_versions.py",
    "stories/test_processes.py", "browser/test_lab_extension.py", "install/test_install.py",
    "stories/test_cards.py", "fleet/test_fleet.py", "stories/test_serving_under_fire.py",
    "owner/test_torn_ledger.py", "faces/test_login.py", "faces/test_any_words.py",
    "owner/test_away.py", "stories/test_training.py",
    "stories/test_forks.py", "stories/test_damage.py", "scheduler/test_audited_processes.py",
    "scheduler/test_laws.py",
)  # fmt: skip


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skips files whose tests `-m` would deselect: importing these files takes longer than many tests.

    All tests marked gpu are in `gpu/`. A machine with a card may lack the packages of other tests.
    """
    here = Path(__file__).parent
    if not collection_path.is_file() or not collection_path.is_relative_to(here):
        return None
    path, wanted = collection_path.relative_to(here).as_posix(), config.option.markexpr
    if wanted == "gpu":
        return None if path.startswith("gpu/") else True
    return True if "not processes" in wanted and path.startswith(PROCESSES) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks tests that start processes, orders them, and skips tests marked gpu without a GPU."""
    here = Path(__file__).parent
    for item in items:
        inside = item.path.is_relative_to(here)
        path = item.path.relative_to(here).as_posix() if inside else item.path.name
        if inside and path.startswith(PROCESSES):
            item.add_marker(pytest.mark.processes)
    turns = {here / path: turn for turn, path in enumerate(LONGEST)}
    items.sort(key=lambda item: _turn(item, turns))
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    reason = _why_no_gpu() if on_gpu else ""
    if reason:
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs an `async def` test in an event loop of its own, within bounded time."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = inspect.signature(pyfuncitem.obj).parameters
    in_loop(pyfuncitem.obj)(**{name: pyfuncitem.funcargs[name] for name in given})
    return True


def _turn(item: pytest.Item, turns: dict[Path, int]) -> int:
    """The rank of `item` in the order of a run. `turns` has the ranks of the longest files.

    The longest files run first, then tests with processes and notebooks, then the rest.
    """
    if item.path in turns:
        return turns[item.path]
    waits = item.get_closest_marker("processes") or item.path.suffix == ".ipynb"
    return len(LONGEST) if waits else len(LONGEST) + 1


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collects the tests without searches for garbage, which took a fifth of the time.

    Nearly all objects that an import makes are kept.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Excludes all objects that the collection of tests imported from later garbage collections.

    Many tests collect garbage to count bytes. With pandas and torch loaded, one collection took 0.3
    s. The search for a notebook's memory also looks at objects that the user froze, and counting the
    frozen objects takes 0.13 s. In the tests the user froze none, so the count is replaced by 0.
    """
    gc.collect()
    gc.freeze()
    gc.get_freeze_count = lambda: 0  # type: ignore[assignment]


@pytest.fixture(scope="module", autouse=True)
def _small_collections() -> None:
    """Excludes the objects that earlier modules imported from this module's garbage collections."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _small_collections_after_imports() -> Iterator[None]:
    """The same for what a test imports, such as pandas at its first table."""
    before = len(sys.modules)
    yield
    if len(sys.modules) > before:
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _empty_catalogue() -> Iterator[None]:
    """Removes what this module wrote into the catalogue of the tests, so that no test of another
    module finds it: `rt.models()` lists it.
    """
    yield
    shutil.rmtree(files.state_home() / "catalog", ignore_errors=True)


@pytest.fixture(scope="module", autouse=True)
def _empty_cards(_small_collections: None) -> Iterator[None]:
    """Empties the simulated cards after each module, since tests of the next module count bytes on them."""
    yield
    # An interrupt between two instructions can leave its error as the context of all later errors.
    assert sys.exc_info()[1] is None, "this module left an error that this thread still handles"
    simgpu = sys.modules.get("tests.simgpu")
    if simgpu is not None and any(map(simgpu.used_bytes, range(simgpu.CARDS))):
        from gpu_runtime.backends.pytorch import shadows

        shadows._on_cards.clear()  # it keeps 1 MiB on each card that it was used on
        gc.collect()
        left = simgpu.leftovers()
        if left:  # garbage that was frozen while it was in use: looking for it takes a second
            gc.unfreeze()
            gc.collect()
            left = simgpu.leftovers()
        assert not left, "this module left memory of simulated cards:\n" + "\n".join(left)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
    """Appends the result of a soak run to its log. A run that one of its tests starts is a part of that test."""
    marks = terminalreporter.config.option.markexpr
    if os.environ.get("SOAK") and "not soak" not in marks:
        count = lambda *words: sum(len(terminalreporter.stats.get(word, ())) for word in words)
        chosen = terminalreporter.config
        run = " ".join([*chosen.args, f"-m '{marks}'"])
        run += f" -k '{chosen.option.keyword}'" if chosen.option.keyword else ""
        run += ", interrupted" if exitstatus == pytest.ExitCode.INTERRUPTED else ""
        examples = settings().max_examples if "hypothesis" in marks else 0
        figures = count("passed"), count("failed", "error"), count("skipped")
        soak.write(run, examples, *figures, time.monotonic() - _began)


def _why_no_gpu() -> str:
    """Why tests marked gpu cannot run on this machine. Empty if they can run."""
    try:
        import torch
    except ImportError as error:
        return f"needs an NVIDIA GPU; torch cannot be imported: {error}"
    if torch.version.cuda is None:
        return "needs an NVIDIA GPU; this torch is a CPU build"
    return "" if torch.cuda.is_available() else "needs an NVIDIA GPU; torch finds none"
