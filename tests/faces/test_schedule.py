"""The schedule of waiting cells and their models, shown as text and as HTML."""

from gpu_runtime.facts import CellModels, Schedule, ScheduledModel
from gpu_runtime.rendering import html, render

CELLS = (CellModels("cell 4", ("a",), ("a",), True), CellModels("cell 5", ("b", "c"), ("b", "c")))
FULL = Schedule(
    cells=CELLS,
    models=(
        ScheduledModel("a", "cell 4", True, "sim:0"),
        ScheduledModel("b", "cell 5", False, "sim:0", ahead=True),
        ScheduledModel("c", "cell 5", False, "disk", loading=True),
        ScheduledModel("d", "cell 6", False, "sim:0"),
        ScheduledModel("e", "cell 7", False, "host", because="sim:0 has 4.0 GiB free"),
        ScheduledModel("f", "cell 8", False, "disk"),
    ),
    loaded_ahead=5, used=3, unused=1,
)  # fmt: skip


def test_each_model_has_its_first_use_its_place_and_its_state():
    assert html.schedule_text(FULL).splitlines() == [
        "MODEL  FIRST USE  WHERE  STATE", "a      cell 4     sim:0  used by the running cell",
        "b      cell 5     sim:0  loaded ahead", "c      cell 5     disk   being loaded ahead",
        "d      cell 6     sim:0  on its device",
        "e      cell 7     host   not loaded ahead: sim:0 has 4.0 GiB free",
        "f      cell 8     disk   not loaded yet", "Loaded ahead so far: 5; 3 used, 1 not used.",
    ]  # fmt: skip


def test_without_cells_it_says_what_to_do_and_names_are_escaped():
    assert html.schedule_text(Schedule()) == html.NO_CELL_WAITS
    assert "GPU_PREFETCH=never" in html.schedule_text(Schedule("never"))
    assert "<code>%gpu next</code>" in html.schedule_html(Schedule())
    evil = Schedule(models=(ScheduledModel("<b>x", "cell 1", False, "disk", because="<i>"),))
    shown = render.shown("next", evil)
    assert set(shown._repr_mimebundle_()) == {"text/plain", "text/html"}
    page = shown._repr_mimebundle_()["text/html"]
    assert "&lt;b&gt;x" in page and "&lt;i&gt;" in page and "<b>x" not in page
