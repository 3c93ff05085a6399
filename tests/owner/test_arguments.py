"""Any value for any argument is refused in one sentence, or gives a book that every process can decode."""

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from gpu_runtime import BadSetting, BadSize, GpuError, NeedsWith, Runtime
from gpu_runtime.arguments import (
    FIELDS,
    KEYWORDS,
    OPTIONS,
    REFUSED,
    RULES,
    read,
    read_options,
    rules_of,
)
from gpu_runtime.facts import LeaseId
from gpu_runtime.facts.book import decode_book, encode
from gpu_runtime.fleet.client import Fleet
from gpu_runtime.safe_text import MOST_MESSAGE
from gpu_runtime.settings import NAMES

LONGEST_SENTENCE = 1500  # characters


# -- values that a caller may pass by mistake, or to do harm
class _Failing:
    """An object whose special methods all raise, also `repr`."""

    def _fail(self, *_: Any) -> Any:
        raise ZeroDivisionError("a value's own code")

    __repr__ = __str__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _fail
    __hash__ = __bool__ = __len__ = __iter__ = __contains__ = __getattr__ = _fail
    __index__ = __int__ = __float__ = __fspath__ = __format__ = _fail


class _LyingText(str):
    """Text whose own special methods raise: it cannot be compared, hashed or shown."""

    __repr__ = __str__ = __eq__ = __hash__ = __len__ = __iter__ = strip = _Failing._fail  # type: ignore[assignment]


class _LyingNumber(int):
    __repr__ = __eq__ = __lt__ = __le__ = __hash__ = __bool__ = __abs__ = _Failing._fail  # type: ignore[assignment]


class _BytesPath:
    def __fspath__(self) -> bytes:
        return b"/model\xff"


class _NotItself:
    @property
    def __class__(self) -> type:  # type: ignore[override]
        raise ZeroDivisionError("a value's own code")


MANY = 2**21  # 2 MiB of text
WORDS = (
    "", " ", "qwen", "sim:0", "sim:0,1", "8GiB", "14", "--5", "-1", "yes", "auto", "torch", "a@b",
    "\udcff", "a\udce9.ipynb", "a\0b", "\x1b[31mred", "a\nb", "9" * 5000, "٣ GiB", "²", "nan", "inf",
    "/dev/null", "/no/such", "org/name", "*", "%s{}", "1e400", "x" * MANY,
)  # fmt: skip
NUMBERS = (
    0, 1, -1, 14, 2**31, 2**63, 2**64, -(2**63), 10**400, -(10**400), 0.5, -0.0, 1e308,
    float("nan"), float("inf"), True, False,
)  # fmt: skip
# Functions that return a value: Hypothesis itself cannot handle the values that fail.
STRANGE: tuple[Callable[[], Any], ...] = (
    _Failing, _NotItself, _BytesPath, object,
    lambda: None,
    lambda: _LyingText("qwen"),
    lambda: _LyingNumber(7),
    lambda: b"x" * MANY,
    lambda: ["x" * MANY] * 3,
    lambda: LeaseId(None, []),  # type: ignore[arg-type]
    lambda: LeaseId("1.1.0", "\udcff"),
    lambda: [_Failing()],
    lambda: {"sim:0": _Failing()},
    lambda: ["sim:0", None],
)  # fmt: skip
Make = Callable[[], Any]


def _returns(value: Any) -> Make:
    return lambda: value


FIXED: tuple[Make, ...] = (*STRANGE, *map(_returns, (*WORDS, *NUMBERS)))
MADE = st.one_of(
    st.integers(),
    st.floats(),
    st.text(st.characters(exclude_categories=()), max_size=20),  # lone surrogates too
    st.binary(max_size=8),
    st.lists(st.sampled_from(WORDS) | st.none(), max_size=3),
    st.dictionaries(st.sampled_from(WORDS), st.integers(), max_size=2),
).map(_returns)
VALUES = st.one_of(st.sampled_from(FIXED), MADE)


