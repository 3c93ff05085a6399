"""The next minor version of the product in this process, beside this one, and the box's ends of it.

`tests/next_version.py` says what it has that this version has not. Errors and threads are those of this version, so
that a day sees one kind of each.
"""

import re
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any

import gpu_runtime.errors
import gpu_runtime.threads
from tests.next_version import ROOT, next_version

HERE = Path(__file__).parent
ENDS = {f"{__package__}.later_{name}": HERE / f"{name}.py" for name in ("box", "disk")}


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> Any:
        file = Path(self.path)
        text = next_version(f"{file.relative_to(ROOT)}", file.read_text())
        text = re.sub(r"\b(from|import) gpu_runtime\b", r"\1 later_runtime", text)
        text = text.replace("from . import disk\n", "from . import later_disk as disk\n")
        return compile(text.replace("from .disk", "from .later_disk"), self.path, "exec")


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        package, _, rest = name.partition(".")
        if package != "later_runtime" and name not in ENDS:
            return None
        file = ENDS.get(name) or ROOT / "gpu_runtime" / rest.replace(".", "/")
        if file.is_dir():
            file /= "__init__.py"
        return spec_from_file_location(
            name, file.with_suffix(".py"), loader=_Loader(name, f"{file.with_suffix('.py')}")
        )


sys.meta_path.insert(0, _Finder())
sys.modules["later_runtime.errors"] = gpu_runtime.errors
sys.modules["later_runtime.threads"] = gpu_runtime.threads

from . import later_box  # type: ignore[attr-defined]  # noqa: E402

__all__ = ["later_box"]


def same_figures(*modules: Any) -> None:
    """Gives the later version the figures of these modules, which a day has changed."""
    for module in modules:
        later = sys.modules[module.__name__.replace("gpu_runtime", "later_runtime")]
        figures = {name: value for name, value in vars(module).items() if name.isupper()}
        vars(later).update({n: v for n, v in figures.items() if isinstance(v, int | float)})
