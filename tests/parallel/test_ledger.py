"""The ledger against closed forms, against torch's own dispatcher, and against the kernel's socket counters."""

import platform
from functools import partial

import pytest
import torch
from parallel import programs

from muon_lab.parallel import algorithms, calls, ledger, worlds
from muon_lab.parallel.grid import Grid
from muon_lab.parallel.ledger import Ledger
from muon_lab.parallel.rendezvous import alone


def tagged(world):
    ledger = Ledger(world)
    groups = ledger.split(Grid(dp=2, tp=2).groups("tp"))
    for layer in ("q", "k"):
        on_layer = groups.tagged(layer=layer, phase="gram")
        for iteration in range(3):
            on_layer.tagged(iteration=iteration).all_reduce(torch.ones(4, 4)).wait()
        on_layer.tagged(phase="gather").all_gather(torch.ones(2, 4, dtype=torch.bfloat16)).wait()
    ledger.broadcast(torch.ones(8), root=3).wait()
    return ledger


def test_calls_are_recorded_by_group_layer_iteration_and_phase():
    first = worlds.run(tagged, 4)[0]
    assert first.calls == 9
    assert [row["calls"] for row in first.summary("layer")] == [4, 4, 1]
    assert first.summary("phase", "iteration")[0] == {
        "phase": "gram",
        "iteration": 0,
        "calls": 2,
        "logical_bytes": 2 * 64,
        "sent_bytes": 2 * 64,  # 2 (p-1)/p of 64 bytes, p = 2
    }
    gathered = first.summary()[1]
    assert gathered == {
        "verb": "all_gather",
        "dtype": "bfloat16",
        "group": (0, 1),
        "calls": 2,
        "logical_bytes": 2 * 16,
        "sent_bytes": 2 * 16,
    }
    assert first.summary("group")[1] == {"group": (0, 1, 2, 3), "calls": 1, "logical_bytes": 32, "sent_bytes": 32}
    totals = [sum(row[name] for row in first.summary()) for name in ("calls", "logical_bytes", "sent_bytes")]
    assert totals == [first.calls, first.logical_bytes, first.sent_bytes]


def test_records_of_all_ranks_add_up_to_the_totals_of_the_algorithm():
    ledgers = worlds.run(tagged, 4)
    records = [record for one in ledgers for record in one.records]
    for family in algorithms.FAMILIES:
        by_verb = {row["verb"]: row["sent_bytes"] for row in ledger.summary(records, "verb", algorithm=family)}
        assert by_verb["all_reduce"] == 2 * 6 * algorithms.total(calls.all_reduce((4, 4), "float32", 2), family)
        assert by_verb["broadcast"] == algorithms.total(calls.broadcast((8,), "float32", 4, 3), family)


def test_a_ledger_changes_no_result():
    cases = [
        ("all_reduce", "float32", "plain"),
        ("all_gather_v", "bfloat16", "strided"),
        ("all_to_all", "int64", "plain"),
    ]
    plain, counted = (worlds.run(partial(verbs, wrap, cases), 3) for wrap in (False, True))
    assert all(
        torch.equal(a, b) for one, two in zip(plain, counted, strict=True) for a, b in zip(one, two, strict=True)
    )


def verbs(wrap, cases, world):
    return programs.verbs(cases, Ledger(world) if wrap else world)


def test_unknown_columns_and_algorithms_are_refused():
    one = Ledger(alone())
    assert one.summary("layer") == []
    one.tagged(layer=1).barrier().wait()
    assert one.summary("layer") == [{"layer": 1, "calls": 1, "logical_bytes": 0, "sent_bytes": 0}]
    with pytest.raises(ValueError, match="one of verb, dtype, op, group, layer, not 'phase'"):
        one.summary("phase")
    with pytest.raises(ValueError, match="algorithm must be one of ring"):
        Ledger(alone(), "star")


#: What the dispatcher of torch calls each verb over gloo.
DISPATCHED = {
    "all_reduce": "allreduce_",
    "all_gather": "_allgather_base_",
    "all_gather_v": "broadcast_",
    "reduce_scatter": "_reduce_scatter_base_",
    "all_to_all": "alltoall_base_",
    "broadcast": "broadcast_",
}


@pytest.mark.world
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_dispatcher_of_torch_sees_the_same_bytes(ranks):
    """Rows are gathered by one broadcast an owner, each of the owner's rows; uneven parts by an all_reduce of all."""
    dtypes = ("float32", "bfloat16", "float8_e4m3fn")
    cases = [
        (verb, dtype, "plain") for verb in ("all_gather", "all_gather_v", "all_to_all", "broadcast") for dtype in dtypes
    ]
    cases += [(verb, "float32", "strided") for verb in ("all_reduce:max", "reduce_scatter", "reduce_scatter:uneven")]
    for place, (records, seen) in enumerate(worlds.run(partial(programs.counted, cases), ranks, "gloo", checked=False)):
        seen = iter(seen)
        for record in records:
            uneven = record.call.verb == "reduce_scatter" and len(set(record.call.rows)) > 1
            name = "allreduce_" if uneven else DISPATCHED[record.call.verb]
            if record.call.verb == "all_gather_v":
                assert [next(seen) for part in record.call.parts if part] == [
                    (name, part) for part in record.call.parts if part
                ]
            else:
                assert next(seen) == (name, record.logical)
            assert record.place == place
        assert next(seen, None) is None


@pytest.mark.world
@pytest.mark.skipif(platform.system() != "Linux", reason="socket counters are those of Linux")
@pytest.mark.parametrize("ranks", [2, 4])
def test_sockets_carry_what_the_ledger_says(ranks):
    """Within 1 % and 8 kB: headers of gloo's messages, and its handshakes."""
    verbs = ("all_reduce", "all_gather", "all_gather_v", "reduce_scatter", "uneven", "all_to_all", "broadcast")
    cases = [(verb, elements) for verb in verbs for elements in (24 * 1024, 768 * 1024)]
    for results, wire, ss in worlds.run(partial(programs.on_the_wire, cases), ranks, "gloo", checked=False):
        for case, (said, carried) in zip(cases, results, strict=True):
            assert abs(carried - said) <= 0.01 * said + 8192, (case, said, carried)
        assert ss is None or abs(ss - wire) <= 8192
    large = [carried for (verb, elements), (_, carried) in zip(cases, results, strict=True) if elements > 10**5]
    ring = algorithms.sent(calls.reduce_scatter((), "float32", [768 * 1024 // ranks] * ranks), 0)
    assert large[3] > 1.9 * ring  # negative control: not the ring optimum, by far


@pytest.mark.world
def test_recording_costs_nothing_beside_the_call():
    """Both minima of rounds in turn, so that other processes disturb both alike."""
    recording, call = worlds.run(programs.overhead, 2, "gloo", checked=False)[0]
    assert 0 < recording < 0.05 * call
