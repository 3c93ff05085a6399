"""Faults that the tests must notice: mutants of sampled lines, and the whole faults of `faults/`.

    python -m tests.mutants                 40 mutants, a fresh sample with a printed seed
    python -m tests.mutants faults [WORD]   the patches of tests/faults/, or those whose name has a WORD

A mutant is one change of a product line, made by an operator of mutmut. A trial applies it to a copy of
the tree, and runs there the tests that run the line. It is killed if a test fails or takes too long, and
if that test passes without the mutant. Nothing is compared as text, and no survivor is excused here.

The map from lines to tests comes from coverage's contexts. It is made once for each folder of tests, from
the tests that start no process, and kept in build/mutants until the product or that folder changes.
mutmut's own runner does not fit: it leaves out decorated functions, its trampolines add a frame to every
call, and it cannot sample lines. cosmic-ray runs one command for all mutants, in the working tree itself.
"""

import _thread
import argparse
import difflib
import gc
import hashlib
import json
import multiprocessing
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = {
    name: f"gpu_runtime/{name}"
    for name in "facts scheduler ledgers owner backends serving web catalog estimation rendering".split()
} | {"kernel_ext": "kernel_ext/gpu", "panels": "panels/gpu_panels"}
FAULTS = ROOT / "tests" / "faults"
MAPS = ROOT / "build" / "mutants"
IMPORTED = ["gpu_runtime", "kernel_ext", "panels"]
LEAN = (
    "-q --no-header -p no:cacheprovider -p no:nbval -p no:schemathesis -p no:xdist -p no:frontrun"
).split()
# of tests for one mutant, as the map measured them; the quickest tests come first
MOST_SECONDS = 60.0


def product_files(folder: str) -> Iterator[Path]:
    """The Python files of a folder of the product, or the one file that it is."""
    place = ROOT / PRODUCT[folder]
    yield from place.rglob("*.py") if place.is_dir() else [place.with_suffix(".py")]


# The map from lines to tests.


class Mapper:
    """A pytest plugin: gives each test a coverage context, and keeps the seconds of those that pass.

    On a busy machine they are divided by how much slower it is. Else fewer tests would be tried.
    """

    def __init__(self, coverage: Any, file: Path) -> None:
        self.coverage, self.file = coverage, file
        self.seconds: Counter[str] = Counter()
        self.failed: set[str] = set()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if sys.gettrace() is None:  # a test with a trace function of its own has ended coverage's
            sys.settrace(threading.gettrace())
        self.coverage.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] += report.duration
        if not report.passed:
            self.failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        from tests.clock import SLOWNESS

        passed = {
            test: took / SLOWNESS for test, took in self.seconds.items() if test not in self.failed
        }
        self.file.write_text(json.dumps(passed))


def make_map(folder: str, data: Path) -> int:
    """Runs the tests of one folder that `make check` runs too, with coverage. Returns pytest's status."""
    import coverage
    import pytest

    include = [f"{ROOT}/{folder}/*" for folder in IMPORTED]
    measured = coverage.Coverage(data_file=str(data), config_file=False, include=include)
    measured.start()
    _trace_all_threads()
    arguments = ["-m", "not processes and not thorough and not soak", "--hypothesis-profile=quick"]
    mapper = Mapper(measured, data.with_suffix(".json"))
    status = pytest.main([*LEAN, *arguments, f"tests/{folder}"], plugins=[mapper])
    measured.stop()
    measured.save()
    return status


def _trace_all_threads() -> None:
    """`threading` traces its own threads. The package starts others, with `_thread`."""
    start = _thread.start_new_thread

    def started(function: Any, arguments: Any, keywords: Any = {}) -> int:  # noqa: B006
        def run(*arguments: Any, **keywords: Any) -> None:
            sys.settrace(threading.gettrace())
            function(*arguments, **keywords)

        return start(run, arguments, keywords)

    _thread.start_new_thread = started


def digest(folders: Iterable[str]) -> str:
    """Names the content of all Python files in `folders`."""
    found = hashlib.sha256()
    for file in sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py")):
        found.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return found.hexdigest()[:16]