# -- the public methods, and arguments that they accept
class Still:
    """A kernel in which nothing runs."""

    why_not, mark, change = str, int, str


OF_A_MODEL = "forget spec here use preload restore evict cancel pin unpin inspect delete".split()
BARE = "park hibernate unpark defrag free who events evictions history decisions report backtest".split()
PLAIN: dict[str, dict[str, Any]] = {
    **{method: {"name": "qwen"} for method in OF_A_MODEL},
    **{method: {} for method in BARE},
    "register": {"name": "new", "backend": "fake", "size": "1GiB"},
    "adopt": {"name": "new", "module": torch.nn.Linear(4, 4).eval()},
    "lease": {"size": "1GiB"},
    "on_behalf_of": {"name": "ann"},
    "move": {"name": "qwen", "device": "sim:1"},
    "attach_kernel": {"stillness": Still()},
    "resume": {"process": str(os.getpid())},
    "interrupt": {"process": "nobody"},
    "drain": {"device": "sim:0"},
    "tell_waits": {"told": None, "arrived": None},
    "plan": {"name_or_size": "qwen", "source": None, "timeout": 1},
    "load": {"name": "qwen", "source": None, "progress": None, "timeout": 1},
    "why": {"name": "qwen", "replay": False, "oom": False},
    "apply": {"file": "/no/such.yaml"},
}
# A call in which the parameter matters; the others of `register` and so on need no more than PLAIN.
DEVICES = "sim:2x24GiB,host:64GiB"


def public_methods() -> dict[str, Any]:
    """Every public method of a runtime that takes an argument."""
    members = inspect.getmembers(Runtime, inspect.isfunction)
    taking = {name: one for name, one in members if len(inspect.signature(one).parameters) > 1}
    return {name: one for name, one in taking.items() if not name.startswith("_")}


def parameters(method: Any) -> list[str]:
    """The names of a method's parameters, without `self` and without `**options`."""
    found = list(inspect.signature(method).parameters.values())[1:]
    return [one.name for one in found if one.kind is not inspect.Parameter.VAR_KEYWORD]


CALLS = [
    (name, parameter) for name, one in public_methods().items() for parameter in parameters(one)
]


def test_every_public_method_is_tried():
    assert set(PLAIN) == set(public_methods())


def test_the_keywords_of_register_are_those_of_the_table():
    found = inspect.signature(Runtime.register).parameters
    assert {name: found[name].default for name in KEYWORDS} == KEYWORDS
    assert {*found} - {*KEYWORDS} == {"self", "name", "source", "restore_on_call", "options"}


@pytest.mark.parametrize("method", [*PLAIN, "__init__"])
def test_every_parameter_has_a_rule(method):
    """`checked` can check only parameters that have a rule. A new parameter needs a line in the table."""
    function = inspect.unwrap(getattr(Runtime, method))
    assert set(rules_of(function)) == set(parameters(function))


def fleet_methods() -> list[Any]:
    """The methods of a fleet whose arguments are checked."""
    members = [one for name, one in inspect.getmembers(Fleet, inspect.isfunction) if name[0] != "_"]
    return [one for one in members if len(inspect.signature(one).parameters) > 1]


@pytest.mark.parametrize("method", fleet_methods(), ids=lambda one: one.__name__)
def test_every_argument_of_a_fleet_is_checked(method):
    """A wrong value must not reach the wishes, which all hosts read. Unknown keywords name the nearest."""
    function = inspect.unwrap(method)
    assert function is not method and set(rules_of(function)) == set(parameters(function))
    with pytest.raises(BadSetting, match="the nearest is"):
        method(None, unknown=1)


@pytest.mark.parametrize(
    ("method", "given"),
    [
        ("apply", {"file": "x", "copies": "2"}),
        ("apply", {"file": "x", "copies": -1}),
        ("apply", {"file": "x", "copies": True}),
        ("apply", {"file": "x", "dedicated": 1}),
        ("plan", {"name": 5}),
        ("use", {"name": "qwen", "importance": "supreme"}),
        ("create_slot", {"model": "qwen", "host": "a", "devices": []}),
        ("create_slot", {"model": "qwen", "host": "a", "devices": ["cuda:0", "cuda:0"]}),
        ("status", {"timeout": None}),
    ],
)
def test_a_wrong_value_never_reaches_the_fleet(method, given):
    with pytest.raises(GpuError):
        getattr(Fleet, method)(None, **given)


