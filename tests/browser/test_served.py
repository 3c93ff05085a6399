"""The served console in a real Chromium, with real kernels and two sessions."""

import contextlib
import re
import signal
from itertools import pairwise

import pytest
from gpu_panels import tabs

from tests.clock import until
from tests.faces.served import OPERATORS, VIEWERS, end, gpu_console
from tests.stories.kernels import Kernel
from tests.stories.notebooks import Notebook

from .chromium import SHOWN_MS, WIDE, BrowserPage, serious

playwright = pytest.importorskip("playwright.sync_api")

DEVICES = "sim:24GiB,host:64GiB"  # the same as of the served console
TABS = tuple(tabs.titles())


@pytest.fixture(scope="module")
def box(tmp_path_factory):
    return tmp_path_factory.mktemp("box")


@pytest.fixture(scope="module")
def served(box):
    with gpu_console(box) as found:
        yield found


@pytest.fixture(scope="module")
def opened(chromium, served):
    """A function that opens the console, by default as an operator.

    Tests share a page, because loading a page takes five seconds of the processor. A page of which
    Chromium has stopped to draw frames is opened again: once, 13 tests waited in vain for it.
    """
    made: dict[str, BrowserPage] = {}

    def open(token: str = OPERATORS, **context) -> BrowserPage:
        key = f"{token} {context}"
        if key in made and not made[key].draws():
            made.pop(key).close()
        if key not in made:
            url = f"http://127.0.0.1:{served.port}/?token={token}"
            made[key] = BrowserPage(chromium, url, **context)
        return made[key].ready()

    yield open
    for page in made.values():
        page.close()


@pytest.fixture
def kernel(box):
    """Another process with a model on the card."""
    one = Kernel(f"keeper://{box}/ledger", DEVICES)
    assert (
        one.run("rt.register('qwen', backend='fake', size='14GiB'); rt.preload('qwen')") == "done"
    )
    yield one
    one.end()


def where(kernel: Kernel) -> str:
    """The place of the kernel's model, as the kernel itself reports it."""
    kernel.process.stdin.write(
        "print(next(lease.where for lease in rt.status().leases() if lease.name == 'qwen'))\n"
    )
    kernel.process.stdin.flush()
    said = kernel.answer()
    assert kernel.answer() == "done"
    return said


def pid(kernel: Kernel) -> str:
    return str(kernel.process.pid)


def test_every_tab_renders_accessibly_without_an_error_or_a_foreign_request(opened, kernel):
    """In both themes. axe-core checks names, roles and contrasts."""
    seen = opened()
    loaded = seen.page.evaluate("performance.getEntriesByType('resource').map(({name}) => name)")
    modules = [name for name in loaded if "panel-material-ui.bundle.js" in name]
    assert len(modules) == 1, "the browser itself loads Material's module, and so once"
    assert not [name for name in loaded if "roboto" in name], "no fonts are loaded"
    for _ in range(2):
        for title in TABS:
            seen.tab(title)
            seen.page.wait_for_selector(f"[role=tab][aria-selected=true]:has-text('{title}')")
            assert serious(seen.page) == [], title
        seen.tab("Models")
        seen.row("qwen", pid(kernel)).wait_for()
        assert not seen.page.locator("text=could not be drawn").count()
        assert (seen.errors, seen.elsewhere) == ([], []), background(seen)
        was = background(seen)
        seen.page.click("[aria-label='Toggle theme']")
        seen.page.wait_for_function(f"(was) => {BACKGROUND} !== was", arg=was)


BACKGROUND = "getComputedStyle(document.body).backgroundColor"


def test_a_reload_stays_where_it_was(opened, kernel):
    """The URL contains the tab, the choices and the words of a filter."""
    seen = opened()
    seen.tab("Timeline")
    seen.page.get_by_role("button", name="7 days").click()
    seen.page.wait_for_function("() => location.search.includes('range=7+days')")
    seen.tab("Leases")
    seen.page.wait_for_function("() => !location.search.includes('range')")
    seen.page.locator("input[type=search]").first.fill("qwen")
    seen.page.reload()
    seen.ready()
    seen.row("qwen", pid(kernel)).wait_for()
    assert seen.page.locator("input[type=search]").first.input_value() == "qwen"
    assert "tab=Leases&leases=qwen" in seen.page.url and "token" not in seen.page.url
    seen.page.locator("input[type=search]").first.fill("")  # other tests share this page
    seen.page.wait_for_function("() => !location.search.includes('leases=')")
    assert seen.errors == []