class Map:
    """Which tests run a line, and how long each takes."""

    def __init__(self, folders: Iterable[str]) -> None:
        import coverage

        self.seconds: dict[str, float] = {}
        self.parts = []
        MAPS.mkdir(parents=True, exist_ok=True)
        for folder in folders:
            data = MAPS / f"{folder}-{digest([*IMPORTED, f'tests/{folder}'])}.data"
            if not data.with_suffix(".json").exists():
                print(f"mapping tests/{folder}", flush=True)
                for old in MAPS.glob(f"{folder}-*"):
                    old.unlink()
                run_here("map", folder, str(data))
            if data.exists():
                self.seconds |= json.loads(data.with_suffix(".json").read_text())
                self.parts.append(coverage.CoverageData(str(data)))
                self.parts[-1].read()

    def tests(self, file: str, lines: Iterable[int], at_import: bool = False) -> list[str]:
        """The tests that run one of `lines`, or with `at_import` any line of the file: first those of the
        folder with the file's name, the quickest first, up to MOST_SECONDS. Tests of one file stay together.

        A keeper is another process, which many tests of the ledgers start. So all of them are tried for its lines.
        """
        wanted, found = set(lines), set()
        for part in self.parts:
            for line, contexts in part.contexts_by_lineno(f"{ROOT}/{file}").items():
                if at_import or line in wanted:
                    found.update(contexts)
        own = f"tests/{Path(file).parts[1]}/"
        left, chosen = MOST_SECONDS, []
        if "/keeper/" in file and not found & self.seconds.keys():
            found = {test for test in self.seconds if test.startswith(own)}
        by_need = lambda test: (not test.startswith(own), self.seconds[test])
        for test in sorted(found & self.seconds.keys(), key=by_need):
            left -= self.seconds[test]
            if left < 0 and chosen:
                break
            chosen.append(test)
        files: Counter[str] = Counter()
        for test in chosen:
            files[test.split("::")[0]] += self.seconds[test]
        return sorted(chosen, key=lambda test: (files[test.split("::")[0]], test.split("::")[0]))


def run_here(*arguments: str) -> None:
    """Runs this module in a process of its own, which imports the product from this tree."""
    path = os.pathsep.join([str(ROOT), f"{ROOT}/kernel_ext", f"{ROOT}/panels"])
    command = [sys.executable, "-m", "tests.mutants", *arguments]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, stdout=sys.stderr)


# Mutants.


class Trial(NamedTuple):
    """A fault and the tests that may notice it. `changed` has the new text of `file`, or is a patch."""

    folder: str
    name: str
    file: str
    changed: str
    tests: list[str]


def mutants(file: str) -> dict[int, list[tuple[list[int], bool, Any]]]:
    """All mutants of a file, by line: the lines of its statement, whether they run at import only, and
    a function that returns the new text.
    """
    import libcst as cst
    from libcst.metadata import MetadataWrapper, PositionProvider
    from mutmut.mutation import mutators

    def negated(node: cst.If) -> Iterator[cst.CSTNode]:
        test = node.test.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
        yield node.with_changes(test=cst.UnaryOperation(cst.Not(), test))

    def left_out(node: cst.SimpleStatementLine) -> Iterator[cst.CSTNode]:
        only = node.body[0]
        if isinstance(only, cst.Expr) and not isinstance(only.value, cst.BaseString):
            yield node.with_changes(body=[cst.Pass(), *node.body[1:]])

    # Words are left out: a test of a sentence, word by word, is not what is missing.
    operators = [pair for pair in mutators.mutation_operators if pair[0] is not cst.BaseString]
    operators += [(cst.If, negated), (cst.SimpleStatementLine, left_out)]
    wrapper = MetadataWrapper(cst.parse_module((ROOT / file).read_text()), unsafe_skip_copy=True)
    places = wrapper.resolve(PositionProvider)
    found: dict[int, list[tuple[list[int], bool, Any]]] = {}

    def visit(node: cst.CSTNode, start: int, line: int, runs_later: bool) -> None:
        if isinstance(node, (cst.Annotation, cst.Decorator)):
            return
        if place := places.get(node):
            line = place.start.line
            if isinstance(node, (cst.SimpleStatementLine, cst.BaseCompoundStatement)):
                start = line
        for kind, operator in operators:
            for other in operator(node) if isinstance(node, kind) else ():
                made = lambda old=node, new=other: wrapper.module.deep_replace(old, new).code
                lines = list(range(start, line + 1))
                found.setdefault(line, []).append((lines, not runs_later, made))
        for child in node.children:
            inside = isinstance(node, (cst.FunctionDef, cst.Lambda)) and child is node.body
            visit(child, start, line, runs_later or inside)

    visit(wrapper.module, 1, 1, False)
    return found


