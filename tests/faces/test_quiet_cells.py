"""Which cells run while the notebook's memory is parked. A cell that could reach an object of the
user's is never among them.
"""

import ast
import gc
import io
import logging
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from gpu import quiet_cells
from gpu.magics import LOGGER, GpuMagics, LogLines
from gpu.parking import Parking
from IPython.core.events import EventManager, available_events

from gpu_runtime import verbs


@pytest.fixture
def shell():
    """A shell that has our magic, and no hooks of the user's."""
    magics = {"gpu": GpuMagics.gpu, "gpuctl": GpuMagics.gpu}
    shell = SimpleNamespace(ast_transformers=[], find_line_magic=magics.get)
    shell.events = EventManager(shell, available_events)
    return shell


def touches_nothing(shell, code, **content):
    return quiet_cells.touches_nothing(shell, {"code": code, **content})


@pytest.mark.parametrize("code", [
    "%gpu", "%gpu status --all;", "# who holds it?\n%gpu leases\n\n  %gpuctl why kernel",
    "%gpu park",  # it is parked already
    "%gpu park train.ipynb", "(1.5, 'a') == [2, None]", "not True or -3 < 4  # quick", "# a note",
])  # fmt: skip
def test_reading_verbs_and_constants_touch_nothing(shell, code):
    assert touches_nothing(shell, code)


@pytest.mark.parametrize("code", [
    "x", "print(1)", "import torch", "f'{x}'", "%gpu\nx.sum()",
    "(5\n%gpu\n)",  # the rest of a division by a variable
    "%gpu why {name}", "%gpu why $name", "%gpu why x?", "%gpu who \\\n--json", "%gpu models -o df",
    "%gpu models --output=df", "df = %gpu models", "%gpu why 'open", "%gpu free", "%gpu park never",
    "%%gpu status", "%time 1", "1+",
])  # fmt: skip
def test_every_other_cell_gets_its_memory_first(shell, code):
    assert not touches_nothing(shell, code)


class WithFinalizer:
    def __del__(self):
        pass


@pytest.fixture
def user(shell):
    import torch

    shell.user_ns = {
        "torch": torch, "gc": gc, "x": torch.ones(4), "p": torch.nn.Parameter(torch.ones(2)),
        "model": torch.nn.Linear(2, 2),
        "mine": type("Mine", (torch.nn.Module,), {"state_dict": lambda self: {}})(),
        "optimizer": torch.optim.SGD([torch.ones(1)], lr=1.0), "losses": [0.5, 0.25],
        "path": Path("x.pt"), "finalized": WithFinalizer(), "data": object(),
        "sparse": torch.eye(3).to_sparse(), "packed": torch.ones(4).to_mkldnn(),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "inside": [],
    }  # fmt: skip
    torch.func.vmap(lambda part: shell.user_ns["inside"].append(part) or part)(torch.ones(2, 2))
    shell.user_ns["inside"] = shell.user_ns["inside"][0]
    return shell.user_ns


@pytest.mark.parametrize("code", [
    "del x", "del x, p, data", "x = None", "x = p = None; del model",
    "# free it\ndel x\nimport gc\ngc.collect()\ntorch.cuda.empty_cache()", "%gpu free x",
    "%gpu free", "%gpu evict tune.ipynb", "del x\n%gpu free p", "torch.save(x, 'x.pt')", "torch.save(x, path)",
    "torch.save(x, f=path)", "torch.save(model.state_dict(), 'm.pt')",
    "torch.save({'m': model.state_dict(), 'o': optimizer.state_dict(), 'step': 3}, 'all.pt')",
    "print(x)", "print('mean', x[:2].max().item(), p.shape, sep=' ')",
    "print(f'{x.min()} {losses}', losses[0])",
    "print(float(x[0]), round(x.max().item(), 2), len(x))",
])  # fmt: skip
def test_cells_that_delete_save_free_or_print_run_in_ram(shell, user, code):
    cell = quiet_cells.in_ram(shell, {"code": code})
    assert cell is not None and not cell.returns


class _Pickles:
    """Its pickling reads and writes a tensor, as that of many averages of weights and trackers does."""

    def __getstate__(self):
        raise AssertionError


def _with_hook(method):
    import torch

    made = torch.nn.Sequential(torch.nn.Linear(2, 2))
    getattr(made[0], method)(lambda *_: None)
    return made


def _with_method(name):
    import torch

    return torch.nn.Sequential(type("Mine", (torch.nn.Linear,), {name: lambda self: {}})(2, 2))


def _optimizer_with_hook(method):
    import torch

    made = torch.optim.SGD([torch.ones(1)], lr=1.0)
    getattr(made, method)(lambda *_: None)
    return made


def _parameter_of_a_class_of_the_users():
    import torch

    made = torch.nn.Linear(2, 2)
    made.weight = type("Mine", (torch.nn.Parameter,), {})(torch.ones(2, 2))
    return made


