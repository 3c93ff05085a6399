"""Which models a cell uses. The scan reads only the text of the cell."""

import pytest
from gpu import look_ahead
from gpu.look_ahead import Scan, ScannedModels

KNOWN = ("a", "b", "c", "qwen:8b")


def uses(code, **names):
    return list(Scan(KNOWN, names).read(code).uses)


@pytest.mark.parametrize(("code", "wanted"), [
    ('with rt.use("a") as m: m(1)', ["a"]),
    ('N = "b"\nwith rt.use(N): pass', ["b"]),
    ('N: str = "b"\nrt.use(N)', ["b"]),
    ('for n in ["a", "b"]:\n    with rt.use(n) as m: pass', ["a", "b"]),
    ('names = ("c", "a")\nfor n in names: rt.preload(n)', ["c", "a"]),
    ('for i, n in enumerate(["a", "c"]): rt.preload(n)', ["a", "c"]),
    ('[rt.preload(n) for n in ("a", "b")]', ["a", "b"]),
    ('X, Y = "a", "b"\nrt.use(Y)', ["b"]),
    ('for n, size in {"a": 1}.items(): rt.use(n)', ["a"]),
    ('if (n := "c"): rt.use(n)', ["c"]),
    ("%gpu preload a", ["a"]),
    ("if True:\n    %gpu restore a", ["a"]),
    ("%gpu evict a", []),
    ("%%gpu 2GiB --model b\nx = 1", ["b"]),
    ('%%gpu --model=b\nrt.use("a")', ["b", "a"]),
    ('%%time\nwith rt.use("c"): pass', ["c"]),
    ('%time rt.use("c")', ["c"]),
    ('%%writefile x.py\nrt.use("c")', []),
    ("x = %gpu load qwen:8b path", ["qwen:8b"]),
    ("%gpu load qwen:8b path", ["qwen:8b"]),
    ('%gpu preload "a', []),
    ('# rt.use("a")\ns = "rt.use(\\"b\\")"', []),
    ('rt.use(f"{x}")', []),
    ('def f():\n    with rt.use("a"): pass', []),
    ('def f():\n    with rt.use("a"): pass\nf()', ["a"]),
    ('def f(n, other="b"):\n    rt.use(n); rt.use(other)\nf("a")', ["a", "b"]),
    ('def f(n):\n    rt.use(n)\nf(n="c")', ["c"]),
    ("def f():\n    f()\nf()", []),
    ("x = 1 +", []),
    ('gpu_runtime.runtime().use("a")', ["a"]),
    ('await go(rt.use("b"))', ["b"]),
    ('[x for x in rt.use("c")]', ["c"]),
    ("!ls", []),
    ('pipe("a")', []),
    ('with rt.use("a") as x, rt.use("b") as y: pass', ["a", "b"]),
    ('with rt.use(name="a"): pass', ["a"]),
    ('rt.use("unknown")', []),
    ('rt.use("a")\nrt.use("a")', ["a"]),
    ('N = "a"\nN = compute()\nrt.use(N)', []),
    ('rt.use("a" if fast else "b")', ["a", "b"]),
    ('MODELS = ["a", "b"]\nrt.use(MODELS[0])', ["a", "b"]),
    ('n = "a"\ndef n():\n    pass\nrt.use(n)', []),
    ("rt.use('a')#" + "x" * (look_ahead.MOST_CHARACTERS - 12), ["a"]),
    ("rt.use('a')#" + "x" * (look_ahead.MOST_CHARACTERS - 11), []),
])  # fmt: skip
def test_the_models_of_a_cell_are_found_in_their_order(code, wanted):
    assert uses(code) == wanted


def test_the_variables_of_the_notebook_and_of_waiting_cells_count():
    assert uses("with rt.use(N): pass", N="c") == ["c"]
    assert uses("for n in NAMES: rt.use(n)", NAMES=["b", "a"]) == ["b", "a"]
    assert uses("for n in NAMES: rt.use(n)", NAMES=range(10**9)) == []
    scan = Scan(KNOWN, {"M": "a"})
    cells = ['def g():\n    rt.use("b")', "g()", 'M = "c"', "rt.use(M)", "g = 1", "g()"]
    assert [scan.read(code).uses for code in cells] == [(), ("b",), (), ("c",), (), ()]
    scan = Scan(KNOWN, {"n": "a"})
    assert scan.read('def f(n):\n    rt.use(n)\nf("b")\nrt.use(n)').uses == ("b", "a")


