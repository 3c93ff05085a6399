"""Metrics for others' tools: `gpu exporter`, and the dashboards and rules of docs/grafana.

Each expression there is valid, and names figures that exist. A real Prometheus reads an exporter and answers them all;
this part is skipped where there is none (`apt install prometheus`).
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlencode
from urllib.request import urlopen

import promql_parser
import pytest
import yaml
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from gpu_runtime.facts import HOST, Event, Share, Ticket
from gpu_runtime.rendering import answers
from gpu_runtime.serving import metrics
from gpu_runtime.serving.fleet_server import FleetMetrics
from gpu_runtime.serving.metrics import CARD, HOLDER, Metrics
from gpu_runtime.telemetry.hours import DAY, ON_CARD
from gpu_runtime.units import GIB
from tests.clock import until
from tests.faces import samples
from tests.faces.samples import WALL
from tests.faces.served import OPERATORS, VIEWERS, end, free_port, gpu_console, serving

DOCS = Path(__file__).parents[2] / "docs"
BOARDS = sorted((DOCS / "grafana").glob("*.json"))
RULES = DOCS / "grafana" / "alerts.yaml"
VARIABLES = {"$__rate_interval": "5m", "$Hostname": ".*", "$user": "ann"}
KNOWN = dict(
    re.findall(
        r"^\| `(gpuconsole_\w+)` \| \w+ \| (.*?) \|",
        (DOCS / "reference/metrics.md").read_text(),
        re.M,
    )
)


def expressions() -> list[str]:
    """All expressions of the dashboards and rules, with values for the dashboards' variables."""
    found = [rule["expr"] for group in rules() for rule in group["rules"]]
    for board in BOARDS:
        panels = json.loads(board.read_text())["panels"]
        found += [target["expr"] for panel in panels for target in panel["targets"]]
    for variable, value in VARIABLES.items():
        found = [one.replace(variable, value) for one in found]
    return found


def rules() -> list[dict]:
    return yaml.safe_load(RULES.read_text())["groups"]


def selectors(node: object) -> list[promql_parser.VectorSelector]:
    """Every selector of a figure in the expression."""
    if isinstance(node, promql_parser.VectorSelector):
        return [node]
    if isinstance(node, promql_parser.MatrixSelector):
        return [node.vector_selector]
    names = ("expr", "lhs", "rhs")
    below = [getattr(node, name, None) for name in names] + list(getattr(node, "args", []) or [])
    return [found for one in below if one is not None for found in selectors(one)]


@pytest.mark.parametrize("expression", expressions())
def test_each_expression_is_valid_and_names_figures_and_labels_that_exist(expression):
    found = selectors(promql_parser.parse(expression))
    assert found, expression
    for one in found:
        name = re.sub(r"_(bucket|count|sum)$", "", one.name)
        assert name in KNOWN, one.name
        for matcher in one.matchers.matchers:
            assert f"`{matcher.name}`" in KNOWN[name], matcher.name


