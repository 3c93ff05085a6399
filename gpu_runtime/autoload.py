"""The lines by which kernels load the extension themselves, in a file of IPython's configuration.

`gpu autoload` writes them for the kernels of one environment, `gpu box install` for all of a machine.
Their block is marked. The other lines of the file are the operator's, and stay as they are.
"""

from __future__ import annotations

import stat
import sys
from pathlib import Path
from typing import Any

from .errors import GpuError
from .facts import Outcome
from .files import make_directory, replace_file

AUTOLOAD_FILE = "ipython_kernel_config.py"  # read by kernels, not by IPython in a terminal
AUTOLOAD_TEXT: Any = {
    "encoding": "utf-8",
    "errors": "surrogateescape",
}  # bytes that are not UTF-8 stay
BEGIN, END = "# >>> gpu-console", "# <<< gpu-console"
# If the package was removed, the block does nothing: IPython would show a traceback in every new kernel.
BLOCK = f"""{BEGIN}: written by `gpu autoload`, removed by `gpu autoload --remove`
if __import__("importlib.util").util.find_spec("gpu"):
    get_config().InteractiveShellApp.extensions.append("gpu")
{END}
"""


def write_autoload(remove: bool = False, prefix: str = sys.prefix) -> Outcome:
    """Writes the marked block of lines into the configuration of the environment at `prefix`.

    If `remove` is true, removes the block instead.

    Raises GpuError if the file cannot be written, or if the end of the block is missing in the
    file.
    """
    path = Path(prefix) / "etc" / "ipython" / AUTOLOAD_FILE
    try:
        write_block(path, "" if remove else BLOCK)
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


def write_block(path: Path, block: str) -> None:
    """Puts the marked `block` at the end of the file `path`, instead of an older one.

    An empty `block` removes the older one, and the file if it had nothing else. Raises OSError, and
    GpuError if the end of the older block is missing.
    """
    before, present, after = parts(path)
    text = before + after + block
    if text != before + present + after:
        _write(path, text)


def parts(path: Path) -> tuple[str, str, str]:
    """The text of the file `path` before the block, the block, and the text after it.

    Raises OSError, and GpuError if the end of the block is missing.
    """
    text = path.read_text(**AUTOLOAD_TEXT) if path.exists() else ""
    before, begin, marked = text.partition(BEGIN)
    if not begin:
        return text if not text or text.endswith("\n") else text + "\n", "", ""
    inside, end, after = marked.partition(END)
    if not end:  # the lines that follow may be the operator's
        raise GpuError(
            f"{path} has the line '{BEGIN}' and no line '{END}'.\n"
            f"  Delete the lines of gpu-console in this file, and type the command again.",
            path=str(path),
        )
    rest = after.lstrip("\n")
    return before, begin + inside + end + after[: len(after) - len(rest)], rest


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
    replace_file(path, text.encode(**AUTOLOAD_TEXT), lambda draft: draft.chmod(mode))
