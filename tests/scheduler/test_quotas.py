"""The operator's caps are read from one file and enforced on each user's own requests. Each cap has a test."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpu_runtime.errors import BadSetting
from gpu_runtime.facts import Cap, Grant, Phase, Refuse, Section, Staying, Wait
from gpu_runtime.ledgers import host_config
from gpu_runtime.scheduler import capacity, caps
from gpu_runtime.scheduler.transitions import Truth, publish

from ..worlds import NOW, at, block, book, decide, lease, owner, request, size, world

FILE = "/etc/gpu-console/config.toml"


def capped(**fields):
    """A cap on the user ann, as if the file had it in her own table."""
    tables = {key.removesuffix("_seconds"): "users.ann" for key in fields}
    return Cap("ann", FILE, tables=tables, **fields)


def there(cap, **words):
    return world(**{"sim0": 40, "grace_seconds": 0, **words}, cap=cap)


def of(page, **users):
    """The page, with the given users as the owners of processes: `of(page, ann=(1, 2), bob=(3,))`."""
    for user, pids in users.items():
        for pid in pids:
            section = page.sections[owner(pid).id]
            page = page.with_section(replace(section, owner=replace(section.owner, user=user)))
    return page


def test_bytes_on_each_device_and_another_card_may_take_them():
    """The card has room, but the user's cap is reached. The refusal names the cap."""
    page = of(book(lease("llama", sim0=16, pins=1)), ann=(1,))
    _, verdict = decide(page, request("qwen", gib=8), there(capped(bytes_per_device=size(20))))
    because = (
        "qwen needs 8.0 GiB; ann may hold at most 20.0 GiB on sim:0 (cap [users.ann] "
        f"bytes_per_device in {FILE}); 16.0 GiB there cannot leave now"
    )
    figures = dict(need_bytes=size(8), budget_bytes=size(4), device="sim:0")
    assert verdict == Refuse(because, "cap", **figures)
    page = of(book(lease("llama", sim0=16, pins=1)), ann=(1,))
    box = there(capped(bytes_per_device=size(20)), sim1=40)
    _, verdict = decide(page, request("qwen", gib=8), box)
    assert isinstance(verdict, Grant) and verdict.lease.target[0].device == "sim:1"


FIXED = {
    "in use": {"pins": 1},
    "kept": {"keep": True},
    "a block": {"kind": "block", "movable": False, "droppable": False},
    "arriving": {"phase": Phase.ARRIVING},
}


@pytest.mark.parametrize("state", [*FIXED, "idle"])
@pytest.mark.parametrize("user", ["ann", "bob"])
def test_exactly_the_cap_may_be_held(state, user):
    """20 GiB is admitted, one byte more refused. What can leave does not count, nor what others hold."""
    page = of(book(lease("held", by=2, sim0=6, **FIXED.get(state, {})), owners=(1,)), ann=(1,))
    page, box = of(page, **{user: (2,)}), there(capped(bytes_per_device=size(20)))
    most = size(20 if state == "idle" or user == "bob" else 14)
    for need in (most - 1, most, most + 1):
        refused = caps.capped_cards(page, request("qwen", gib=f"{need} B"), box)
        assert bool(refused) == (need > most)


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.sampled_from((1, 19, 20))), max_size=4))
def test_a_user_is_above_the_cap_by_all_that_the_user_holds_there_and_by_nothing_else(held):
    """Leases count, and memory that stays; memory of others does not."""
    page = book(owners=(1, 2))
    for n, (anns, stays, gib) in enumerate(held):
        pid, staying = 1 if anns else 2, Staying("sim:0", "a view", size(gib))
        section = page.sections[owner(pid).id]
        if stays:
            page = page.with_section(replace(section, staying=(*section.staying, staying)))
        else:
            page = page.with_lease(lease(f"m{n}", by=pid, sim0=gib))
    beyond = size(sum(gib for anns, _, gib in held if anns) - 20)
    found = caps.over_cap(of(page, ann=(1,), bob=(2,)), there(capped(bytes_per_device=size(20))))
    assert found == ({"sim:0": beyond} if beyond > 0 else {})


