"""A folder is a layer. The tests check which folders it may import, and which modules no decision may import.

`MAY_IMPORT` has one line for each folder. Imports inside functions count like those at the top of a file. The one
exception is the public facade: `gpu_runtime/__init__` opens `gpu_runtime.runtime`.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]

GROUND = (
    "safe_text errors fault_texts units facts arguments settings threads attribution files"
    " tcp_sockets names tracked_objects"
    " notebook user_frames error_help access_keys version stop_text"
    " other_libraries tables compat"
)
# Of these, only telemetry (capacity) and settings (policies) import a module of the scheduler.
ACTING = f"catalog backends telemetry devices ledgers {GROUND}"
MAY_IMPORT = {  # folder or top-level file -> what it may import besides itself, and only downward
    "safe_text": "",
    "stop_text": "",
    "user_frames": "safe_text",
    "errors": "safe_text user_frames",
    "error_help": "errors",
    "compat": "",
    "fault_texts": "compat",
    "threads": "",
    "attribution": "safe_text",
    "tcp_sockets": "files",
    "files": "units",
    "access_keys": "safe_text errors facts files",
    "alerts": "access_keys threads errors facts files safe_text",
    "units": "errors",
    "facts": "safe_text errors units compat",
    "tables": "safe_text threads",
    "other_libraries": "threads tracked_objects units",
    "arguments": "safe_text errors units facts threads",
    "names": "",
    "tracked_objects": "",
    "notebook": "safe_text facts files",
    "version": "",
    "autoload": f"{GROUND}",
    "box": f"autoload box_kernel ledgers {GROUND}",
    "box_kernel": "",
    "uninstall": f"autoload catalog ledgers {GROUND}",
    "settings": "safe_text errors units facts arguments scheduler.policies",
    "samples": "errors units threads",
    "web": "alerts attribution errors units settings threads files tcp_sockets",
    "estimation": "errors units facts",
    "scheduler": "errors units facts attribution",
    "backtest": "errors units facts scheduler",
    "ledgers": GROUND,
    "devices": f"ledgers {GROUND}",
    "telemetry": f"devices ledgers scheduler.capacity {GROUND}",
    "backends": f"devices ledgers {GROUND}",
    "catalog": f"backends devices ledgers {GROUND}",
    "owner": f"backtest scheduler estimation {ACTING}",
    "runtime": f"owner scheduler {ACTING}",
    "rendering": f"owner {GROUND}",
    "fleet": f"runtime scheduler.offers catalog backends {GROUND}",
    "__init__": "runtime fleet errors threads version",
    "verbs": "__init__ rendering alerts autoload box uninstall fleet owner catalog ledgers"
    f" scheduler.policies {GROUND}",
    "serving": "__init__ runtime telemetry.hours rendering web fleet catalog"
    f" backends.pytorch.sentence_modules {GROUND}",
    "watching": f"__init__ runtime ledgers {GROUND}",
    "hub": f"__init__ watching ledgers web {GROUND}",
    "gpu_panels": "__init__ alerts runtime serving.metrics watching ledgers.reader rendering verbs web fleet hub"
    f" {GROUND}",
    "gpu": f"__init__ runtime rendering verbs backends.torch_release {GROUND}",
    "top": f"__init__ rendering {GROUND}",
    "cli": f"__init__ runtime watching rendering verbs serving gpu_panels hub top {GROUND}",
}
# A decision depends only on its arguments: no clock, device, environment, log or random numbers.
NOT_IN_DECISIONS = {
    "time", "datetime", "os", "sys", "logging", "random", "secrets", "uuid", "socket", "threading",
    "subprocess", "pathlib", "torch", "psutil", "pynvml",
}  # fmt: skip
# These load when they are first needed, never at the import of a module of the core.
HEAVY = {"torch", "transformers", "accelerate", "panel", "bokeh", "llama_cpp", "ray"}
FUNCTIONS = {"runtime", "fleet"}  # functions of the package that have the name of a module
MAY_BE_HEAVY = {"backends", "serving", "gpu_panels", "web"}
NOT_IN_SERVING = {"panel", "bokeh"}  # headless serving needs neither
NOT_IN_DATA = {"panel", "panel_material_ui", "bokeh", "param", "tornado"}


def sources() -> list[Path]:
    folders = (ROOT / "gpu_runtime", ROOT / "kernel_ext" / "gpu", ROOT / "panels" / "gpu_panels")
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def module_of(path: Path) -> str:
    """The name of the module in `path`: `gpu_runtime/ledgers/memory.py` gives `gpu_runtime.ledgers.memory`.

    The name of a package does not contain `__init__`.
    """
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "gpu_runtime" else parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PACKAGES = {module_of(path) for path in sources() if path.name == "__init__.py"}
MODULES = {module_of(path) for path in sources()}


def folder_of(module: str) -> str | None:
    """The folder or top-level file that a module belongs to. None if the module is of another distribution."""
    top, *below = module.split(".")
    if top in ("gpu", "gpu_panels"):
        return top
    if top != "gpu_runtime":
        return None
    return below[0] if below and f"{top}.{below[0]}" in MODULES else "__init__"


def imports(tree: ast.AST, module: str) -> Iterator[str]:
    """The absolute names of all modules that `module` imports, at the top or inside a function."""
    package = module.split(".") if module in PACKAGES else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                # `from gpu_runtime import runtime` is the function of that name, not the module
                is_function = (base, node.level) == ("gpu_runtime", 0) and alias.name in FUNCTIONS
                is_module = f"{base}.{alias.name}" in MODULES and not is_function
                yield f"{base}.{alias.name}" if is_module else base


def complaints(tree: ast.Module, module: str, names: set[str] | None = None) -> list[str]:
    """One sentence for each forbidden import in `module`."""
    folder = folder_of(module)
    if folder not in MAY_IMPORT:
        return [f"{module} lies in a folder that MAY_IMPORT does not name"]
    allowed = MAY_IMPORT[folder].split()
    found = []
    for imported in names or set(imports(tree, module)):
        there = folder_of(imported)
        if there is not None and there != folder and there not in allowed:
            if not any(imported == f"gpu_runtime.{name}" for name in allowed):
                found.append(f"{module} imports {imported}: {folder} may not import {there}")
        elif folder in ("scheduler", "estimation") and imported.split(".")[0] in NOT_IN_DECISIONS:
            found.append(f"{module} decides, and imports {imported}")
        elif folder in ("serving", "web") and imported.split(".")[0] in NOT_IN_SERVING:
            found.append(f"{module} imports {imported}, which headless serving does without")
    if folder not in MAY_BE_HEAVY:
        top = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        heavy = [
            name for node in top for name in imports(node, module) if name.split(".")[0] in HEAVY
        ]
        found += [f"{module} imports {name} as soon as it is imported" for name in heavy]
    return found


class Module(NamedTuple):
    """The facts about one module that the rules need."""

    complaints: list[str]
    imports: set[str]


@pytest.fixture(scope="module")
def modules() -> dict[str, Module]:
    """Every module by its name. Each is read and parsed once."""
    read = {}
    for path in sources():
        module = module_of(path)
        tree = ast.parse(path.read_text())
        names = set(imports(tree, module))
        read[module] = Module(complaints(tree, module, names), names)
    return read


def test_every_module_imports_downward_only(modules):
    """A module imports only what its folder may import. The scheduler imports no layer that acts."""
    assert len(modules) > 150
    assert {name: module.complaints for name, module in modules.items() if module.complaints} == {}


def test_no_two_modules_import_each_other(modules):
    """Imports inside functions or for types count, too. Two files that import each other cannot be
    read one after the other.
    """
    uses = {name: module.imports & MODULES for name, module in modules.items()}
    uses["gpu_runtime"] -= {"gpu_runtime.runtime", "gpu_runtime.fleet.client"}  # the facade
    left = {module: found - {module} for module, found in uses.items()}
    while free := [module for module, found in left.items() if not found & left.keys()]:
        for module in free:
            del left[module]
    in_circles = {module: sorted(found & left.keys()) for module, found in left.items()}
    assert in_circles == {}


def test_what_the_console_shows_is_computed_without_panel(modules):
    """`gpu_panels/data` is pure. Of its own package it imports only itself and the palette."""
    pure = [name for name in modules if name.startswith("gpu_panels.data.")]
    assert pure
    for module in pure:
        for name in modules[module].imports:
            assert name.split(".")[0] not in NOT_IN_DATA, f"{module} imports {name}"
            is_ours = name.startswith(("gpu_panels.data", "gpu_panels.palette"))
            assert is_ours or not name.startswith("gpu_panels."), f"{module} imports {name}"


@pytest.mark.parametrize(("module", "source", "complaint"), [
    ("gpu_runtime.scheduler.queue", "from ..ledgers import memory", "scheduler may not import ledgers"),
    ("gpu_runtime.scheduler.queue", "def f():\n    from ..devices import probe", "scheduler may not import devices"),
    ("gpu_runtime.scheduler.queue", "import time", "decides, and imports time"),
    ("gpu_runtime.scheduler.queue", "from gpu_runtime import Runtime", "scheduler may not import __init__"),
    ("gpu_runtime.ledgers.memory", "from ..scheduler.admission import admit", "ledgers may not import scheduler"),
    ("gpu_runtime.telemetry.journal", "from ..scheduler import admission", "telemetry may not import scheduler"),
    ("gpu_runtime.ledgers", "from ..runtime import Runtime", "ledgers may not import runtime"),
    ("gpu_runtime.facts", "import gpu_runtime.scheduler.queue", "facts may not import scheduler"),
    ("gpu_runtime.runtime", "from .cli import main", "runtime may not import cli"),
    ("gpu_runtime.runtime", "import torch", "imports torch as soon as it is imported"),
    ("gpu_runtime.verbs", "from gpu_panels import server", "verbs may not import gpu_panels"),
    ("gpu_runtime.serving.gateway", "def f():\n    import panel", "headless serving does without"),
    ("gpu.magics", "from gpu_runtime.owner.session import Session", "gpu may not import owner"),
])  # fmt: skip
def test_a_forbidden_import_is_caught(module, source, complaint):
    """The checks notice a fault: each of these imports is forbidden."""
    found = complaints(ast.parse(source), module)
    assert len(found) == 1 and complaint in found[0]
