"""A policy, an engine and routes are each added to a copy of the package, in the files that CONTRIBUTING names.

A process with the copy then uses the addition. So a second place that would need a change is noticed.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.core.test_layers import ROOT

POLICIES = "gpu_runtime/scheduler/policies.py"
RECIPES = "gpu_runtime/backends/engines/recipes.py"
ENGINES = "gpu_runtime/facts/engines.py"
ROUTES = "gpu_runtime/serving/api/memory.py"
APPLICATION, SERVER = "gpu_runtime/serving/api/app.py", "gpu_runtime/serving/server.py"
KEYS = "gpu_runtime/web/auth.py"


@pytest.fixture
def copy(tmp_path):
    """A copy of the package. `add` puts text after a line of a file, and `run` runs a program with the copy."""
    shutil.copytree(
        ROOT / "gpu_runtime", tmp_path / "gpu_runtime", ignore=shutil.ignore_patterns("__pycache__")
    )

    class Copy:
        def add(self, file: str, after: str, text: str) -> None:
            source = (tmp_path / file).read_text()
            assert source.count(after) == 1, after
            (tmp_path / file).write_text(source.replace(after, after + text))

        def run(self, program: str, **environment: str) -> str:
            path = os.pathsep.join((str(tmp_path), str(ROOT)))  # ROOT: for `tests`
            given = {
                **os.environ,
                "PYTHONPATH": path,
                "XDG_STATE_HOME": str(tmp_path),
                **environment,
            }
            command = [
                sys.executable,
                "-c",
                f"import sys; sys.path[:0] = [{str(tmp_path)!r}]\n{program}",
            ]
            done = subprocess.run(command, env=given, cwd=tmp_path, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            return done.stdout

    return Copy()


def test_a_policy_is_added_in_one_file(copy):
    """It evicts, it is a value of the setting, and a backtest and the help of its command have it."""
    source = Path(ROOT / POLICIES).read_text()
    copy.add(
        POLICIES,
        "POLICIES: Mapping[str, Policy] = {",
        '"mru": lambda lease, world: -lease.last_used, ',
    )
    assert '"mru"' not in source
    shown = copy.run("""
from gpu_runtime import Runtime, cli
from gpu_runtime.settings import Settings
times = iter(range(1, 10**6))
clock = lambda: float(next(times))
with Runtime(devices="sim:10GiB,host:64GiB", ledger="memory:", policy="mru", clock=clock, monitor=False) as rt:
    for name in ("old", "new", "third"):
        rt.register(name, backend="fake", size="4GiB")
    for name in ("old", "new", "third"):
        with rt.use(name):
            pass
    print([name for name in ("old", "new", "third") if rt.here(name)])
print(Settings.load(gpu_policy="mru").gpu_policy)
print(Runtime.backtest.__wrapped__.__kwdefaults__["policy"])
try:
    cli.main(["backtest", "--help"])
except SystemExit:
    pass
""")
    left, setting, compared, usage = shown.split("\n", 3)
    assert (left, setting) == ("['old', 'third']", "mru")
    assert "mru" in compared.split(",") and "mru" in usage


def test_an_engine_is_added_as_a_recipe_and_a_line_in_the_registry(copy, tmp_path):
    """Its server starts and answers a chat, its cards are named, and the catalogue takes the fields that it reads."""
    copy.add(ENGINES, "ENGINES = {", '"toy": Engine("Toy", ("dtype",), 7, tensor_parallel=True), #')
    recipe = '''

class Toy(Recipe):
    """Starts the tests' stand-in for vLLM."""

    LAYOUT = "balanced"

    def missing(self) -> str:
        return ""

    def command(self, order: LaunchOrder) -> Command:
        words = ["vllm", "serve", order.source, "--port", str(order.port), "--served-model-name", order.spec.name]
        program = (sys.executable, "-m", "tests.engine_stand_in")
        return Command((*program, *words, "--dtype", order.spec.options["dtype"]), {"VLLM_API_KEY": order.key})