def test_bytes_on_each_device_limit_each_part_of_a_divided_model():
    """bob's model in use is on one card. So ann's cap and the free room differ from card to card."""
    page = of(book(lease("other", by=2, sim0=25, keep=True)), bob=(2,))
    box = there(capped(bytes_per_device=size(20)), sim1=40)
    _, verdict = decide(page, request("qwen", gib=50, layout="auto"), box)
    assert isinstance(verdict, Refuse)
    assert (verdict.kind, verdict.budget_bytes) == ("cap", size(35)), verdict.because
    _, verdict = decide(page, request("qwen", gib=34, layout="proportional"), box)
    assert isinstance(verdict, Grant)
    assert all(share.bytes <= size(20) for share in verdict.lease.target)


def kernel(by=1, **fields):
    return lease("kernel", by=by, kind="kernel", droppable=False, **fields)


def published(page, box):
    """The page after the owner 1 has published its leases as they are."""
    mine = page.sections[owner(1).id]
    before = page.with_section(Section(mine.owner))
    return publish(before, Truth(mine.owner, mine.leases, staying=mine.staying), box)


def test_what_plain_code_holds_above_the_cap_counts_and_leaves_first():
    """Without a request, 1.2 GiB were held above a cap of 100 MiB. It leaves before less important memory."""
    box = there(capped(bytes_per_device=size(20)))
    held = (kernel(sim0=24, importance=1), block(sim0=1, importance=1), lease("b", by=2, sim0=10))
    page = published(of(book(*held), ann=(1,), bob=(2,)), box)
    [section] = [one for one in page.sections.values() if one.over_cap]
    for fact in (
        "ann holds 25.0 GiB on sim:0",
        "20.0 GiB of each card",
        f"bytes_per_device in {FILE}",
    ):
        assert fact in section.over_cap
    assert section.lease("code").importance == 1, "a block ends with its cell, and never leaves"
    _, verdict = decide(page, request("new", gib=10, by=3, importance="batch"), there(None))
    assert isinstance(verdict, Wait) and verdict.asked == (at(1, "kernel"),)
    box = there(capped(bytes_per_device=size(20)))
    page = of(book(kernel(sim0=12, importance=1), kernel(by=2, sim0=9)), ann=(1, 2))
    assert published(page, box).lease(owner(1).id, "kernel").importance == caps.OVER_CAP
    page = of(book(kernel(sim0=12, importance=1), kernel(by=2, sim0=8)), ann=(1, 2))
    assert published(page, box).lease(owner(1).id, "kernel").importance == 1


def test_above_the_cap_nothing_new_is_granted_and_parked_memory_returns():
    """The cap takes no memory away for ever: what was there may return (law 16)."""
    box = there(capped(bytes_per_device=size(20)))
    page = of(book(kernel(sim0=24, pins=1)), ann=(1,))
    _, verdict = decide(page, request("new", gib=1), box)
    assert isinstance(verdict, Refuse) and verdict.kind == "cap"
    away = of(book(kernel(host=24)), ann=(1,))
    back = request("kernel", gib=24, kind="kernel", devices=("sim:0",))
    _, verdict = decide(away, back, box)
    assert isinstance(verdict, Grant) and verdict.steps


def test_torch_itself_refuses_more_if_the_cap_is_enforced():
    """On a real card the bound is the cap, less what the user's other processes hold there."""
    mine = {"cap": capped(bytes_per_device=size(20), enforce=True)}
    box = world(cuda0=36, total={"cuda:0": 40}, free={"cuda:0": 40}, **mine)
    theirs = kernel(by=2, cuda0=8), lease("of bob", by=3, cuda0=4)
    for own in ((), (kernel(cuda0=3),)):  # own memory is within the bound
        page = of(book(*theirs, *own, owners=(1,)), ann=(1, 2), bob=(3,))
        assert capacity.torch_bounds(page, owner(1).id, box, {}) == {"cuda:0": 12 / 40}
    page = of(book(*theirs, owners=(1,)), ann=(1, 2), bob=(3,))
    free = replace(box, rules=replace(box.rules, cap=capped(bytes_per_device=size(20))))
    assert capacity.torch_bounds(page, owner(1).id, free, {}) == {}


def test_cards_that_hold_more_than_their_budgets_could_give_nothing_to_a_divided_model():
    """Facts may overdraw a card. Then the card's room for a divided model is 0, never negative."""
    page = book(lease("a", sim0=50, keep=True), lease("b", sim1=50, keep=True))
    _, verdict = decide(page, request("qwen", gib=60, layout="auto"), world(sim0=40, sim1=40))
    assert isinstance(verdict, Refuse)
    assert verdict.budget_bytes == 0
    assert "could give 0 B + 0 B" in verdict.because


