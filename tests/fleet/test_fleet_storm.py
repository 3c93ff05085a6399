"""The long stories of the fleet, run by `make soak`: many clients, and a real model."""

import os
import random
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import gpu_runtime
from gpu_runtime import Busy, DoesNotFit, NodeLost, Runtime, samples
from tests.clock import PATIENCE, scaled, until
from tests.faces.served import OPERATORS, free_port, serving
from tests.fleet.ray_cluster import ENVIRONMENT, started, write_models

DEVICES = "sim:4x40GiB,host:1GiB"
CLIENTS, SECONDS = 30, 40.0


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_no_book_is_overfull_and_every_client_gets_an_answer(tmp_path):
    """A client is served, or refused with the reason of each host. A killed agent loses its pins."""
    with started(tmp_path, {"box1": (DEVICES, 4), "box2": (DEVICES, 4)}) as hosts:
        fleet = gpu_runtime.fleet(hosts.cluster.address)
        names = [f"m{number}" for number in range(CLIENTS)]
        fleet.apply(write_models(tmp_path / "models.yaml", dict.fromkeys(names, 30)), copies=0)
        end = time.monotonic() + SECONDS
        wrong: list[Any] = []
        answers: list[str] = []

        def client(name: str) -> None:
            """Uses the model `name` again and again."""
            while time.monotonic() < end:
                try:
                    with fleet.use(name, timeout=PATIENCE) as model:
                        assert model(name) == name
                    answers.append("served")
                except NodeLost:
                    answers.append("lost")
                except (Busy, DoesNotFit) as error:
                    answers.append("refused")
                    if not error.facts["hosts"]:
                        wrong.append(error)
                except BaseException as error:  # noqa: BLE001 - the test fails with it
                    wrong.append(error)

        threads = [threading.Thread(target=client, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        books = [Runtime(devices=DEVICES, ledger=hosts.ledger(name)) for name in hosts.nodes]
        killed = 0
        while time.monotonic() < end:
            for book in books:
                for view in book.status().devices:
                    if view.claimed_bytes > view.limit_bytes:
                        wrong.append(view)
            if time.monotonic() > end - SECONDS + 8.0 * (killed + 1):
                killed += 1
                with_agent = random.choice(list(hosts.nodes))
                os.kill(hosts.agent_pid(with_agent), signal.SIGKILL)
            time.sleep(0.1)
        for thread in threads:
            thread.join(scaled(90))
        assert not any(thread.is_alive() for thread in threads)
        assert not wrong and killed >= 3
        counts = {answer: answers.count(answer) for answer in set(answers)}
        assert counts["served"] > CLIENTS, counts
        pins = lambda: sum(lease.pins for book in books for lease in book.status().leases())
        until(lambda: not pins(), f"the end of all pins: {counts}")
        print(counts)
        for book in books:
            book.close()


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_no_call_is_lost_before_its_first_token_while_a_host_is_killed(tmp_path):
    """500 calls of OpenAI's own client through `gpu serve --fleet`, half of them streamed."""
    openai = pytest.importorskip("openai")
    with started(tmp_path, {name: (DEVICES, 4) for name in ("box1", "box2", "box3")}) as hosts:
        fleet = gpu_runtime.fleet(hosts.cluster.address)
        fleet.apply(write_models(tmp_path / "models.yaml", {"echo": 4}), copies=2)
        port = free_port()
        words = ["serve", "--fleet", hosts.cluster.address, "--port", str(port)]
        command = [sys.executable, "-m", "gpu_runtime.cli", *words]
        environment = {**ENVIRONMENT, "GPU_CONSOLE_TOKEN": OPERATORS}
        with serving(command, tmp_path, environment, port=port, path="/health"):
            client = openai.OpenAI(
                base_url=f"http://127.0.0.1:{port}/v1", api_key=OPERATORS, max_retries=0
            )
            slow: list[float] = []

            def call(number: int) -> str:
                """The answer to one call."""
                if number == 200 and len(hosts.nodes) == 3:
                    hosts.kill(where(fleet, "echo"))
                messages = [{"role": "user", "content": f"{number} two three"}]
                began = time.monotonic()
                made = client.chat.completions.create(
                    model="echo", messages=messages, stream=bool(number % 2)
                )
                if number % 2:
                    text = ""
                    try:
                        for event in made:
                            text += "".join(c.delta.content or "" for c in event.choices)
                    except openai.APIError:  # cut off after its first token
                        assert text
                        return call(number)
                else:
                    text = made.choices[0].message.content
                slow.append(time.monotonic() - began)
                return text

            with ThreadPoolExecutor(8) as pool:
                assert list(pool.map(call, range(500))) == [f"{n} two three" for n in range(500)]
            slow.sort()
            print(f"median {slow[250] * 1000:.0f} ms, longest {slow[-1]:.2f} s")


def where(fleet: Any, name: str) -> str:
    """A host that has the model, and that is not the head."""
    fleet.hosts()  # reads which hosts there are
    held = fleet._holdings()
    return next(host for host in ("box3", "box2") if name in held[host])


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_a_real_model_takes_and_gives_tensors(tmp_path):
    """The first offer of a host imports transformers, which may take longer than other offers."""
    path = samples.causal_lm(tmp_path / "lm")
    file = tmp_path / "lm.yaml"
    file.write_text(f"models: {{lm: {{path: {path}, memory: 64MiB}}}}\n")
    with started(tmp_path, {"box1": ("sim:1x1GiB,host:1GiB", 1)}) as hosts:
        fleet = gpu_runtime.fleet(hosts.cluster.address)
        assert fleet.apply(file) == {"lm": "box1"}
        with fleet.use("lm") as model:
            words = model.tokenizer("Hi", return_tensors="pt")
            assert model.generate(**words, max_new_tokens=5).shape[1] > words["input_ids"].shape[1]
            with pytest.raises(AttributeError):
                model.no_such_method()
