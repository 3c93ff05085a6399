"""One isolated state directory for every test and notebook.

Importing this module removes all settings from the environment. It points every place that gpu-console, IPython,
Jupyter or transformers reads to a new, empty directory. So no test reads the developer's own catalogue, configuration
or ledger. Kernels and other processes that are started later inherit this environment.
"""

import atexit
import os
import shutil
import signal
import tempfile

from gpu_runtime.settings import NAMES

# A short path: sockets lie below it, and a socket's path may have 107 bytes.
HOME = tempfile.mkdtemp(prefix="gpu-")
CONFIG_FILE = f"{HOME}/machine.toml"  # stands for /etc/gpu-console/config.toml; it does not exist


def isolate() -> None:
    """Points the environment of this process, and so of its children, to the empty directory.

    A shell starts background jobs with SIGINT ignored; a test that presses Ctrl-C would wait for ever.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in NAMES:
        os.environ.pop(name.upper(), None)
    os.environ.update(
        GPU_CONFIG_FILE=CONFIG_FILE,
        XDG_STATE_HOME=f"{HOME}/state",
        XDG_CONFIG_HOME=f"{HOME}/config",
        IPYTHONDIR=f"{HOME}/ipython",
        JUPYTER_CONFIG_DIR=f"{HOME}/jupyter",
        JUPYTER_DATA_DIR=f"{HOME}/jupyter-data",
        JUPYTER_RUNTIME_DIR=f"{HOME}/jupyter-run",
        HF_HOME=f"{HOME}/huggingface",
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
        TOKENIZERS_PARALLELISM="false",
        OMP_NUM_THREADS="1",  # the models are tiny, and several workers share the cores
    )


isolate()
atexit.register(shutil.rmtree, HOME, ignore_errors=True)
