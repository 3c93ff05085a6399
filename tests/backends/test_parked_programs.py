"""Random programs and training compute the same to the bit wherever their memory is parked (law 13)."""

import gc
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.utils.checkpoint
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as some
from torch import nn

from gpu_runtime.backends.pytorch import search
from gpu_runtime.units import MIB
from tests import simgpu
from tests.backends.test_kernel_memory import Kernel, floats

pytestmark = pytest.mark.thorough

Park = Callable[[], None]


# -- random programs with side streams -------------------------------------------------------------
class Program:
    """Three tensors, a parameter with its optimizer, and two side streams. Each method is a possible step."""

    def __init__(self, park: Park) -> None:
        self.park = park
        self.main = torch.simgpu.default_stream(0)
        self.sides = [torch.simgpu.Stream(0) for _ in range(2)]
        self.tensors = [floats(float(value + 1)) for value in range(3)]
        self.weight = floats(0.5).requires_grad_()
        self.optimizer = torch.optim.AdamW([self.weight], lr=0.01)
        self.results: list[torch.Tensor] = []

    def add(self, one: int, other: int) -> None:
        self.tensors[one].add_(self.tensors[other])

    def view(self, one: int, other: int) -> None:
        half = self.tensors[one].view(2, -1)[1]
        self.park()
        half.mul_(0.5)

    def replace(self, one: int, other: int) -> None:
        """Replaces the tensor `one`. The block of the old tensor is freed and may be used again at once."""
        self.tensors[one] = self.tensors[other] * 1.5

    def beside(self, one: int, other: int) -> None:
        """A side stream changes a tensor of the main stream. Each stream waits for the other one."""
        side = self.sides[other % 2]
        side.wait_stream(self.main)
        with torch.simgpu.stream(side):
            self.tensors[one].add_(2)
            self.park()
            self.tensors[one].mul_(0.75)
        self.main.wait_stream(side)

    def freed_beside(self, one: int, other: int) -> None:
        """Freed on the main stream while a side stream, on which the block was recorded, still reads it."""
        side = self.sides[one % 2]
        block = self.tensors[other] + 1
        block.record_stream(side)
        self.park()
        side.wait_stream(self.main)
        with torch.simgpu.stream(side):
            self.results.append(block * 2)
        del block
        self.tensors[one] = self.tensors[one] + 50

    def made_beside(self, one: int, other: int) -> None:
        """A side stream's block is freed while the main stream still reads it; then the side stream allocates."""
        side = self.sides[one % 2]
        side.wait_stream(self.main)
        with torch.simgpu.stream(side):
            block = self.tensors[other] * 3
        self.park()
        self.main.wait_stream(side)
        block.record_stream(self.main)
        self.results.append(block + 1)
        del block
        with torch.simgpu.stream(side):
            self.results.append(torch.full((1024,), 9.0, device="simgpu:0"))

    def step(self, one: int, other: int) -> None:
        """The program is parked while an autograd graph, gradients and the optimizer's moments are alive."""
        loss = (self.weight * self.tensors[one]).tanh().square().sum()
        self.park()
        loss.backward(retain_graph=True)
        self.park()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=bool(other))

    def values(self) -> list[torch.Tensor]:
        torch.simgpu.synchronize(0)
        return [t.detach().cpu() for t in (*self.tensors, self.weight, *self.results)]


DEEDS = ("add", "view", "replace", "beside", "freed_beside", "made_beside", "step")
PROGRAM = some.lists(
    some.tuples(some.sampled_from(DEEDS), some.integers(0, 2), some.integers(0, 2)), max_size=8
)


def run(deeds: list[tuple[str, int, int]], park: Park) -> list[torch.Tensor]:
    with simgpu.late(segment_bytes=2 * MIB):
        program = Program(park)
        for name, one, other in deeds:
            getattr(program, name)(one, other)
        values = program.values()
        del program
        gc.collect()
    return values


