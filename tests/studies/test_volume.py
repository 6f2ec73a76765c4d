"""Bytes and flops of layouts: published numbers, ledgers of the real thing, and break-evens found by trying."""

import json
import subprocess
import sys
from fractions import Fraction
from math import inf

import pytest
import torch

from muon_lab import polar, studies
from muon_lab.parallel import layouts, volume, worlds
from muon_lab.parallel.grid import even
from muon_lab.parallel.ledger import Ledger
from muon_lab.studies.running import run_case
from muon_lab.studies.study import LeftOut

STUDY = studies.get("volume")
MiB = 2**20


def rows(**point):
    settled = STUDY.settle({name: values[0] for name, values in STUDY.defaults.items()} | point, None)
    return [run_case("volume", case) for case in settled]


def row(**point):
    (only,) = rows(**point)
    assert (only["outcome"], only["note"]) == ("ok", None)
    return only


# --- published numbers ------------------------------------------------------------------------------------------------


def test_the_published_example_in_mebibytes():
    """4096×1024 in float32, 8 ranks, 5 steps: 14, 35, 3.5, 7 and 0 (readers of MoonshotAI/Moonlight#16 asked)."""
    layouts = {"duplicated": 14, "distributed": 35, "owner": 3.5, "gram": 7, "blockwise": 0, "periodic": 2.8}
    for layout, expected in layouts.items():
        found = row(layout=layout, rows=4096, cols=1024, dim=0, tp=8, steps=5)
        assert found["sent_bytes"] - found["norm_bytes"] == round(10 * expected) * MiB / 10
        assert found["norm_bytes"] == (42 if layout == "distributed" else 0)  # 2 (p-1)/p of three doubles
    for layout in layouts:
        alone = row(layout=layout, tp=1)
        assert (alone["sent_bytes"], alone["sent_most"]) == (0, 0)


#: Bytes in units of GiB and flops in 1e12, a rank and step: 8 ranks, 5 steps, 2-byte wires, all cut layers but experts.
MODELS = {
    "gpt2-xl": (2.40, 8.01, 55, 14, 3),
    "llama-3-8b": (11.4, 61.3, 666, 225, 32),
    "llama-3-70b": (111.6, 612.5, 13223, 4481, 645),
    "qwen3-30b-a3b": (1.48, 13.1, 42, 21, 1),
    "moonlight-16b-a3b": (1.40, 9.3, 45, 16, 1),
    "deepseek-v3": (23.2, 206.9, 1658, 1107, 64),
    "kimi-k2": (13.5, 206.9, 973, 1025, 22),
    "glm-4.5": (24.8, 275.2, 1598, 1059, 55),
}


@pytest.mark.parametrize("model", ["gpt2-xl", "llama-3-8b", "llama-3-70b", "qwen3-30b-a3b", "moonlight-16b-a3b"])
def test_models_move_what_was_counted_for_them_before(model):
    """By the plain formula, in which Gram matrices have the axis that is not cut; that is the short one here."""
    gathered, summed, flops, less, least = MODELS[model]
    found = {
        layout: rows(model=model, layout=layout, tp=8, dtype="bfloat16")
        for layout in ("duplicated", "distributed", "blockwise")
    }
    totals = {
        layout: (sum(each["model_bytes"] for each in kinds), sum(each["model_flops"] for each in kinds))
        for layout, kinds in found.items()
    }
    assert totals["duplicated"][0] / 2**30 == pytest.approx(gathered, rel=5e-3)
    assert totals["duplicated"][1] / 1e12 == pytest.approx(flops, rel=1e-2)
    naive = [
        kind["count"] * 5 * 2 * 7 / 8 * (kind["cols"] if kind["dim"] == 0 else kind["rows"]) ** 2 * 2
        for kind in found["distributed"]
    ]
    assert sum(naive) / 2**30 == pytest.approx(summed, rel=5e-3)
    assert totals["distributed"][0] / 2**30 <= 1.005 * summed  # the short axis is cut anew, for less
    assert totals["distributed"][1] / 1e12 <= less + 0.5
    assert totals["blockwise"][1] / 1e12 == pytest.approx(least, abs=0.5)