def test_a_function_of_an_earlier_cell_is_read_without_its_source():
    space = {"NAME": "c"}
    exec('def h():\n    return rt.use("qwen:8b")', space)
    exec("def by_name(n):\n    return rt.use(n)", space)
    exec("def by_variable():\n    return rt.use(NAME)", space)
    exec('def inner():\n    return [rt.preload(x) for x in ("a", "b")]', space)
    exec("def outer():\n    return inner()", space)
    exec('def harmless():\n    return "a"', space)
    assert uses("h()", **space) == ["qwen:8b"]
    assert uses('by_name("b")', **space) == ["b"]
    assert uses("by_variable()", **space) == ["c"]
    assert uses("outer()", **space) == ["a", "b"]
    assert uses("harmless()", **space) == []
    exec("def f4():\n    return rt.use('a')", space)
    for n in range(3, -1, -1):
        exec(f"def f{n}():\n    return f{n + 1}()", space)
    assert (uses("f1()", **space), uses("f0()", **space)) == (["a"], []), "so deep and no deeper"


def test_a_variable_that_is_a_governed_model_counts_as_its_use():
    model = object()
    scan = Scan(KNOWN, {"model": model}, lambda value: "b" if value is model else "")
    assert scan.read("out = model(x)").uses == ("b",)
    assert scan.read("model = None\nprint(model)").uses == ()


def test_a_model_that_is_only_named_is_told_apart():
    """It is not loaded ahead, and not evicted for another model while the cell runs."""
    assert Scan(KNOWN, {}).read('print(rt.plan("a"), rt.use("b"))') == ScannedModels(
        ("b",), {"a", "b"}
    )
    assert Scan(KNOWN, {}).read("%gpu evict c").mentions == {"c"}


def test_nothing_of_the_cell_runs_and_nothing_of_a_value_is_called():
    class Trap:
        def __getattribute__(self, name):
            raise AssertionError(f"{name} was read")

        def __eq__(self, other):
            raise AssertionError("it was compared")

        __hash__ = None

    assert uses("rt.use(x); x(); [y for y in x]", x=Trap()) == []


def test_any_text_is_read_to_its_end():
    """Two functions that call each other would be read for ever."""
    for code in ("(" * 5000, "x\0y", "\\", "1" * 200_000, "%", "%%", "?x", "%%gpu", "a" * 10**6):
        assert Scan(KNOWN, {}).read(code).uses == ()
    scan = Scan(KNOWN, {})
    scan.read("def f():\n    g(); g(); g()\ndef g():\n    f(); f(); f()\nf()\n" * 3)


def followed_calls(monkeypatch, scan, code):
    """The reading of `code`, and the number of calls that it followed."""
    cells, kind = [], look_ahead._Cell
    monkeypatch.setattr(look_ahead, "_Cell", lambda scan: cells.append(kind(scan)) or cells[-1])
    return scan.read(code), cells[-1].followed


def test_calls_of_functions_that_call_many_are_read_up_to_a_limit(monkeypatch):
    """Three functions with 30 calls each make 27,000 calls of one."""
    scan = Scan(KNOWN, {})
    for i in range(3):
        scan.read(f"def h{i}(x):\n" + f"    y = h{i + 1}(x)\n" * 30)
    reading, calls = followed_calls(monkeypatch, scan, "h0(1)\n" * 100 + 'rt.use("b")')
    assert calls == look_ahead.MOST_CALLS and reading.uses == ("b",)
    names = {}
    for i in range(100):
        called = [f"f{(7 * i + k) % 100}(x)" for k in range(30)]
        exec(f"def f{i}(x):\n    return {' + '.join(called)}", names)
    reading, calls = followed_calls(monkeypatch, Scan(KNOWN, names), 'f1(3)\nrt.use("b")')
    assert calls == look_ahead.MOST_CALLS and reading.uses == ("b",)