'''
    copy.add(RECIPES, 'return Command((*program, *words), {"GPU_ENGINE_KEY": order.key})', recipe)
    entry = (
        "models:\n- {name: written, path: org/name, runtime: toy, memory: 1GiB, dtype: bfloat16}\n"
    )
    (tmp_path / "models.yaml").write_text(entry)
    shown = copy.run(
        """
import asyncio
from gpu_runtime import Runtime
from gpu_runtime.errors import BadSetting
from gpu_runtime.facts import Share, cards_label
from gpu_runtime.serving.queue import calls_at_once
with Runtime(devices="sim:2x10GiB,host:64GiB", ledger="memory:", catalog="models.yaml") as rt:
    rt.register("given", "org/name", backend="toy", size="1GiB", dtype="bfloat16")
    for name in ("given", "written"):
        with rt.use(name) as server:
            print(server.base_url.rpartition(":")[0], rt.spec(name).options["dtype"])
    print(calls_at_once(rt.spec("given")))
    try:
        rt.register("other", "org/name", backend="toy", size="1GiB", gpu_layers=2)
    except BadSetting as error:
        print(type(error).__name__)
print(cards_label((Share("cuda:0", 1), Share("cuda:1", 1)), "toy"))
""",
        GPU_ENGINE_PORTS="18300-18399",
        STAND_IN_RECORD=str(tmp_path / "record"),
    )
    server = "http://127.0.0.1 bfloat16"
    assert shown.split("\n")[:-1] == [server, server, "7", "BadSetting", "GPUs: 0,1 (TP:2)"]


def test_a_route_is_added_in_one_file(copy):
    """It answers a visitor, refuses others as every route does, and the description of the routes has it."""
    route = '''

    @routes.post("/added")
    def post_added(actor: str = ACTS) -> Json:
        """An added route."""
        return {"added": rt.specs()[0].name}
'''
    copy.add(ROUTES, "return stats(rt.status())", route)
    shown = copy.run("""
from gpu_runtime import Runtime
from tests.serving.app_client import VIEWER, client
with Runtime(devices="sim:10GiB,host:64GiB", ledger="memory:", monitor=False) as rt:
    rt.register("qwen", backend="fake", size="1GiB")
    for visitor in ({}, {"visitor": VIEWER}, {"visitor": None}):
        answer = client(rt, **visitor).post("/memory/added")
        print(answer.status_code, answer.json().get("added"))
    print("/memory/added" in client(rt).get("/openapi.json").json()["paths"])
""")
    assert shown.split("\n")[:-1] == ["200 qwen", "403 None", "401 None", "True"]


@pytest.mark.parametrize("known", [True, False])
def test_a_first_word_of_a_path_is_added_to_the_server_and_for_keys(copy, known):
    """Without the word, the server of `gpu serve` has no such path, and programs with a key are refused."""
    copy.add(
        APPLICATION, "_add_engine_log(app)\n", '    app.get("/added")(lambda: {"added": True})\n'
    )
    if known:
        copy.add(SERVER, '_WORDS = r"memory', " added")
        copy.add(KEYS, 'API_PATHS = ("/v1/"', ', "/added"')
    shown = copy.run("""
import urllib.error, urllib.request
from gpu_runtime import Runtime
from gpu_runtime.serving.server import serve
from gpu_runtime.web.auth import API_PATHS
with Runtime(devices="sim:1GiB,host:1GiB", ledger="memory:", monitor=False) as rt:
    url, token = serve(rt, "127.0.0.1")
    request = urllib.request.Request(f"{url}/added", headers={"Authorization": f"Bearer {token}"})
    try:
        print(urllib.request.urlopen(request, timeout=60).status)
    except urllib.error.HTTPError as error:
        print(error.code)
print("/added".startswith(API_PATHS))
""")
    assert shown.split("\n")[:-1] == (["200", "True"] if known else ["404", "False"])
