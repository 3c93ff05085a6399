"""%gpu and %%gpu in a shell: every verb, every kind of error, and the state afterwards."""

import json
import os
import re
import shlex
import sys
import time
from types import SimpleNamespace

import pandas
import pytest
from gpu import magics
from IPython.core.error import UsageError
from IPython.utils.capture import capture_output

import gpu_runtime
from gpu_runtime import errors, facts, verbs
from gpu_runtime.arguments import FLAGS
from gpu_runtime.rendering import render
from tests.clock import finished
from tests.worlds import owner

from . import samples

pytestmark = pytest.mark.filterwarnings(
    "ignore:To exit", "ignore::IPython.core.completer.ProvisionalCompleterWarning"
)
GIB = 2**30


def run(shell, cell):
    """Runs a cell and returns its value. Raises the error of the cell."""
    with capture_output(display=False):
        outcome = shell.run_cell(cell)
    outcome.raise_error()
    return outcome.result


def printed(shell, cell):
    with capture_output(display=False) as captured:
        shell.run_cell(cell)
    return captured.stdout


SHOWN = {
    "": "1 simulated GPU",
    "status": "1 simulated GPU",
    "health": "healthy",
    "next": "No cell waits that uses a model",
    "plan qwen": "qwen is loaded already",
    "plan llama": "llama fits once 1 other is evicted",
    "plan 2GiB": "A block of 2.0 GiB fits in the free memory",
    "why qwen": "was loaded, 14.0 GiB",
    "why": "About a model or a notebook:  %gpu why NAME",
    "why qwen --replay": "Decided again: the same.",
    "evict qwen": "evict qwen: qwen was offloaded to RAM; 14.0 GiB came free",
    "preload llama": "preload llama: llama is on sim:0",
    "restore llama": "restore llama: llama is on sim:0",
    "pin qwen": "pin qwen: qwen is pinned",
    "unpin qwen": "unpin qwen: qwen may be evicted",
    "defrag": "defrag: ",
    "free": "free: 0 B came free",
    "move qwen sim:0": "move qwen: qwen is on sim:0 already",
    "drain sim:0": "drain sim:0: sim:0 is drained: it takes no new lease. 14.0 GiB left it",
    "drain sim:0 --undo": "sim:0 was not drained",
    "doctor": "last refusals",
    "config": "SETTING",
    "config --preset 8GB": "export GPU_MEMORY_MAX_PERCENT=0.85",
    "help": "  %gpu [status]",
    "help evict": "%gpu evict [NAME]",
    "help DoesNotFit": "What to do: %gpu plan NAME shows the figures",
    "load qwen": "load qwen: qwen is on sim:0 already",
    "-h": "  %gpu [status]",
    "evict --help": "%gpu evict [NAME]",
    "cancel --help": "%gpu cancel NAME",
    "apply -f models.yaml": "2 unchanged (phi:4b, org/far)",
    "inspect phi:4b": "metadata:\n  name: phi:4b",
    "inspect phi:4b --format json": '"memory": "4GiB"',
    "delete phi:4b": "delete phi:4b: phi:4b is no longer in the catalogue",
    "load phi:4b": "load phi:4b: phi:4b is on sim:0",
    "register small --backend fake --size 2 GiB": "small: fake, 2.0 GiB; load it with  %gpu preload small",
    "forget llama": "forget llama: llama is no longer registered here",
    "plan 2 GiB": "A block of 2.0 GiB fits in the free memory",
}
FRAMES = {
    "models": "name backend where bytes idle_seconds uses importance keep owner",
    "leases": "model device bytes measured_bytes owner user pid notebook importance pins idle_seconds",
    "evictions": "time model action reason bytes device owner",
    "evictions --all --limit 2": "time model action reason bytes device owner",
    "report --by waits": "user waited_for waited_h",
    "who": "name kind device bytes alone_bytes cell what stays stays_bytes",
    "backtest --policy lru --device 50%": "policy engine device_bytes host_bytes requests wait_s wait_p50_s "
    "wait_p99_s loads restores moved_bytes requests_per_s wait_vs_lru",
    "catalog": "name type backend bytes context_length importance keep state source",
    "fragmentation": "device allocated_bytes reserved_bytes fragmentation_bytes fragmentation_percent alloc_retries "
    "ooms inactive_bytes releasable_bytes largest_free_bytes largest_request_bytes owner user pid "
    "notebook",
}