def test_the_table_has_no_rule_without_a_parameter():
    used = set()
    for function in (*public_methods().values(), *fleet_methods(), Runtime.__init__):
        names = parameters(function)
        method = inspect.unwrap(function).__name__
        used |= {*names, *(f"{method}.{name}" for name in names)}
    assert set(RULES) - used == set()


# -- the law
@contextmanager
def box() -> Iterator[Runtime]:
    """A runtime on two simulated cards, with the model `qwen` on one of them."""
    with Runtime(devices=DEVICES, ledger="memory:", monitor=False) as rt:
        prepare(rt)
        yield rt


def prepare(rt: Runtime) -> None:
    """Restores the initial state: only `qwen` is registered, it is on a card, and no card is drained."""
    for spec in rt.specs():
        rt.forget(spec.name)
    rt.drain("sim:0", undo=True)
    rt.register("qwen", backend="fake", size="2GiB")
    rt.preload("qwen")


def attempt(rt: Runtime, method: str, arguments: dict[str, Any]) -> Exception | None:
    """Calls the method. Returns its GpuError, or None if it returned. Any other exception fails the test."""
    try:
        answer = getattr(rt, method)(**arguments)
        if method in ("use", "lease", "on_behalf_of"):
            with answer:
                pass
        if method == "register":
            rt.preload(answer.name)
    except GpuError as error:
        return error
    return None


def require_lawful(rt: Runtime, error: Exception | None) -> None:
    """Checks that the error is a bounded, printable sentence, and that the book counts `qwen` once."""
    if error is not None:
        sentence = str(error)
        assert 0 < len(sentence) <= LONGEST_SENTENCE
        assert sentence.replace("\n", "").isprintable()
    rt._session.publish()
    book = rt._session.ledger.read()
    assert decode_book(encode(book)) == book
    for section in book.sections.values():
        assert all(type(lease.keep) is bool for lease in section.leases)
    claimed = book.claims()
    for device, limit in book.limits.items():
        assert 0 <= claimed.get(device, 0) <= limit


def try_value(rt: Runtime, method: str, arguments: dict[str, Any]) -> Exception | None:
    """Calls the method, checks the law and restores the runtime. Returns the error of the call."""
    error = attempt(rt, method, arguments)
    require_lawful(rt, error)
    if error is None:
        prepare(rt)
    return error


@pytest.mark.thorough
@pytest.mark.parametrize(("method", "parameter"), CALLS)
def test_every_strange_value_of_every_argument_is_an_error_or_a_lawful_book(method, parameter):
    with box() as rt:
        for make in FIXED:
            try_value(rt, method, {**PLAIN[method], parameter: make()})


@given(calls=st.lists(st.tuples(st.sampled_from(CALLS), VALUES), max_size=10))
def test_any_value_of_any_argument_is_an_error_or_a_lawful_book(calls):
    with box() as rt:
        for (method, parameter), make in calls:
            try_value(rt, method, {**PLAIN[method], parameter: make()})


NEW = {"name": "new", "source": "/no/such", "size": "1GiB"}


@pytest.mark.thorough
@pytest.mark.parametrize("option", sorted({*OPTIONS, *REFUSED}))
def test_every_strange_value_of_every_option_is_an_error_or_a_lawful_book(option):
    backends = REFUSED[option][0] if option in REFUSED else FIELDS[option].backends
    backend = (backends or ("transformers",))[0]
    with box() as rt:
        for make in FIXED:
            try_value(rt, "register", {**NEW, "backend": backend, option: make()})


