"""The cost of a fork in a process with an idle runtime and 20 models, and in the same process without a runtime.

The two processes fork in turn, so that both see the same machine.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time

FORKS = 300


def answer(url: str) -> None:
    """Forks once for each line of its input, and prints the two times in seconds. It runs in a process of its own."""
    import gpu_runtime.runtime

    if url:  # without a URL there is no runtime
        rt = gpu_runtime.Runtime(devices="sim:2x24GiB,host:64GiB", ledger=url)
        for number in range(20):
            rt.register(f"m{number}", backend="fake", size="64MiB")
            rt.preload(f"m{number}")
    for _ in sys.stdin:
        inbox, outbox = os.pipe()
        began = time.perf_counter()
        pid = os.fork()
        if pid == 0:
            os.write(outbox, str(time.perf_counter() - began).encode())
            os._exit(0)
        in_parent = time.perf_counter() - began
        os.close(outbox)
        in_child = os.read(inbox, 40).decode()
        os.close(inbox)
        os.waitpid(pid, 0)
        print(in_parent, in_child, flush=True)


def milliseconds(forks: int = FORKS) -> dict[str, float]:
    """Median milliseconds until `os.fork` returns in the parent and in the child, without and with a runtime."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "tests.bench.bench_fork"]
        processes = {
            name: subprocess.Popen(
                [*command, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for name, url in (("without", "-"), ("with", f"keeper://{directory}/ledger"))
        }
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in processes}
        for _ in range(forks):
            for name, process in processes.items():
                assert process.stdin and process.stdout
                print(file=process.stdin, flush=True)
                in_parent, in_child = map(float, process.stdout.readline().split())
                times[name].append((in_parent * 1e3, in_child * 1e3))
        for process in processes.values():
            process.communicate()
    found = {}
    for name, pairs in times.items():
        in_parent, in_child = zip(*pairs, strict=True)
        found[f"parent, {name}"] = statistics.median(in_parent)
        found[f"child, {name}"] = statistics.median(in_child)
    return found


if __name__ == "__main__":
    if sys.argv[1:]:
        answer(sys.argv[1].removeprefix("-"))
    else:
        for name, value in milliseconds().items():
            print(f"{name:>16}  {value:7.2f} ms")
