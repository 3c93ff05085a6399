"""The report of `gpu doctor`: it is complete, works even if a part fails, and contains no secrets."""

import argparse
import os
import types

import pytest

from gpu_runtime import DoesNotFit, verbs
from gpu_runtime.devices import nvml
from gpu_runtime.errors import LedgerUnavailable


def chapter(report, title):
    return dict(next(one for one in report.chapters if one.title == title).rows)


def test_it_tells_versions_devices_ledger_settings_and_where_each_came_from(runtime, environment):
    environment.setenv("GPU_POLICY", "cost_aware")
    report = runtime(devices="sim:2x16GiB,host:32GiB", gpu_memory_max_percent=0.5).doctor()
    assert chapter(report, "versions")["gpu-console"]
    assert chapter(report, "versions")["python"].startswith("3.")
    assert (
        chapter(report, "devices")["sim:1"]
        == "simulated, total 16.0 GiB, budget 8.0 GiB, claimed 0 B, LOW"
    )
    assert chapter(report, "ledger")["where"] == "memory:"
    settings = chapter(report, "settings")
    assert settings["GPU_POLICY"] == "cost_aware  (environment)"
    assert settings["GPU_MEMORY_MAX_PERCENT"] == "0.5  (argument)"
    assert settings["GPU_RELIEF"] == "auto"


def test_it_names_the_last_refusals_and_what_is_drained(runtime):
    rt = runtime(devices="sim:16GiB")
    rt.register("big", backend="fake", size="64GiB")
    with pytest.raises(DoesNotFit):
        rt.preload("big")
    rt.drain("sim:0")
    refusals = " ".join(
        how
        for _, how in next(
            c for c in rt.doctor().chapters if c.title.startswith("last refusals")
        ).rows
    )
    assert "big refused (hopeless): big needs 64" in refusals and "sim:0 drained" in refusals
    assert "sim:0 was drained by" in chapter(rt.doctor(), "devices")["sim:0"]


@pytest.mark.parametrize("secret", ["s3cretpassw0rd", "hf_abcdefghijklmnopqrstuvwxyz"])
def test_no_password_and_no_token_is_in_it(runtime, environment, secret):
    rt = runtime(devices="sim:16GiB")
    environment.setenv("HF_TOKEN", secret)
    rt._session.ledger.url = f"redis://ops:{secret}@box:6379/0?password={secret}"
    rt.register("big", backend="fake", size="64GiB")
    said = types.SimpleNamespace(
        tail=lambda: [
            types.SimpleNamespace(
                action="refused",
                wall=0.0,
                model="big",
                reason="failed",
                because=f"https://ann:{secret}@hub/x said no to {secret}"
                if secret.startswith("hf_")
                else f"https://ann:{secret}@hub/x said no",
            )
        ]
    )
    rt._session.journal, before = said, rt._session.journal
    text = rt.doctor().text
    rt._session.journal = before
    assert secret not in text and "redis://ops:***@box:6379/0" in text


def test_where_nothing_opens_it_says_why_and_the_rest_all_the_same(environment, monkeypatch):
    import gpu_runtime

    def broken():
        raise LedgerUnavailable("the ledger /x cannot be written.\n  Check the disk.", path="/x")

    monkeypatch.setattr(gpu_runtime, "runtime", broken)
    environment.setenv("GPU_LEDGER", "redis://ops:s3cret@nowhere:1/0")
    report = verbs.doctor(None, argparse.Namespace())
    assert (
        "the ledger /x cannot be written."
        in next(c for c in report.chapters if c.title == "the runtime does not open").rows[0][1]
    )
    assert chapter(report, "settings")["GPU_LEDGER"] == "redis://ops:***@nowhere:1/0  (environment)"


def test_a_setting_that_is_wrong_hides_only_the_settings(environment, monkeypatch):
    environment.setenv("GPU_RELIEF", "sometimes")
    import gpu_runtime
    from gpu_runtime.settings import Settings

    monkeypatch.setattr(gpu_runtime, "runtime", Settings.load)
    report = verbs.doctor(None, argparse.Namespace())
    assert "GPU_RELIEF" in chapter(report, "settings")["not known"]
    assert chapter(report, "versions")["python"]


def test_a_driver_that_fails_is_told_in_its_words(runtime, monkeypatch):
    broken = types.ModuleType("pynvml")
    broken.NVMLError = type("NVMLError", (Exception,), {})
    for name in ("LibraryNotFound", "DriverNotLoaded"):
        setattr(broken, f"NVMLError_{name}", type(name, (broken.NVMLError,), {}))

    def init():
        raise broken.NVMLError("Driver/library version mismatch")

    broken.nvmlInit = init
    monkeypatch.setattr(nvml, "pynvml", broken)
    report = runtime().doctor()
    assert chapter(report, "drivers")["cuda by NVML"] == "fails: Driver/library version mismatch"


def test_what_chooses_the_cards_in_the_environment_is_in_it(runtime, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert chapter(runtime().doctor(), "drivers")["CUDA_VISIBLE_DEVICES"] == "(empty)"
    assert "HOME" not in chapter(runtime().doctor(), "drivers") and os.environ["HOME"]