# Every control that can be seen and is smaller than 44 pixels in a direction. Parts of bars are as wide as they are.
SMALL = """() => {
  const found = []
  const collect = (root) => {
    for (const node of root.querySelectorAll("button, [role=tab], [role=combobox], input:not([aria-hidden])")) {
      const {width, height} = node.getBoundingClientRect()
      const least = node.closest(".parts") ? height : Math.min(width, height)
      if (width && least < 44) found.push(node.outerHTML.slice(0, 200))
    }
    for (const node of root.querySelectorAll("*")) if (node.shadowRoot) collect(node.shadowRoot)
  }
  collect(document)
  return found
}"""


def test_a_phone_has_one_header_line_tabs_at_the_bottom_and_targets_for_fingers(opened, kernel):
    """Screen readers announce problems and missing updates, and not each new second."""
    seen = opened(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    for title in TABS:
        seen.tab(title)
        seen.page.wait_for_selector(f"[role=tab][aria-selected=true]:has-text('{title}')")
        # A tab that has just come has its style a moment later.
        until(lambda: seen.page.evaluate(SMALL) == [], f"{title}: targets are too small")
        until(lambda: seen.page.evaluate("document.documentElement.scrollWidth") <= 390, title)
        assert serious(seen.page) == [], title
    tabs = seen.page.get_by_role("tablist").bounding_box()
    assert tabs["y"] + tabs["height"] > 840
    seen.tab("Models")
    row = seen.row("qwen", pid(kernel))
    until(lambda: (row.bounding_box() or {"height": 0})["height"] > 100, "the row is no card")
    title, swatch = row.locator("td").first, row.locator(".swatch").first.bounding_box()
    assert title.bounding_box()["width"] > 300, "the title has the whole width of the card"
    assert swatch["width"] >= 11, "a swatch is not squeezed"
    assert row.locator(".act").first.bounding_box()["x"] == title.bounding_box()["x"]
    assert seen.page.locator("header").first.bounding_box()["height"] <= 72
    is_cut = """(node) => {
        node.textContent = "2 problems; 1 waits"; node.classList.add("some"); return node.scrollWidth > node.clientWidth
    }"""
    assert not seen.page.locator(".words .problems").evaluate(is_cut)
    spoken = seen.page.locator("[role=status].spoken")
    until(lambda: "problem" in spoken.text_content())
    assert "as of" not in spoken.text_content()
    button = row.locator("button", has_text="Pin")
    button.click()
    cancel = seen.page.locator("[role=dialog] button", has_text="Cancel")
    cancel.wait_for()
    question = cancel.evaluate(
        "(node) => node.getRootNode().getElementById(node.getAttribute('aria-describedby')).textContent"
    )
    assert "It keeps its 14.0 GiB on sim:0" in question, "a screen reader reads it with the button"
    seen.page.keyboard.press("Escape")
    until(lambda: button.evaluate("(node) => node.getRootNode().activeElement === node"))


def test_a_first_load_is_small(opened, served, kernel):
    """Every text answer is compressed. Without compression it had 4.6 MB."""
    seen = opened()
    sizes: list[int] = []
    tools = seen.context.new_cdp_session(seen.page)
    tools.send("Network.enable")
    tools.send("Network.setCacheDisabled", {"cacheDisabled": True})
    tools.on("Network.loadingFinished", lambda event: sizes.append(event["encodedDataLength"]))
    seen.page.reload()
    seen.ready()
    assert 500_000 < sum(sizes) < 1_300_000


OPEN_ROOTS = """(() => {
  const attach = Element.prototype.attachShadow
  Element.prototype.attachShadow = function () { return attach.call(this, {mode: "open"}) }
})()"""


def test_the_figures_are_shown_before_panels_scripts_have_arrived(chromium, served, kernel):
    """The preview has the figures and the theme of the live page. The live page replaces the preview."""
    context = chromium.new_context(viewport=WIDE, color_scheme="dark")
    context.add_init_script(OPEN_ROOTS)
    page, held, errors = context.new_page(), [], []
    page.set_default_timeout(SHOWN_MS)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.route("**/bokeh.min.js*", lambda route: held.append(route))
    preview = page.locator("#preview.dark")
    figure = preview.get_by_text("14.0 of 21.6 GiB held")
    for _ in range(6):  # a preview does not change, and has the figures that the server read last
        held.clear()
        page.goto(f"http://127.0.0.1:{served.port}/?token={OPERATORS}", wait_until="commit")
        with contextlib.suppress(playwright.TimeoutError):
            figure.wait_for(timeout=SHOWN_MS / 6)
            break
    figure.wait_for()
    preview.get_by_text(re.compile(r"as of \d")).wait_for()
    assert page.evaluate("document.getElementById('preview').inert"), "its buttons do nothing"
    for route in held:
        route.continue_()
    preview.wait_for(state="detached")
    page.get_by_role("tab", name="Models").click()
    page.get_by_role("button", name="Evict: qwen").wait_for()
    assert errors == []
    context.close()


def background(seen) -> str:
    return seen.page.evaluate(BACKGROUND)


def test_the_page_takes_the_systems_theme_until_another_is_chosen(opened, kernel):
    """A chosen theme is kept over a reload of the page."""
    light = background(opened())
    seen = opened(color_scheme="dark")
    seen.page.wait_for_function(f"(light) => {BACKGROUND} !== light", arg=light)
    dark = background(seen)
    seen.page.click("[aria-label='Toggle theme']")
    seen.page.wait_for_function("() => localStorage.getItem('gpu-console-theme') === 'light'")
    seen.page.reload()
    seen.ready().page.wait_for_timeout(1000)  # time in which it would become dark
    assert background(seen) == light
    seen.page.click("[aria-label='Toggle theme']")
    seen.page.wait_for_function("() => localStorage.getItem('gpu-console-theme') === null")
    seen.page.wait_for_function(f"(dark) => {BACKGROUND} === dark", arg=dark)
    assert dark != light and seen.errors == []


def test_a_confirmed_click_evicts_the_model_in_its_own_kernel(opened, kernel):
    seen, second = opened(), opened(VIEWERS)
    for page in (seen, second):
        page.tab("Models")
        page.row("qwen", pid(kernel), "sim:0").wait_for()
    second.page.locator("text=viewer, read only").first.wait_for()
    assert not second.page.locator("tbody button").count()
    seen.row("qwen", pid(kernel)).locator("button", has_text="Evict").click()
    for said in ("Evict qwen?", "This frees 14.0 GiB on sim:0.", f"Held by pid {pid(kernel)}"):
        seen.page.locator("[role=dialog]").get_by_text(said).wait_for()
    seen.page.locator("button", has_text="Evict, freeing").click()
    # It is shown for 20 s.
    seen.page.locator(".outcome.done", has_text="evict qwen").first.wait_for()
    for page in (seen, second):
        page.row("qwen", pid(kernel), "RAM").wait_for()
    assert where(kernel) == "host"
    seen.row("qwen", pid(kernel)).locator("button", has_text="Restore").click()
    seen.page.locator("[role=dialog] button", has_text="Restore").click()
    second.row("qwen", pid(kernel), "sim:0").wait_for()
    assert where(kernel) == "sim:0"
    assert (seen.errors, seen.elsewhere) == ([], [])


def test_a_notebook_of_plain_code_lists_its_variables_and_is_parked(opened, box):
    """At its next cell the memory returns."""
    notebook = Notebook("train.ipynb", f"keeper://{box}/ledger", GPU_DEVICES=DEVICES)
    try:
        notebook.run("import torch\nweights = torch.ones(8 * 2**18)")
        seen = opened()
        seen.tab("Leases")
        row = seen.row("train.ipynb", "its own code")
        row.locator("button", has_text="Variables").click()
        seen.row("weights", "8.0 MiB", "Tensor").wait_for()
        row.locator("button", has_text="Park").click()
        seen.page.locator("[role=dialog]").get_by_text("Park train.ipynb?").wait_for()
        seen.page.locator("button", has_text="Park, freeing 8.0 MiB").click()
        seen.page.locator(".outcome.done", has_text="park train.ipynb").wait_for()
        seen.row("train.ipynb", "parked").wait_for()
        assert "came back from RAM" in notebook.run("float(weights.sum())")
        seen.row("train.ipynb", "sim:0").locator("button", has_text="Park").wait_for()
        assert (seen.errors, seen.elsewhere) == ([], [])
    finally:
        notebook.close()


@pytest.mark.parametrize("no", ["Enter", "Escape", "click"])
def test_cancel_has_the_focus_and_changes_nothing(opened, kernel, no):
    seen = opened()
    seen.tab("Models")
    before = seen.page.locator(".outcome").count()  # of earlier tests
    seen.row("qwen", pid(kernel)).locator("button", has_text="Evict").click()
    cancel = seen.page.locator("[role=dialog] button", has_text="Cancel")
    cancel.wait_for()
    until(lambda: seen.focused() == "Cancel")
    cancel.click() if no == "click" else seen.page.keyboard.press(no)
    cancel.wait_for(state="detached")
    assert where(kernel) == "sim:0" and seen.page.locator(".outcome").count() <= before


def test_the_timeline_follows_a_kernel_and_keeps_what_is_open(opened, kernel):
    """Models come and go while a line is open, a kind is chosen, and a range is dragged."""
    seen = opened()
    seen.tab("Timeline")
    page = seen.page
    page.get_by_role("button", name="15 min").click()
    page.get_by_role("img", name="qwen · ").first.wait_for()
    page.get_by_role("button", name="evict", exact=True).click()
    assert kernel.run("rt.evict('qwen')") == "done"
    lines = page.locator("details", has_text="was offloaded").filter(has_text=pid(kernel))
    lines.locator("summary").click()  # there is one line of this kernel, and lines of other tests
    lines.get_by_text("qwen was evicted by hand").wait_for()
    for _ in range(3):
        assert kernel.run("rt.preload('qwen'); rt.evict('qwen')") == "done"
    until(lambda: lines.count() == 4)
    assert page.locator("details[open]").get_by_text("evicted by hand").is_visible()
    assert not page.locator("details", has_text="was restored").count()
    box = page.locator(".area").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 30)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] - 1, box["y"] + 30)
    page.mouse.up()
    page.wait_for_function("() => /range=Custom&span=[0-9]+-[0-9]+/.test(location.search)")
    assert "kinds=evict" in page.url
    page.get_by_role("button", name="evict", exact=True).click()  # other tests share this page
    page.get_by_role("button", name="15 min").click()
    assert seen.errors == []


