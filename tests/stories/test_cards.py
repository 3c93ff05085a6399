"""Processes that see different cards of one host, with NVML's binding and a fake driver of eight cards."""

import psutil
import pytest

from gpu_runtime.units import GIB
from tests.clock import PATIENCE, until
from tests.nvml_driver import Driver, Kernel

WHERE = "[[lease.name, lease.where] for lease in sorted(rt.status().leases(), key=lambda lease: lease.name)]"
TORCH = "{device.id: rt.probe.place(device.id).torch for device in rt.probe.devices}"


def hold(kernel, name, gib, **options):
    """Loads a model of `gib` GiB in the kernel. Returns the cards that hold it, or the error."""
    words = "".join(f", {key}={value!r}" for key, value in options.items())
    kernel.evaluate(f"rt.register({name!r}, backend='fake', size='{gib}GiB'{words}) and None")
    return kernel.evaluate(f"rt.preload({name!r}, timeout={PATIENCE}).where")


def test_two_processes_that_see_different_cards_do_not_take_them_for_one(host, driver):
    """In both, torch calls the first card cuda:0. In the book these are two cards, and both can be filled."""
    driver.set(count=2)
    one, other = host.kernel(CUDA_VISIBLE_DEVICES="0"), host.kernel(CUDA_VISIBLE_DEVICES="1")
    assert one.evaluate(TORCH) == {"cuda:0": "cuda:0", "host": "cpu"}
    assert other.evaluate(TORCH) == {"cuda:1": "cuda:0", "host": "cpu"}
    assert (hold(one, "a", 60), hold(other, "b", 60)) == ("cuda:0", "cuda:1")
    assert one.evaluate(WHERE) == other.evaluate(WHERE) == [["a", "cuda:0"], ["b", "cuda:1"]]


def test_two_processes_that_order_the_cards_otherwise_share_each(host, driver):
    """One takes 60 of the 80 GiB of a card. For the other it is the second card, with the same use."""
    driver.set(count=2)
    one, other = host.kernel(CUDA_VISIBLE_DEVICES="0,1"), host.kernel(CUDA_VISIBLE_DEVICES="1,0")
    assert other.evaluate(TORCH) == {"cuda:1": "cuda:0", "cuda:0": "cuda:1", "host": "cpu"}
    assert hold(one, "a", 60, devices=["cuda:0"], keep=True) == "cuda:0"
    assert "DoesNotFit" in hold(other, "b", 30, devices=["cuda:0"])
    assert hold(other, "c", 30) == "cuda:1"


def test_a_process_may_not_use_a_card_that_it_does_not_see(host, driver):
    driver.set(count=2)
    one, other = host.kernel(CUDA_VISIBLE_DEVICES="0"), host.kernel(CUDA_VISIBLE_DEVICES="1")
    assert hold(other, "b", 1) == "cuda:1"
    told = one.evaluate("rt.register('a', backend='fake', size='1GiB', devices=('cuda:1',))")
    assert told.startswith("UnknownDevice") and "This machine has cuda:0" in told
    assert "DoesNotFit" in hold(one, "c", 70) + hold(one, "d", 75), "one card is all it has"


def test_containers_whose_drivers_number_different_cards_alike_agree_by_uuid(
    host, driver, library, tmp_path
):
    """In each container the driver shows one card, with the number 0. The book identifies the cards by UUID."""
    there = tmp_path / "container"
    there.mkdir()
    (there / library.name).symlink_to(library)
    contained = Driver(there)
    contained.set(_0_uuid="GPU-11111111-0000-0000-0000-000000000000")
    one = host.kernel()
    other = Kernel(contained, host.url)
    host.kernels.append(other)
    assert hold(one, "a", 60) == "cuda:0"
    other.evaluate("rt.register('b', backend='fake', size='60GiB') and None")
    assert "cuda:1" in other.evaluate("rt.plan('b').considered[0].because")
    assert other.evaluate(TORCH) == {"cuda:1": "cuda:0", "host": "cpu"}


@pytest.mark.parametrize(
    "visible, seen",
    [
        ("", []),
        ("7,0", ["cuda:7", "cuda:0"]),
        ("GPU-00000000-0000-0000-0000-000000000005", ["cuda:5"]),
    ],
)
def test_visible_devices_choose_among_eight_cards(host, driver, visible, seen):
    driver.set(count=8)
    kernel = host.kernel(devices="auto", CUDA_VISIBLE_DEVICES=visible)
    cards = "[d.id for d in rt.probe.cards if not d.simulated]"
    assert kernel.evaluate(cards) == seen