@pytest.mark.parametrize("words", SHOWN)
def test_a_verb_returns_a_value_that_displays_itself(shell, models, words):
    answer = run(shell, f"%gpu {words}")
    assert SHOWN[words] in repr(answer)
    assert set(answer._repr_mimebundle_()) == {"text/plain", "text/html"}


@pytest.mark.parametrize("words", [
    "qwen", "llama", "unloaded --importance high", "small --backend fake --size 2 GiB --keep",
    "small --backend fake --size 2GiB --context 4096 --sequences 2 --timeout 30s",
    "models/small --backend fake --size 2.5GiB", "unloaded --size 5GiB --importance low",
    "'a b' --backend fake --size 1GiB",
])  # fmt: skip
def test_the_command_of_a_plan_does_what_was_planned(shell, models, words):
    """The command in the text leads to the shares of the plan, and needs no further step."""
    models.register("unloaded", backend="fake", size="1GiB")
    planned = run(shell, f"%gpu plan {words}")
    command = repr(planned).partition("Do it:  ")[2] or f"%gpu {planned.value.command}"
    run(shell, command)
    (lease,) = [one for one in models.status().leases() if one.name == planned.value.name]
    assert planned.value.shares == lease.shares
    again = run(shell, f"%gpu plan {words}").value
    assert (again.steps, again.obstacle) == ((), "")
    asked = models.spec(lease.name)
    assert (lease.importance, lease.keep) == (asked.importance, asked.keep)
    assert lease.keep == ("--keep" in words) and (lease.importance < 10) == ("high" in words)


def test_load_gives_other_options_only_to_a_model_that_is_not_loaded(shell, models):
    with pytest.raises(errors.AlreadyRegistered, match="loaded with other options"):
        run(shell, "%gpu load qwen --size 15GiB")
    planned = run(shell, "%gpu plan qwen --size 15GiB")
    assert "It would not be loaded: qwen is loaded with other options" in repr(planned)
    run(shell, "%gpu forget qwen")
    run(shell, "%gpu load qwen --backend fake --size 15GiB")
    assert models.spec("qwen").size == 15 * GIB


@pytest.mark.parametrize("words", FRAMES)
def test_a_table_is_a_dataframe(shell, models, words):
    frame = run(shell, f"df = %gpu {words}\ndf")
    assert isinstance(frame, pandas.DataFrame) and list(frame.columns) == FRAMES[words].split()


def test_every_verb_is_tested_here_and_no_other_word_is_taken_for_one():
    """Others: test_inline.py, fleet/test_fleet.py, owner/test_kernel.py. `plan` takes all that `load` takes."""
    tried = {words.split()[0] for words in (*SHOWN, *FRAMES) if words}
    elsewhere = {"console", "park", "hibernate", "unpark", "fleet"}
    assert {verb.name for verb in verbs.verbs(verbs.MAGIC)} == tried - {"-h"} | elsewhere
    plan, load, register = (
        {flag for one in verbs.VERBS[verb].arguments if one.is_option for flag in one.flags}
        for verb in ("plan", "load", "register")
    )
    assert plan == load == register | {"--timeout"} == set(FLAGS.values())
    assert {name for meant in verbs.MEANINGS.values() for name in meant} <= verbs.VERBS.keys()
    assert not verbs.MEANINGS.keys() & verbs.VERBS.keys()


def test_evictions_lists_evictions_and_with_all_every_event(shell, models):
    """Code reads the owner's id, and people a living process by its notebook."""
    assert set(run(shell, "%gpu evictions").action) == {"offloaded"}
    frame = run(shell, "%gpu evictions --all")
    me = models.status().owner
    assert "loaded" in set(frame.action) and set(frame.owner) == {me.id}
    assert frame.attrs["owners"] == {me.id: me.label}
    frame.attrs["owners"][me.id] = "train.ipynb (pid 7)"
    assert "train.ipynb (pid 7)" in repr(frame) and "train.ipynb (pid 7)" in frame._repr_html_()