def test_dashboards_can_be_imported():
    """Grafana needs ids that differ, a source that can be chosen, and panels that do not overlap."""
    assert [board.stem for board in BOARDS] == ["operator", "user"]
    for board in map(json.loads, (board.read_text() for board in BOARDS)):
        panels = board["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels) and board["uid"]
        assert board["templating"]["list"][0]["type"] == "datasource"
        taken = set()
        for panel in panels:
            grid = panel["gridPos"]
            assert grid["x"] + grid["w"] <= 24
            area = {
                (x, y)
                for x in range(grid["x"], grid["x"] + grid["w"])
                for y in range(grid["y"], grid["y"] + grid["h"])
            }
            assert not taken & area, panel["title"]
            taken |= area


def figures_of(scraped):
    return {
        (family.name, *one.labels.values()): one.value
        for family in scraped.collect()
        for one in family.samples
    }


def test_an_order_to_another_process_is_no_request_that_waits():
    """A request to evict counted as one, on a host and in a fleet."""
    use = Ticket("k", samples.BOB.id, "use", "llama", samples.NOW - 5, samples.NOW)
    order = replace(use, key="o", verb="evict", name=f"{samples.ME.id}/qwen")
    seen = samples.snapshot(samples.lease("qwen", 14), tickets=(use, order))
    past = SimpleNamespace(events=())
    host = SimpleNamespace(status=lambda: seen, allocator_maps=lambda: (), history=lambda *_: past)
    assert figures_of(Metrics(host))["gpuconsole_waiting_requests",] == 1
    there = replace(seen, host="box1")
    models = SimpleNamespace(fleet=SimpleNamespace(status=lambda: [there]))
    assert figures_of(FleetMetrics(models, None))["gpuconsole_host_waiting_requests", "box1"] == 1
    assert "1 waiting" in answers.fleet((there,)).text


def test_an_event_counts_once_whenever_it_is_written_and_however_the_clock_jumps():
    """One of two processes wrote its event later. A clock that was ahead for a moment stopped the counters."""
    seen, past = samples.snapshot(), []

    def offloaded(wall):
        past.append(Event(1, wall, "qwen", "offloaded", "recall", "", GIB, "sim:0", "7.1.0"))

    host = SimpleNamespace(
        status=lambda: replace(seen, wall=now),
        history=lambda seconds, _: SimpleNamespace(
            events=[one for one in past if one.wall >= now - seconds]
        ),
    )
    now = WALL
    offloaded(now - 5)
    counting, counts = Metrics(host), []
    for wall, walls in (
        (WALL + 5, (WALL + 4,)), (WALL + 10, (WALL + 3, WALL + 9)), (WALL + DAY, (WALL + DAY - 1,)),
        (WALL + 20, ()), (WALL + 25, (WALL + 24,)), (WALL + 22, (WALL + 21,)), (WALL + 30, ()),
    ):  # fmt: skip
        now = wall
        for at in walls:
            offloaded(at)
        counting._count_new_events()
        counts.append(counting._evictions.labels("recall", "offloaded")._value.get())
    assert counts == [1, 3, 4, 4, 5, 6, 6]


def test_a_model_that_two_processes_of_a_host_hold_has_the_sum_of_its_bytes_on_cards():
    """It had a row for each, of which Prometheus keeps one. Bytes in RAM counted too, as on a further card."""
    mine = replace(samples.lease("qwen", 14), pins=2)
    parts = (Share("sim:0", 4 * GIB), Share(HOST, 10 * GIB))
    bobs = replace(mine, owner=samples.BOB.id, shares=parts, pins=1)
    seen = replace(samples.snapshot(mine, bobs), host="box1")
    models = SimpleNamespace(fleet=SimpleNamespace(status=lambda: [seen]))
    scraped = FleetMetrics(models, None)
    names = [(one.name, *one.labels.values()) for f in scraped.collect() for one in f.samples]
    assert len(names) == len(set(names))
    found = figures_of(scraped)
    assert found["gpuconsole_host_model_bytes", "box1", "qwen"] == 18 * GIB
    assert found["gpuconsole_host_model_users", "box1", "qwen"] == 3
    assert found["gpuconsole_placements", "1"] == 2


def test_the_states_add_up_to_the_card_with_the_labels_of_dcgm(runtime):
    """Law: what is held in all states is the card, as in `gpu report`."""
    rt = runtime(devices="sim:24GiB,host:64GiB", monitor=False)
    rt.register("a", backend="fake", size="6GiB")
    rt.register("b", backend="fake", size="3GiB")
    rt.preload("a")
    with rt.use("b"):
        rt._session.publish()
        text = Metrics(rt).text("")[0].decode()
    families = {one.name: one for one in text_string_to_metric_families(text)}
    held = families["gpuconsole_held_bytes"].samples
    assert {*CARD, *HOLDER} == held[0].labels.keys() and CARD[:2] == ("gpu", "UUID")
    states = {state.replace(" ", "_") for state in ON_CARD}
    on_card = [one for one in held if one.labels["gpu"] == "0" and one.labels["state"] in states]
    [total] = [
        one.value
        for one in families["gpuconsole_device_total_bytes"].samples
        if one.labels["gpu"] == "0"
    ]
    assert sum(one.value for one in on_card) == total
    by_name = {one.labels["name"]: one for one in on_card}
    assert (by_name["a"].value, by_name["a"].labels["state"]) == (6 * GIB, "idle")
    assert (by_name["b"].value, by_name["b"].labels["state"]) == (3 * GIB, "in_use")
    about = families["gpuconsole_device_info"].samples[0].labels
    assert about["simulated"] == "true" and about["modelName"] == "simulated"
    assert families["gpuconsole_build_info"].samples[0].labels["version"]


def test_a_program_without_a_lease_has_its_user_and_its_command():
    """The sum over the states is the card also then."""
    seen = samples.eight  # carol's python3 holds 11 GiB on the first card without a lease
    [family] = metrics._held(seen, "box")
    first = [one for one in family.samples if one.labels["device"] == "cuda:0"]
    [carol] = [one for one in first if one.labels["state"] == "outside"]
    assert (carol.labels["user"], carol.labels["notebook"]) == ("carol", "python3")
    assert carol.value == 11 * GIB


# -- served ---------------------------------------------------------------------------------------
TOKENS = {"GPU_CONSOLE_TOKEN": OPERATORS, "GPU_CONSOLE_VIEWER_TOKEN": VIEWERS}


@pytest.fixture(scope="module")
def exporter(tmp_path_factory):
    port = free_port()
    words = [sys.executable, "-m", "gpu_runtime.cli", "exporter", "--port", str(port)]
    with serving(words, tmp_path_factory.mktemp("exporter"), TOKENS, port=port) as served:
        yield served


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}", "Accept": "text/plain"}


