"""The modules for ROCm and Metal report the same facts.

The tests use recorded and documented answers of the vendors' tools.
"""

import sys
import types
from pathlib import Path

import psutil
import pytest

from gpu_runtime.devices import amd, apple, drivers, nvml
from gpu_runtime.devices.drivers import NoAnswer
from gpu_runtime.devices.probe import open_probe
from gpu_runtime.errors import BadSetting, ProbeFailed
from gpu_runtime.facts import Device, Sample
from gpu_runtime.units import GIB, MIB

RECORDED = Path(__file__).parent / "recorded"


class Rocm(types.ModuleType):
    """The ROCm binding as its source documents it: dictionaries with MiB and "N/A", exceptions for missing features."""

    class AmdSmiException(Exception):
        pass

    class AmdSmiTemperatureType:
        EDGE, HOTSPOT = "edge", "hotspot"

    class AmdSmiTemperatureMetric:
        CURRENT = "current"

    def __init__(self, *told):
        super().__init__("amdsmi")
        self.told = told

    def amdsmi_init(self):
        if not self.told:
            raise self.AmdSmiException(
                "Error code: 34 | AMDSMI_STATUS_DRIVER_NOT_LOADED - Driver not loaded"
            )

    def amdsmi_get_processor_handles(self):
        return list(range(len(self.told)))

    def __getattr__(self, name):
        if not name.startswith("amdsmi_get_"):
            raise AttributeError(name)

        def answer(handle, *_):
            if name not in self.told[handle]:
                raise self.AmdSmiException(
                    "Error code: 2 | AMDSMI_STATUS_NOT_SUPPORTED - Feature not supported"
                )
            return self.told[handle][name]

        return answer


def mi300(hip_id, **more):
    return {
        "amdsmi_get_gpu_vram_usage": {"vram_total": 196592, "vram_used": 1592},
        "amdsmi_get_gpu_asic_info": {
            "market_name": "AMD Instinct MI300X",
            "target_graphics_version": "gfx942",
        },
        "amdsmi_get_gpu_device_uuid": f"{hip_id:02}ff74a1-0000-1000-80ff-000000000000",
        "amdsmi_get_gpu_enumeration_info": {
            "drm_render": 128,
            "drm_card": 1,
            "hsa_id": hip_id + 1,
            "hip_id": hip_id,
            "hip_uuid": f"GPU-{hip_id:016x}",
        },
        "amdsmi_get_gpu_activity": {"gfx_activity": 45, "umc_activity": 30, "mm_activity": "N/A"},
        "amdsmi_get_power_info": {
            "current_socket_power": 350,
            "average_socket_power": "N/A",
            "power_limit": 750,
        },
        "amdsmi_get_temp_metric": 52,
        "amdsmi_get_gpu_process_list": [
            {
                "name": "python3",
                "pid": 12345,
                "mem": 1073741824,
                "engine_usage": {"gfx": 100, "enc": 0},
                "memory_usage": {"gtt_mem": 0, "cpu_mem": 0, "vram_mem": 1073741824},
            }
        ],
        "amdsmi_get_gpu_driver_info": {"driver_name": "amdgpu", "driver_version": "6.10.5"},
        **more,
    }


@pytest.fixture
def rocm(monkeypatch):
    def install(*told):
        made = Rocm(*told)
        monkeypatch.setitem(sys.modules, "amdsmi", made)
        monkeypatch.setattr(nvml, "list_cards", lambda: drivers.Listing(nvml, absent="not here"))
        monkeypatch.setenv("PATH", "/nonexistent")
        for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
            monkeypatch.delenv(name, raising=False)
        return made

    return install


def test_rocm_cards_give_the_same_facts(rocm):
    rocm(mi300(1), mi300(0))
    probe = open_probe("auto")
    assert probe.devices[0] == Device(
        "rocm:0", 196592 * MIB, "AMD Instinct MI300X", "GPU-0000000000000000", 0
    )
    assert [probe.place(f"rocm:{n}").torch for n in (0, 1)] == ["cuda:0", "cuda:1"], (
        "as torch calls them"
    )
    assert probe.samples(5.0)["rocm:1"] == Sample(
        "rocm:1", 5.0, 195000 * MIB, {12345: GIB}, 45, 52, 350
    )
    assert amd.versions()["driver"] == "6.10.5"