@pytest.mark.parametrize(
    "anns, bobs, need, leave", [(16, 8, 8, {"llama"}), (8, 30, 14, {"llama", "bobs"})]
)
def test_the_users_own_idle_models_leave_first_in_any_process(anns, bobs, need, leave):
    """ann's other process is asked. bob's model, idle for longer, leaves only if the card is short too."""
    llama = lease("llama", by=2, sim0=anns, last_used=500)
    page = book(llama, lease("bobs", by=3, sim0=bobs, last_used=1), owners=(1, 2, 3))
    box = there(capped(bytes_per_device=size(20)))
    _, verdict = decide(of(page, ann=(1, 2), bob=(3,)), request("qwen", gib=need), box)
    assert isinstance(verdict, Wait) and {id.split("/")[1] for id in verdict.asked} == leave


@pytest.mark.parametrize("importance", [1, 9, 10, 11])
@pytest.mark.parametrize("keep", [False, True])
def test_the_highest_importance_and_keep(importance, keep):
    """Exactly the cap is allowed. A refusal names the place where the operator has set the cap."""
    wanted = request("qwen", importance=importance, keep=keep)
    _, verdict = decide(of(book(), ann=(1,)), wanted, there(capped(importance=10, keep=False)))
    assert isinstance(verdict, Refuse) == (importance < 10 or keep)
    if isinstance(verdict, Refuse):
        assert (verdict.kind, verdict.need_bytes) == ("cap", size(1))
        key = "importance" if importance < 10 else "keep"
        assert f"cap [users.ann] {key} in {FILE}" in verdict.because


def test_bytes_that_leave_count_under_the_cap_until_they_have_left():
    """Nothing is granted above the cap meanwhile, and no second model leaves for the same bytes."""
    going = lease("going", sim0=12, phase=Phase.LEAVING, key="x", target=lease("", host=12).shares)
    page = of(book(going, lease("idle", sim0=8)), ann=(1,))
    _, verdict = decide(page, request("qwen", gib=10), there(capped(bytes_per_device=size(20))))
    assert isinstance(verdict, Wait) and (verdict.steps, verdict.asked) == ((), ())


def test_the_longest_lease():
    """A block's memory stays over its time, in use. Its user gets no new lease until it has ended."""
    cap = capped(longest_lease_seconds=3600.0)
    begun = [block("training#1", by=2, sim0=4, settled_at=NOW + 4000 - age) for age in (3601, 3600)]
    late, early = (of(book(each, owners=(1, 2)), ann=(1, 2)) for each in begun)
    moment = replace(there(cap), now=NOW + 4000)
    _, verdict = decide(late, request("qwen"), moment)
    assert isinstance(verdict, Refuse) and (verdict.kind, verdict.need_bytes) == ("cap", size(1))
    for fact in (f"longest_lease in {FILE}", "training#1 (4.0 GiB) of pid 2 is held for 60 min"):
        assert fact in verdict.because
    assert isinstance(decide(early, request("qwen"), moment)[1], Grant)


@given(used=st.floats(0, 100), importance=st.sampled_from([1, 10, 30, 77]))
def test_beyond_the_card_hours_of_a_week_all_is_of_the_lowest_class(used, importance):
    """Law: the request and the leases of this user alone are lowered, never raised, and only beyond the quota."""
    cap = capped(card_hours_per_week=40.0)
    cap = replace(cap, used_card_hours=used)
    lowest = max(importance, 30) if used >= 40 else importance
    asked = request("qwen", importance=importance)
    assert caps.lowered(asked, there(cap)).lease.importance == lowest
    page = of(book(lease("a", importance=importance, sim0=4), owners=(1,)), ann=(1,))
    section = page.sections[owner(1).id]
    assert caps.as_capped(page, section, cap, there(cap)).leases[0].importance == lowest
    others = replace(cap, user="bob")
    assert caps.as_capped(page, section, others, there(others)) == section


def test_beyond_the_quota_a_request_displaces_only_the_lowest_and_says_why_it_waits():
    cap = replace(capped(card_hours_per_week=40.0), used_card_hours=41.2)
    page = of(book(lease("bobs", by=2, sim0=30), owners=(1, 2)), ann=(1,), bob=(2,))
    _, verdict = decide(page, request("qwen", gib=20), there(cap))
    said = f"ann has had 41.2 card-hours in the last seven days, of 40 (cap [users.ann] card_hours_per_week in {FILE})"
    assert isinstance(verdict, (Wait, Refuse)) and not getattr(verdict, "recalls", {})
    assert said in verdict.because
    assert decide(page, request("qwen", gib=20), there(None))[1].recalls
    _, verdict = decide(page, request("small", gib=4), there(cap))
    assert isinstance(verdict, Grant), "free memory is hers as before"
    assert verdict.lease.importance == 30


