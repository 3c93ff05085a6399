"""Unmanaged memory is the measured use less what the book accounts for; unmeasured it is unknown."""

from msgspec.structs import replace

from gpu_runtime.facts import Drop, Sample, Stranger
from gpu_runtime.scheduler.capacity import stranger_bytes, strangers
from gpu_runtime.scheduler.transitions import left, reap
from tests.worlds import NOW, at, book, lease, owner, size, world


def there(free, listing=None, **more):
    return world(
        cuda0=72, total={"cuda:0": 80}, free={"cuda:0": free}, processes=listing or {}, **more
    )


def beyond(page, world_):
    return stranger_bytes(page, world_)["cuda:0"]


def test_unmanaged_memory_is_the_cards_use_less_what_the_book_had_in_the_sample():
    page = book(lease("a", by=2, cuda0=30), residue={2: {"cuda:0": size(1)}})
    assert beyond(page, there(40)) == size(9)
    assert beyond(page, there(60)) == 0, "measured less than claimed: that is nobody's"
    page = book(lease("a", by=2, cuda0=30, settled_at=NOW))
    assert beyond(page, there(70)) == size(10)
    # The sample still includes the bytes that just left. The bytes of a dead process are counted
    # separately.
    page = book(lease("a", by=2, cuda0=30))
    step = Drop(at(2, "a"), page.lease(owner(2).id, "a").shares, "")
    assert beyond(left(page, step, (), there(50)), there(50)) == 0
    assert beyond(reap(page, [owner(2).id], there(50)), there(50)) == 0
    assert beyond(book(), there(None)) is None
    assert beyond(book(), world(cuda0=72)) is None
    # a simulated card has only what the book says
    assert stranger_bytes(book(), world(sim0=9)) == {}


def test_processes_that_are_no_owners_are_listed_the_largest_first():
    page = reap(
        book(lease("a", by=2, cuda0=30), lease("b", by=3, cuda0=1)), [owner(3).id], there(0)
    )
    listing = {2: size(30), 3: size(1), 71: None, 72: size(4), 73: size(5)}
    assert strangers(page, there(0, listing), {72: ("ann", "python train.py")}) == (
        Stranger("cuda:0", 73, size(5)),
        Stranger("cuda:0", 72, size(4), "ann", "python train.py"),
        Stranger("cuda:0", 71, None),
    )
    page = replace(book(), samples={"cuda:0": Sample("cuda:0", NOW, 0, {9: 5})})
    assert strangers(page, there(70), {}) == (Stranger("cuda:0", 9, 5),)
