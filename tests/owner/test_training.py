"""A module in training is in use while a cell runs, elsewhere from `forward` to the end of the step."""

import threading

import pytest
import torch
from torch import nn

from gpu_runtime import StillInUse
from gpu_runtime.notebook import activity
from gpu_runtime.owner import registry

from .conftest import where

X = torch.linspace(-1, 1, 32).view(4, 8)


@pytest.fixture
def cell():
    """`cell()` starts a cell, which ends with the test."""
    yield lambda: activity.began("a cell")
    activity.ended("a cell")
    activity.forget()


@pytest.fixture
def trained(runtime):
    """A runtime, the record of a module in training, the module itself, which is on the card, and its optimizer."""
    rt = runtime()
    module = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(module.parameters())
    rt.adopt("net", module, optimizer=optimizer)
    rt.preload("net")
    return rt, registry.find(rt._session, "net"), module, optimizer


def test_a_module_in_training_is_in_use_while_a_cell_runs(trained, cell):
    _, resident, _, _ = trained
    assert not resident.in_use() and resident.truth().pins == 0
    cell()
    assert resident.in_use() and resident.truth().pins == 1
    assert not resident.begin_moving()
    activity.ended("a cell")
    assert not resident.in_use()


def test_a_module_for_inference_is_not_in_use_because_a_cell_runs(runtime, cell):
    rt = runtime()
    rt.adopt("net", nn.Linear(8, 8).eval())
    rt.preload("net")
    cell()
    assert not registry.find(rt._session, "net").in_use()


ENDS = {
    "step": lambda module, optimizer, loss: optimizer.step(),
    "zero_grad of the optimizer": lambda module, optimizer, loss: optimizer.zero_grad(),
    "zero_grad of the module": lambda module, optimizer, loss: module.zero_grad(),
    "the end of the graph": lambda module, optimizer, loss: loss.clear(),
}


@pytest.mark.parametrize("end", ENDS)
def test_outside_a_cell_it_is_in_use_from_forward_to_the_end_of_the_step(trained, end):
    _, resident, module, optimizer = trained
    loss = [module(X).sum()]
    assert resident.in_use() and not resident.begin_moving()
    if end != "the end of the graph":
        loss[0].backward()
        assert resident.in_use()
    ENDS[end](module, optimizer, loss)
    assert not resident.in_use()


def test_gradients_without_a_graph_keep_it_until_the_step(trained):
    """`m(x).sum().backward()` ends the graph at once; the optimizer still uses the gradients."""
    _, resident, module, optimizer = trained
    module(X).sum().backward()
    assert resident.in_use()
    optimizer.step()
    assert not resident.in_use()


def test_a_forward_without_gradients_leaves_nothing_behind(trained):
    _, resident, module, _ = trained
    with torch.no_grad():
        kept = module(X)
    assert kept.shape == (4, 8) and not resident.in_use()


def test_the_one_who_trains_may_evict_by_hand(trained, cell):
    """In the cell that trains, while a loss waits for its backward pass: the bytes return for that pass."""
    rt, _, module, optimizer = trained
    cell()
    loss = module(X).sum()
    rt.evict("net")
    assert where(rt) == {"net": "host"}
    optimizer.step()
    assert where(rt) == {"net": "sim:0"}
    loss.backward()
    assert module.weight.grad.any()


@pytest.mark.parametrize("in_cell", [False, True])
def test_an_eviction_by_hand_leaves_the_training_of_another_thread_alone(trained, cell, in_cell):
    """A move during that thread's backward pass would end in a segmentation fault."""
    rt, _, module, _ = trained
    losses = []
    if in_cell:
        cell()
    other = threading.Thread(target=lambda: losses.append(module(X).sum()))
    other.start()
    other.join()
    with pytest.raises(StillInUse):
        rt.evict("net")
    losses.clear()
    rt.evict("net")
    assert where(rt) == {"net": "host"}


def test_another_thread_does_not_end_the_waiver_of_the_one_who_trains(trained, cell):
    """Another thread evicts the model at the same time. It is refused, and changes nothing."""
    _, resident, module, _ = trained
    cell()
    loss = module(X).sum()

    def evict() -> None:
        with resident.training.waived():
            pass

    with resident.training.waived():
        other = threading.Thread(target=evict)
        other.start()
        other.join()
        assert not resident.in_use()
    assert resident.in_use() and loss.requires_grad


def test_a_step_that_fails_pins_nothing(trained):
    _, resident, module, optimizer = trained
    module(X).sum().backward()
    module.weight.grad = torch.ones(8, 8)
    optimizer.param_groups[0]["betas"] = None
    try:
        optimizer.step()
    except TypeError:
        pass
    optimizer.zero_grad()
    assert not resident.in_use()


def test_gradients_are_measured_by_the_thread_that_trains(trained, monkeypatch):
    """The monitor's thread read a gradient that autograd was replacing, and the process died of SIGSEGV."""
    rt, resident, module, optimizer = trained
    weights, measure, measured = resident.lease.bytes, resident.backend.measure, []
    monkeypatch.setattr(
        resident.backend, "measure", lambda model: measured.append(1) or measure(model)
    )
    loss = module(X).sum()
    resident.uses_counted = -1
    rt.tick()
    loss.backward()
    rt.tick()
    assert measured == [], "a backward pass may run"
    optimizer.step()
    assert measured and resident.lease.bytes > weights