def test_a_quota_may_refuse():
    cap = capped(card_hours_per_week=40.0, after_quota="refuse")
    _, verdict = decide(book(), request("qwen"), there(replace(cap, used_card_hours=40.0)))
    assert isinstance(verdict, Refuse) and verdict.kind == "cap"
    assert "qwen is refused: ann has had 40.0 card-hours" in verdict.because
    assert isinstance(
        decide(book(), request("qwen"), there(replace(cap, used_card_hours=39.9)))[1], Grant
    )


# The configuration


def test_a_users_own_table_wins_and_of_several_groups_the_most_generous():
    said = host_config.parse("""
        [users.ann]
        keep = false
        [groups.students]
        keep = true
        bytes_per_device = "8 GiB"
        importance = "normal"
        [groups.staff]
        bytes_per_device = "20 GiB"
        importance = "low"
        longest_lease = "4h"
        card_hours_per_week = 40
        after_quota = "refuse"
        [groups.guests]
        card_hours_per_week = 8.5
        after_quota = "lower"
    """)
    cap = said.cap("ann", ("students", "staff"))
    values = dict(importance=10, keep=False, longest_lease_seconds=14400.0)
    tables = dict(keep="users.ann", importance="groups.students")
    tables |= dict(bytes_per_device="groups.staff", longest_lease="groups.staff")
    quota = said.cap("eve", ("staff", "guests"))
    assert (quota.card_hours_per_week, quota.after_quota) == (40.0, "lower")
    values |= dict(card_hours_per_week=40.0, after_quota="refuse")
    tables |= dict(card_hours_per_week="groups.staff", after_quota="groups.staff")
    assert cap == Cap("ann", FILE, bytes_per_device=size(20), **values, tables=tables)
    assert said.cap("bob") is None


def test_operators_and_no_file(tmp_path):
    said = host_config.parse('[operators]\nusers = ["ops"]\ngroups = ["admins"]')
    who = (("root", ()), ("ops", ()), ("ann", ("admins",)), ("ann", ("students",)))
    assert [said.is_operator(*one) for one in who] == [True, True, True, False]
    none = str(tmp_path / "none.toml")
    assert host_config.read(none) == host_config.Machine(none)


@pytest.mark.parametrize(
    ("text", "key", "expected"),
    [
        ("ledger = 3", "ledger", "text in quotes"),
        ("legder = 'x'", "legder", "under a key that is known, such as ledger"),
        (
            "[users.a]\nbytes_per_device = 'lots'",
            "users.a.bytes_per_device",
            "a size, such as '20 GiB'",
        ),
        ("[users.a]\nbyte_per_device = 1", "users.a.byte_per_device", "such as bytes_per_device"),
        ("[users.a]\nimportance = 'top'", "users.a.importance", "urgent, high, normal, low, batch"),
        ("[groups.s]\nkeep = 'no'", "groups.s.keep", "true or false"),
        ("[groups.s]\nlongest_lease = true", "groups.s.longest_lease", "such as 3600 or '4h'"),
        ("[users.a]\ncard_hours_per_week = 0", "users.a.card_hours_per_week", "hours above 0"),
        ("[users.a]\ncard_hours_per_week = nan", "users.a.card_hours_per_week", "hours above 0"),
        ("[users.a]\nafter_quota = 'kill'", "users.a.after_quota", "'lower' or 'refuse'"),
        ("users = 'ann'", "users", "a table, written [users]"),
        ("[operators]\nusers = 'ops'", "operators.users", "a list of names"),
    ],
)
def test_an_error_in_the_file_is_reported_with_its_key(text, key, expected):
    with pytest.raises(BadSetting) as error:
        host_config.parse(text)
    assert f"{FILE}: {key}=" in str(error.value) and expected in str(error.value)


def test_invalid_toml_is_reported_with_its_line(tmp_path):
    (tmp_path / "config.toml").write_text("ledger = 'x'\n[users.ann\n")
    wrong = r"GPU_CONFIG_FILE='.*config.toml' cannot be used: it must be TOML; here: .*line 2"
    with pytest.raises(BadSetting, match=wrong):
        host_config.read(str(tmp_path / "config.toml"))