@pytest.mark.parametrize(
    "code", ["torch.save(it, 'x.pt')", "torch.save({'it': [it], 'step': 3}, 'x.pt')"]
)
@pytest.mark.parametrize("make", [
    _Pickles, lambda: {"average": _Pickles()}, lambda: [1, (_Pickles(),)], lambda: _with_method("__getstate__"),
])  # fmt: skip
def test_what_the_users_code_pickles_has_the_memory(shell, user, code, make):
    """Such code got an error, and the file that it was to replace was already empty."""
    user["it"] = make()
    assert quiet_cells.in_ram(shell, {"code": code}) is None


def test_a_tensor_with_an_object_of_the_users_has_the_memory_when_it_is_saved(shell, user):
    assert quiet_cells.in_ram(shell, {"code": "torch.save([x], 'x.pt')"})
    user["x"].owner = _Pickles()
    assert quiet_cells.in_ram(shell, {"code": "torch.save([x], 'x.pt')"}) is None


@pytest.mark.parametrize("make", [
    lambda: _with_hook("register_state_dict_pre_hook"), lambda: _with_hook("register_state_dict_post_hook"),
    lambda: _with_method("get_extra_state"), lambda: _with_method("state_dict"),
    lambda: _with_method("_save_to_state_dict"), _parameter_of_a_class_of_the_users,
    lambda: _optimizer_with_hook("register_state_dict_pre_hook"),
    lambda: _optimizer_with_hook("register_state_dict_post_hook"),
])  # fmt: skip
def test_a_state_that_the_users_code_makes_has_the_memory(shell, user, make):
    user["it"] = make()
    assert quiet_cells.in_ram(shell, {"code": "torch.save(it.state_dict(), 'x.pt')"}) is None


def test_states_of_modules_and_optimizers_of_torch_are_saved_in_ram(shell, user):
    torch = user["torch"]
    net = user["net"] = torch.nn.Sequential(torch.nn.Conv1d(2, 2, 1), torch.nn.BatchNorm1d(2))
    adam = user["adam"] = torch.optim.Adam(net.parameters())
    net(torch.ones(2, 2, 2)).sum().backward()
    adam.step()
    user["all"] = {"net": net.state_dict(), "adam": adam.state_dict(), "losses": [0.5, 0.25]}
    user["all"]["itself"] = user["all"]
    code = "torch.save(net.state_dict(), 'x.pt')\ntorch.save(adam.state_dict(), 'x.pt')\ntorch.save(all, f='x.pt')"
    assert quiet_cells.in_ram(shell, {"code": code}).saves


@pytest.mark.parametrize("code", ["%gpu unpark", "%gpu park never", "%gpu who\n%gpu unpark"])
def test_the_verbs_that_bring_the_memory_back_run_while_it_is_away(shell, user, code):
    cell = quiet_cells.in_ram(shell, {"code": code})
    assert cell is not None and cell.returns


@pytest.mark.parametrize("code", [
    "del unknown",
    "del finalized", "x = finalized = None",  # its method may read anything
    "del x[0]", "del model.weight", "x = x + 1", "x += 1", "x[0] = 1", "a, b = 1, 2", "import numpy",
    "print(data)", "print(x.add_(1))", "print(x.max(0))", "print(x.max(dim=0))", "print(**data)",
    "print(round(x, ndigits=2))", "gc.collect(generation=2)", "torch.cuda.empty_cache(data)",
    "torch.save(x, 'x.pt', _use_new_zipfile_serialization=False)", "torch.save(x, 'x.pt', path)",
    "torch.save(model, 'x.pt')",
    "print(x.sum())", "print(x.data)", "print(x, file=data)", "print(*losses)", "torch.save(x + 1, 'x.pt')",
    "print(sparse)", "print(packed.max())", "print(nested.shape)", "print(inside.max())",
    "torch.save(mine.state_dict(), 'm.pt')", "torch.save(x, data)", "torch.load('x.pt')", "!ls",
    "%gpu unpark\ndel x",
])  # fmt: skip
def test_every_other_cell_needs_the_card(shell, user, code):
    assert quiet_cells.in_ram(shell, {"code": code}) is None


def test_a_cell_that_prints_and_saves_needs_the_card(shell, user):
    """It saved the copy that it printed: on the CPU, no Parameter, and apart from the views of it."""
    code = "print(p)\ntorch.save({'p': p, 'part': x}, 'x.pt')"
    assert quiet_cells.in_ram(shell, {"code": code}) is None
    assert quiet_cells.in_ram(shell, {"code": "print('saved')\ntorch.save(p, 'x.pt')"}).saves


def test_a_long_list_is_not_printed_in_ram(shell, user):
    for length, quick in ((1000, True), (1001, False)):
        user["many"] = [0.5] * length
        assert (quiet_cells.in_ram(shell, {"code": "print(many)"}) is not None) is quick
    assert quiet_cells.in_ram(shell, {"code": "print(x, p)"}).printed == {"x", "p"}