@given(
    backend=st.sampled_from(("fake", "transformers", "llama_cpp", "torch", "vllm")),
    options=st.dictionaries(st.sampled_from(sorted({*OPTIONS, *REFUSED})), VALUES, max_size=3),
)
def test_any_values_of_any_options_are_an_error_or_a_lawful_book(backend, options):
    made = {option: make() for option, make in options.items()}
    with box() as rt:
        try_value(rt, "register", {**NEW, "backend": backend, **made})


@given(option=st.text(st.characters(), max_size=30))
@example(option="x" * MANY)
@example(option="contxt_length")
def test_an_option_without_a_rule_is_refused_with_the_nearest_name(option):
    """The misspelt `contxt_length=8192` was ignored, and no memory was reserved for the context."""
    if option in FIELDS or option in REFUSED or option in RULES:
        return
    with box() as rt:
        error = try_value(rt, "register", {**PLAIN["register"], option: 8192})
        assert isinstance(error, BadSetting)
        assert "the nearest is " in str(error)


@pytest.mark.parametrize(
    ("backend", "option", "value"),
    [
        ("transformers", "gpu_layers", 20),
        ("vllm", "gpu_layers", 20),
        ("llama_cpp", "attn_implementation", "sdpa"),
        ("llama_cpp", "task", "text-generation"),
        ("llama_cpp", "dtype", "bfloat16"),
        ("llama-server", "torch_dtype", "bfloat16"),
        ("ollama", "dtype", "bfloat16"),
        ("llama_cpp", "runtime_args", ["--seed", "1"]),
        ("transformers", "runtime_args", ["--seed", "1"]),
        ("llama-server", "isolated", False),
    ],
)
def test_an_option_of_another_backend_is_refused(backend, option, value):
    """With `gpu_layers=20` a transformers model was accepted, and all its layers were on the card."""
    with box() as rt, pytest.raises(BadSetting, match=f"option that the backend {backend} takes"):
        rt.register("m", "org/name", backend=backend, **{option: value})


@pytest.mark.parametrize(
    ("backend", "option", "value"),
    [
        ("llama_cpp", "n_gpu_layers", 3),
        ("llama_cpp", "n_ctx", 512),
        ("llama-server", "tensor_split", [1]),
        ("llama_cpp", "gpu_layers", -2),
        ("llama_cpp", "gpu_layers", True),
        ("llama_cpp", "gpu_layers", 1.5),
        ("llama_cpp", "split_mode", "diagonal"),
        ("llama_cpp", "main_gpu", -1),
        ("llama-server", "main_gpu", "0"),
        ("transformers", "device_map", "auto"),
        ("transformers", "quantization_config", {}),
        ("transformers", "load_in_8bit", True),
    ],
)
def test_an_impossible_option_is_refused_before_the_source_is_read(backend, option, value):
    """In an earlier version, `register` accepted `split_mode="diagonal"` if a size was declared."""
    with box() as rt, pytest.raises(BadSetting, match=option):
        rt.register("m", "org/name", backend=backend, size="1GiB", **{option: value})


@pytest.mark.parametrize(
    ("source", "option", "value"),
    [
        ("llama-7B-Q4", "contxt_length", 8192),
        ("llama-7B-Q4", "trust_remote_code", "yes"),
        ("/m/x-7B.gguf", "split_mode", []),
        ("/m/x-7B.gguf", "n_ctx", 512),
    ],
)
def test_a_plan_of_an_unregistered_source_checks_its_options(source, option, value):
    """A misspelt `contxt_length` was ignored, and `split_mode=[]` raised TypeError."""
    with box() as rt, pytest.raises(BadSetting, match=option):
        rt.plan(source, **{option: value})


@pytest.mark.parametrize(
    "argument",
    [
        {"size": "8GiB"},
        {"layout": "balanced"},
        {"backend": "transformers"},
        {"quantization": "int8"},
        {"devices": "sim:0"},
        {"context_length": 8192},
    ],
)
def test_what_has_no_effect_on_a_module_is_refused(argument):
    """In an earlier version, `register("m", module, size="8GiB")` was accepted, and the size was ignored."""
    with box() as rt, pytest.raises(BadSetting, match=next(iter(argument))):
        rt.register("m", torch.nn.Linear(4, 4).eval(), **argument)
    with box() as rt:
        assert rt.register("m", torch.nn.Linear(4, 4).eval(), model_type="llm").model_type == "llm"