def test_an_answer_can_be_stored_and_silenced(shell, models):
    """`-o` also stores the answer under a name. A semicolon hides the answer. `%gpuctl` is the same magic."""
    answer = run(shell, "%gpu plan qwen -o planned")
    assert shell.user_ns["planned"] is answer and answer.value.granted
    assert printed(shell, "%gpu health;") == ""
    assert "healthy" in printed(shell, "%gpuctl health")


@pytest.mark.parametrize("words", [
    "status", "models", "leases", "evictions", "fragmentation", "health", "plan qwen", "why qwen",
    "config", "config --preset 4GB", "defrag",
])  # fmt: skip
def test_json_is_valid_text_and_a_tree(shell, models, words):
    answer = run(shell, f"%gpu {words} --json")
    assert answer._repr_mimebundle_()["application/json"] == json.loads(answer)


def test_unknown_values_are_null_in_json(shell, models):
    models.register("new", backend="fake", size="1GiB")
    row = next(row for row in json.loads(run(shell, "%gpu models --json")) if row["name"] == "new")
    assert row["where"] == "disk" and row["idle_seconds"] is None


@pytest.mark.parametrize("verb", render.EMPTY)
def test_an_empty_table_says_what_to_type(shell, verb):
    """The data frame itself is not changed."""
    with capture_output(display=False) as captured:
        frame = shell.run_cell(f"%gpu {verb}").result
    assert frame.empty or verb == "fragmentation"
    assert (render.nothing(verb) in captured.stdout) is frame.empty


@pytest.mark.parametrize(("code", "words"), [
    ("rt.status()", "1 simulated GPU"), ("rt.plan('qwen')", "qwen is loaded already"),
    ("rt.evict('qwen')", "evict qwen: qwen was offloaded"), ("rt.health()", "healthy · pressure"),
    ("rt.schedule()", "No cell waits that uses a model"),
])  # fmt: skip
def test_python_values_are_displayed_like_the_magics(shell, models, code, words):
    assert words in printed(shell, code)


def test_a_failed_load_leaves_the_name_free_and_a_path_with_spaces_is_one_word(
    shell, models, tmp_path
):
    """The quotes of a path are removed, as a shell does."""
    (tmp_path / "my model").mkdir()
    with pytest.raises(errors.NotAModel, match="my model") as caught:
        run(shell, f"%gpu load new '{tmp_path}/my model'")
    assert f"'{tmp_path}" not in str(caught.value.facts.get("source", ""))
    with pytest.raises(errors.LoadFailed):
        run(shell, f"%gpu load new {tmp_path}")
    run(shell, "%gpu load new --backend fake --size 1GiB --importance high --keep")
    spec = next(spec for spec in models.specs() if spec.name == "new")
    assert (spec.size, spec.importance, spec.keep) == (GIB, 5, True)


@pytest.mark.parametrize(("typed", "meant"), [
    ("evcit", "evict"), ("statsu", "status"), ("modles", "models"), ("Health", "health"),
    ("preloda", "preload"), ("xyz", ""), ("unload qwen", "evict or free"),
    ("release", "evict or free"), ("rm qwen", "forget or evict"), ("abort qwen", "cancel or evict"),
    ("ps", "status or models"), ("events", "evictions or why"), ("processes", "leases or status"),
])  # fmt: skip
def test_a_typo_suggests_the_nearest_verb_and_another_tools_word_those_of_its_meaning(
    shell, typed, meant
):
    """Each verb of that meaning has a line that says what it does."""
    with pytest.raises(errors.UnknownVerb) as caught:
        run(shell, f"%gpu {typed}")
    said = str(caught.value)
    assert f"Did you mean {meant}?" in said if meant else "Did you mean" not in said
    if " or " in meant:
        assert all(verbs.VERBS[name].doc in said for name in meant.split(" or "))
    else:
        assert caught.value.nearest == meant


