"""Every figure with its target: `python -m tests.bench` prints the rows, `--write` puts them into RESULTS.md.

The figures are ratios and medians of one run on one machine. Compared values are measured side by side. The test
suite does not run this module.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping

from . import (
    bench_admit,
    bench_ahead,
    bench_console,
    bench_crowd,
    bench_engines,
    bench_estimate,
    bench_fleet,
    bench_fleet_calls,
    bench_fork,
    bench_history,
    bench_http,
    bench_idle,
    bench_imports,
    bench_ledger,
    bench_parking,
    bench_placement,
    bench_restore,
    bench_served,
    bench_serving,
    bench_shared,
    bench_use,
    bench_week,
)
from .results import HEAD, RESULTS, Row, merged, this_machine


def imports() -> Iterator[Row]:
    taken = bench_imports.seconds()
    for name, words, target in (
        ("gpu_runtime", "`import gpu_runtime`", 0.1),
        ("load_ext", "`%load_ext gpu`", 0.2),
    ):
        ratio = taken[name] / taken["torch"]
        yield Row(
            f"{words}, against `import torch`",
            f"{taken[name] * 1e3:.0f} of {taken['torch'] * 1e3:.0f} ms = {ratio:.3f}×", f"≤ {target}×",
            ratio <= target
        )  # fmt: skip


def parking() -> Iterator[Row]:
    taken = bench_parking.count_milliseconds()
    yield Row(
        "counting what a kernel holds, beginning and end of a cell together, beside 20 models on the card",
        f"{taken['card']:.2f} ms", "≤ 1 ms", taken["card"] <= 1
    )  # fmt: skip
    yield Row(
        f"counting on a simulated card, by a search of {bench_parking.OBJECTS:,} objects; a slow search waits until "
        "it costs a twentieth of the time",
        f"{taken['simulated']:.2f} ms a cell, {taken['simulated, one count']:.0f} ms a search", "≤ 1 ms, ≤ 50 ms",
        taken["simulated"] <= 1 and taken["simulated, one count"] <= 50
    )  # fmt: skip
    start = bench_parking.kernel_start_milliseconds()
    more = start["with"] - start["without"]
    yield Row(
        "start of a kernel with `gpu autoload`, against one without, in processor time",
        f"{more:+.0f} ms ({start['with']:.0f} against {start['without']:.0f})", "≤ +50 ms", more <= 50
    )  # fmt: skip
    searched = bench_parking.search_milliseconds()
    yield Row(
        f"the search before a park, {bench_parking.MANY_OBJECTS:,} objects, in processor time",
        f"{searched:.0f} ms", "≤ 500 ms", searched <= 500
    )  # fmt: skip
    small = bench_parking.small_seconds()
    few, many = small["1 MiB"], small["4 KiB"]
    yield Row(
        f"{bench_parking.SMALL_STORAGES:,} storages of 4 KiB, away and back, in processor time for each GiB, against "
        "storages of 1 MiB", f"{many['park']:.1f} of {few['park']:.2f} s = {many['park'] / few['park']:.0f}×; "
        f"{many['return']:.1f} of {few['return']:.2f} s = {many['return'] / few['return']:.0f}×", "≤ 4 s each",
        max(many.values()) <= 4
    )  # fmt: skip
    swap = bench_parking.swap_seconds()
    ratio = swap["return"] / swap["copy"]
    yield Row(
        "return of 1 GiB, against a bare copy into fresh memory",
        f"{swap['return'] * 1e3:.0f} of {swap['copy'] * 1e3:.0f} ms = {ratio:.2f}×", "≤ 1.3×", ratio <= 1.3
    )  # fmt: skip
    ratio = swap["compare"] / swap["copy"]
    yield Row(
        "the comparison of 1 GiB in host memory at the exchange, against a bare copy into fresh memory",
        f"{swap['compare'] * 1e3:.0f} of {swap['copy'] * 1e3:.0f} ms = {ratio:.2f}×", "≤ 0.1×", ratio <= 0.1
    )  # fmt: skip
    recall = bench_parking.recall()
    target = recall.copies.p99 + 0.5
    yield Row(
        f"request to grant while an idle 1 GiB kernel of {bench_parking.MANY_OBJECTS:,} objects parks",
        f"{recall.waits}; bare copies into fresh memory {recall.copies}", "p99 of a bare copy + 0.5 s",
        recall.waits.p99 <= target
    )  # fmt: skip


def ahead() -> Iterator[Row]:
    share = bench_ahead.hidden_share()
    yield Row(
        "Run All of three models on a card that holds two: the share of the load time that no cell waits for",
        f"{share:.0%}", "≥ 65 %", share >= 0.65
    )  # fmt: skip
    taken = bench_ahead.slowdown()
    more = taken["auto"] / taken["never"] - 1
    yield Row(
        f"a pure-Python cell beside the load of a {bench_ahead.LAYERS * 16} MiB file, without its waits for a "
        f"processor; the least of {bench_ahead.ROUNDS}",
        f"{more:+.1%} ({taken['auto']:.2f} s against {taken['never']:.2f})", "≤ +5 %", more <= 0.05
    )  # fmt: skip


def use() -> Iterator[Row]:
    median, p99 = bench_use.microseconds()
    yield Row(
        "`with rt.use(resident)`, enter + exit, the keeper, 50 leases", f"{median:.1f} µs (p99 {p99:.1f})", "≤ 2 µs",
        median <= 2
    )  # fmt: skip


def fork() -> Iterator[Row]:
    taken = bench_fork.milliseconds()
    for where in ("parent", "child"):
        more = taken[f"{where}, with"] - taken[f"{where}, without"]
        yield Row(
            f"`os.fork` in the {where}, beside an idle runtime with 20 models, against none",
            f"{more:+.2f} ms ({taken[f'{where}, with']:.2f} against {taken[f'{where}, without']:.2f})",
            "≤ 1 ms more", more <= 1.0
        )  # fmt: skip


def admit() -> Iterator[Row]:
    taken = bench_admit.figures()
    yield Row(
        "one `admit`, 20 models on 4 devices",
        f"p99 {taken['twenty_p99'] * 1e6:.0f} µs (p50 {taken['twenty_p50'] * 1e6:.0f})", "p99 ≤ 100 µs",
        taken["twenty_p99"] <= 100e-6
    )  # fmt: skip
    yield Row(
        "one `admit`, 20 models on 4 devices, against an exhaustive search over all their subsets",
        f"{taken['exhaustive_ratio']:,.0f}× faster", "≥ 1,000×", taken["exhaustive_ratio"] >= 1000
    )  # fmt: skip
    yield Row(
        "one `admit`, 20 models on 4 devices, in pieces",
        f"p99 {taken['pieces_p99'] * 1e6:.0f} µs (p50 {taken['pieces_p50'] * 1e6:.0f})", "p99 ≤ 150 µs",
        taken["pieces_p99"] <= 150e-6
    )  # fmt: skip
    yield Row(
        "one `admit`, a full page (1,024 leases and tickets)",
        f"p99 {taken['full_p99'] * 1e3:.2f} ms (p50 {taken['full_p50'] * 1e3:.2f})", "p99 ≤ 2 ms",
        taken["full_p99"] <= 2e-3
    )  # fmt: skip


def placement() -> Iterator[Row]:
    taken = bench_placement.figures()
    for layout in ("balanced", "proportional"):
        ratio = taken[layout] / taken["accelerate"]
        yield Row(
            f"`plan`, a 70B model over 8 cards with 200 leases, {layout}, against "
            "`accelerate.infer_auto_device_map`",
            f"{taken[layout] * 1e3:.1f} of {taken['accelerate'] * 1e3:.1f} ms = {ratio:.2f}×", "≤ 5 ms, ≤ 1×",
            taken[layout] <= 5e-3 and ratio <= 1
        )  # fmt: skip
    for policy in ("best-fit", "fewest-evictions"):
        excess = taken[f"{policy} bytes"]
        yield Row(
            f"`{policy}`: bytes freed in 1,000 small random worlds, against an exact optimum",
            f"{excess:.3f}× ({taken[f'{policy} unbound']:.3f}× without regard to the last use)", "≤ 1.05×",
            excess <= 1.05
        )  # fmt: skip


def week() -> Iterator[Row]:
    seeds = (1, 2, 3)
    found = [bench_week.figures(seed) for seed in seeds]
    for rule in ("Helix", "NDIF"):
        ratios = [one["ours"][0] / one[rule][0] for one in found]
        yield Row(
            f"seconds of loads in a simulated week over 8 cards, against {rule}'s rules; {len(seeds)} weeks",
            " ".join(f"{ratio:.2f}×" for ratio in ratios), "≤ 0.7×", max(ratios) <= 0.7
        )  # fmt: skip


def ledger() -> Iterator[Row]:
    taken = bench_ledger.transaction_cost()
    for which, ratio in (("alone", "ratio"), ("in turn", "ratio in turn")):
        yield Row(
            f"one `transact`, the keeper, 50 leases, {which}, against a bare round trip of its bytes over a socket",
            f"{taken['transact, ' + which]:.0f} of {taken['bare round trip']:.0f} µs = {taken[ratio]:.1f}×", "≤ 3×",
            taken[ratio] <= 3
        )  # fmt: skip
    large = bench_ledger.large_page_cost()
    for which in ("alone", "in turn"):
        yield Row(
            f"one `transact` in a page of 1,000 leases, {which}, against one of 50",
            f"{large[f'1,000 leases, {which}']:.0f} of {large[f'50 leases, {which}']:.0f} µs = "
            f"{large[f'ratio, {which}']:.1f}×", "≤ 2×", large[f"ratio, {which}"] <= 2
        )  # fmt: skip
    taken_by_register = bench_ledger.register_cost()
    yield Row(
        "`register` of the 4,000th model", f"{taken_by_register:.0f} µs", "≤ 50 µs", taken_by_register <= 50
    )  # fmt: skip


def restore() -> Iterator[Row]:
    taken = bench_restore.bytes_a_second()
    ratio = taken["restore"] / taken["copy"]
    yield Row(
        "host → device restore of a 2 GB module, simulated device, against a plain preallocated `copy_`",
        f"{taken['restore'] / 1e9:.1f} of {taken['copy'] / 1e9:.1f} GB/s = {ratio:.2f}×", "≥ 0.9×", ratio >= 0.9
    )  # fmt: skip


def shared() -> Iterator[Row]:
    first, second = bench_shared.figures()
    ratio = second["seconds"] / first["seconds"]
    yield Row(
        "a second kernel loads the same 2 GB model, against the first, which reads the weights from disk",
        f"{second['seconds']:.1f} of {first['seconds']:.1f} s = {ratio:.2f}×, {second['read'] / 1024:.0f} KiB read, "
        "with the header", "≤ 0.5×, no weights", ratio <= 0.5 and second["read"] <= bench_shared.HEADER_BYTES
    )  # fmt: skip


def idle() -> Iterator[Row]:
    taken = bench_idle.percent_of_a_core(64, 20.0)
    yield Row(
        "64 idle kernels with monitors, the keeper, simulated devices: use of the processor by all of them",
        f"{taken:.2f} % of one core", "≤ 1 %", taken <= 1
    )  # fmt: skip


def fleet() -> Iterator[Row]:
    taken = bench_fleet.figures()
    yield Row(
        "the choice among 200 hosts of 8 cards and 40 leases, without messages, with eight plans; how often it is "
        "the host that 200 plans choose", f"p50 {taken['p50 ms']:.1f} ms, {taken['same host']:.0%}",
        "≤ 25 ms, 100%", taken["p50 ms"] <= 25 and taken["same host"] == 1
    )  # fmt: skip


def fleet_calls() -> Iterator[Row]:
    found = bench_fleet_calls.figures()
    for words in bench_fleet_calls.SAMPLES:
        tokens = found.pop(words)
        ratio = tokens["fleet"] / tokens["here"]
        yield Row(
            f"{words} through the fleet, against the same call in this process",
            f"{tokens['fleet'] * 1e3:.1f} of {tokens['here'] * 1e3:.1f} ms = {ratio:.2f}×", "≤ 1.1×", ratio <= 1.1
        )  # fmt: skip
    for payload, seconds in found.items():
        ratio = seconds["fleet"] / seconds["ray"]
        yield Row(
            f"a call of a fleet's model that returns its argument, {payload}, against Ray's own call of such an actor",
            f"{seconds['fleet'] * 1e3:.2f} of {seconds['ray'] * 1e3:.2f} ms = {ratio:.2f}×", "≤ 1.1×", ratio <= 1.1
        )  # fmt: skip


def estimate() -> Iterator[Row]:
    taken = bench_estimate.milliseconds()
    for kind, words in (
        ("shards", "30 safetensors shards, cold"),
        ("gguf", "one GGUF file, 400,000 strings in its header, cold"),
    ):
        yield Row(
            f"footprint of a 70B model from {words}",
            f"{taken[f'{kind}, cold']:.0f} ms (warm {taken[f'{kind}, warm']:.0f})", "≤ 50 ms",
            taken[f"{kind}, cold"] <= 50
        )  # fmt: skip


def history() -> Iterator[Row]:
    taken = bench_history.figures()
    slowest = (
        max(taken[f"history, {span}"] for span in ("24 h", "2 h", "15 min"))
        + taken["events, 10,000"]
    )
    yield Row(
        "a day of history, 8 devices with 25 leases each and 10,000 events, read for a chart of 600 points",
        f"{slowest:.0f} ms ({taken['MiB on disk']:.0f} MiB on disk)", "≤ 100 ms", slowest <= 100
    )  # fmt: skip


def crowd() -> Iterator[Row]:
    killed = bench_crowd.grant_after_kill()
    yield Row(
        "from a kernel's kill to the grant of its memory to a waiting request; 64 holders", str(killed),
        "p99 ≤ 100 ms", killed.p99 <= 0.1
    )  # fmt: skip
    cycles = bench_crowd.cycles()
    yield Row(
        "64 processes, 10 times a second each: lease and release", str(cycles), "p50 ≤ 5 ms, worst ≤ 50 ms",
        cycles.median <= 0.005 and cycles.worst <= 0.05
    )  # fmt: skip
    loop = bench_crowd.closed_loop()
    yield Row(
        "64 processes that write without pause, 50 leases in the page",
        f"{loop.a_second:,.0f} a second; worst {loop.waits.worst * 1e3:.0f} ms (p99 {loop.waits.p99 * 1e3:.0f}); the "
        f"least served {loop.fairness:.2f} of the most served", "≥ 4,000; ≤ 150 ms; ≥ 0.8",
        loop.a_second >= 4000 and loop.waits.worst <= 0.15 and loop.fairness >= 0.8
    )  # fmt: skip
    hogs = bench_crowd.bystander()
    yield Row(
        "writes of a third process, while two kernels hold their GIL for 200 ms at a time", str(hogs),
        "p99 ≤ 10 ms", hogs.p99 <= 0.01
    )  # fmt: skip
    idle = bench_crowd.recall(busy=False)
    yield Row(
        "recall of another kernel's idle 1 GiB model, request to grant",
        f"{idle.waits}; the copy alone {idle.copy * 1e3:.0f} ms", "p50 ≤ 50 ms + the copy",
        idle.waits.median <= 0.05 + idle.copy
    )  # fmt: skip
    for tensors in (8, 40):
        busy = bench_crowd.recall(busy=True, tensors=tensors)
        target = 0.1 + busy.copy + 0.005 * (tensors - 8)
        yield Row(
            f"recall of an idle 1 GiB model in {tensors} tensors, its kernel's main thread in a pure-Python loop",
            f"{busy.waits}; the copy alone {busy.copy * 1e3:.0f} ms", "p99 ≤ 100 ms + the copy"
            + (f" + {5 * (tensors - 8)} ms for the further tensors" if tensors > 8 else ""),
            busy.waits.p99 <= target
        )  # fmt: skip


def engines() -> Iterator[Row]:
    taken = bench_engines.figures()
    ratio = taken["swap"] / taken["start"]
    yield Row(
        "swap of two tiny llama.cpp models, isolated, against the start of the bare engine",
        f"{taken['swap'] * 1e3:.0f} of {taken['start'] * 1e3:.0f} ms = {ratio:.2f}×", "≤ 1.15×", ratio <= 1.15
    )  # fmt: skip
    yield Row(
        "from kill -9 of a worker to the error at its caller; the lease is released",
        f"{taken['died'] * 1e3:.0f} ms", "≤ 100 ms", taken["died"] <= 0.1
    )  # fmt: skip


def serving() -> Iterator[Row]:
    told = bench_serving.simulated()
    ours, plain = told["ours"], told["first come"]
    yield Row(
        "number of loads for a mixed trace, six models and room for two, against first-come order; simulated",
        f"{plain.loads / ours.loads:.1f}× fewer; the longest wait {ours.longest_wait:.0f} s (first come "
        f"{plain.longest_wait:.0f}), {ours.against_bound:.2f} of its ageing bound", "≥ 2×; ≤ 1",
        plain.loads >= 2 * ours.loads and ours.against_bound <= 1 and not ours.overtaken_late
    )  # fmt: skip
    real = bench_serving.real()
    loads, plain_loads = real["ours"], real["first come"]
    yield Row(
        "number of loads for a mixed trace with a real gateway, 32 clients, against first-come order",
        f"{plain_loads / loads:.1f}× fewer ({loads})", "≥ 2×", plain_loads >= 2 * loads
    )  # fmt: skip
    rates = bench_serving.rates()
    yield Row(
        "calls of an echo engine through gateway and queue, 32 clients, without HTTP",
        f"{rates['a second']:,.0f} a second ({rates['a processor second']:,.0f} a processor second)", "≥ 1,000",
        rates["a second"] >= 1000
    )  # fmt: skip
    tokens = bench_serving.tokens()
    yield Row(
        "a llama.cpp model through the gateway, against its own methods, without HTTP",
        f"{tokens['added, median'] * 1e3:.1f} ms added; {tokens['tokens ratio']:.2f}× the tokens a second",
        "≤ 3 ms; ≥ 0.95×", tokens["added, median"] <= 0.003 and tokens["tokens ratio"] >= 0.95
    )  # fmt: skip


def http() -> Iterator[Row]:
    echo, added = bench_http.figures()
    if echo is not None:
        yield Row(
            "calls of an echo engine through `gpu serve`, by `wrk` with "
            f"{bench_http.CONNECTIONS} connections on the same cores",
            f"{echo.a_second:,.0f} a second ({echo.a_processor_second:,.0f} a second of the server's processor "
            f"time); at {echo.half_load:,.0f} a second p50 {echo.median * 1e3:.1f} ms, p99 {echo.p99 * 1e3:.1f} ms",
            "≥ 1,000; p99 ≤ 50 ms at half that load",
            echo.a_second >= 1000 and echo.p99 <= 0.05 and echo.half_load >= 450,
        )
    yield Row(
        "a chat completion of a llama.cpp model through `gpu serve`, against the same engine called directly",
        f"{added['added, median'] * 1e3:.1f} ms added to {added['direct, median'] * 1e3:.1f} for one token; "
        f"{added['tokens ratio']:.2f}× the tokens a second", "≤ 3 ms; ≥ 0.95×",
        added["added, median"] <= 0.003 and added["tokens ratio"] >= 0.95
    )  # fmt: skip


def _beside_engine(
    told: Mapping[str, float], name: str, engine: str, most: float, least: float
) -> Iterator[Row]:
    """The rows that compare `gpu serve` with its `engine`, called directly, for the figures called `name`.

    `most` and `least` are the targets. There are no rows without figures, if the engine is not installed.
    """
    direct = told.get(f"{name}, one token, direct")
    model = "a model of 24 MiB" if name.endswith("writer") else "a model of 400 MiB"
    if direct is None:
        return
    one = told[f"{name}, one token, served"] / direct
    yield Row(
        f"a chat with one token through `gpu serve`, {model}, against {engine} called directly",
        f"{one:.2f}× of {direct * 1e3:.1f} ms", f"≤ {most}×", one <= most
    )  # fmt: skip
    alone = told[f"{name}, clients, direct"]
    many = told[f"{name}, clients, served"] / alone
    yield Row(
        f"calls a second of {bench_served.CONNECTIONS} clients, {model}, against {engine} alone",
        f"{many:.2f}× of {alone:.0f} a second", f"≥ {least}×", many >= least
    )  # fmt: skip


def served() -> Iterator[Row]:
    told = bench_served.figures()
    for model in bench_served.MODELS:
        yield from _beside_engine(told, model, "its own worker", 1.3, 0.95)
    gap = told["gap, served"] - told["gap, direct"]
    yield Row(
        "gap between the first and the second piece of a stream, against the worker", f"{gap * 1e3:+.1f} ms",
        "≤ +1 ms", gap <= 0.001
    )  # fmt: skip
    batched = told["embeddings, served"] / told["embeddings, direct"]
    yield Row(
        "256 embeddings through `gpu serve`, against batches of 32 in plain transformers",
        f"{batched:.2f}× of {told['embeddings, direct']:.2f} s", "≤ 1.2×", batched <= 1.2
    )  # fmt: skip
    for model in bench_served.MODELS:
        yield from _beside_engine(told, f"HTTP engine, {model}", "llama-server", 1.6, 0.85)
    free, job = told["hang-up"], told["job"]
    yield Row(
        "from a client that leaves its stream to another client's token; cancel of a job",
        f"{free * 1e3:.0f} ms; {job * 1e3:.0f} ms", "≤ 100 ms", max(free, job) <= 0.1
    )  # fmt: skip


def two_models() -> Iterator[Row]:
    told = bench_served.two_models()
    if not told:
        return
    swap = told["swap, served"] / told["swap"]
    yield Row(
        "two models of 24 and 400 MiB with room for one: a call of each, by its own worker, against "
        "llama-server's router", f"{swap:.2f}× of {told['swap'] * 1e3:.0f} ms", "≤ 1.3×", swap <= 1.3
    )  # fmt: skip
    many = told["calls, served"] / told["calls"]
    yield Row(
        f"two models of 24 and 400 MiB with room for one, {bench_served.PARALLEL} clients: calls a "
        "second against llama-server's router; p50 of the calls of the model that is away",
        f"{many:.2f}× of {told['calls']:.1f} a second; {told['cold, served']:.1f} s (router {told['cold']:.1f})",
        "≥ 0.8×; ≤ 5 s", many >= 0.8 and told["cold, served"] <= 5
    )  # fmt: skip


def console() -> Iterator[Row]:
    first, later, warm, slow = bench_console.paint()
    yield Row(
        "the served page, from its request to the figures of the first card, in a browser with an empty cache",
        f"{later.figures:,.0f} ms (of a server that has just started {first.figures:,.0f}); buttons act after "
        f"{later.live:,.0f} ms", "≤ 2,000 ms", max(first.figures, later.figures) <= 2000
    )  # fmt: skip
    yield Row(
        "the served page in a browser that was there before",
        f"{warm.figures:,.0f} ms; buttons act after {warm.live:,.0f} ms", "≤ 1,000 ms", warm.figures <= 1000
    )  # fmt: skip
    yield Row(
        "the served page with an empty cache over a line of 1.6 Mbit/s and 150 ms: something to read; figures",
        f"{slow.read:,.0f} ms; {slow.figures:,.0f} ms; buttons act after {slow.live:,.0f} ms",
        "≤ 2,000 ms; ≤ 12,000 ms", slow.read <= 2000 and slow.figures <= 12000
    )  # fmt: skip
    yield Row(
        "bytes of a first visit", f"{later.bytes / 1e6:.2f} MB", "≤ 1.3 MB", later.bytes <= 1.3e6
    )
    seen = bench_console.effect()
    yield Row(
        "from the click that confirms an action to its effect on the page; the target kernel is idle", str(seen),
        "≤ 1 s", seen.worst <= 1
    )  # fmt: skip
    spent = bench_console.crowd()
    yield Row(
        "20 sessions on 8 cards with 200 leases, all sessions on the same tab",
        "; ".join(f"{tab} {milliseconds:.0f}" for tab, milliseconds in spent.items())
        + " ms of the server's processor a second", "≤ 100 ms", max(spent.values()) <= 100
    )  # fmt: skip
    grown = bench_console.memory()
    yield Row(
        "the server's memory after 1,000 sessions, compared with its memory after the first 100",
        f"{grown.late:.0f} of {grown.early:.0f} MiB = {grown.part:+.1%}", "≤ +10 %", grown.part <= 0.1
    )  # fmt: skip


BENCHES: dict[str, Callable[[], Iterator[Row]]] = {
    each.__name__: each
    for each in (
        imports, parking, ahead, use, fork, admit, placement, week, ledger, restore, shared, idle, fleet,
        fleet_calls, estimate, history, crowd, console, engines, serving, http, served, two_models,
    )
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("which", nargs="*", choices=[[], *BENCHES], help="only these")
    parser.add_argument("--write", action="store_true", help="put the rows into RESULTS.md")
    parser.add_argument("--note", default="", help="put behind the machine's name")
    wanted = parser.parse_args()
    print(HEAD)
    lines = []
    for name in wanted.which or BENCHES:
        for row in BENCHES[name]():
            lines.append(row.line(this_machine() + wanted.note))
            print(lines[-1], flush=True)
    if wanted.write:
        RESULTS.write_text(merged(RESULTS.read_text(), lines))


if __name__ == "__main__":
    main()