@pytest.mark.parametrize("parameter", parameters(Runtime.__init__))
def test_every_strange_value_of_every_argument_of_the_runtime_itself(parameter):
    plain = {"devices": "sim:1GiB", "ledger": "memory:", "monitor": False}
    for make in FIXED:
        try:
            with Runtime(**{**plain, parameter: make()}) as rt:
                require_lawful(rt, None)
        except GpuError as error:
            assert 0 < len(str(error)) <= LONGEST_SENTENCE


@pytest.mark.thorough
@pytest.mark.parametrize("setting", sorted(set(NAMES) - {"gpu_ledger"}))
def test_every_strange_value_of_every_setting(tmp_path, monkeypatch, setting):
    """Every setting can also be given as a keyword of the runtime."""
    monkeypatch.chdir(tmp_path)
    plain = {"gpu_devices": "sim:1GiB", "ledger": "memory:", "monitor": False}
    for make in FIXED:
        try:
            with Runtime(**_named({**plain, setting: make()})) as rt:
                rt.register("qwen", backend="fake", size="1MiB")
                rt.preload("qwen")
                require_lawful(rt, None)
        except GpuError as error:
            assert 0 < len(str(error)) <= LONGEST_SENTENCE


def _named(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments, with the shorter keyword for the three settings that have one."""
    short = {"gpu_devices": "devices", "gpu_catalog": "catalog", "gpu_policy": "policy"}
    return {short.get(name, name): value for name, value in arguments.items()}


# -- the examples of the trial


@pytest.mark.parametrize(
    ("call", "what_to_type"),
    [
        (lambda rt: rt.evict(None), "'qwen@4121'"),
        (lambda rt: rt.decisions(-1), "a number of rows, 0 or more"),
        (lambda rt: rt.register("m", backend="fake", size=1, importance="--5"), "urgent, high"),
        (lambda rt: rt.use("qwen", timeout=["30s"]), "'10m' or '2h'"),
        (lambda rt: rt.lease("14"), "Did you mean 14 GiB? Write it like '14 B' if you mean bytes"),
        (lambda rt: rt.plan("14"), "Did you mean 14 GiB? Write it like '14 B' if you mean bytes"),
        (lambda rt: rt.plan(14 * 10**400), "Write it like '8 GiB'"),
        (lambda rt: rt.preload("qwen", timeout=1e300), "'10m' or '2h'"),
    ],
)
def test_an_error_says_what_to_type(call, what_to_type):
    with box() as rt, pytest.raises((BadSetting, BadSize)) as error:
        call(rt)
    assert what_to_type in str(error.value)


@pytest.mark.parametrize(
    ("name", "least", "most", "step"),
    [
        ("points", 1, 1_000_000, 1),
        ("limit", 0, 2**31 - 1, 1),
        ("copies", 0, 10_000, 1),
        ("days", 0.1, 36_499.9, 0.1),
        ("gpu_layers", -1, 2**31 - 1, 1),
        ("context_length", 1, 2**27, 1),
        ("sequences", 1, 2**16, 1),
        ("seed", -1, 2**32 - 1, 1),
        ("main_gpu", 0, 2**31 - 1, 1),
        ("n_batch", 1, 2**31 - 1, 1),
        ("rope_freq_base", -(2**31) + 1, 2**31 - 1, 1),
    ],
)
def test_numbers_are_accepted_to_their_ends_and_not_beyond(name, least, most, step):
    rule = FIELDS[name].rule if name in FIELDS else RULES[name]
    for value in (least, most):
        assert read(name, value, rule) == value
    for value in (least - step, most + step):
        with pytest.raises(BadSetting):
            read(name, value, rule)


@pytest.mark.parametrize(
    ("name", "most"),
    [("model_type", 200), ("adopt.name", 200), ("backend", 4096), ("file", 4096), ("name", 4096)],
)
def test_text_is_accepted_to_its_longest_and_not_beyond(name, most):
    assert read(name, "x" * most, RULES[name]) == "x" * most
    with pytest.raises(BadSetting):
        read(name, "x" * (most + 1), RULES[name])


@pytest.mark.parametrize("dtype", ["float16", torch.float16])
def test_both_names_of_the_dtype_have_an_effect(dtype):
    """With a dtype of torch, vLLM was started with `--dtype torch.float16`, and failed."""
    assert read_options("vllm", {"dtype": dtype}) == {"dtype": "float16"}
    assert read_options("vllm", {"torch_dtype": dtype}) == {"dtype": "float16"}
    both = {"torch_dtype": "float32", "dtype": dtype}
    assert read_options("torch", both) == {"dtype": "float16"}
    assert read_options("torch", dict(reversed(both.items()))) == {"dtype": "float16"}


def test_an_option_that_is_none_is_left_out():
    given = {"context_length": None, "thinking": False, "sequences": 1}
    assert read_options("transformers", given) == {"thinking": False, "sequences": 1}


def test_a_long_value_is_quoted_in_part():
    error = BadSize("x" * MANY)
    assert len(str(error)) < 300
    assert len(str(GpuError("x" * MANY))) == MOST_MESSAGE


def test_a_message_can_be_printed_and_stored():
    assert str(GpuError("no \udce9.gguf\n  \x1b[31mType this")) == (
        "no \\udce9.gguf\n  \\x1b[31mType this"
    )


@pytest.mark.parametrize(
    ("call", "nearest"),
    [
        (lambda rt: rt.register("a", backend="fake", size="1GiB", importnce="low"), "importance"),
        (lambda rt: rt.register("a", backend="fake", size=1, contxt_length=8192), "context_length"),
        (lambda rt: rt.adopt("a", object(), keeep=True), "keep"),
        (lambda rt: rt.use("a", timeot=3), "timeout"),
        (lambda rt: rt.lease("1GiB", purpse="x"), "purpose"),
        (lambda rt: rt.evict("a", forced=True), "force"),
        (lambda rt: Runtime(device="sim:1GiB"), "devices"),
        (lambda rt: Runtime(gpu_memory_max_percnt=1), "gpu_memory_max_percent"),
    ],
)
def test_an_unknown_keyword_is_refused_with_the_nearest_one(runtime, call, nearest):
    rt = runtime()
    with pytest.raises(BadSetting) as error:
        call(rt)
    assert str(error.value).endswith(f"{nearest}.")


@pytest.mark.parametrize("call", ["rt.use('a')", "rt.lease('2.0 GiB')"])
def test_a_block_without_with_says_so(runtime, call):
    """`model = rt.use("a")` is the first mistake of a new user."""
    rt = runtime()
    rt.register("a", backend="fake", size="1GiB")
    block = eval(call)
    assert call in repr(block)
    for wrong in (lambda: block.generate, lambda: block("hello")):
        with pytest.raises(NeedsWith, match="`with` is missing") as error:
            wrong()
        assert f"with {call} as " in str(error.value)
    assert not hasattr(block, "generate") and not hasattr(block, "_repr_html_")


def test_objects_of_the_runtime_are_readable(runtime):
    rt = runtime()
    spec = rt.register("a", backend="fake", size="1GiB", importance="high", keep=True)
    rt.preload("a")
    assert str(spec) == "a: fake, 1.0 GiB, high, kept"
    assert [str(lease) for lease in rt.status().leases()] == ["a: 1.0 GiB on sim:0"]
    assert str(rt.probe.devices[0]).startswith("sim:0: ")
    assert repr(rt).startswith("<Runtime with 1 model on sim:0: ") and "memory:" in repr(rt)
    rt.close()
    assert repr(rt) == "<Runtime, closed>"