def test_what_if_answers_the_question_and_then_preloads(opened, kernel):
    """The answer changes with the kernel: when its model has left, the plan says that the new model fits now."""
    seen = opened()
    seen.tab("What if")
    page = seen.page
    page.get_by_label("or a size, such as 14 GiB").fill("30 GiB")
    page.keyboard.press("Enter")
    page.get_by_text("Never, as things are").wait_for()
    page.get_by_role("combobox", name="A model").click()
    page.locator("li", has_text="qwen").first.click()
    page.get_by_text("qwen is loaded already").wait_for()
    assert kernel.run("rt.evict('qwen')") == "done"
    page.get_by_text("Now · qwen fits in the free memory").wait_for()
    after = page.get_by_text("sim:0 after")
    after.wait_for()
    page.get_by_role("button", name="Preload").click()
    page.locator("[role=dialog] button", has_text="Preload").click()
    page.get_by_text("qwen is loaded already").wait_for()
    after.wait_for(state="hidden")  # the bars of the earlier answer stayed below the new one
    assert where(kernel) == "sim:0" and seen.errors == []


def test_a_narrow_page_shows_its_buttons_and_the_labels_of_its_axis(opened, kernel):
    """In a notebook the page is narrow: the nine labels of a card lay on one another. Times have 24 hours."""
    seen = opened()  # its locale is en-US
    seen.tab("Now")
    seen.page.locator(".tick").first.wait_for()

    def have_room() -> bool:
        boxes = seen.page.locator(".tick").evaluate_all(
            "all => all.map(one => one.getBoundingClientRect()).map(box => [box.left, box.right])"
        )
        shown = [(left, right) for left, right in boxes if right > left]
        return len(shown) >= 2 and all(one[1] <= then[0] for one, then in pairwise(shown))

    for width in (1400, 1000, 700):
        seen.page.set_viewport_size({"width": width, "height": 700})
        until(have_room, f"the labels have room at {width} pixels")
    seen.tab("Models")
    pin = seen.row("qwen", pid(kernel)).locator("button", has_text="Pin")
    pin.wait_for()
    until(lambda: (box := pin.bounding_box()) and 0 < box["x"] and box["x"] + box["width"] <= 700)
    seen.tab("Timeline")
    line = seen.page.locator("summary", has_text="qwen").first
    assert re.fullmatch(r"\d\d:\d\d:\d\d", line.locator(".when").inner_text())
    seen.page.set_viewport_size(WIDE)


