"""Pages in host memory that several leases share are counted once, and never less than is mapped."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpu_runtime.facts import HOST, Lease, Phase, Share, decode_book, encode
from gpu_runtime.facts.book import _claims_after
from gpu_runtime.scheduler import victims
from gpu_runtime.scheduler.capacity import room
from tests.worlds import book, owner, world

SIZES = {"a.1": 70, "b.2": 40}  # the pages that exist, and their bytes


@st.composite
def leases(draw):
    """A lease as its owner publishes it, with the bytes that are really private to its process."""
    pid = draw(st.integers(1, 3))
    copy = draw(st.sampled_from(["", *SIZES]))
    used = draw(st.integers(1, SIZES[copy])) if copy else 0
    private = draw(st.integers(0, 30))
    name = f"m{draw(st.integers(0, 5))}"
    fields = {"copy": copy, "copy_bytes": SIZES.get(copy, 0), "copied_bytes": used}
    base = Lease(owner(pid).id, name, **fields)
    place = draw(st.sampled_from(["shadow", "host", "parts", "leaving", "restoring"]))
    host, card = used + private, (Share("sim:0", 5),)
    there = (Share(HOST, host),) if host else ()
    if place == "shadow":
        return replace(base, shares=card, shadow_bytes=host), private
    if place == "host":
        return replace(base, shares=there), private
    if place == "parts":
        return replace(base, shares=(*card, *there)), private
    if place == "leaving":
        leaving = replace(base, shares=(Share("sim:0", host),), target=there, phase=Phase.LEAVING)
        return leaving, private
    return replace(base, shares=there, target=card, phase=Phase.ARRIVING), private


def unique(found):
    return list({lease.id: (lease, private) for lease, private in found}.values())


@given(st.lists(leases(), max_size=8).map(unique))
def test_the_host_counts_shared_pages_once_and_all_of_what_is_mapped(found):
    one = book(*[lease for lease, _ in found])
    mapped = sum(private for _, private in found)
    mapped += sum(SIZES[copy] for copy in {lease.copy for lease, _ in found} - {""})
    assert one.claims().get(HOST, 0) == mapped
    assert decode_book(encode(one)).claims().get(HOST, 0) == mapped
    now = world(sim0=1, host=1)
    assert room(one, now)[HOST] == now.limits[HOST] - mapped


@given(st.lists(leases(), min_size=1, max_size=8).map(unique), st.data())
def test_a_write_changes_the_claims_as_the_whole_book_does(found, data):
    """They are computed from the claims before the write, and equal those of the whole new book."""
    old = book(*[lease for lease, _ in found])
    gone = data.draw(st.sampled_from(sorted(old.sections)))
    lease, _ = data.draw(leases())
    sections = {id: section for id, section in old.sections.items() if id != gone}
    new = replace(old, sections=sections)
    if lease.owner in sections:
        new = new.with_lease(lease)
    changed = [id for id in new.sections if new.sections[id] is not old.sections[id]]
    after = _claims_after(old, new, changed, {gone})
    assert {id: size for id, size in after.items() if size} == {
        id: size for id, size in new.claims().items() if size
    }


def test_a_second_shadow_on_the_same_pages_needs_no_room():
    first = Lease(
        owner(1).id,
        "m",
        shares=(Share("sim:0", 70),),
        shadow_bytes=70,
        copy="a.1",
        copy_bytes=70,
        copied_bytes=70,
    )
    second = Lease(owner(2).id, "m", target=(Share("sim:0", 70),), phase=Phase.ARRIVING)
    one = book(first, second)
    now = world(sim0=1, host=1)
    full = replace(now, limits={**now.limits, HOST: 100})
    one = replace(one, limits=full.limits)
    assert victims.reserve_shadow(one, owner(2).id, "m", 70, full) == (one, False)
    after, done = victims.reserve_shadow(one, owner(2).id, "m", 70, full, "a.1", 70)
    assert done and after.claims()[HOST] == 70
    # The last lease on the pages keeps them counted.
    assert after.without_lease(owner(1).id, "m").claims()[HOST] == 70
    # Pages that nobody holds any more are not free.
    assert victims.reserve_shadow(book(second), owner(2).id, "m", 101, full, "a.1", 70)[1] is False