# --- the real thing ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", [(24, 8), (8, 24), (9, 9)])
def test_rows_are_means_of_what_ledgers_say(shape, tp):
    schedule = polar.schedules.get("quintic", 3)
    G = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for dim in (0, 1):
        cut = even(shape[dim], tp, dim)

        def ledgers(world, cut=cut):
            made = {}
            plain = polar.newton_schulz(schedule)
            for name, layout in {
                "duplicated": lambda ranks: layouts.duplicated(plain, ranks, cut),
                "distributed": lambda ranks: layouts.distributed(schedule, ranks, cut),
                "gram": lambda ranks: layouts.gram(schedule, ranks, cut),
                "blockwise": lambda ranks: layouts.blockwise(plain, ranks, cut),
            }.items():
                made[name] = Ledger(world)
                layout(made[name])(cut.shard(G, world.rank))
            made["owner"] = Ledger(world)
            layouts.owner(plain, made["owner"], [cut] * tp)([cut.shard(G, world.rank)] * tp)
            return {name: (ledger.calls, ledger.logical_bytes, ledger.sent_bytes) for name, ledger in made.items()}

        seen = worlds.run(ledgers, tp)
        for name in seen[0]:
            share = tp if name == "owner" else 1
            found = row(layout=name, rows=shape[0], cols=shape[1], dim=dim, tp=tp, steps=3)
            columns = zip(*(one[name] for one in seen), strict=True)
            means = [Fraction(sum(column), tp * share) for column in columns]
            assert [found[key] for key in ("calls", "logical_bytes", "sent_bytes")] == [float(mean) for mean in means]
            assert found["sent_most"] == max(one[name][2] for one in seen) / share


# --- lines and where they meet ----------------------------------------------------------------------------------------


def sent(layout, shape, dim, tp, steps, dtype, wire=None):
    """Return the bytes that a rank sends on average, from the calls of all."""
    cut = even(shape[dim], tp, dim)
    if layout == "owner":
        made = [volume.owner([shape] * tp, [cut] * tp, rank, dtype) for rank in range(tp)]
    else:
        extra = {"steps": steps, "wire": wire} if layout == "distributed" else {}
        made = [getattr(volume, layout)(shape, cut, rank, dtype, **extra) for rank in range(tp)]
    total = sum(volume.Volume(calls, rank).sent for rank, calls in enumerate(made))
    return Fraction(total, tp * (tp if layout == "owner" else 1))


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("dim", [0, 1])
def test_lines_are_the_means_of_the_calls(dim, tp, dtype):
    for layout in volume.WORK:
        for across in (False, True):
            for ratio in (1, 2, 5):
                if across and ratio == 1:
                    continue  # a square matrix is never cut anew
                short, long = 16, 16 * ratio
                shape = (long, short) if (dim == 0) != across else (short, long)
                line = volume.line(layout, short, tp, dtype, steps=3, wire="float32", across=across and tp > 1)
                assert line.at(ratio) == sent(layout, shape, dim, tp, 3, dtype, "float32"), (layout, across, ratio)


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("layout", ["distributed", "gram", "owner"])
@pytest.mark.parametrize("other", ["duplicated", "owner"])
@pytest.mark.parametrize("tp", [2, 4])
def test_the_break_even_is_where_a_scan_finds_it(layout, other, tp, across):
    short, steps, dtype = 16, 2, "bfloat16"
    ours, theirs = (volume.line(name, short, tp, dtype, steps=steps, across=across) for name in (layout, other))
    ratio = volume.break_even(ours, theirs)
    near = 0 if ratio == inf else round(ratio * short) // 8 * 8
    for long in {*range(2 * short, 40 * short, 64), *(max(near + step, 2 * short) for step in (-16, -8, 0, 8, 16))}:
        shape = (short, long) if across else (long, short)
        less = sent(layout, shape, 0, tp, steps, dtype) < sent(other, shape, 0, tp, steps, dtype)
        assert less == (long / short > ratio), (long, ratio)
    assert layout == other or ratio != 0.0 or (layout, other) == ("owner", "duplicated")