def test_a_killed_kernel_disappears_with_its_leases(opened, kernel):
    """There is no other kernel that could notice the death, so the server of the page notices it."""
    seen = opened()
    seen.tab("Leases")
    seen.row("qwen", pid(kernel)).wait_for()
    kernel.signal(signal.SIGKILL)
    seen.row("qwen", pid(kernel)).wait_for(state="detached")


def test_an_owner_that_does_not_answer_is_shown_with_the_time(opened, kernel):
    """C code keeps the interpreter of the model's owner. The page keeps working, and names the owner and the time."""
    seen = opened()
    seen.tab("Models")
    seen.row("qwen", pid(kernel)).locator("button", has_text="Evict").click()
    kernel.block()
    seen.page.locator("button", has_text="Evict, freeing").click()
    seen.page.locator(".outcome.waiting", has_text="no answer since").wait_for()
    beat = seen.page.locator("text=/as of \\d/").inner_text()
    seen.page.wait_for_function("(was) => !document.body.innerText.includes(was)", arg=beat)
    kernel.signal(signal.SIGINT)
    assert "KeyboardInterrupt" in kernel.answer()
    seen.page.locator(".outcome.waiting").wait_for(state="detached")
    seen.page.locator(".outcome.done", has_text="evict qwen").first.wait_for()
    assert where(kernel) == "host"