@pytest.mark.parametrize("environment, seen", [
    ({}, ["rocm:0", "rocm:1", "rocm:2"]),
    ({"HIP_VISIBLE_DEVICES": "2,0"}, ["rocm:2", "rocm:0"]),
    ({"HIP_VISIBLE_DEVICES": "GPU-0000000000000001"}, ["rocm:1"]),
    ({"CUDA_VISIBLE_DEVICES": "1"}, ["rocm:1"]),
    ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}, ["rocm:0"]),
    ({"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "1"}, ["rocm:2"]),
    ({"HIP_VISIBLE_DEVICES": ""}, []),
])  # fmt: skip
def test_hips_variables_are_read_as_hip_reads_them(rocm, environment, seen):
    rocm(mi300(0), mi300(1), mi300(2))
    found = drivers.visible_cards(environment).cards
    assert [card.device.id for card in found] == seen
    assert [card.torch for card in found] == [f"cuda:{n}" for n in range(len(seen))]


def test_values_that_a_rocm_card_does_not_report_are_unknown(rocm):
    told = {
        name: said
        for name, said in mi300(0).items()
        if name in ("amdsmi_get_gpu_vram_usage", "amdsmi_get_gpu_device_uuid")
    }
    rocm(told)
    [card] = drivers.visible_cards({}).cards
    assert card.device.uuid == told["amdsmi_get_gpu_device_uuid"]
    told["amdsmi_get_gpu_vram_usage"] = {"vram_total": 196592, "vram_used": "N/A"}
    assert amd.measure(card, 5.0) == Sample("rocm:0", 5.0, None)
    del told["amdsmi_get_gpu_vram_usage"]
    with pytest.raises(NoAnswer, match="NOT_SUPPORTED"):
        amd.measure(card, 5.0)


def test_a_failing_rocm_driver_is_an_error(rocm):
    rocm()
    with pytest.raises(
        ProbeFailed,
        match="the driver of the rocm cards does not answer amdsmi: .*DRIVER_NOT_LOADED",
    ):
        drivers.visible_cards({}, "rocm")


def test_rocm_requested_by_name_without_a_card_is_an_error():
    with pytest.raises(BadSetting, match="no ROCm card is visible here"):
        open_probe("rocm")


def test_apple_silicon_has_one_gpu_whose_memory_is_the_machines():
    [card] = apple.read((RECORDED / "system_profiler_m1.json").read_text()).cards
    assert card.device == Device(
        "metal:0", psutil.virtual_memory().total, "Apple M1", "METAL-0", 0, unified=True
    )
    sample = apple.measure(card, 5.0)
    assert 0 < sample.free_bytes <= card.device.total_bytes and sample.processes == {}
    assert (
        apple.visible(apple.read((RECORDED / "system_profiler_m1.json").read_text()), {})[0].torch
        == "mps:0"
    )


def test_of_an_intel_mac_the_discrete_gpu_is_used_and_its_free_memory_is_unknown():
    listing = apple.read("""{"SPDisplaysDataType": [
        {"sppci_model": "Intel UHD Graphics 630", "spdisplays_metal": "spdisplays_supported",
         "spdisplays_vram_shared": "1536 MB"},
        {"sppci_model": "AMD Radeon Pro 5500M", "spdisplays_mtlgpufamilysupport": "spdisplays_metal3",
         "spdisplays_vram": "8 GB"}]}""")
    [card] = listing.cards
    assert (card.device.name, card.device.total_bytes, card.device.unified) == (
        "AMD Radeon Pro 5500M",
        8 * GIB,
        False,
    )
    assert apple.measure(card, 5.0).free_bytes is None


@pytest.mark.parametrize("said, absent", [
    ('{"SPDisplaysDataType": []}', True),
    ('{"SPDisplaysDataType": [{"_name": "NVIDIA GeForce 9400M"}]}', True), ('{"other": 1}', False),
    ("no json", False),
])  # fmt: skip
def test_a_mac_without_metal_has_no_card_and_an_invalid_report_is_an_error(said, absent):
    if absent:
        assert apple.read(said).absent == "no GPU here can do Metal"
    else:
        with pytest.raises(NoAnswer, match="no valid report"):
            apple.read(said)


def test_every_source_defines_all_functions_of_a_source():
    """To add a vendor, write one module with all functions of a source, and add it to SOURCES."""
    wanted = [name for name in vars(drivers.Source) if not name.startswith("_")] + ["KIND", "NAME"]
    for name in drivers.SOURCES:
        assert [what for what in wanted if not hasattr(drivers.source(name), what)] == []