def test_break_evens_are_the_known_multiples_of_the_steps():
    """2K at equal dtypes, K if Gram matrices travel in half as many bytes; the norm adds 48 / (k² b)."""
    for steps in (1, 5, 8):
        for wire, times in (("float32", 2), ("bfloat16", 1)):
            found = row(layout="distributed", cols=64, rows=64, tp=8, steps=steps, wire=wire)
            assert found["beats_duplicated"] == pytest.approx(times * steps + 48 / (64**2 * 4), rel=1e-12)
            assert found["beats_owner"] == pytest.approx(4 * found["beats_duplicated"], rel=1e-12)
    assert row(layout="gram", tp=8)["beats_duplicated"] == 2.0
    assert row(layout="gram", tp=8, dtype="bfloat16")["beats_duplicated"] == 4.0
    same = volume.line("duplicated", 8, 2, steps=1)
    assert volume.break_even(same, same) == inf


# --- what is asked for ------------------------------------------------------------------------------------------------


def test_the_command_starts_no_process_and_imports_no_torch(tmp_path):
    code = (
        "import sys\n"
        "def refuse(event, arguments):\n"
        "    if event in ('subprocess.Popen', 'os.fork', 'os.posix_spawn') and 'git' not in str(arguments):\n"
        "        raise RuntimeError(event)\n"
        "sys.addaudithook(refuse)\n"
        "from muon_lab import studies\n"
        "study = studies.get('volume')\n"
        "point = {name: values[0] for name, values in study.defaults.items()} | {'model': 'llama-3-8b'}\n"
        "rows = [study.row(case) for case in study.settle(point, None)]\n"
        "print(len(rows), {row['outcome'] for row in rows}, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.strip() == "7 {'ok'} False"


def test_a_model_stands_for_its_layers_that_are_cut():
    kinds = rows(model="kimi-k2", layout="duplicated", tp=8)
    assert not [kind for kind in kinds if kind["layer"].startswith(("experts", "router", "attn.q_a", "attn.kv_a"))]
    assert {(kind["layer"], kind["dim"]) for kind in kinds} >= {("attn.q_b", 0), ("attn.o", 1), ("shared.down", 1)}
    assert sum(kind["count"] for kind in kinds) == 366
    assert json.loads(json.dumps(kinds, allow_nan=False)) == kinds


def test_what_does_not_matter_is_none_and_what_is_wrong_is_refused():
    assert row(layout="owner")["wire"] is None
    assert row(layout="periodic")["period"] == 5
    for dtype in ("float32", "bfloat16"):  # the optimizer works in at least float32
        assert row(layout="factors", rows=8, cols=8, tp=2, dtype=dtype)["sent_bytes"] == 7 * 64 * 4 / 2
    assert row(layout="gram", algorithm="tree")["beats_owner"] is None
    for point, message in (
        ({"layout": "owned"}, "did you mean 'owner'"),
        ({"model": "kimi"}, "did you mean 'kimi-k2'"),
        ({"tp": 0}, "at least 1, not 0"),
        ({"tp": 100_000}, "tp must be at most 1024, not 100000"),
        ({"dtype": "float31"}, "did you mean"),
        ({"wire": "float31"}, "did you mean"),
        ({"algorithm": "rings"}, "did you mean 'ring'"),
        ({"rows": 0}, "rows must be at least 1, not 0"),
    ):
        with pytest.raises(ValueError, match=message):
            rows(**point)
    with pytest.raises(LeftOut, match="power of two"):
        rows(algorithm="halving_doubling", tp=6)