@pytest.mark.processes
def test_an_exporter_serves_figures_and_nothing_else(exporter):
    answer = exporter.get("/metrics", **bearer(VIEWERS))
    assert answer.status == 200 and "gpuconsole_device_total_bytes{" in answer.body
    assert exporter.get("/metrics", Accept="text/plain").status == 401
    assert exporter.get("/metrics", **bearer("wrong-0123456789abcdef")).status in (401, 429)
    assert exporter.get("/memory/stats", **bearer(OPERATORS)).status == 404
    assert exporter.get("/metrics", method="POST", **bearer(OPERATORS)).status == 405
    openmetrics = {**bearer(VIEWERS), "Accept": "application/openmetrics-text"}
    assert exporter.get("/metrics", **openmetrics).body.endswith("# EOF\n")


@pytest.mark.processes
def test_a_console_has_the_same_figures(tmp_path):
    with gpu_console(tmp_path) as served:
        assert "gpuconsole_held_bytes{" in served.get("/metrics", **bearer(VIEWERS)).body
        assert served.get("/metrics", Accept="text/plain").status == 401


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (apt install prometheus)")
    return found


@pytest.mark.processes
def test_promtool_takes_the_rules():
    done = subprocess.run([tool("promtool"), "check", "rules", RULES], capture_output=True)
    assert done.returncode == 0 and b"SUCCESS: 6 rules found" in done.stdout, done


@pytest.mark.processes
def test_the_alert_and_the_query_name_who_holds_a_card_idle(tmp_path):
    """bob's kernel is parked: it has a CUDA context of 0.4 GiB. carol's cell has run once in between."""
    labels = 'gpu="0",UUID="U",device="cuda:0",Hostname="box",name="its own code"'
    series = lambda user, state, values: {
        "series": f'gpuconsole_held_bytes{{{labels},user="{user}",notebook="{user}.ipynb",state="{state}"}}',
        "values": values,
    }
    held = [
        series("ann", "idle", f"{20 * GIB}x130"),
        series("bob", "idle", f"{GIB * 4 // 10}x130"),
        series("carol", "idle", f"{20 * GIB}x60 stale _x4 {20 * GIB}x60"),
        series("carol", "in_use", f"_x60 {20 * GIB}x4 stale _x60"),
    ]
    summary = "ann has held 20GiB of cuda:0 on box idle for 2 h (ann.ipynb)"
    expected = {
        "exp_labels": dict(
            severity="ticket",
            user="ann",
            notebook="ann.ipynb",
            Hostname="box",
            UUID="U",
            device="cuda:0",
        ),
        "exp_annotations": {"summary": summary},
    }
    alerts = [
        {"eval_time": "115m", "alertname": "GpuHeldIdle", "exp_alerts": []},
        {"eval_time": "125m", "alertname": "GpuHeldIdle", "exp_alerts": [expected]},
    ]
    held.append({"series": 'DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="U"}', "values": "3x130"})
    page = (DOCS / "reference/metrics.md").read_text()
    query = re.search(r"```text\n(sum by .*?)```", page, re.S)[1]
    left = '{Hostname="box", UUID="U", device="cuda:0", user="%s", notebook="%s.ipynb"}'
    answers = [{"labels": left % (who, who), "value": 20 * GIB} for who in ("ann", "carol")]
    queries = [{"expr": query, "eval_time": "125m", "exp_samples": answers}]
    tests = [
        {
            "interval": "1m",
            "input_series": held,
            "alert_rule_test": alerts,
            "promql_expr_test": queries,
        }
    ]
    path = tmp_path / "tests.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "tests": tests}))
    done = subprocess.run([tool("promtool"), "test", "rules", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.processes
def test_a_real_prometheus_reads_the_exporter_and_answers_every_expression(exporter, tmp_path):
    port = free_port()
    (tmp_path / "token").write_text(VIEWERS)
    job = {
        "job_name": "gpu-console",
        "authorization": {"credentials_file": f"{tmp_path}/token"},
        "static_configs": [{"targets": [f"127.0.0.1:{exporter.port}"]}],
    }
    settings = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [job],
    }
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(settings))
    words = [tool("prometheus"), f"--config.file={tmp_path}/prometheus.yml"]
    words += [f"--storage.tsdb.path={tmp_path}/data", f"--web.listen-address=127.0.0.1:{port}"]
    out = (tmp_path / "prometheus.txt").open("wb")
    process = subprocess.Popen(words, stdout=out, stderr=out, start_new_session=True)

    def ask(path: str, **query: str) -> dict:
        with urlopen(f"http://127.0.0.1:{port}/api/v1/{path}?{urlencode(query)}") as answer:
            return json.load(answer)["data"]

    def totals() -> list:
        try:
            return ask("query", query="gpuconsole_device_total_bytes")["result"]
        except OSError:  # it does not listen yet
            return []

    try:
        until(totals, "Prometheus has read the exporter")
        for expression in expressions():
            assert "result" in ask("query", query=expression), expression
        [free] = ask("query", query='sum(gpuconsole_held_bytes{state="free"})')["result"]
        assert float(free["value"][1]) == 24 * GIB
        loaded = [rule for group in ask("rules")["groups"] for rule in group["rules"]]
        assert len(loaded) == 6 and all(rule["health"] != "err" for rule in loaded)
    finally:
        end(process)
        out.close()
