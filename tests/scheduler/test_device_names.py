"""One name in the book is one physical card, whoever sees what, and however their drivers number them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpu_runtime.facts import HOST, Book, Device
from gpu_runtime.scheduler.device_names import names


def card(id, uuid, **fields):
    return Device(id, 80, uuid=uuid, **fields)


def test_in_an_empty_book_the_driver_s_names_stand():
    assert names((card("cuda:3", "GPU-d"), Device(HOST, 64)), Book()) == {}


def test_a_card_is_called_what_the_book_calls_it():
    """Two that see both cards, in containers that number them otherwise."""
    book = Book(devices=(card("cuda:0", "GPU-a"), card("cuda:1", "GPU-b"), Device(HOST, 64)))
    assert names((card("cuda:0", "GPU-b"), card("cuda:1", "GPU-a")), book) == {
        "cuda:0": "cuda:1",
        "cuda:1": "cuda:0",
    }


def test_a_card_that_the_book_does_not_know_takes_a_name_that_is_free():
    book = Book(devices=(card("cuda:0", "GPU-a"),))
    assert names((card("cuda:0", "GPU-b"),), book) == {"cuda:0": "cuda:1"}
    assert names((card("cuda:0", "GPU-b"), card("cuda:1", "GPU-c")), book) == {"cuda:0": "cuda:2"}
    assert names((card("cuda:1", "GPU-b"),), book) == {}


def test_an_instance_that_was_made_anew_is_another_device():
    """Partitioned again, the card has other instances in the same places."""
    book = Book(devices=(card("cuda:0.0", "MIG-a"), card("cuda:0.1", "MIG-b")))
    assert names((card("cuda:0.0", "MIG-c"), card("cuda:0.1", "MIG-b")), book) == {
        "cuda:0.0": "cuda:0.2"
    }


def test_simulated_cards_are_everybody_s_under_their_own_names():
    book = Book(devices=(card("sim:0", "SIM-0", simulated=True),))
    assert (
        names(
            (card("sim:0", "SIM-0", simulated=True), card("sim:1", "SIM-1", simulated=True)), book
        )
        == {}
    )


@given(st.lists(st.permutations(range(5)).map(lambda seen: seen[:3]), min_size=1, max_size=6))
def test_whoever_comes_in_whatever_order_all_agree(processes):
    """Each sees three of five cards, numbered from 0: no name is two cards, no card has two names."""
    book = Book()
    called: dict[int, str] = {}
    for seen in processes:
        mine = tuple(
            card(f"cuda:{place}", f"GPU-{physical}") for place, physical in enumerate(seen)
        )
        theirs = names(mine, book)
        mine = tuple(replace(device, id=theirs.get(device.id, device.id)) for device in mine)
        for physical, device in zip(seen, mine, strict=True):
            assert called.setdefault(physical, device.id) == device.id
        known = {device.id: device for device in book.devices}
        book = replace(
            book, devices=tuple({**{device.id: device for device in mine}, **known}.values())
        )
    assert len(set(called.values())) == len(called)