def test_instances_of_a_partitioned_card_are_devices_of_their_own(host, driver):
    """Each has memory of its own, the temperature and power of the card, and an unknown utilisation."""
    driver.set(count=2, _0_mig=3, _0_1_free=4 * GIB)
    uuid = "MIG-00000000-0000-0000-{:04d}-000000000000".format
    one, other = [host.kernel(CUDA_VISIBLE_DEVICES=uuid(number)) for number in (0, 1)]
    assert one.evaluate(TORCH) == {"cuda:0.0": "cuda:0", "host": "cpu"}
    assert other.evaluate(TORCH) == {"cuda:0.1": "cuda:0", "host": "cpu"}
    sample = "v.sample.utilisation_percent, v.sample.temperature_celsius, v.sample.power_watts"
    view = f"[[v.device.total_bytes, v.measured_bytes, {sample}] for v in rt.status().devices][0]"
    assert one.evaluate(view) == [10 * GIB, 0, None, 61, 412]
    assert other.evaluate(view)[:2] == [10 * GIB, 6 * GIB]
    assert (hold(one, "a", 8), hold(other, "b", 3)) == ("cuda:0.0", "cuda:0.1")
    assert "DoesNotFit" in hold(one, "c", 20), "an instance is no whole card"


def test_a_card_with_a_broken_sensor_can_be_leased(host, driver):
    """nvidia-smi shows ERR! there, from NVML_ERROR_UNKNOWN. The card computes as before."""
    driver.set(_0_sensors=999, _0_free=70 * GIB)
    kernel = host.kernel()
    sample = "v.sample.utilisation_percent, v.sample.temperature_celsius, v.sample.power_watts"
    view = f"[[v.measured_bytes, {sample}] for v in rt.status().devices][0]"
    assert kernel.evaluate(view) == [10 * GIB, None, None, None] and kernel.degraded == ""
    assert hold(kernel, "a", 60) == "cuda:0"


def test_pcie_traffic_is_counted_where_the_driver_counts_it(host, driver):
    """It is in the sample after the first. An instance has none, and neither has a driver without the figure."""
    driver.set(count=2, _0_pcie="1500000,20000")
    kernel = host.kernel()
    seen = "[v.sample.pcie and list(v.sample.pcie) for v in rt.status().devices][:2]"
    until(lambda: kernel.evaluate(seen) == [[1_500_000_000, 20_000_000], None])


def test_without_a_choice_cuda_shows_one_instance_and_nothing_beside_it(host, driver):
    """NVIDIA's MIG User Guide, section Device Enumeration."""
    driver.set(count=2, _1_mig=2)
    kernel = host.kernel()
    assert kernel.evaluate(TORCH) == {"cuda:1.0": "cuda:0", "host": "cpu"}


def test_of_eight_cards_those_that_can_be_listed_are_used_and_the_others_named(host, driver):
    driver.set(count=8, _3_listed=15, _5_mig=0)
    kernel = host.kernel()
    assert len(kernel.evaluate(TORCH)) == 7
    assert "card 3 cannot be used: GPU is lost" in kernel.degraded
    assert "card 5 cannot be used: it is partitioned (MIG), and has no instance" in kernel.degraded
    assert hold(kernel, "a", 60) == "cuda:0"


def test_an_explicit_choice_comes_before_the_visible_devices_and_within_them(host, driver):
    driver.set(count=8)
    kernel = host.kernel(devices="cuda:6", CUDA_VISIBLE_DEVICES="2,6")
    assert kernel.evaluate(TORCH) == {"cuda:6": "cuda:1", "host": "cpu"}
    kernel = host.kernel(INFERENCE_GPU_INDEX="6", CUDA_VISIBLE_DEVICES="2,6")
    assert hold(kernel, "a", 1) == "cuda:6"


def test_the_cpu_is_used_where_it_is_asked_for_and_never_because_memory_ran_out(host, driver):
    """A model that fits on no card, or for which a full card cannot make room, is refused with the figures."""
    seen = "[d.id for d in rt.probe.devices]"
    only_cpu = host.kernel(devices="auto", DEVELOPMENT_CPU_ONLY="true")
    assert only_cpu.evaluate(seen) == ["sim:0", "host"]
    kernel = host.kernel(devices="auto", INFERENCE_GPU_LAYERS="-1")
    assert kernel.evaluate(seen) == ["cuda:0", "host"]
    assert "DoesNotFit: big needs 100" in hold(kernel, "big", 100)
    assert hold(kernel, "a", 60) == "cuda:0"
    kernel.evaluate("held = rt.use('a'); held.__enter__() and None")
    assert "a (60.0 GiB) is held by the block that makes the request" in hold(kernel, "b", 60)
    assert kernel.evaluate(WHERE) == [["a", "cuda:0"]]


def test_a_card_that_shows_no_memory_but_is_known_to_share_the_machines_is_unified(host, driver):
    driver.set(_0_name="NVIDIA GB10", _0_total="na")
    kernel = host.kernel()
    found = kernel.evaluate("[rt.probe.devices[0].unified, rt.probe.devices[0].total_bytes]")
    assert found == [True, psutil.virtual_memory().total]
    until(lambda: kernel.evaluate("rt.status().devices[0].measured_bytes"))
    assert kernel.degraded == ""


@pytest.mark.parametrize("how", ["na", "forbidden"])
def test_a_card_that_does_not_say_how_much_memory_it_has_is_not_used(host, driver, how):
    """A card of unknown size is not used. It is also not taken for a card that shares the machine's memory."""
    driver.set(count=2, _0_total=how)
    kernel = host.kernel()
    assert list(kernel.evaluate(TORCH)) == ["cuda:1", "host"]
    assert "card 0 cannot be used" in kernel.degraded
