"""The long stories of the fleet, run by `make soak`: many clients, and a real model."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from typing import Any

import pytest

import gpu_runtime
from gpu_runtime import Busy, DoesNotFit, NodeLost, Runtime, samples
from tests.fleet.ray_cluster import started, write_models

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
        until = time.monotonic() + SECONDS
        wrong: list[Any] = []
        answers: list[str] = []

        def client(name: str) -> None:
            """Uses the model `name` again and again."""
            while time.monotonic() < until:
                try:
                    with fleet.use(name, timeout=20) as model:
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
        while time.monotonic() < until:
            for book in books:
                for view in book.status().devices:
                    if view.claimed_bytes > view.limit_bytes:
                        wrong.append(view)
            if time.monotonic() > until - SECONDS + 8.0 * (killed + 1):
                killed += 1
                with_agent = random.choice(list(hosts.nodes))
                os.kill(hosts.agent_pid(with_agent), signal.SIGKILL)
            time.sleep(0.1)
        for thread in threads:
            thread.join(90)
        assert not any(thread.is_alive() for thread in threads)
        assert not wrong and killed >= 3
        counts = {answer: answers.count(answer) for answer in set(answers)}
        assert counts["served"] > CLIENTS, counts
        for _ in range(100):
            if not any(lease.pins for book in books for lease in book.status().leases()):
                break
            time.sleep(0.1)
        assert not any(lease.pins for book in books for lease in book.status().leases()), counts
        print(counts)
        for book in books:
            book.close()


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