@settings(
    max_examples=max(1, settings().max_examples // 10),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    deeds=PROGRAM, turns=some.lists(some.sampled_from(["", "ram", "disk"]), min_size=1, max_size=6)
)
@example(deeds=[(name, 0, 1) for name in DEEDS * 2], turns=["ram"])
@example(deeds=[(name, 0, 1) for name in DEEDS * 2], turns=["disk"])
def test_a_random_program_with_side_streams_is_the_same_with_parks(guards, deeds, turns):
    """`turns` decides at which places the program is parked in RAM or on a disk, and returned."""
    alone = run(deeds, lambda: None)
    kernel, places = Kernel(), iter(turns * 20)

    def park() -> None:
        if place := next(places):
            kernel.park()
            if place == "disk":
                written = kernel.backend.write(kernel.handle, Path(tempfile.gettempdir()))
                kernel.backend.move_on(kernel.handle, written)
            kernel.unpark()

    parked = run(deeds, park)
    assert all(torch.equal(mine, twin) for mine, twin in zip(alone, parked, strict=True))


# -- training --------------------------------------------------------------------------------------
class Net(nn.Module):
    """A module with tied weights, dropout, batch norm, attention and an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.encode = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True)
        self.norm = nn.BatchNorm1d(32)
        self.lstm = nn.LSTM(32, 32, 2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(32, 50)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.encode(self.embed(x))
        hidden = self.norm(hidden.transpose(1, 2)).transpose(1, 2)
        # In bfloat16 oneDNN has no LSTM for processors without AVX-512.
        with torch.autocast("cpu", enabled=False):
            hidden = self.lstm(hidden.float())[0]
        return self.head(hidden)


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, 1e-3, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, 1e-3, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2),
}
RUNS = [
    (kind, amp, again)
    for kind in OPTIMIZERS
    for amp in (False, True)
    for again in (False, True)
    if not (again and kind == "lbfgs")
]


def trained(kind: str, amp: bool, again: bool, park: Park) -> list[torch.Tensor]:
    """The losses, weights, moments and random state after some steps. `park` is called three times a step."""
    torch.manual_seed(1)
    net = Net().train()
    optimizer = OPTIMIZERS[kind](net.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=amp)
    losses: list[torch.Tensor] = []

    def closure() -> torch.Tensor:
        x = torch.randint(0, 50, (2, 6))
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=amp):
            out = (
                torch.utils.checkpoint.checkpoint(net, x, use_reentrant=False) if again else net(x)
            )
            loss = nn.functional.cross_entropy(out.reshape(-1, 50).float(), x.reshape(-1))
        park()
        keeps = len(losses) % 2 == 0  # the graph stays alive
        scaled = loss if kind == "lbfgs" else scaler.scale(loss)
        scaled.backward(retain_graph=keeps)
        park()
        losses.append(loss)
        return loss

    for _ in range(2):
        if kind == "lbfgs":
            optimizer.step(closure)
        else:
            closure()
            scaler.step(optimizer)
            scaler.update()
        park()
    state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    found = [*losses, *net.state_dict().values(), *state, torch.get_rng_state()]
    return [tensor.detach().clone() for tensor in found]


@pytest.mark.parametrize("kind, amp, again", RUNS)
def test_training_that_is_parked_three_times_a_step_is_the_same_to_the_bit(
    monkeypatch, kind, amp, again
):
    """`amp` is mixed precision. With `again` the forward pass is checkpointed, so it is computed twice."""
    alone = trained(kind, amp, again, lambda: None)
    monkeypatch.setattr(search, "SIMULATED_BYTES", 1)
    kernel = Kernel("sim")
    parks: list[int] = []

    def park() -> None:
        kernel.park()
        parks.append(kernel.handle.away_bytes)
        kernel.unpark()

    parked = trained(kind, amp, again, park)
    assert all(torch.equal(mine, twin) for mine, twin in zip(alone, parked, strict=True))
    assert len(parks) >= 6 and min(parks) > 50_000
