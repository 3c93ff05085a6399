"""`gpu autoload`: every kernel of a Python environment loads the extension when it starts.

IPython reads the environment's configuration in `PREFIX/etc/ipython`. `gpu autoload` writes one
marked block of lines into one file of this directory. `--remove` removes only these lines.
"""

from __future__ import annotations

import stat
import sys
from pathlib import Path
from typing import Any

from .errors import GpuError
from .facts import Outcome
from .private_paths import make_directory, replace_file

FILE = "ipython_kernel_config.py"  # read by kernels, not by IPython in a terminal
TEXT: Any = {"encoding": "utf-8", "errors": "surrogateescape"}  # bytes that are not UTF-8 stay
BEGIN, END = "# >>> gpu-console", "# <<< gpu-console"
BLOCK = f"""{BEGIN}: written by `gpu autoload`, removed by `gpu autoload --remove`
get_config().InteractiveShellApp.extensions.append("gpu")
{END}
"""


def autoload(remove: bool = False, prefix: str = sys.prefix) -> Outcome:
    """Writes the marked block of lines into the configuration of the environment at `prefix`.

    If `remove` is true, removes the block instead.

    Raises GpuError if the file cannot be written, or if the end of the block is missing in the
    file.
    """
    path = Path(prefix) / "etc" / "ipython" / FILE
    try:
        before = path.read_text(**TEXT) if path.exists() else ""
        rest = _without_block(before, path)
        after = rest if remove else rest + BLOCK
        if after != before:
            _write(path, after)
    except OSError as error:
        raise GpuError(
            f"{path} cannot be written: {error.strerror or error}.\n"
            f"  Run it as the owner of the environment, or in each notebook:  %load_ext gpu",
            path=str(path),
        ) from error
    if remove:
        because = "new kernels of this environment no longer load gpu by themselves"
    else:
        because = f"every new kernel of this environment loads gpu: {path}"
    return Outcome(verb="autoload", name="", done=True, because=because, bytes=0)


def _without_block(text: str, path: Path) -> str:
    before, begin, marked = text.partition(BEGIN)
    if not begin:
        return text if not text or text.endswith("\n") else text + "\n"
    _, end, after = marked.partition(END)
    if not end:  # the lines that follow may be the operator's
        raise GpuError(
            f"{path} has the line '{BEGIN}' and no line '{END}'.\n"
            f"  Delete the lines of gpu-console in this file, and type the command again.",
            path=str(path),
        )
    return before + after.lstrip("\n")


def _write(path: Path, text: str) -> None:
    """Replaces the content of the file `path` by `text`, in one step. If `text` is empty, removes
    the file.

    A new file and its directory are readable for the kernels of all users, even if the operator's
    umask is 077. An existing file keeps its mode.
    """
    if not text:
        path.unlink(missing_ok=True)
        return
    for directory in (path.parent.parent, path.parent):
        make_directory(directory, 0o755)
    path = path.resolve()  # a link stays a link
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o644
    replace_file(path, text.encode(**TEXT), lambda draft: draft.chmod(mode))