def test_what_the_user_put_in_the_place_of_the_output_gets_the_memory_before_a_print(
    shell, user, monkeypatch
):
    monkeypatch.setattr(
        "sys.stdout", type("Tee", (io.StringIO,), {"write": lambda self, text: 0})()
    )
    assert quiet_cells.in_ram(shell, {"code": "print(3)"}) is None
    assert quiet_cells.in_ram(shell, {"code": "del x"}) is not None


def test_a_name_of_the_users_that_hides_a_function_needs_the_card(shell, user):
    user["print"] = lambda x: x.add_(1)
    user["torch"] = SimpleNamespace(save=print)
    assert quiet_cells.in_ram(shell, {"code": "print(x)"}) is None
    assert quiet_cells.in_ram(shell, {"code": "torch.save(x, 'x.pt')"}) is None


def test_a_magic_or_a_change_of_the_syntax_tree_of_another_package_is_not_ours(shell):
    of_a_file_named_like_ours = eval("lambda line: None", {"__name__": "gpu.magics"})
    shell.find_line_magic = {"gpu": ast.parse, "gpuctl": of_a_file_named_like_ours}.get
    assert not touches_nothing(shell, "%gpu")
    assert not touches_nothing(shell, "%gpuctl")
    shell.ast_transformers.append(type("Mine", (ast.NodeTransformer,), {"__module__": "mine"})())
    assert not touches_nothing(shell, "1")


def test_what_the_user_lets_run_beside_a_cell_gets_the_memory_first(shell):
    """A front end may send expressions with a cell. A hook runs beside every cell."""
    kernel = SimpleNamespace(pre_handler_hook=None, post_handler_hook=None, control_handlers={})
    shell.kernel = kernel
    parking = Parking(shell, lambda: None, print)
    assert touches_nothing(shell, "1")
    parking.remove()
    assert not touches_nothing(shell, "1", user_expressions={"a": "x"})
    shell.events.register("post_run_cell", lambda: None)
    assert not touches_nothing(shell, "1")


def test_a_verb_that_changes_something_is_none_that_reads():
    """`park` finds this notebook parked already."""
    acts = "load evict restore move pin unpin unpark hibernate free drain defrag apply delete cancel".split()
    assert {verb.name for verb in verbs.VERBS.values() if verb.reads}.isdisjoint(acts)
    assert quiet_cells.READS <= {one.name for one in verbs.verbs("%gpu")}


@pytest.mark.parametrize("make", ["sparse", "compressed", "storage", "mkldnn", "none"])
def test_memory_is_noticed_in_whatever_form_it_comes_first(make):
    """A sparse tensor has no `nbytes`; the hook after each cell raised NameError for ever."""
    torch = pytest.importorskip("torch")
    from gpu.parking import _may_be_large

    made = {
        "sparse": lambda: torch.eye(8).to_sparse(),
        "compressed": lambda: torch.eye(8).to_sparse_csr(),
        "storage": lambda: torch.UntypedStorage(1 << 20),
        "mkldnn": lambda: torch.ones(8, 8).to_mkldnn(),
        "none": lambda: torch.ones(8),
    }[make]()
    assert _may_be_large(made, torch) == (make != "none")


# -- the log lines of background threads -----------------------------------------------------------
LINE = "CRITICAL memory pressure! Usage: 94.1%. Forcing aggressive eviction."


@pytest.fixture
def written(monkeypatch):
    """What appears in the kernel's log, and what in the cell."""
    written: dict[str, list[str]] = {"kernel": [], "cell": []}

    def to(name):
        handler = logging.Handler()
        handler.emit = lambda record: written[name].append(record.getMessage())
        return handler

    monkeypatch.setattr(logging, "lastResort", to("cell"))
    kernel_log = logging.Logger("kernel")
    kernel_log.addHandler(to("kernel"))
    lines = LogLines(kernel_log)
    yield written
    lines.remove()
    assert not any(isinstance(one, LogLines) for one in LOGGER.handlers)


def in_thread(act):
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


def test_a_line_of_the_monitor_appears_in_the_kernels_log_only(written):
    """It appeared under whichever cell had run last."""
    in_thread(lambda: LOGGER.error("%s", LINE))
    in_thread(lambda: LOGGER.info("nobody sees this"))
    assert written == {"kernel": [LINE], "cell": []}


def test_a_line_of_the_users_own_call_appears_in_the_cell(written, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest has its own
    LOGGER.warning("qwen is dropped, since it could not be moved")
    assert written == {"kernel": [], "cell": ["qwen is dropped, since it could not be moved"]}


def test_a_user_who_has_set_up_logging_reads_each_line_once(written, monkeypatch):
    mine = logging.Handler()
    mine.emit = lambda record: written.setdefault("mine", []).append(record.getMessage())
    monkeypatch.setattr(logging.getLogger(), "handlers", [mine])
    LOGGER.warning("here")
    in_thread(lambda: LOGGER.warning("beside"))
    assert written == {"kernel": ["beside"], "cell": [], "mine": ["here", "beside"]}
