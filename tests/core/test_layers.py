"""Who may import whom: ground below, then mind and hands who do not know each other, then the house, then the faces."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

ROOMS = {
    "ground": {"activity", "silence", "threads", "persons", "facts", "units", "errors", "settings"},
    "mind": {
        "moments",
        "bounds",
        "drains",
        "moves",
        "naming",
        "splitting",
        "several",
        "planner",
        "caps",
        "telling",
        "asks",
        "bookkeeping",
        "clearing",
        "deadlock",
        "estimate",
        "hopeless",
        "leaving",
        "placement",
        "working",
        "policy",
        "pressure",
        "strangers",
        "queueing",
        "room",
    },
    "hands": {
        "cards",
        "nvidia_smi",
        "amd",
        "apple",
        "allocators",
        "ledgers",
        "backends",
        "blocks",
        "probe",
        "pool",
        "journal",
        "machine",
        "owner",
        "memory",
        "segments",
        "nvml",
        "record",
        "sampling",
        "documents",
        "fields",
        "manifests",
        "measurements",
    },
    "house": {
        "recorder",
        "sampler",
        "doctor",
        "defragmenting",
        "maps",
        "draining",
        "moving",
        "__init__",
        "runtime",
        "keeper",
        "monitor",
        "frames",
        "samples",
        "catalog",
        "catalogued",
        "entries",
        "sharing",
        "sizing",
        "planning",
        "showing",
        "losses",
    },
    "faces": {"cli", "verbs", "serving", "gpu", "gpu_panels"},
}
MAY_IMPORT = {
    "ground": {"ground"},
    "mind": {"ground", "mind"},
    "hands": {"ground", "hands"},
    "house": {"ground", "mind", "hands", "house"},
    "faces": {"ground", "faces", "house"},  # of the house: what is not BACKSTAGE
}
BACKSTAGE = {"keeper", "monitor"}
# A decision knows only what it is given: no clock, device, environment, log or chance.
NOT_IN_MIND = {
    "time",
    "datetime",
    "os",
    "sys",
    "logging",
    "random",
    "secrets",
    "uuid",
    "socket",
    "threading",
    "subprocess",
    "pathlib",
    "torch",
    "psutil",
    "pynvml",
    "pydantic",
    "pydantic_settings",
}
HEAVY = {"torch", "transformers", "accelerate", "panel", "bokeh", "llama_cpp"}


def sources() -> list[Path]:
    folders = (ROOT / "gpu_runtime", ROOT / "kernel_ext" / "gpu", ROOT / "panels" / "gpu_panels")
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def module_of(path: Path) -> tuple[str, ...]:
    """`gpu_runtime/ledgers/sqlite/ledger.py` -> ("gpu_runtime", "ledgers", "sqlite"); a package ends in "__init__"."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts if parts[0] == "gpu_runtime" else parts[1:]


def room_of(module: tuple[str, ...]) -> str | None:
    """The room a module lies in; None for a third party's."""
    if module[0] in ("gpu", "gpu_panels"):
        return "faces"
    if module[0] != "gpu_runtime":
        return None
    name = module[1] if len(module) > 1 else "__init__"
    return next((room for room, names in ROOMS.items() if name in names), "no room")


def imports(tree: ast.AST, module: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Every module that this one imports, at the top or inside a function, as absolute names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module[: len(module) - node.level] if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            for alias in node.names:
                # `from gpu_runtime import runtime` imports a module, `import Runtime` a name of the root
                is_module = base == ("gpu_runtime",) and any(
                    alias.name in names for names in ROOMS.values()
                )
                yield (*base, alias.name) if is_module else base


def complaints(source: str, module: tuple[str, ...]) -> list[str]:
    """What this module imports and may not, in words."""
    tree = ast.parse(source)
    me, found = ".".join(module), []
    here = room_of(module)
    if here == "no room":
        return [f"{me} lies in no room; add it to ROOMS in {Path(__file__).name}"]
    for imported in imports(tree, module):
        there = room_of(imported)
        name = ".".join(imported)
        if there is not None and there not in MAY_IMPORT[here]:
            found.append(f"{me} ({here}) imports {name} ({there})")
        elif (
            here == "faces"
            and imported[0] == "gpu_runtime"
            and imported[1:2]
            and imported[1] in BACKSTAGE
        ):
            found.append(f"{me} (faces) imports {name}, which only the house knows")
        elif here == "mind" and imported[0] in NOT_IN_MIND:
            found.append(f"{me} decides, and imports {name}")
    if here != "faces" and module[1:2] != ("backends",):
        top = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        found += [
            f"{me} imports {heavy[0]} as soon as it is imported"
            for node in top
            for heavy in imports(node, module)
            if heavy and heavy[0] in HEAVY
        ]
    return found


@pytest.mark.parametrize("path", sources(), ids=lambda path: "/".join(module_of(path)))
def test_every_module_keeps_to_its_room(path):
    """Mind and hands never import each other; only the house knows both; faces know the house."""
    assert complaints(path.read_text(), module_of(path)) == []


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        (
            "gpu_runtime.scheduler.eviction_policy",
            "from .ledgers import memory",
            "imports gpu_runtime.ledgers (hands)",
        ),
        (
            "gpu_runtime.scheduler.eviction_policy",
            "def f():\n    from . import probe",
            "imports gpu_runtime.devices.probe (hands)",
        ),
        ("gpu_runtime.scheduler.eviction_policy", "import time", "decides, and imports time"),
        (
            "gpu_runtime.scheduler.eviction_policy",
            "from gpu_runtime import Runtime",
            "imports gpu_runtime (house)",
        ),
        (
            "gpu_runtime.ledgers.sqlite.ledger",
            "from ..planner import admit",
            "imports gpu_runtime.scheduler.admission (mind)",
        ),
        (
            "gpu_runtime.ledgers.__init__",
            "from ..runtime import Runtime",
            "imports gpu_runtime.runtime (house)",
        ),
        (
            "gpu_runtime.facts",
            "import gpu_runtime.scheduler.eviction_policy",
            "imports gpu_runtime.scheduler.eviction_policy (mind)",
        ),
        ("gpu_runtime.runtime", "from .cli import main", "imports gpu_runtime.cli (faces)"),
        ("gpu_runtime.runtime", "import torch", "imports torch as soon as it is imported"),
        (
            "gpu.magics",
            "from gpu_runtime.owner.resident import Pool",
            "imports gpu_runtime.owner.resident (hands)",
        ),
        ("gpu.magics", "from gpu_runtime import monitor", "which only the house knows"),
        ("gpu_runtime.cellar", "", "lies in no room"),
    ],
)
def test_a_forbidden_import_is_caught(module, source, complaint):
    """This file can fail."""
    found = complaints(source, tuple(module.split(".")))
    assert len(found) == 1 and complaint in found[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("gpu_runtime.scheduler.admission", "from .facts import Book\nfrom .policy import lru"),
        (
            "gpu_runtime.owner.resident",
            "from .backends import open_backend\ndef f():\n    import torch",
        ),
        ("gpu_runtime.runtime", "from . import planner, probe"),
        (
            "gpu_runtime.backends.pytorch.torch_backend",
            "import torch\nfrom ..units import show_bytes",
        ),
        (
            "gpu.magics",
            "from gpu_runtime import Runtime, runtime\nfrom gpu_runtime.units import show_bytes",
        ),
    ],
)
def test_an_allowed_import_is_not(module, source):
    """Nor does it fail for nothing."""
    assert complaints(source, tuple(module.split("."))) == []