def test_a_stopped_process_is_continued_from_its_problem(opened, kernel):
    """Its other buttons show that it acts on no request."""
    kernel.run("held = rt.use('qwen'); held.__enter__()")
    kernel.signal(signal.SIGSTOP)
    try:
        seen = opened()
        seen.tab("Models")
        asleep = "button:disabled[title^='Its process is stopped']"
        seen.row("qwen", pid(kernel)).locator(asleep, has_text="Evict").wait_for()
        seen.row(f"pid {pid(kernel)} is stopped").locator("button", has_text="Continue").click()
        seen.page.locator("[role=dialog] button", has_text="Continue").click()
        seen.page.locator(".outcome.done", has_text="runs again").wait_for()
        seen.row(f"pid {pid(kernel)} is stopped").wait_for(state="detached")
    finally:
        kernel.signal(signal.SIGCONT)
    assert kernel.run("held.__exit__(None, None, None)") == "done"


def test_a_table_is_filtered_and_sorted_in_the_browser(opened, kernel):
    assert (
        kernel.run(
            "[(rt.register(n, backend='fake', size=s), rt.preload(n)) for n, s in (('bge', '1GiB'), "
            "('llama', '3GiB'))]"
        )
        == "done"
    )
    seen = opened()
    seen.tab("Models")
    seen.row("llama", pid(kernel)).wait_for()

    def names():
        return seen.row(pid(kernel)).locator("td:first-child").all_inner_texts()

    seen.page.locator("th button", has_text="Size").click()
    until(lambda: names() == ["qwen", "llama", "bge"], "numbers: the largest first")
    seen.page.locator("th button", has_text="Size").click()
    until(lambda: names() == ["bge", "llama", "qwen"])
    seen.page.locator("input[type=search]").first.fill(f"LLAMA {pid(kernel)}")
    until(lambda: names() == ["llama"])
    seen.page.locator("input[type=search]").first.fill("no such model")
    seen.page.locator("text=No row contains all these words.").wait_for()
    seen.page.locator("input[type=search]").first.fill("")


def test_the_page_itself_notices_that_its_server_has_gone(opened, served):
    """When the server has gone, the page shows the age of its figures. This is the last test of the server."""
    seen = opened()
    end(served.process)
    seen.page.locator("text=/no update from the server for \\d+ s/").wait_for()
