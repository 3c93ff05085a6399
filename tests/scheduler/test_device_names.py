"""A name in the book is one physical card, whichever cards a process sees and however they are numbered."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpu_runtime.facts import HOST, Book, Device
from gpu_runtime.scheduler.transitions import device_names


def card(id, uuid, **fields):
    return Device(id, 80, uuid=uuid, **fields)


def test_a_card_has_the_name_that_the_book_gives_it():
    assert device_names((card("cuda:3", "GPU-d"), Device(HOST, 64)), Book()) == {}
    # Two processes see both cards, in containers that number them differently.
    book = Book(devices=(card("cuda:0", "GPU-a"), card("cuda:1", "GPU-b"), Device(HOST, 64)))
    assert device_names((card("cuda:0", "GPU-b"), card("cuda:1", "GPU-a")), book) == {
        "cuda:0": "cuda:1",
        "cuda:1": "cuda:0",
    }
    book = Book(devices=(card("cuda:0", "GPU-a"),))
    assert device_names((card("cuda:0", "GPU-b"),), book) == {"cuda:0": "cuda:1"}
    assert device_names((card("cuda:0", "GPU-b"), card("cuda:1", "GPU-c")), book) == {
        "cuda:0": "cuda:2"
    }
    assert device_names((card("cuda:1", "GPU-b"),), book) == {}
    # After a new partitioning, other MIG instances are at the same positions of the card.
    book = Book(devices=(card("cuda:0.0", "MIG-a"), card("cuda:0.1", "MIG-b")))
    assert device_names((card("cuda:0.0", "MIG-c"), card("cuda:0.1", "MIG-b")), book) == {
        "cuda:0.0": "cuda:0.2"
    }
    book = Book(devices=(card("sim:0", "SIM-0", simulated=True),))
    assert (
        device_names(
            (card("sim:0", "SIM-0", simulated=True), card("sim:1", "SIM-1", simulated=True)), book
        )
        == {}
    )


@given(st.lists(st.permutations(range(5)).map(lambda seen: seen[:3]), min_size=1, max_size=6))
def test_all_processes_agree_on_names_in_whatever_order_they_start(processes):
    """Each process sees three of five cards, numbered from 0. Each card has exactly one name."""
    book = Book()
    called: dict[int, str] = {}
    for seen in processes:
        mine = tuple(
            card(f"cuda:{place}", f"GPU-{physical}") for place, physical in enumerate(seen)
        )
        theirs = device_names(mine, book)
        mine = tuple(replace(device, id=theirs.get(device.id, device.id)) for device in mine)
        for physical, device in zip(seen, mine, strict=True):
            assert called.setdefault(physical, device.id) == device.id
        known = {device.id: device for device in book.devices}
        book = replace(
            book, devices=tuple({**{device.id: device for device in mine}, **known}.values())
        )
    assert len(set(called.values())) == len(called)
