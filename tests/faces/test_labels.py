"""Every face shows the same label for the same lease: its state, its holder and its cards."""

import ast
import inspect
import re

import pytest
from gpu_panels.data import cells, devices
from msgspec.structs import replace

from gpu_runtime.backends.engines.recipe import recipe
from gpu_runtime.facts import (
    ENGINES,
    HOST,
    Book,
    Device,
    Footprint,
    Lease,
    Phase,
    PlacementRules,
    Request,
    Section,
    Share,
    World,
    cards_label,
)
from gpu_runtime.rendering import answers, views
from gpu_runtime.scheduler.plan import plan
from tests.core.test_layers import ROOT, sources

from .samples import BOB, ME, busy

NOW = busy.now
LEASES = {
    "arriving": {"phase": Phase.ARRIVING, "shares": (), "target": (Share("sim:0", 8),)},
    "leaving": {"phase": Phase.LEAVING},
    "in use for 70 s": {"pins": 1, "pinned_since": NOW - 70.0},
    "idle 3 min": {"last_used": NOW - 200.0},
    "never used": {},
    "in RAM, idle 3 min": {"shares": (Share(HOST, 8),), "last_used": NOW - 200.0},
    "asleep, idle 3 min": {
        "shares": (Share(HOST, 8),),
        "last_used": NOW - 200.0,
        "backend": "vllm",
    },
    "parked, idle 3 min": {"shares": (Share(HOST, 8),), "last_used": NOW - 200.0, "kind": "kernel"},
}


def world_of(lease):
    """The sample snapshot with `lease` as its only lease, and the section of that lease."""
    section = replace(busy.sections[lease.owner], leases=(lease,))
    others = {id: replace(one, leases=()) for id, one in busy.sections.items()}
    return replace(busy, sections={**others, lease.owner: section}), section


@pytest.mark.parametrize("state", LEASES)
def test_the_state_of_a_lease_is_the_same_in_every_face(state):
    """The tables of the console round durations."""
    lease = Lease(BOB.id, "qwen", **{"shares": (Share("sim:0", 8),), **LEASES[state]})
    world, section = world_of(lease)
    assert views.holdings(world)[0].state == state
    assert all(state in face for face in answers.status(world))
    assert state in devices.lease_tooltip(world, section, lease, lease.bytes, lease.phase.value)
    cell = cells.state_cell(lease, NOW).text
    assert cell == state or cell == state.partition(",")[0] or cell == state.partition(" ")[0]


@pytest.mark.parametrize("owner", [ME, BOB], ids=["mine", "another's"])
def test_the_holder_of_a_lease_is_the_same_in_every_face(owner):
    """Another user's process has the user's name."""
    lease = Lease(owner.id, "qwen", shares=(Share("sim:0", 8),))
    world, _ = world_of(lease)
    label = views.holder(world, owner.id)
    assert next(row.holder for row in views.holdings(world) if row.name == "qwen") == label
    assert cells.owner_cell(owner, world).text == label
    assert label == ("this process" if owner is ME else "analysis.ipynb (pid 4121), bob")


@pytest.mark.parametrize(
    ("backend", "label"), [("vllm", "GPUs: 0,1 (TP:2)"), ("torch", "GPUs: 0,1")]
)
def test_the_cards_of_a_plan_are_those_of_the_lease_that_follows(backend, label):
    """A model that is cut between its layers is not tensor parallel, even if its shares are equal."""
    cards = (Device("sim:0", 8, simulated=True), Device("sim:1", 8, simulated=True, index=1))
    limits = {"sim:0": 8, "sim:1": 8}
    world = World(NOW, 0.0, cards, limits)
    book = Book(devices=cards, limits=limits).with_section(Section(ME))
    wanted = Lease(ME.id, "qwen", backend=backend)
    rules = PlacementRules(layout="balanced", least_cards=2)
    planned = plan(book, Request("k", wanted, Footprint.of(8), 1.0, rules), world, lambda *_: 0.0)
    assert planned.cards == label
    placed = cells.place(replace(wanted, shares=planned.shares))
    assert placed == label.replace("GPUs: ", "sim:")


def test_an_engine_is_tensor_parallel_if_its_command_line_says_so():
    """The registry of engines is written by hand. The test compares it with their recipes."""
    flag = "--tensor-parallel-size"
    parallel = {name for name in ENGINES if flag in inspect.getsource(type(recipe(name)))}
    assert parallel == {name for name, engine in ENGINES.items() if engine.tensor_parallel}
    assert cards_label((Share("cuda:0", 1), Share("cuda:1", 1)), "fake") == "GPUs: 0,1"


# The strings of these files are shown to people who never read the glossary.
SHOWN = (
    *(
        "kernel_ext",
        "gpu_runtime/rendering",
        "gpu_runtime/scheduler",
        "gpu_runtime/backends/pytorch",
    ),
    *(
        f"gpu_runtime/owner/{name}.py"
        for name in ("failures", "kernel", "holdings", "release", "out_of_memory")
    ),
    *("gpu_runtime/facts", "panels/gpu_panels/data", "gpu_runtime/owner/load_and_plan.py"),
)
JARGON = re.compile(
    r"\b(leases?|leased|ledgers?|host memory|the host|host's|warm|evictable|shadows?|adopted|pins|residue)\b",
    re.IGNORECASE,
)
TYPED = re.compile(r"%gpu leases|rt\.lease\(|rt\.adopt\(|GPU_\w+")  # a person types them


def test_no_sentence_has_a_word_that_only_the_glossary_explains():
    """JupyterLab's panel and the console's status bar name the ledger, and a tooltip says what it is."""
    found = []
    for path in sources():
        if not str(path.relative_to(ROOT)).startswith(SHOWN):
            continue
        tree = ast.parse(path.read_text())
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        docs = {
            id(one.body[0].value)
            for one in ast.walk(tree)
            if isinstance(one, documented) and ast.get_docstring(one)
        }
        for one in ast.walk(tree):
            if isinstance(one, ast.Constant) and isinstance(one.value, str) and id(one) not in docs:
                is_sentence = " " in one.value.strip()
                if is_sentence and JARGON.search(TYPED.sub("", one.value)):
                    found.append((path.name, one.lineno, one.value))
    assert found == []


@pytest.mark.parametrize("words", ["(TP:", '"this process"', 'is_engine(lease) else "in RAM"'])
def test_the_words_are_written_in_one_file(words):
    """With a second copy, two faces could differ again."""
    code = {path: re.sub(r'"""(?s:.*?)"""|#.*', "", path.read_text()) for path in sources()}
    found = [str(path.relative_to(ROOT)) for path, lines in code.items() if words in lines]
    assert found == ["gpu_runtime/facts/book.py"]