@pytest.mark.parametrize(("line", "kind"), [
    ("evict nobody", errors.UnknownModel), ("plan nobody", errors.UnknownModel),
    ("why nobody", errors.UnknownModel), ("why --replay", errors.GpuError),
    ("load phi:4b --importance high", errors.AlreadyRegistered),
    ("load org/far", errors.LoadFailed), ("inspect nobody", errors.UnknownModel),
    ("apply -f none.yaml", errors.BadDocument), ("config --preset 3GB", errors.BadSetting),
    ("load big --backend fake --size lots", errors.BadSize),
    ("load big --backend fake --size 100GiB", errors.DoesNotFit),
    ("load qwen --backend fake --size 1GiB", errors.AlreadyRegistered),
])  # fmt: skip
def test_a_failure_is_a_gpu_error_and_is_shown_as_one_sentence(shell, models, line, kind):
    """The error has no traceback of the magic. It is raised, so that nbval notices it."""
    with pytest.raises(kind):
        run(shell, f"%gpu {line}")
    shown = printed(shell, f"%gpu {line}")
    assert shown.startswith(f"{kind.__name__}: ") and "Traceback" not in shown


NAMES = {"a b", "pinned one"}


@pytest.mark.parametrize("line", [
    "register 'a b' --backend fake --size 1GiB", "load 'a b' --backend fake --size 99GiB", "evict 'a b'",
    "move 'pinned one' host", "evict 'pinned one'", "who", "status",
])  # fmt: skip
def test_a_command_in_a_message_can_be_typed_also_if_the_name_has_a_space(shell, rt, line):
    rt.register("pinned one", backend="fake", size="1GiB")
    if line != "status":
        rt.preload("pinned one")
        rt.pin("pinned one")
    said = printed(shell, f"%gpu {line}")
    commands = re.findall(r"%gpu ((?:evict|load|plan|preload|unpin) .*?)(?: {2}|\n|$)", said)
    assert commands and all(NAMES & set(shlex.split(command)) for command in commands)


