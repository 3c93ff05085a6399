"""Which variables reach which storages, and which storages become free when a variable is deleted."""

import functools
import gc
import types
import weakref

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from gpu_runtime.backends.pytorch import holders as ho
from gpu_runtime.backends.pytorch import search as se


def every(storage):
    return "sim:0" if storage.device.type == "cpu" else ""


def living():
    """The keys of all storages that exist now."""
    gc.collect()
    return {one.key for one in se.search(every).found}


def program(lines):
    """Runs `lines` and returns their namespace of variables, as a notebook has one."""
    names = {"torch": torch, "nn": nn, "np": np, "functools": functools, "__name__": "__main__"}
    exec(lines, names)
    return names


def reach(names, *variables):
    return ho.reached(
        [names[variable] for variable in variables],
        ho.Graphs(se.Limit()),
        shared={id(names), id(vars(torch))},
    )


def freed_by_deleting(names, *variables):
    """Deletes the variables and returns the keys of the storages that disappear."""
    before = living()
    for variable in variables:
        del names[variable]
    return before - living()


CASES = {
    "tensor": "x = torch.ones(10)",
    "two names": "x = torch.ones(10); y = x",
    "view elsewhere": "x = torch.ones(10); y = x[2:]",
    "view": "base = torch.ones(10); x = base[2:]",
    "complex views": "x = [torch.full((10,), 2 + 3j)]; x += [x[0].real, x[0].conj()]",
    "list": "x = [torch.ones(10), {'a': torch.ones(20)}]",
    "partly shared": "y = torch.ones(10); x = [y, torch.ones(20)]",
    "cycle": "x = [torch.ones(10)]; x.append(x)",
    "module": "x = nn.Linear(3, 4)",
    "module with optimizer": "m = nn.Linear(3, 4); x = torch.optim.AdamW(m.parameters())\n"
    "m(torch.ones(2, 3)).sum().backward(); x.step()",
    "parameters elsewhere": "x = nn.Linear(3, 4); y = x.weight",
    "graph": "w = torch.ones(30, requires_grad=True); x = (w * 2).exp().sum()",
    "graph shared": "w = torch.ones(30, requires_grad=True); y = (w * 2).exp(); x = y.sin().sum()",
    "graph's leaf": "x = torch.ones(30, requires_grad=True); y = (x * 2).sum()",
    "node": "x = (torch.ones(30, requires_grad=True) * 2).exp(); fn = x.grad_fn",
    "gradient": "x = torch.ones(30, requires_grad=True); (x * 2).sum().backward()",
    "gradient elsewhere": "x = torch.ones(30, requires_grad=True); (x * 2).sum().backward(); g = x.grad",
    "lstm": "net = nn.LSTM(4, 4); x = net(torch.randn(3, 2, 4))",
    "closure": "def make(b):\n  return lambda: b.sum()\nx = make(torch.ones(10))",
    "default": "x = lambda b=torch.ones(10): b",
    "bound method": "x = torch.ones(10).sum",
    "future": "x = torch.futures.Future(); x.set_result(torch.ones(10))",
    "future shared": "x = torch.futures.Future(); x.set_result(torch.ones(10)); y = x.value()",
    "script list": "x = torch._C.ScriptList([torch.ones(10)])",
    "script dict": "x = torch._C.ScriptDict({'a': torch.ones(10)})",
    "partial": "x = functools.partial(torch.add, torch.ones(10))",
    "generator": "x = (a.sum() for a in [torch.ones(10), torch.ones(20)]); next(x)",
    "class": "class x:\n  cache = torch.ones(10)",
    "instance": "class K:\n  pass\nx = K(); x.a = torch.ones(10)",
    "looks like a node": "class K:\n  next_functions = 5\nx = K(); x.a = torch.ones(10)",
    "slots": "class K:\n  __slots__ = ('a',)\nx = K(); x.a = torch.ones(10)",
    "instance and class": "class K:\n  pass\nK.b = torch.ones(20); x = K(); x.a = torch.ones(10)",
    "sparse": "x = torch.eye(4).to_sparse()",
    "csr": "x = torch.eye(4).to_sparse_csr()",
    "values of a sparse": "s = torch.eye(4).to_sparse(); x = s._values()",
    "numpy array of a tensor": "x = torch.ones(10); a = x.numpy()",
    "storage": "x = torch.ones(10).untyped_storage()",
    "detached": "x = torch.ones(10, requires_grad=True); y = x.detach()",
    "attribute of a tensor": "x = torch.ones(10); x.more = torch.ones(20)",
    "custom function": "class F(torch.autograd.Function):\n"
    "  @staticmethod\n  def forward(ctx, a):\n    ctx.save_for_backward(a * 3); ctx.k = a * 5; return a * 2\n"
    "  @staticmethod\n  def backward(ctx, g): return g\n"
    "x = F.apply(torch.ones(30, requires_grad=True))",
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("lines", CASES.values(), ids=CASES)
def test_alone_is_what_deleting_the_name_frees(lines):
    names = program(lines)
    found = reach(names, "x")
    assert found.whole
    assert found.alone == freed_by_deleting(names, "x")


def test_a_search_keeps_no_class_of_the_notebook_alive():
    """A class may hold tensors, and each run of a notebook's cell defines the class anew."""
    names = program("class K:\n  cache = torch.ones(10)\ny = K()\n" + CASES["custom function"])
    classes = [weakref.ref(names["K"]), weakref.ref(names["F"])]
    reach(names, "x"), reach(names, "y"), reach(names, "K")
    names.clear()
    gc.collect()
    assert [one() for one in classes] == [None, None]


def test_all_references_of_a_name_count_together():
    """IPython keeps an output under several names. The storage becomes free when all of these names are deleted."""
    names = program("a = torch.ones(10); b = a; c = [a]")
    assert reach(names, "a").alone == frozenset()
    assert reach(names, "a", "b").alone == frozenset()
    assert len(reach(names, "a", "b", "c").alone) == 1


def test_what_only_a_graph_refers_to_is_told_apart():
    names = program("w = torch.ones(30, requires_grad=True); x = (w * 2).exp().sum()")
    found = reach(names, "x")
    assert len(found.direct) == 1 and len(found.saved) >= 2
    assert reach(names, "w").saved == frozenset()


def test_a_large_variable_ends_at_the_limit():
    names = program("x = [[i] for i in range(20_000)] + [torch.ones(10)]")
    found = ho.reached([names["x"]], ho.Graphs(se.Limit()), limit=se.Limit(0))
    assert not found.whole


# -- random programs -------------------------------------------------------------------------------

NAMES = "abcdef"
pick = st.sampled_from(NAMES)
LINES = st.one_of(
    st.builds("{0} = torch.ones({1})".format, pick, st.integers(1, 50)),
    st.builds("{0} = torch.ones({1}, requires_grad=True)".format, pick, st.integers(1, 50)),
    st.builds("{0} = {1}".format, pick, pick),
    st.builds("{0} = [{1}, {2}]".format, pick, pick, pick),
    st.builds("{0} = {{'k': {1}}}".format, pick, pick),
    st.builds("{0}.append({1})".format, pick, pick),
    st.builds("{0} = {1}[1:]".format, pick, pick),
    st.builds("{0} = {1} * 2".format, pick, pick),
    st.builds("{0} = ({1} * {2}).exp()".format, pick, pick, pick),
    st.builds("{0} = {1}.sum()".format, pick, pick),
    st.builds("{0}.sum().backward()".format, pick),
    st.builds("{0} = {1}.grad".format, pick, pick),
    st.builds("{0} = {1}.detach()".format, pick, pick),
    st.builds("{0} = {1}.grad_fn".format, pick, pick),
    st.builds("{0} = (lambda v: lambda: v)({1})".format, pick, pick),
    st.builds("{0} = Box({1})".format, pick, pick),
    st.builds("{0}.more = {1}".format, pick, pick),
    st.builds("{0} = nn.Linear(2, 3)".format, pick),
    st.builds("{0} = {1}.untyped_storage()".format, pick, pick),
    st.builds("del {0}".format, pick),
)


@pytest.mark.filterwarnings("ignore")
@settings(suppress_health_check=list(HealthCheck), deadline=None)
@given(st.lists(LINES, min_size=1, max_size=12), pick)
def test_alone_is_what_deleting_frees_in_random_programs(lines, name):
    """The test deletes the name and asks torch which storages disappeared."""
    names = program("class Box:\n  def __init__(self, v): self.v = v")
    for line in lines:
        try:
            exec(line, names)
        except Exception:
            pass  # a line that means nothing here
    names.pop("__builtins__", None)
    if name not in names:
        return
    found = reach(names, name)
    assert found.alone == freed_by_deleting(names, name)


# -- what no name reaches --------------------------------------------------------------------------
@pytest.mark.parametrize("traced", [
    "lambda x, constant=held: x + constant",
    "nn.Linear(7, 7)",
], ids=["function", "module"])  # fmt: skip
def test_the_tensors_of_a_traced_function_are_reached(traced):
    """They are in C++ objects, which Python cannot list."""
    names = program(f"held = torch.ones(7); traced = torch.jit.trace({traced}, torch.ones(7))")
    constants = [*getattr(names["traced"], "parameters", lambda: [names["held"]])()]
    keys = {one.untyped_storage()._cdata for one in constants}
    assert keys and keys <= reach(names, "traced").direct


def referrer_of(tensor):
    key = tensor.untyped_storage()._cdata
    del tensor
    (found,) = [one for one in se.search(every).found if one.key == key]
    return ho.referrer(found, (), se.Limit())


def test_a_module_a_class_and_a_cache_are_named():
    module = types.ModuleType("helpers")
    module.store = [torch.ones(7)]
    assert referrer_of(module.store[0]) == "module helpers"

    class Registry:
        store = {"a": torch.ones(7)}

    assert referrer_of(Registry.store["a"]).startswith("class tests.backends.test_holders.")

    @functools.cache
    def table():
        return [torch.ones(7)]

    assert referrer_of(table()[0]).endswith("table")


def test_what_a_kept_error_holds_is_no_garbage():
    """Its traceback has the variables of the function that failed. It was called a cycle that nothing refers to."""

    def fail():
        _held = torch.ones(7)
        raise ValueError

    module = types.ModuleType("helpers")
    try:
        fail()
    except ValueError as error:
        module.failures = [error]
        key = error.__traceback__.tb_next.tb_frame.f_locals["_held"].untyped_storage()._cdata
    (found,) = [one for one in se.search(every).found if one.key == key]
    assert ho.referrer(found, (), se.Limit()) == "module helpers"


def test_only_a_cycle_without_a_name_is_garbage():
    kept = torch.ones(7)
    assert referrer_of(kept) == ho.CPP
    future = torch.futures.Future()
    future.set_result(torch.ones(7))
    key = future.value().untyped_storage()._cdata
    (found,) = [one for one in se.search(every).found if one.key == key]
    assert ho.referrer(found, (), se.Limit()) == ho.CPP
    cycle = [torch.ones(7)]
    cycle.append(cycle)
    key = cycle[0].untyped_storage()._cdata
    del cycle
    (found,) = [one for one in se.search(every).found if one.key == key]
    assert ho.referrer(found, (), se.Limit()) == ho.GARBAGE
