"""The probe: which devices it finds, in which order, and its report if a driver fails or hangs."""

import os
import sys
import threading
import types

import psutil
import pytest

from gpu_runtime.devices import drivers as cards
from gpu_runtime.devices import nvml
from gpu_runtime.devices.probe import check_index, open_probe
from gpu_runtime.errors import BadSetting, ProbeFailed, UnknownDevice
from gpu_runtime.facts import Device, Sample
from gpu_runtime.ledgers.access import slug_of
from gpu_runtime.units import GIB
from tests.clock import PATIENCE


def test_simulated_cards_and_host():
    probe = open_probe("sim:2x24GiB,host:64GiB")
    assert probe.simulated
    assert probe.devices == (
        Device("sim:0", 24 * GIB, "simulated", "SIM-0", 0, simulated=True),
        Device("sim:1", 24 * GIB, "simulated", "SIM-1", 1, simulated=True),
        Device("host", 64 * GIB, "simulated RAM", simulated=True),
    )
    assert probe.samples(5.0) == {}
    assert probe.used() == {"sim:0": 0, "sim:1": 0, "host": 0}


@pytest.mark.parametrize(("text", "gib"), [
    ("sim:24GiB+12GiB", [24, 12]),
    ("sim:2x24GiB+12GiB,host:64GiB", [24, 24, 12]),
    ("sim:12GiB + 2x24GiB, host:64GiB", [12, 24, 24]),
])  # fmt: skip
def test_simulated_cards_of_different_sizes(text, gib):
    devices = open_probe(text).devices
    assert [device.total_bytes // GIB for device in devices if not device.is_host] == gib
    assert [device.id for device in devices][:-1] == [f"sim:{n}" for n in range(len(gib))]


def test_each_set_of_simulated_cards_has_a_book_of_its_own():
    """Two processes with cards in another order must not share one book."""
    texts = ("24GiB+12GiB", "12GiB+24GiB", "2x24GiB+12GiB", "24GiB+2x12GiB", "2x24GiB", "24GiB")
    slugs = [slug_of(open_probe(f"sim:{text}").devices) for text in texts]
    assert len(set(slugs)) == len(texts)
    assert slugs[0] == "sim-1x24.0GiB-1x12.0GiB"
    assert slugs[4:] == ["sim-2x24.0GiB", "sim-1x24.0GiB"]


def test_without_a_host_in_the_text_the_host_is_this_machine():
    probe = open_probe("sim:24GiB")
    assert probe.devices[-1] == Device("host", psutil.virtual_memory().total, "RAM")
    sample = probe.samples(5.0)["host"]
    assert sample.taken_at == 5.0 and 0 < sample.free_bytes <= probe.devices[-1].total_bytes


@pytest.mark.parametrize("text", [
    "", "sim", "sim:", "sim:0x1GiB", "sim:65x1GiB", "sim:-1GiB", "sim:0", "sim:1GiB,", "cuda:",
    "auto:0", "vulkan", "sim:1GiB,host:", "sim:1GiB,host:0", "sim:1GiB,cuda",
    "sim:1GiB,host:1GiB,host:1GiB", "sim:1GiB+", "sim:+1GiB", "sim:64x1GiB+1GiB",
    "sim:999999999x1GiB", "sim:9999999999999x1GiB", "sim:2048TiB", f"sim:{'9' * 5000}GiB",
])  # fmt: skip
def test_a_bad_text_is_refused_with_examples(text):
    with pytest.raises(BadSetting, match="sim:2x24GiB,host:64GiB") as error:
        open_probe(text)
    assert error.value.setting == "GPU_DEVICES"


def test_a_renamed_card_is_found_under_its_new_name_alone():
    probe = open_probe("sim:2x1GiB,host:1GiB")
    probe.rename({"sim:0": "sim:4"})
    assert [(device.id, device.index) for device in probe.devices[:2]] == [
        ("sim:4", 4),
        ("sim:1", 1),
    ]
    assert (probe.place("sim:4").device, probe.devices[0].uuid) == ("sim:4", "SIM-0")
    with pytest.raises(UnknownDevice):
        probe.place("sim:0")


def test_the_only_gpu_to_use_is_one_that_this_process_sees():
    seen = [Device("host", 1), *(Device(f"cuda:{n}", 1, index=n) for n in (0, 2))]
    for index in (None, 0, 2):
        check_index(index, seen)
    for index in (1, 3):
        with pytest.raises(BadSetting, match=r"0 \(cuda:0\), 2 \(cuda:2\)"):
            check_index(index, seen)


def test_an_unknown_device_is_named():
    with pytest.raises(UnknownDevice, match="This machine has sim:0, host"):
        open_probe("sim:1GiB").place("cuda:0")


class Driver(types.ModuleType):
    """A pynvml whose cards are described by dictionaries."""

    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        pass

    def __init__(self, *cards, broken=None):
        super().__init__("pynvml")
        self.cards, self.broken = cards, broken
        names = "LibraryNotFound DriverNotLoaded NotSupported NoPermission FunctionNotFound NotFound GpuIsLost"
        for name in names.split():
            setattr(self, f"NVMLError_{name}", type(name, (self.NVMLError,), {}))

    def nvmlInit(self):
        if self.broken:
            raise getattr(self, f"NVMLError_{self.broken}")(self.broken)

    def nvmlDeviceGetCount(self):
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index):
        return self.cards[index]

    def nvmlDeviceGetMigMode(self, card):
        if "instances" not in card:
            raise self.NVMLError_NotSupported()
        return (1, 1)

    def nvmlDeviceGetMaxMigDeviceCount(self, card):
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card, index):
        if index >= len(card["instances"]):
            raise self.NVMLError_NotFound()
        return card["instances"][index]

    def nvmlDeviceGetName(self, card):
        return "H200"

    def nvmlDeviceGetUUID(self, card):
        return card["uuid"]

    def nvmlDeviceGetMemoryInfo(self, card):
        self.answer(card)
        if "free" not in card:
            raise self.NVMLError_NotSupported()
        return types.SimpleNamespace(
            total=80 * GIB, free=card["free"], used=80 * GIB - card["free"]
        )

    def answer(self, card):
        if card.get("lost"):
            raise self.NVMLError_GpuIsLost("GPU is lost")
        if "hangs" in card:
            card["hangs"].wait()

    def nvmlDeviceGetComputeRunningProcesses(self, card):
        return [
            types.SimpleNamespace(pid=pid, usedGpuMemory=size)
            for pid, size in card.get("processes", {}).items()
        ]

    def nvmlDeviceGetGraphicsRunningProcesses(self, card):
        if "graphics" not in card:
            raise self.NVMLError_NotSupported()
        return [types.SimpleNamespace(pid=pid, usedGpuMemory=1) for pid in card["graphics"]]

    def nvmlSystemGetCudaDriverVersion_v2(self):
        return 12110

    def nvmlSystemGetDriverVersion(self):
        return "580.65"

    def nvmlSystemGetNVMLVersion(self):
        return "12.580"

    def nvmlDeviceGetUtilizationRates(self, card):
        return types.SimpleNamespace(gpu=37)

    def nvmlDeviceGetTemperature(self, card, sensor):
        return 61

    def nvmlDeviceGetPowerUsage(self, card):
        return 412_000