def sample(folders: list[str], wanted: int, seed: int, known: Map) -> Iterator[Trial]:
    """`wanted` mutants, as many from each folder: a random file by its length, one of its lines, and
    one mutant of that line.
    """
    dice = random.Random(seed)
    parsed: dict[str, Any] = {}
    for index, folder in enumerate(folders):
        here = {
            str(file.relative_to(ROOT)): file.read_text().count("\n")
            for file in sorted(product_files(folder))
        }
        drawn: set[tuple[str, int]] = set()
        share = wanted // len(folders) + (index < wanted % len(folders))
        for _ in range(50 * share):
            if len(drawn) == share:
                break
            file = dice.choices(list(here), list(here.values()))[0]
            if file not in parsed:
                parsed[file] = mutants(file)
            if not parsed[file]:
                continue
            line = dice.choice(list(parsed[file]))
            lines, at_import, made = dice.choice(parsed[file][line])
            text = made()
            if (file, line) in drawn or not compiles(text):
                continue
            drawn.add((file, line))
            tests = known.tests(file, lines, at_import)
            yield Trial(folder, f"{file}:{line}", file, text, tests)


def compiles(text: str) -> bool:
    try:
        compile(text, "mutant", "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True


def faults(words: list[str], known: Map) -> Iterator[Trial]:
    """The patches of tests/faults. A line `Tests:` in a patch names tests beyond those of the map."""
    for patch in sorted(FAULTS.glob("*.patch")):
        if words and not any(word in patch.name for word in words):
            continue
        text = patch.read_text()
        tests = [test for line in re.findall(r"^Tests: (.*)", text, re.M) for test in line.split()]
        files = []
        for part in re.split(r"^--- a/", text, flags=re.M)[1:]:
            files.append(part.split("\n", 1)[0])
            lines = set()
            for start, body in re.findall(r"^@@ -(\d+).*@@.*\n((?:[-+ ].*\n?|\n)*)", part, re.M):
                line = int(start)
                for row in body.splitlines():
                    if row[:1] in "-+":
                        lines |= {line, line - (row[0] == "+")}  # after the last line of a block
                    line += row[:1] != "+"
            if not tests:
                tests = known.tests(files[-1], lines)
        yield Trial("faults", patch.stem, files[0], text, tests)


# Trials.

_place = Path()
_sound: set[str] = set()  # tests that pass in the copy without a fault


def make_copy(places: Any) -> None:
    """Gives this worker a copy of the tree. It has the times of the files, so compiled modules are used."""
    global _place
    _place = Path(places.get())
    for source in ROOT.iterdir():
        if source.name in (*IMPORTED, "tests", "docs", "notebooks"):
            shutil.copytree(source, _place / source.name, ignore=shutil.ignore_patterns("_build"))
        elif source.is_file() and source.name != ".git":
            shutil.copy2(source, _place)


def run_tests(tests: list[str], timeout: float, limit: float) -> tuple[int, str]:
    """Runs `tests` in the copy, in a fork of this process. Returns pytest's status, or the negative number of a
    signal, and the test that failed. SIGKILL stands for a run that took longer than `limit` seconds.
    """
    output = _place.with_suffix(".out")
    child = os.fork()
    if not child:
        os.setsid()
        with open(output, "wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        os.chdir(_place)
        for name in [
            name for name in sys.modules if name.split(".")[0] in ("tests", "gpu_runtime")
        ]:
            del sys.modules[name]
        own = [str(_place), f"{_place}/kernel_ext", f"{_place}/panels"]
        sys.path[:] = own + [
            path for path in sys.path if Path(path or ".").resolve() not in (ROOT, *ROOT.iterdir())
        ]
        os.environ["PYTHONPATH"] = os.pathsep.join(own)
        arguments = [
            "-x", "-rfE", "--tb=no", "--hypothesis-profile=mutants", f"--timeout={timeout:.0f}",
        ]  # fmt: skip
        import pytest

        os._exit(pytest.main([*LEAN, *arguments, *tests]))
    pidfd = os.pidfd_open(child)
    late = not select.select([pidfd], [], [], limit)[0]
    os.close(pidfd)
    try:
        os.killpg(child, signal.SIGKILL)  # also what its tests left
    except ProcessLookupError:
        pass  # nothing is left
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    failed = re.findall(
        r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", output.read_text(errors="replace"), re.M
    )
    return (-signal.SIGKILL if late else status), failed[-1] if failed else ""


def attempt(trial: Trial, seconds: float, longest: float) -> str:
    """Why the fault is killed, or `survived: ...`."""
    if not trial.tests:
        return "survived: no test of the map runs it"
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(_place.parent)}
    apply = ["git", "apply", "--whitespace=nowarn"]
    target = _place / trial.file
    is_patch = trial.folder == "faults"
    if is_patch:
        ran = subprocess.run(
            apply, cwd=_place, env=environment, input=trial.changed, text=True, capture_output=True
        )
        if ran.returncode:
            return f"survived: the patch does not apply: {ran.stderr.strip()}"
    else:
        target.write_text(trial.changed)
    try:
        status, failed = run_tests(trial.tests, 30 + 10 * longest, 300 + 10 * seconds)
    finally:
        if is_patch:
            undone = [*apply, "--reverse"]
            subprocess.run(undone, cwd=_place, env=environment, input=trial.changed, text=True)
        else:
            shutil.copy2(ROOT / trial.file, target)
    if not status:
        return f"survived: {len(trial.tests)} tests pass"
    if status < 0 or "::" not in failed:
        return f"killed: pytest ends with {status}"
    if failed not in _sound and run_tests([failed], 30 + 10 * longest, 300 + 10 * seconds)[0]:
        return f"survived: {failed} fails without the fault too"
    _sound.add(failed)
    return f"killed by {failed}"


def main() -> int:
    """Prints each result, then the score by folder and the survivors. Returns how many
    patches survived: a sample only measures."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument(
        "what", nargs="*", help="faults [WORD ...]; nothing for a sample of mutants"
    )
    parser.add_argument("-n", type=int, default=40, help="mutants in all (40)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--folders", default=" ".join(PRODUCT), help="of the product")
    parser.add_argument("--tests", default="", help="folders of tests, if not all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    if options.what[:1] == ["map"]:
        return make_map(options.what[1], Path(options.what[2]))
    from tests import clock

    print(f"the machine is {clock.SLOWNESS:.1f} times slower than usual")
    with_tests = sorted({file.parent.name for file in (ROOT / "tests").glob("*/test_*.py")})
    known = Map(options.tests.split() or with_tests)
    if options.what[:1] == ["faults"]:
        trials = list(faults(options.what[1:], known))
    else:
        print(f"seed {options.seed}", flush=True)
        trials = list(sample(options.folders.split(), options.n, options.seed, known))
    # Each trial is a fork of a process that has these libraries already. They read no setting at import.
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    for library in "hypothesis msgspec numpy pandas psutil pytest torch".split():
        __import__(library)
    gc.collect()
    gc.freeze()  # else each fork's first search for garbage copies all their pages
    context = multiprocessing.get_context("fork")
    killed: Counter[str] = Counter()
    survivors = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        places = context.Queue()
        for job in range(options.jobs):
            (Path(folder) / str(job)).mkdir()
            places.put(f"{folder}/{job}")
        with ProcessPoolExecutor(options.jobs, context, make_copy, (places,)) as pool:
            took = [
                [clock.scaled(known.seconds.get(test, 60.0)) for test in trial.tests]
                for trial in trials
            ]
            totals, longest = map(sum, took), (max(each, default=0.0) for each in took)
            for trial, result in zip(
                trials, pool.map(attempt, trials, totals, longest), strict=True
            ):
                print(f"{trial.name:<56} {result}", flush=True)
                killed[trial.folder] += result.startswith("killed")
                if not result.startswith("killed"):
                    survivors.append((trial, result))
    for trial, result in survivors:
        print(f"\n{trial.name}  {result}")
        before = (ROOT / trial.file).read_text().splitlines()
        if trial.folder != "faults":
            rows = list(difflib.unified_diff(before, trial.changed.splitlines(), n=0, lineterm=""))
            print("\n".join(rows[3:]))
    tried = Counter(trial.folder for trial in trials)
    print("\n| folder | killed | tried |\n|---|---|---|")
    for folder, count in tried.items():
        print(f"| {folder} | {killed[folder]} | {count} |")
    return len(survivors) if options.what else 0


if __name__ == "__main__":
    sys.exit(min(main(), 100))