@pytest.mark.parametrize(("line", "message"), [
    ("pin", "required: NAME"),
    ("evict qwen --frobnicate", "unrecognized arguments: --frobnicate"),
    ("evict qwen --timeout soon", "'soon' is not a duration"),
    ("load x --importance vital", "'vital' is none of urgent"),
    ("evictions --limit none", "'none' is not a number of rows"),
    ("plan 'qwen", "No closing quotation"),
    ("health -o 3x", "not a name that Python could use"),
    ("health -o class", "not a name that Python could use"),
    ("status extra", "unrecognized arguments: extra"),
])  # fmt: skip
def test_bad_syntax_shows_the_usage(shell, models, line, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        run(shell, f"%gpu {line}")


def held(rt):
    return [(lease.name, lease.pins) for lease in rt.status().leases() if lease.pins]


def test_a_cell_runs_in_the_users_namespace_under_a_lease(shell, rt):
    """The value of the last expression is displayed, then the memory that the cell used."""
    kinds = "[(l.kind, l.bytes) for l in rt.status().leases()]"
    shown = printed(shell, f"%%gpu 8GiB\nkind = {kinds}\nlen(kind)")
    assert shell.user_ns["kind"] == [("block", 8 * GIB)] and list(rt.status().leases()) == []
    first, second = shown.strip().splitlines()
    assert first.endswith("1")
    assert second.startswith("8.0 GiB reserved on sim:0 · peak and delta unknown")
    silenced = printed(shell, "%%gpu 1GiB\ninner = %gpu health\n41 + 1;")
    assert silenced.startswith("1.0 GiB reserved") and shell.user_ns["inner"].value.healthy


@pytest.mark.parametrize(
    "raises", ["1/0", "raise KeyboardInterrupt", "raise SystemExit(3)", "import nothing_such"]
)
@pytest.mark.parametrize("line", ["8GiB", "--model llama", "1GiB --model llama --importance high"])
def test_a_cell_releases_everything_whatever_it_raises(shell, models, line, raises):
    printed(shell, f"%%gpu {line}\nseen = [l.pins for l in rt.status().leases()]\n{raises}")
    assert any(shell.user_ns["seen"])
    assert held(models) == [] and "model" not in shell.user_ns
    assert {lease.kind for lease in models.status().leases()} == {"model"}


def test_a_traceback_shows_the_users_own_lines_once_and_ends_with_its_error(shell, rt):
    """What is added to an error refers to no frame: the user's tensors become free with it."""
    shown = printed(shell, "%%gpu 1GiB\ndef f():\n    1 / 0\n\nf()")
    assert shown.count("ZeroDivisionError") == 2  # its head and its last line
    assert "line 5" in shown and "line 3, in f()" in shown
    assert "magics.py" not in shown and "cell.py" not in shown and "run_cell_magic" not in shown
    printed(shell, "%%gpu 1GiB\nraise ValueError('x')")
    kept = [cell.cell_contents for cell in sys.last_value._render_traceback_.__closure__]
    assert not [one for one in kept if isinstance(one, BaseException)]


def test_a_cell_that_cannot_be_compiled_fails_with_its_reason(shell, rt):
    with pytest.raises(errors.GpuError):
        run(shell, "%%gpu 1GiB\nx = (")
    shown = printed(shell, "%%gpu 1GiB\nx = (")
    assert "SyntaxError" in shown and "line 2" in shown and "magics.py" not in shown
    with pytest.raises(errors.GpuError, match="awaits at its top level"):
        run(shell, "%%gpu 1GiB\nimport asyncio\nawait asyncio.sleep(0)")


OUT_OF_MEMORY = "raise MemoryError('Tried to allocate 2.00 GiB')"
ONCE = f"if len(tries) < 2: {OUT_OF_MEMORY}"
STEPPED_ASIDE = "12.0 GiB came free (trainer.ipynb stepped aside): the cell runs again."


@pytest.mark.parametrize(("line", "raises", "room_made", "tries", "last"), [
    ("--retry", ONCE, 1, 2, "the cell runs again."),
    ("--retry", OUT_OF_MEMORY, 1, 2, "OutOfMemory"),  # the second failure is the cell's
    ("--retry", OUT_OF_MEMORY, 0, 1, "OutOfMemory"),
    ("--retry", "raise KeyboardInterrupt", 1, 1, "KeyboardInterrupt"),
    ("", OUT_OF_MEMORY, 1, 1, "OutOfMemory"), ("1GiB", OUT_OF_MEMORY, 1, 1, "OutOfMemory"),
])  # fmt: skip
def test_a_cell_runs_again_once_if_its_user_allows_it_and_room_was_made(
    shell, rt, monkeypatch, line, raises, room_made, tries, last
):
    answers = [STEPPED_ASIDE] * room_made
    make_room = lambda error: answers and answers.pop() or ""
    monkeypatch.setattr(magics._loaded[id(shell)].magics, "make_room", make_room)
    shell.user_ns["tries"] = []
    shown = printed(shell, f"%%gpu {line}\ntries.append(1)\n{raises}")
    assert len(shell.user_ns["tries"]) == tries and last in shown
    assert ("Error" in shown or "OutOfMemory" in shown or "Interrupt" in shown) is (raises != ONCE)


def test_a_cell_can_hold_a_model_under_the_name_model(shell, models):
    """After the cell, the user's own value of `model` is restored. A value that the cell assigns is kept."""
    shell.user_ns["model"] = "mine"
    pins = "[l.pins for l in rt.status().leases() if l.name == 'llama']"
    run(shell, f"%%gpu --model llama\nwhat = repr(model), {pins}")
    assert shell.user_ns["what"] == ("<fake llama on sim:0>", [1])
    run(shell, "%%gpu --model llama\nblocks = [l.kind for l in rt.status().leases()]")
    assert set(shell.user_ns["blocks"]) == {"model"}, "without a size no further memory is leased"
    run(shell, "%%gpu 1GiB\nblocks = [l.kind for l in rt.status().leases()]")
    assert "block" in shell.user_ns["blocks"]
    assert shell.user_ns["model"] == "mine"
    run(shell, "%%gpu --model llama\nmodel = 7")
    assert shell.user_ns["model"] == 7


@pytest.mark.parametrize(("line", "kind"), [
    ("100GiB", errors.DoesNotFit), ("lots", errors.BadSize), ("-3", errors.BadSize), ("-3GiB", errors.BadSize),
    ("--model nobody", errors.UnknownModel), ("evict qwen", UsageError),
    ("1GiB --importance vital", UsageError),
])  # fmt: skip
def test_a_cell_whose_lease_is_refused_does_not_run(shell, models, line, kind):
    with pytest.raises(kind):
        run(shell, f"%%gpu {line}\nran = True")
    assert "ran" not in shell.user_ns


def offered(shell, text):
    with capture_output(display=False):
        return [one.text for one in shell.Completer.completions(text, len(text))]


@pytest.mark.parametrize(("text", "words"), [
    ("%gpu m", {"models", "move"}), ("df = %gpu mod", {"models"}),
    ("%gpuctl ev", {"evict", "evictions"}), ("%gpu evictions --limit 3 --li", {"--limit"}),
    ("%gpu evict qwen -o n --t", {"--timeout"}),
    ("%gpu evict ", {"llama", "qwen", "phi:4b", "org/far"}),
    ("%gpu evict q", {"qwen"}), ("x = %gpu plan l", {"llama"}),
    ("%gpu evict qwen --t", {"--timeout"}), ("%gpu load new --importance h", {"high"}),
    ("%gpu config --preset 1", {"16GB"}), ("%gpu help pre", {"preload"}),
    ("%%gpu --model q", {"qwen"}), ("%%gpu 8GiB --i", {"--importance"}),
    ("%%gpu --importance u", {"urgent"}), ("%gpu status --j", {"--json"}),
    ("%gpu load new --backend f", {"fake"}), ("%gpu xyz", set()),
    ("%gpu inspect ", {"phi:4b", "org/far"}), ("%gpu load phi:", {"phi:4b"}),
    ("%gpu plan org/", {"org/far"}), ("%gpu inspect phi:4b --format y", {"yaml"}),
    ('rt.use("', {"llama", "qwen", "phi:4b", "org/far"}), ("with rt.use('q", {"qwen"}),
    ("x = 1\nrt.plan(name_or_size='l", {"llama"}),
])  # fmt: skip
def test_tab_offers_verbs_options_and_models(shell, models, text, words):
    assert set(offered(shell, text)) == words


Other = SimpleNamespace(status=lambda: samples.busy, catalog_names=lambda: ("llama",))


def test_tab_offers_other_processes_models_and_notebooks():
    """Models have their pid. Of two notebooks with one file name, the paths are offered."""
    assert magics.model_names(Other) == ["llama", "qwen", "reranker@4121"]
    assert magics.notebook_names(Other) == ["analysis.ipynb", "train.ipynb"]
    code = samples.lease("cell#1", 1, kind="block")
    world = samples.snapshot(code, samples.lease("kernel", 1, owner=samples.BOB, kind="kernel"))
    rt = SimpleNamespace(status=lambda: world, catalog_names=tuple)
    assert magics.model_names(rt) == [], "code is no model"
    paths = ("/ann/train.ipynb", "/bob/train.ipynb", "/bob/other.ipynb", "")
    owners = [owner(pid, notebook=path) for pid, path in enumerate(paths, 1)]
    book = facts.Book(sections={one.id: facts.Section(one) for one in owners})
    found = magics.notebook_names(SimpleNamespace(status=lambda: book))
    assert found == ["/ann/train.ipynb", "/bob/train.ipynb", "other.ipynb"]


def test_tab_quotes_a_name_with_a_space(shell, monkeypatch):
    """`%gpu evict my train.ipynb` is an error; the name needs quotes."""
    monkeypatch.setattr(magics, "notebook_names", lambda rt: ["my train.ipynb", "train.ipynb"])
    assert offered(shell, "%gpu park my") == ["'my train.ipynb'"]
    assert offered(shell, "%gpu park t") == ["train.ipynb"]


def test_tab_leaves_python_and_the_body_of_a_cell_alone(shell, models):
    from IPython.core.completer import CompletionContext

    def asked(text):
        *above, last = text.split("\n")
        context = CompletionContext("", text, len(last), len(above), None)
        return magics._loaded[id(shell)].matcher(context)["completions"]

    assert asked("%%gpu 8GiB\nevi") == [] and asked("gpu ev") == [] and asked("%gpux ev") == []
    assert asked("%gpu ev")


def test_loading_prints_nothing_and_offers_the_runtime_if_its_name_is_free(fresh_shell, rt):
    with capture_output(display=False) as captured:
        fresh_shell.run_cell("%load_ext gpu")
    assert captured.stdout == captured.stderr == "" and fresh_shell.user_ns["rt"].probe is rt.probe
    fresh_shell.run_cell("%unload_ext gpu")
    fresh_shell.user_ns["rt"] = "mine"
    magics.load(fresh_shell)
    magics.unload(fresh_shell)
    assert fresh_shell.user_ns["rt"] == "mine"


def test_one_line_says_that_a_torch_cannot_park(fresh_shell, rt, monkeypatch):
    """It is under the cell that loads the extension, or under the first cell after the reason is known."""
    lines, reasons = [], iter(["", "torch 2.3.1 is older than 2.4"])
    monkeypatch.setattr(magics, "quiet_line", lines.append)
    monkeypatch.setattr(magics, "why_torch_moves_nothing", lambda: next(reasons))
    fresh_shell.run_cell("%load_ext gpu")
    assert lines == []
    for _ in range(2):
        fresh_shell.run_cell("1")
    assert lines == [
        "Nothing of this notebook is parked or moved: torch 2.3.1 is older than 2.4. "
        "A newer torch: pip install 'torch>=2.12'"
    ]
    fresh_shell.run_cell("%unload_ext gpu")


def test_a_notebooks_line_prints_nothing_if_the_kernel_has_loaded_the_extension_by_itself(
    fresh_shell, rt
):
    """IPython prints two lines about an extension in its list. `%unload_ext` needs it in the list."""
    fresh_shell.extension_manager.load_extension("gpu")
    for _ in "twice":
        with capture_output(display=False) as captured:
            fresh_shell.run_cell("import gpu\n%load_ext gpu")
        assert captured.stdout == captured.stderr == ""
    with capture_output(display=False) as captured:
        fresh_shell.run_cell("%unload_ext gpu\n%load_ext gpu\n%load_ext gpu")
    assert "already loaded" in captured.stdout
    fresh_shell.run_cell("%unload_ext gpu")
    assert "gpu" not in fresh_shell.magics_manager.magics["line"]


def state(shell):
    tables = shell.magics_manager.magics
    return (
        {kind: dict(table) for kind, table in tables.items()},
        list(shell.Completer.custom_matchers),
        dict(shell.display_formatter.mimebundle_formatter.type_printers),
        "rt" in shell.user_ns,
        set(shell.magics_manager.registry),
        {name: list(hooks) for name, hooks in shell.events.callbacks.items()},
    )


def test_unloading_removes_everything(fresh_shell, rt):
    """Unloading the extension restores another extension's magic of the same name."""
    magic = fresh_shell.magics_manager.magics["line"]
    theirs = magic["gpu"] = lambda line: "theirs"
    before = state(fresh_shell)
    for _ in range(2):  # loading twice is loading once
        magics.load(fresh_shell)
    magics.unload(fresh_shell)
    assert state(fresh_shell) == before and magic.pop("gpu") is theirs


def test_loading_opens_nothing_and_the_first_use_raises_the_error(fresh_shell, monkeypatch):
    """The user can correct a bad setting without loading the extension again."""
    opened = []

    def fails():
        opened.append(1)
        raise errors.BadSetting("GPU_DEVICES", "x", "something else")

    monkeypatch.setattr(gpu_runtime, "runtime", fails)
    magics.load(fresh_shell)
    fresh_shell.run_cell("1 + 1")
    assert opened == []
    assert isinstance(fresh_shell.run_cell("rt.status()").error_in_exec, errors.BadSetting)
    assert isinstance(fresh_shell.run_cell("%gpu health").error_in_exec, errors.BadSetting)
    magics.unload(fresh_shell)
    assert "rt" not in fresh_shell.user_ns


def test_rt_is_the_runtime_in_the_first_cell_that_names_it(shell, rt):
    assert shell.user_ns["rt"] is not rt
    shell.run_cell("found = rt")
    assert shell.user_ns["found"] is rt is shell.user_ns["rt"]
    shell.user_ns["rt"] = "mine"
    shell.run_cell("%gpu health")
    assert shell.user_ns["rt"] == "mine", "the user's own value stays"


def test_help_is_the_table_of_verbs_and_names_notebooks_where_a_verb_takes_one(shell):
    """`%gpu restore train.ipynb` worked, but its help and the Tab key knew only models."""
    doc = shell.find_magic("gpu").__doc__
    names = {verb.name for verb in verbs.verbs(verbs.MAGIC)} - {"status"}
    assert all(f"  %gpu {name}" in doc for name in names)
    for verb in verbs.VERBS.values():
        takes = verb.name in ("why", "evict", "restore", "preload", "plan", "defrag")
        offered = magics.candidates([verb.name], "", False, lambda: Other) or ()
        told = "FILE.ipynb" in verbs.details(verb, verbs.MAGIC)
        assert takes == ("train.ipynb" in offered and "qwen" in offered), verb.name
        assert takes == told or verb.name == "cancel"


@pytest.mark.processes
def test_loading_imports_nothing_heavy(child_environment):
    code = (
        "from IPython.core.interactiveshell import InteractiveShell as S; import sys; s = S.instance();"
        "s.run_cell('%load_ext gpu'); s.run_cell('%gpu'); assert 'rt' in s.user_ns;"
        "print([m for m in ('torch', 'transformers', 'panel', 'pandas', 'accelerate') if m in sys.modules])"
    )
    done = finished([sys.executable, "-c", code], env=child_environment)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def own_section(rt):
    return rt.status().sections[rt.status().owner.id]


def test_the_book_shows_that_a_cell_runs_and_when_it_ended(shell, models):
    """Other processes see whether this notebook runs a cell and how long it is idle, while the extension is loaded."""
    state = "(lambda s: (s.busy_since, s.idle_since))(rt.status().sections[rt.status().owner.id])"
    run(shell, "1")
    busy, idle = run(shell, state)
    assert busy > 0 and idle == 0
    assert own_section(models).busy_since == 0 and own_section(models).idle_since >= busy
    printed(shell, "1 / 0")
    assert own_section(models).busy_since == 0, "a failing cell ends as well"
    magics.unload(shell)
    run(shell, "2")
    assert (own_section(models).busy_since, own_section(models).idle_since) == (0.0, 0.0)


NET = """
from torch import nn

class Base(nn.Module):
    def name(self):
        return "base"

class Net(Base):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        return self.layer(x) * {factor}
{more}
"""
MORE = """
    def name(self):
        return "new " + super().name()
"""


def test_autoreload_moves_a_governed_module_to_the_new_class(shell, rt, tmp_path, monkeypatch):
    """A governed module has a hidden subclass of the user's class, which autoreload did not move."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    file = tmp_path / "mynet.py"
    file.write_text(NET.format(factor=1, more=""))

    def run(code):
        shell.run_cell(code).raise_error()

    run("%load_ext autoreload")
    run("%autoreload 2 --full")
    run("import mynet, torch; net, plain = mynet.Net().eval(), mynet.Net(); x = torch.ones(1, 2)")
    shell.user_ns["rt"] = rt
    run("rt.adopt('net', net); first = net(x).tolist()")
    file.write_text(NET.format(factor=2, more=MORE))
    os.utime(file, (time.time() + 9, time.time() + 9))
    run("same = isinstance(plain, mynet.Net), isinstance(net, mynet.Net), type(net.layer).__name__")
    assert shell.user_ns["same"] == (True, True, "Linear")
    run("said = net.name(), plain.name(); rt.evict('net'); second = net(x).tolist()")
    assert shell.user_ns["said"] == ("new base", "new base")
    [first], [second] = shell.user_ns["first"], shell.user_ns["second"]
    assert second == pytest.approx([2 * one for one in first])
    assert rt.models().set_index("name")["where"]["net"] == "sim:0"
    run("rt.forget('net'); kind = type(net) is mynet.Net")
    assert shell.user_ns["kind"]
    sys.modules.pop("mynet")
    run("%autoreload off")