@pytest.fixture
def driver(monkeypatch):
    def install(*cards, **how):
        made = Driver(*cards, **how)
        monkeypatch.setattr(nvml, "pynvml", made)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        return made

    yield install


def card(uuid, free=70 * GIB, **more):
    return {"uuid": uuid, "free": free, **more}


def seen(environment):
    return cards.visible_cards(environment).cards


FOUR = [card(f"GPU-{letter * 4}") for letter in "abcd"]


@pytest.mark.parametrize("visible, uuids", [
    (None, ["GPU-aaaa", "GPU-bbbb", "GPU-cccc", "GPU-dddd"]), ("", []),
    ("2,0", ["GPU-cccc", "GPU-aaaa"]), ("1,9,0", ["GPU-bbbb"]), ("-1", []), ("1,1", []),
    ("GPU-dd,GPU-aaaa", ["GPU-dddd", "GPU-aaaa"]), ("GPU-,0", []),
    ("0,²", ["GPU-aaaa"]),
])  # fmt: skip
def test_cuda_visible_devices_is_read_as_cuda_reads_it(driver, visible, uuids):
    """The first wrong entry ends the list. A UUID that fits two cards is wrong; a card named twice hides all."""
    driver(*FOUR)
    found = seen({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    assert [(c.torch, c.device.uuid) for c in found] == [
        (f"cuda:{i}", uuid) for i, uuid in enumerate(uuids)
    ]
    assert all(c.device.id == f"cuda:{'abcd'.index(c.device.uuid[-1])}" for c in found), (
        "everybody's name is the driver's"
    )


def test_of_a_partitioned_card_the_first_or_the_named_instance_is_visible(driver):
    driver(card("GPU-aaaa", instances=[card("MIG-1"), card("MIG-2")]))
    assert [(c.device.id, c.device.uuid) for c in seen({})] == [("cuda:0.0", "MIG-1")]
    assert [(c.device.id, c.device.uuid) for c in seen({"CUDA_VISIBLE_DEVICES": "MIG-2"})] == [
        ("cuda:0.1", "MIG-2")
    ]


def test_auto_uses_the_cards_and_what_the_driver_does_not_report_is_unknown(driver):
    driver(card("GPU-aaaa", processes={4121: 3 * GIB, 4122: None}))
    probe = open_probe("auto")
    assert not probe.simulated
    assert [device.id for device in probe.devices] == ["cuda:0", "host"]
    assert probe.samples(7.0)["cuda:0"] == Sample(
        "cuda:0", 7.0, 70 * GIB, {4121: 3 * GIB, 4122: None}, 37, 61, 412.0
    )
    there = card("GPU-aaaa", graphics=[4200])
    driver(there)
    probe = open_probe("auto")
    del there["free"]
    sample = probe.samples(0.0)["cuda:0"]
    assert sample.free_bytes is None and sample.processes == {4200: 1}
    assert nvml.versions() == {"driver": "580.65", "CUDA": "12.11", "NVML": "12.580"}


def test_bytes_that_the_driver_charges_to_this_process_count_as_used(driver):
    """The used bytes include the process's CUDA context, which torch does not count."""
    driver(card("GPU-aaaa", processes={os.getpid(): 3 * GIB}))
    assert open_probe("cuda").used()["cuda:0"] == 3 * GIB


def test_looking_at_the_cards_leaves_them_usable_for_forked_children(driver, monkeypatch):
    """After `torch.cuda.is_available()` no child of a fork can use CUDA (torch/cuda/__init__.py)."""
    started = []
    cuda = types.SimpleNamespace(
        is_initialized=lambda: False, is_available=lambda: started.append(1) or True
    )
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    driver(card("GPU-aaaa"))
    probe = open_probe("cuda")
    probe.watch_peaks()
    assert probe.used() == {"cuda:0": 0, "host": 0} and probe.contexts() == {"cuda:0": 0}
    assert (probe.maps(), probe.pulse(), probe.empty_cache()) == ((), (), 0)
    assert not probe.bound("cuda:0", 0.5) and probe.beyond_now("cuda:0") is None
    assert not started


@pytest.mark.parametrize("value", ["", "-1", "9"])
def test_hidden_cards_are_reported(driver, caplog, value):
    """The process gets simulated cards, and a log line says so."""
    driver(*FOUR)
    assert open_probe("auto", environment={"CUDA_VISIBLE_DEVICES": value}).simulated
    (warning,) = caplog.messages
    assert "this process sees no CUDA card of this machine" in warning
    assert f"hidden by CUDA_VISIBLE_DEVICES={value!r}" in warning
    assert "GPU_DEVICES=sim:24GiB" in warning


def test_nothing_is_reported_where_nothing_is_hidden(driver, caplog):
    driver(*FOUR)
    open_probe("auto", environment={})
    open_probe("auto", cpu_only=True, environment={"CUDA_VISIBLE_DEVICES": ""})
    open_probe("sim:1GiB", environment={"CUDA_VISIBLE_DEVICES": ""})
    assert caplog.messages == []


def test_cpu_only_queries_no_card(driver):
    driver(*FOUR)
    assert open_probe("auto", cpu_only=True).simulated
    with pytest.raises(BadSetting, match="DEVELOPMENT_CPU_ONLY"):
        open_probe("cuda", cpu_only=True)


@pytest.mark.parametrize("why", ["LibraryNotFound", "DriverNotLoaded"])
def test_without_a_driver_the_card_is_simulated(driver, why):
    driver(broken=why)
    probe = open_probe("auto")
    assert probe.simulated
    assert probe.devices[0].total_bytes == max(GIB, psutil.virtual_memory().total // 2 // GIB * GIB)
    with pytest.raises(BadSetting, match="no CUDA card is visible here"):
        open_probe("cuda")


def test_a_broken_driver_is_an_error_and_a_card_that_is_lost_later_is_named(driver):
    driver(card("GPU-aaaa", lost=True))
    with pytest.raises(ProbeFailed, match="GPU is lost"):
        open_probe("auto")
    there = card("GPU-aaaa")
    driver(there)
    probe = open_probe("auto")
    there["lost"] = True
    with pytest.raises(ProbeFailed, match=r"cuda:0 \(H200\) does not answer: GPU is lost") as error:
        probe.samples(0.0)
    assert error.value.device == "cuda:0"


def test_a_hanging_driver_blocks_no_caller_for_long(driver, monkeypatch):
    """The first query fails after a limit, the next at once, until the driver answers again."""
    there = card("GPU-aaaa")
    driver(there)
    probe = open_probe("auto")
    monkeypatch.setattr(cards, "ANSWER_SECONDS", 0.05)
    there["hangs"] = threading.Event()
    with pytest.raises(ProbeFailed, match="did not answer within"):
        probe.samples(0.0)
    with pytest.raises(ProbeFailed):
        probe.samples(0.0)
    there["hangs"].set()
    monkeypatch.setattr(cards, "ANSWER_SECONDS", PATIENCE)
    assert probe.samples(0.0)["cuda:0"].free_bytes == 70 * GIB
