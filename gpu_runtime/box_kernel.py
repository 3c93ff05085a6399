"""What `gpu box install` adds to every kernel of the machine: a finder, and the extension.

The block in /etc/ipython runs this file when a kernel starts, before any code of the user. The file is
alone: it imports the standard library only, and every Python from 3.6 on can read it. A failure of it
is one line in the kernel's log, and the kernel is a plain one.
"""

import mmap
import os
import sys
from importlib.machinery import PathFinder

NAME = "gpu_box_kernel"  # of this module in `sys.modules`, and of the extension that IPython loads
# What a user's `import` can find. All else in the directory stays hidden.
SERVED = ("gpu", "gpu_runtime", "gpu_panels", "msgspec", "pynvml")
LEAST_MSGSPEC = (0, 19)


class Finder:
    """Finds the served packages in one directory, for imports that no other finder can satisfy.

    So a package in the user's environment comes first.
    """

    def __init__(self, directory):
        """`directory` has the packages for this Python."""
        self.directory = directory

    def find_spec(self, name, path=None, target=None):
        """The spec of a served package. The modules below a package are found by its own path."""
        if path is None and name in SERVED:
            return PathFinder.find_spec(name, [self.directory], target)
        return None


def start(version):
    """Prepares the kernel of this process. `version` is the directory of a version."""
    try:
        directory = directory_of(version)
        # The mapping lasts as long as the process. It shows that the process uses this version, whose
        # files are kept until then.
        with open(os.path.join(version, "in_use"), "rb") as file:
            globals()["mapping"] = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        sys.meta_path.append(Finder(directory))
        # In the configuration, a list `extensions` of the user's own would replace ours.
        app = running_app()
        app.default_extensions = [*app.default_extensions, NAME]
    except Exception as error:
        report(error)


def directory_of(version):
    """The directory in `version` that has the packages for this Python. Raises RuntimeError."""
    free_threaded = "t" if "t" in getattr(sys, "abiflags", "") else ""
    major, minor = sys.version_info[:2]
    directory = os.path.join(version, f"cp{major}{minor}{free_threaded}")
    name = sys.implementation.name
    if name != "cpython" or not os.path.isdir(directory):
        raise RuntimeError(
            f"{version} has nothing for {name} {major}.{minor}{free_threaded}; see  gpu box status"
        )
    return directory


def load_ipython_extension(shell):
    """Loads the extension `gpu`, which IPython then lists under this name."""
    try:
        require_usable()
        if shell.extension_manager.load_extension("gpu") == "no load function":
            raise RuntimeError(f"{sys.modules['gpu'].__file__} is another package of this name")
    except BaseException as error:  # also SystemExit: the kernel must start
        remove()
        report(error)


def require_usable():
    """Raises RuntimeError if msgspec is the user's own and too old."""
    import msgspec

    found = tuple(int(part) for part in msgspec.__version__.split(".")[:2])
    if found < LEAST_MSGSPEC:
        raise RuntimeError(
            f"this environment has msgspec {msgspec.__version__}; at least "
            f"{'.'.join(map(str, LEAST_MSGSPEC))} is needed"
        )


def remove():
    """Removes the finder, and the modules that it has found."""
    for finder in [finder for finder in sys.meta_path if isinstance(finder, Finder)]:
        sys.meta_path.remove(finder)
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None) or ""
            if file.startswith(finder.directory + os.sep):
                del sys.modules[name]


def running_app():
    """The application that runs this kernel: IPython's IPKernelApp."""
    return sys.modules["traitlets.config"].Application.instance()  # traitlets runs this file


def report(error):
    """Writes one line to the log of the kernel."""
    text = " ".join(str(error).split()) or type(error).__name__
    running_app().log.warning(
        "gpu-console is not loaded in this kernel: %s: %s", type(error).__name__, text
    )
