"""`who` on a simulated card, whose memory is CPU tensors. The table itself: tests/faces/test_who.py."""

import gc
import sys

import torch

from gpu_runtime import other_libraries
from gpu_runtime.backends.pytorch import holders, search
from gpu_runtime.backends.pytorch.search import Limit
from gpu_runtime.backends.pytorch.shadows import digest, every_key
from gpu_runtime.facts import HOST
from gpu_runtime.owner import holdings
from gpu_runtime.rendering import answers
from gpu_runtime.units import MIB
from tests import tiny_models

from .kernels import FLOATS, cell, own


def found_bytes(rt) -> tuple[int, int]:
    """The MiB that names on the card explain, and the MiB without a name."""
    found = holdings.own_holders(rt._session)
    return found.explained_bytes // MIB, found.unknown_bytes // MIB


def test_a_kernel_that_is_leaving_counts_once(started, quiet):
    """While its bytes are copied, the copies are in host memory. They are no second memory on the card."""
    rt, kernel = started(devices="sim:64MiB,host:64MiB")
    before = found_bytes(rt)
    kept = torch.ones(8 * FLOATS)
    cell(kernel)
    seen = []
    quiet.while_copying = lambda: seen.append(found_bytes(rt))
    assert rt.park().done
    quiet.while_copying = lambda: None
    assert seen == [(before[0] + 8, before[1])] and kept.nbytes == 8 * MIB
    parked = holdings.own_holders(rt._session)
    assert (parked.parked_bytes, found_bytes(rt)) == (8 * MIB, before)
    assert "host" in {row.device for row in parked.holders}


def test_who_shows_what_free_frees_of_parked_variables(started):
    """The record of the parked bytes refers to them too, but lets go of them. It was 0 B for each."""
    rt, kernel = started(devices="sim:64MiB,host:64MiB")
    main = vars(sys.modules["__main__"])
    try:
        main.update(mine=torch.ones(8 * FLOATS), one=torch.ones(4 * FLOATS))
        main["other"] = main["one"][:2]
        cell(kernel)
        assert rt.park().done
        frame = rt.who()
        rows = frame.set_index("name").loc[["mine", "one", "other"]]
        assert [*rows["device"]] == [HOST] * 3
        assert [*rows["alone_bytes"]] == [8 * MIB, 0, 0]
        [line] = [
            one
            for one in repr(answers.showing(frame, answers.who)).splitlines()
            if one.startswith("mine")
        ]
        assert "8.0 MiB of RAM" in line
        assert rt.free("mine").bytes == 8 * MIB
        assert own(rt) == {HOST: 4 * MIB}
    finally:
        for name in ("mine", "one", "other"):
            main.pop(name, None)


def test_the_copy_of_a_model_in_host_memory_is_no_memory_of_the_card(started, tmp_path):
    rt, _ = started(devices="sim:64MiB,host:64MiB")
    before = found_bytes(rt)
    rt.register("writer", tiny_models.causal_lm(tmp_path / "writer", size="8 MiB"))
    rt.preload("writer")
    assert rt._session.residents["writer"].shadow_bytes > 8 * MIB
    explained, unknown = found_bytes(rt)
    assert 8 <= explained - before[0] <= 14 and unknown == before[1]


def test_the_keys_of_digests_are_not_listed(started):
    """They are 1 MiB, so a tensor of their size would count."""
    rt, _ = started(devices="sim:64MiB,host:64MiB")
    digest(torch.ones(8, dtype=torch.uint8))
    [keys] = [key for key in every_key() if key.device.type == "cpu"]
    found = holdings._found(rt._session, Limit(60.0)).found
    assert keys.untyped_storage()._cdata not in {one.key for one in found}


def test_who_shows_what_other_libraries_hold_and_that_it_cannot_be_moved(started, monkeypatch):
    """Its memory is no tensor's, so it was part of what nothing explained."""
    rt, _ = started(devices="sim:64MiB,host:64MiB")
    held = other_libraries.Held("jax", "2 arrays", "cuda:0", 3 * MIB)
    monkeypatch.setattr(other_libraries, "held", lambda: [held])
    [row] = [one for one in holdings.own_holders(rt._session).holders if one.name == "jax"]
    assert (row.device, row.bytes, row.what, row.stays) == (
        "cuda:0",
        3 * MIB,
        "2 arrays",
        "not of torch",
    )


def test_what_compiled_code_holds_is_named_and_stays(started):
    """MKL-DNN, packed and frozen weights are in no storage that can be exchanged. They were not counted at all."""
    rt, kernel = started(devices="sim:64MiB,host:64MiB")
    main = vars(sys.modules["__main__"])
    net = torch.nn.Sequential(torch.nn.Linear(1024, 2048, bias=False)).eval()
    try:
        main["dense"] = torch.ones(3 * FLOATS).to_mkldnn()
        main["frozen"] = torch.jit.freeze(torch.jit.script(net))
        main["packed"] = torch.ao.quantization.quantize_dynamic(net, dtype=torch.qint8)
        main["mine"] = torch.ones(FLOATS)
        del net
        gc.collect()
        cell(kernel)
        frame = rt.who()
        rows = frame.set_index("name").loc[["dense", "frozen", "packed"]]
        assert [round(size / MIB) for size in rows["bytes"]] == [3, 8, 2]
        assert {*rows["stays"]} == {search.COMPILED}
        assert "compiled code holds it" in rt.park().because
        assert own(rt)[HOST] >= MIB
    finally:
        for name in ("dense", "frozen", "packed", "mine"):
            main.pop(name, None)


def test_what_no_name_reaches_names_each_of_its_cards_once(started, monkeypatch):
    """A third storage of one cache turned cuda:0,1 into 1,0. Of two reasons to stay the first was lost."""
    rt, _ = started(devices="sim:64MiB,host:64MiB")
    cards, why = ("cuda:0", "cuda:1", "cuda:0"), ("", "one", "two")
    found = [
        search.Found(None, card, MIB, (object(),), stays, MIB)
        for card, stays in zip(cards, why, strict=True)
    ]
    storages = {one.key: holdings._Storage(one.device, MIB, MIB, one.stays) for one in found}
    monkeypatch.setattr(holdings, "_found", lambda *_: search.Search(tuple(found), (), True))
    monkeypatch.setattr(holders, "referrer", lambda *_: "a cache")
    [row], known = holdings._elsewhere(rt._session, storages, storages, Limit())
    assert (row.name, row.device, row.bytes) == ("a cache", "cuda:0,1", 3 * MIB)
    assert (row.stays, row.stays_bytes, known) == ("one; two", 2 * MIB, storages.keys())
