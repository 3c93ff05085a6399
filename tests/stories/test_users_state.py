"""Nothing of the user's changes because gpu-console is loaded: no generator, default, filter, handler, setting."""

import pytest

from gpu_runtime import Runtime, samples
from gpu_runtime.verbs import MAGIC, verbs
from tests.clock import PATIENCE, until

from .notebooks import DEVICES, Notebook, held_bytes

pytestmark = pytest.mark.processes

# A library changes some filters when it is imported. That is the user's choice of library.
LIBRARIES = "import torch._dynamo, transformers.models.llama.modeling_llama, torch.optim.lr_scheduler, pandas, panel"
VERBS = (  # all verbs of a notebook; each row is a cell, and the notebook is parked before it
    "register m {models}/m; load q {models}/q; preload g; status; models; leases",
    "evict m; restore m; pin m; unpin m; move q sim:0; evictions --all; fragmentation --map",
    "health; plan 20MiB; why m; drain sim:0; drain sim:0 --undo; defrag; next; who; free; cancel m",
    "apply -f {models}/models.yaml; catalog; inspect c; delete c; doctor; config",
    "backtest --last 1h; report; park; hibernate; unpark; forget q; console; fleet; help",
)
CELL = """
for line in {lines!r}:
    try:
        get_ipython().run_line_magic("gpu", line)
    except GpuError as error:
        print(error)
    end = time.monotonic() + {patience}  # a monitor that is at work changes the switch interval for a moment
    while (found := changed(before)) and time.monotonic() < end:
        time.sleep(0.01)
    if found:
        print("CHANGED by", line, found)
        before = state()
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A directory with two models of transformers, one of llama.cpp, and a file of the catalogue."""
    directory = tmp_path_factory.mktemp("models")
    samples.causal_lm(directory / "m")
    samples.causal_lm(directory / "q", seed=1)
    samples.gguf_lm(directory / "g.gguf")
    (directory / "models.yaml").write_text("models:\n  c: {backend: fake, memory: 1MiB}\n")
    return directory


def test_no_verb_and_no_background_duty_changes_anything_of_the_user_s(models, keeper, tmp_path):
    """In a real kernel, which another process parks, with its monitor, sampler and back-off all the time."""
    tried = {line.split()[0] for row in VERBS for line in row.split(";")}
    assert tried == {verb.name for verb in verbs(MAGIC)}
    settings = {"XDG_STATE_HOME": str(tmp_path / "state"), "GPU_PARK_TURN_SECONDS": "1"}
    with (
        Notebook("one.ipynb", keeper, **settings) as notebook,
        Runtime(devices=DEVICES, ledger=keeper) as other,
    ):
        notebook.run(
            f"{LIBRARIES}\nfrom tests.users_state import state, changed\n"
            "import random, signal, time, warnings, numpy, torch\nfrom gpu_runtime import GpuError\n"
            "random.seed(0); numpy.random.seed(0); torch.manual_seed(0)\n"
            "warnings.filterwarnings('error', 'mine')\n"
            "signal.signal(signal.SIGUSR1, lambda *_: None)\n"
            "held = torch.ones(3_000_000)\nbefore = state()"
        )
        notebook.run(f"rt.register('g', '{models}/g.gguf')")
        for number, row in enumerate(VERBS):
            until(lambda: held_bytes(other, "one.ipynb") > 0)
            with other.lease("40MiB", purpose=f"lease {number}", timeout=PATIENCE):
                pass  # the notebook was parked
            lines = [line.strip() for line in row.format(models=models).split(";")]
            shown = notebook.run(CELL.format(lines=lines, patience=PATIENCE))
            assert "CHANGED" not in shown and "Traceback" not in shown, shown
        parks = notebook.run("%gpu evictions").count("offloaded")
        assert parks >= len(VERBS), "else the parks were not tried"


PRESSES = """
import os, signal, sys, threading, time

def press():
    \"\"\"Presses the stop button from the first library of pandas to the end of its import.\"\"\"
    while "pandas._libs" not in sys.modules:
        time.sleep(0.001)
    while sys.modules.get("pandas") and sys.modules["pandas"].__spec__._initializing:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)

assert "pandas" not in sys.modules
pressing = threading.Thread(target=press)
pressing.start()
"""


def test_the_first_table_may_be_interrupted_at_any_moment(keeper):
    """Half of pandas stayed in the process: each table, and `import pandas`, failed until a restart."""
    with Notebook("one.ipynb", keeper) as notebook:
        notebook.run(PRESSES)
        assert "KeyboardInterrupt" in notebook.run("%gpu leases")
        notebook.run("pressing.join()")
        assert "3" in notebook.run("import pandas; pandas.DataFrame({'a': [1, 2]}).a.sum()")
        assert "Error" not in notebook.run("%gpu leases")
