"""The planner: what it says adds up, its choices are the quickest, and its command refuses what does not fit."""

import json
import subprocess
import sys

import pytest

from muon_lab import plan as command
from muon_lab.cost import flops, inventory
from muon_lab.cost.network import Cluster, Link, preset
from muon_lab.cost.ownership import Kind, dealt, spread
from muon_lab.cost.plan import ALONE, REASONS, Setting, plan
from muon_lab.parallel import calls
from muon_lab.parallel.grid import Grid

KIMI = "--model kimi-k2 --gpus 256 --pp 4 --dp 64 --ep 64 --cluster gb300-nvl72"
QWEN = "--model qwen3-30b-a3b --gpus 8 --dp 8 --ep 8 --cluster gb300-nvl72"


def run(line, capsys):
    status = command.main(line.split())
    said = capsys.readouterr()
    return status, said.out, said.err


def test_json_is_one_strict_object(capsys):
    status, out, err = run(f"{QWEN} --json", capsys)
    assert (status, err, out.count("\n")) == (0, "", 1)

    def refuse(constant):
        raise AssertionError(constant)

    found = json.loads(out, parse_constant=refuse)
    assert {"layers", "totals", "assumptions"} <= set(found)
    assert sum(layer["count"] for layer in found["layers"] if layer["role"] not in inventory.EXCLUDED) == 18_672
    for layer in found["layers"]:
        assert {"name", "shape", "count", "layout", "bytes", "flops", "seconds"} <= set(layer)
    assert all(isinstance(line, str) for line in found["assumptions"])


def test_the_table_names_every_layer_and_what_is_assumed(capsys):
    status, out, _ = run(KIMI, capsys)
    assert status == 0
    assert all(layer.name in out for layer in inventory.get("kimi-k2").layers)
    assert "Assumed:" in out
    assert "NCCL 2.30.7" in out


@pytest.mark.slow
def test_experts_without_replicas_move_nothing(capsys):
    found = json.loads(run(f"{KIMI} --json", capsys)[1])
    experts = [layer for layer in found["layers"] if layer["role"] == "expert"]
    assert {(layer["layout"], layer["bytes"], layer["held"]) for layer in experts} == {("local", 0, 90)}
    one = flops.newton_schulz(2048, 7168, 5)
    assert {layer["flops"] for layer in experts} == {16 // 16 * 90 * one}


@pytest.mark.parametrize(
    ("model", "grid"),
    [("llama-3-8b", Grid(dp=4, tp=8)), ("kimi-k2", Grid(dp=64, pp=4, ep=64)), ("glm-4.5", Grid(dp=8, tp=4, ep=8))],
)
def test_each_layer_has_its_quickest_layout_unless_the_stage_is_quicker_without(model, grid):
    for layer in plan(model, "gb300-nvl72", grid).layers:
        assert not layer.chosen.reason
        assert all(other.seconds >= layer.chosen.seconds for other in layer.others if not other.reason)
        assert {other.layout for other in layer.others if other.reason == ALONE} <= {"split"}


def test_giants_are_shared_and_the_rest_is_whole():
    """Three matrices of 18432×7168 take 4.1 times the mean; in teams the busiest replica is done in half the time."""
    grid = Grid(dp=64, pp=4, ep=64)
    found, whole = (plan("kimi-k2", "gb300-nvl72", grid, Setting(owners=owners)) for owners in ("hybrid", "whole"))
    assert {layer.chosen.layout for layer in found.layers if layer.held.layer.role == "mlp"} == {"split"}
    assert {layer.chosen.layout for layer in found.layers if layer.held.layer.role == "shared"} == {"layerwise"}
    assert not {layer.chosen.layout for layer in whole.layers} & {"split"}
    (dense, _), (before, _) = found.deals, whole.deals
    assert dense.owners.whole == before.owners.makespan == pytest.approx(max(load.seconds for load in before.loads))
    assert dense.owners.makespan == pytest.approx(max(load.seconds for load in dense.loads))
    assert dense.owners.makespan < before.owners.makespan / 2
    assert sum(dense.owners.entries) == sum(before.owners.entries)
    assert "mlp.gate by" in dense.why
    assert before.why == "whole matrices only, as asked"
    assert found.totals["optimizer_seconds"] < whole.totals["optimizer_seconds"]


def test_a_team_takes_its_part_of_the_products_all_of_the_square_and_its_calls():
    """By hand: four ranks cut 18432×7168 along rows, and sum five Gram matrices of bfloat16."""
    k, s, team = 7168, 18432, 4
    cluster = preset("gb300-nvl72")
    layers = plan("kimi-k2", cluster, Grid(dp=64, pp=4, ep=64)).layers
    (gate,) = [layer.chosen for layer in layers if layer.held.layer.name == "mlp.gate"]
    assert (gate.team, gate.flops) == (team, 5 * (4 * k**2 * s // team + 2 * k**3))
    assert gate.compute == pytest.approx(gate.flops / cluster.rate + 15 * cluster.overhead)
    summed = calls.all_reduce((k, k), "bfloat16", team)
    norm = calls.all_reduce((3, 1, 1), "float64", team)
    assert gate.exchange == pytest.approx(5 * cluster.seconds(summed) + cluster.seconds(norm))
    assert gate.elementwise == pytest.approx(k * s / team * (2 + 4 + 16 + 4) / cluster.stream)


def test_what_is_quicker_alone_is_weighed_for_the_whole_stage():
    """One attention matrix of a class would be done sooner by two, yet all replicas are busy with their own."""
    layers = plan("kimi-k2", "gb300-nvl72", Grid(dp=64, pp=4, ep=64)).layers
    assert {other.layout for layer in layers for other in layer.others if other.reason == ALONE} == {"split"}


def test_a_cap_bounds_what_an_owner_holds():
    grid = Grid(dp=64, pp=4, ep=64)
    free, capped = (plan("kimi-k2", "gb300-nvl72", grid, Setting(cap=cap)).deals[0].owners for cap in (None, 1.3))
    assert spread(free.entries) > 1.3 >= spread(capped.entries)
    assert capped.makespan >= free.makespan
    assert capped.whole is None  # one giant alone is more than that


def test_a_cap_without_room_names_the_matrix_and_the_smallest_cap_that_has():
    """One giant of 80 entries, four replicas and a mean of 30: 2.67 times the mean is the least."""
    kinds = [Kind("giant", 1, 80, lambda team: 8.0 / team), Kind("small", 4, 10, lambda team: 1.0 / team)]
    told = r"cap is 1\.3 times the mean of 30 entries, .* another 'giant' of 80, but a cap of 2\.67 leaves room for all"
    with pytest.raises(ValueError, match=told):
        dealt(kinds, 4, policy="whole", cap=1.3)
    assert dealt(kinds, 4, policy="whole", cap=2.67).entries == (80, 20, 10, 10)


def test_blocks_of_replicas_keep_a_long_search_short():
    kinds = [Kind("w", 512, 64, lambda team: 1.0 / team), Kind("giant", 8, 4096, lambda team: 64.0 / team)]
    found = dealt(kinds, 2**12)
    assert min(found.teams) > 1
    assert found.makespan < 1 / 2
    assert sum(found.entries) == 512 * 64 + 8 * 4096
    assert [sum(owned) for owned in found.owned] == [512 * found.teams[0], 8 * found.teams[1]]


def test_the_owner_layout_takes_as_long_as_its_busiest_rank():
    """Two matrices on four tensor-parallel ranks: two of them have one each, and no mean makes that less."""
    layer = inventory.Layer("w", "mlp", (256, 512), (0, 1), 1, 0)
    cluster = Cluster("slow link", "made up", 8, Link(0.0, 1e6), Link(0.0, 1e6), rate=1e12)
    found = plan(inventory.Model("two", (layer,), 2), cluster, Grid(tp=4))
    (one,) = found.layers
    assert one.chosen.layout == "owner"
    assert found.totals["compute_seconds"] == one.chosen.compute == flops.newton_schulz(256, 512, 5) / 1e12


def test_small_products_run_slower_by_what_each_takes_beside_its_flops():
    model, grid = inventory.get("qwen3-8b"), Grid(dp=4)
    none, some = (plan(model, "h200-nvlink", grid, Setting(overhead=t)).totals for t in (0.0, 1e-5))
    matrices = model.count / 4
    assert some["compute_seconds"] - none["compute_seconds"] == pytest.approx(15 * matrices * 1e-5, rel=0.1)
    assert preset("h200-nvlink").overhead == 1e-5


def test_elementwise_work_is_priced_by_the_memory():
    """One GPU: 2 + 4 bytes of weight and gradient, 16 of state both ways, 4 of the update, at 4.8 TB/s."""
    found = plan("qwen3-8b", "h200-nvlink", Grid())
    model = inventory.get("qwen3-8b")
    rest = model.parameters - model.matrix_parameters - model.vectors
    expected = (26 * model.matrix_parameters + 30 * rest) / 4.8e12
    assert found.totals["elementwise_seconds"] == pytest.approx(expected, rel=1e-12)
    assert found.totals["visible_seconds"] > found.totals["compute_seconds"]


def test_memory_is_that_of_the_fullest_rank_of_all_stages():
    """Weights and gradients of a stage with an embedding, state of what its ranks own: by hand for one rank a stage."""
    found, model = plan("gpt2", "h200-nvlink", Grid(pp=2)), inventory.get("gpt2")
    half = model.matrix_parameters // 2
    first = [layer for layer in model.layers if layer.role in ("embedding", "position")]
    assert found.totals["memory"] == half * (6 + 8) + sum(layer.parameters for layer in first) * (6 + 12)


def test_the_step_is_estimated_at_the_rate_of_the_cluster_and_by_active_parameters():
    base = plan("qwen3-8b", "h200-nvlink", Grid(dp=4)).totals["step_seconds"]
    assert plan("qwen3-8b", "h200-nvlink", Grid(dp=4), Setting(rate=1e14)).totals["step_seconds"] == base
    model = inventory.get("qwen3-8b")
    assert base == pytest.approx(6 * (model.active or model.parameters) * 65_536 / (785e12 / 2))


def test_heads_that_are_cut_are_told():
    """Qwen3-30B-A3B has four key-value heads of 128 rows; on eight ranks each has half of one."""
    cut, fine = (plan("qwen3-30b-a3b", "h200-nvlink", Grid(dp=2, tp=tp)).assumptions for tp in (8, 4))
    assert any("attn.k into 64" in line and "heads of 128" in line for line in cut)
    assert not any(line.startswith("heads are cut") for line in fine)


def test_the_layout_follows_the_machine():
    """Free products and a slow link: gather each matrix once. A fast link and slow products: share the work."""
    slow = Cluster("slow", "made up", 8, Link(1e-6, 1e9), Link(1e-6, 1e9), rate=1e18)
    fast = Cluster("fast", "made up", 8, Link(1e-9, 1e15), Link(1e-9, 1e15), rate=1e12)
    model, grid = inventory.get("llama-3-8b"), Grid(tp=8)

    def layouts(cluster):
        found = plan(model, cluster, grid).layers
        return {layer.chosen.layout for layer in found if layer.held.placement and not layer.held.layer.excluded}

    assert layouts(slow) == layouts(fast) == {"owner"}  # fewest bytes and fewest flops of all, with 32 on 8 ranks
    one = model.without("embedding", "head")
    alone = type(one)(
        "one", tuple(type(layer)(layer.name, layer.role, layer.shape, (0,), 1, layer.cut) for layer in one.layers), 1
    )
    assert {layer.chosen.layout for layer in plan(alone, slow, grid).layers} == {"duplicated"}
    assert {layer.chosen.layout for layer in plan(alone, fast, grid).layers} == {"distributed"}


def test_totals_are_those_of_the_busiest_owner():
    found = plan("qwen3-8b", "h200-nvlink", Grid(dp=16))
    (deal,) = found.deals
    model = inventory.get("qwen3-8b")
    assert not deal.owners.shared
    names = [deal.owners.kinds[kind] for kind in deal.owners.matrices]
    assert sorted(names) == sorted(layer.name for layer in model.matrices for _ in range(layer.count))
    loads, counts = [0.0] * 16, [0] * 16
    for name, owner in zip(names, deal.owners.first, strict=True):
        loads[owner] += flops.newton_schulz(*model.layer(name).shape, 5)
        counts[owner] += 1
    assert found.totals["flops"] in loads
    cluster = preset("h200-nvlink")
    seconds = [load / cluster.rate + 15 * cluster.overhead * count for load, count in zip(loads, counts, strict=True)]
    assert sum(deal.owners.entries) == model.matrix_parameters
    assert found.totals["compute_seconds"] == pytest.approx(max(seconds), rel=2e-3)  # the busiest by all it does
    parts = ("compute_seconds", "elementwise_seconds", "exchange_seconds", "gather_seconds")
    assert found.totals["optimizer_seconds"] == pytest.approx(sum(found.totals[part] for part in parts), rel=1e-12)


def test_a_giant_that_stops_the_balance_is_split():
    """One big matrix among many ranks: no owner is as quick as all of them together."""
    giant = inventory.Layer("giant", "mlp", (8192, 65536), (0,))
    cluster = Cluster("fast", "made up", 64, Link(1e-7, 1e13), Link(1e-7, 1e13), rate=1e14)
    found = plan(inventory.Model("one", (giant,), 1), cluster, Grid(dp=8))
    assert found.layers[0].chosen.layout == "split"
    assert found.totals["compute_seconds"] == pytest.approx(found.layers[0].chosen.compute)
    assert found.layers[0].chosen.team == 8
    assert found.deals[0].owners.owned == ((1,) * 8,)


def test_syrk_and_cubic_steps_take_less():
    base = plan("qwen3-8b", "h200-nvlink", Grid(dp=4)).totals["flops"]
    for setting in (Setting(kernel="syrk"), Setting(degree=3), Setting(steps=4)):
        assert plan("qwen3-8b", "h200-nvlink", Grid(dp=4), setting).totals["flops"] < base


def test_what_hides_behind_forward_is_not_exposed():
    hidden, bare = (
        plan("qwen3-8b", "h200-nvlink", Grid(dp=8), Setting(overlap=overlap)).totals for overlap in (True, False)
    )
    assert hidden["exposed_seconds"] == 0.0 < bare["exposed_seconds"] == bare["gather_seconds"]
    assert hidden["share_of_step"] < bare["share_of_step"] < 1
    short = plan("qwen3-8b", "h200-nvlink", Grid(dp=8), Setting(step=3e-3)).totals
    assert short["exposed_seconds"] == pytest.approx(short["gather_seconds"] - 1e-3)


def test_a_model_that_does_not_fit_says_so():
    found = plan("kimi-k2", "h200-nvlink", Grid(dp=8))
    assert not found.totals["fits"]
    assert any(line.startswith("does not fit") for line in found.assumptions)


@pytest.mark.parametrize(("line", "limit"), [(KIMI, 1), ("--model kimi-k2 --gpus 4096 --cluster gb300-nvl72", 5)])
def test_planning_is_quick(line, limit):
    """In seconds of its own process, start included and shapes unchecked: a wall clock would tell of its neighbours."""
    code = f"import sys, time; from muon_lab.plan import main; main({line.split()!r}); print(time.process_time())"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(answer.stdout.splitlines()[-1]) < limit


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--model kimi2", "did you mean 'kimi-k2'"),
        ("--cluster gb200", "did you mean 'gb300-nvl72'"),
        ("--gpus 256 --pp 4 --dp 32", "pp·dp·tp = 4·32·1 = 128 is not 256 GPUs, but dp=64 would be"),
        ("--gpus 10 --pp 4", "pp·tp = 4·1 = 4 does not divide 10 GPUs, but 8 GPUs would do"),
        ("--gpus 8 --ep 3", "ep=3 does not divide the 128 experts"),
        ("--gpus 8 --ep 16", "ep=16 does not divide dp·tp=8, among which experts are spread, but ep=8 does"),
        ("--gpus 8 --tp 8 --ep 8 --expert-tp 8", "ep=8 does not divide dp=1"),
        ("--model llama-3-8b --gpus 14 --tp 7", "but tp=2 divides all that is cut"),
        ("--model kimi-k2 --gpus 5 --ep 5", "ep=5 does not divide the 384 experts"),
        ("--model llama-3-8b --tp 3", "tp=3 does not divide"),
        ("--model gpt2 --pp 13", "pp=13 stages need a block each, but the model has 12"),
        ("--tp 0", "must be numbers of ranks"),
        ("--modle kimi-k2", "did you mean --model?"),
        ("--kernel syrkk", "did you mean 'syrk'"),
        ("--weight bf16", "did you mean 'bfloat16'"),
        ("--cluster pcie5", "has no rate of products: give one, --tflops on the command line, 'tflops' in a cluster's"),
        ("--model kimi-k2 --qkv fused", "qkv is 'fused', but kimi-k2 has no queries, keys and values"),
        ("-x 3", "there is no option -x: did you mean --"),
        ("--tflops nan", "--tflops takes a number, not 'nan'"),
        ("--step-ms nan", "--step-ms takes a number, not 'nan'"),
        ("--step-ms -3", "--step-ms must be positive, not -3.0"),
        ("--model nothing.toml", "there is no file 'nothing.toml'"),
        ("--cluster nothing.toml", "there is no file 'nothing.toml'"),
        ("--gpus eight", "--gpus takes a whole number, not 'eight'"),
        ("--tflops fast", "--tflops takes a number, not 'fast'"),
        ("--json yes", "--json takes no value, but got 'yes'"),
        ("--model", "--model needs a value"),
        ("--steps 0", "steps must be positive, not 0"),
        ("--tflops inf", "--tflops takes a number, not 'inf'"),
        ("--gpus 1000000000", "1000000000 GPUs are too many to plan for, 131072 are the most"),
        ("--owners hybird", "did you mean 'hybrid'"),
        ("--cap 0.5", "cap must be at least 1 times the mean, not 0.5"),
        ("--product-us -2", "overhead of a product must be at least 0 s"),
        ("--model gpt2 --active 3", "--active is 3.0 B parameters, but gpt2 has 0.12"),
        ("--figure /proc/none/x", "the figure '/proc/none/x' cannot be written"),
        ("stray", "'stray' is no option"),
    ],
)
def test_what_does_not_fit_ends_with_2_and_one_sentence(line, message, capsys):
    status, out, err = run(line, capsys)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_an_interruption_is_one_sentence(capsys, monkeypatch):
    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "planned", interrupted)
    assert run("--model gpt2", capsys) == (130, "", "muon_lab.plan: interrupted\n")


@pytest.mark.parametrize("words", ["--model gpt2", "--help", "--list"])
def test_a_reader_that_has_seen_enough_is_no_error(words):
    """Python ends with 120 and a complaint if what is left cannot be written."""
    answer = subprocess.Popen(
        [sys.executable, "-m", "muon_lab.plan", *words.split()], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    answer.stdout.close()
    said = answer.stderr.read()
    answer.stderr.close()
    assert (answer.wait(), said) == (0, b"")


def test_malformed_files_end_with_2(tmp_path, capsys):
    (tmp_path / "own.toml").write_text("[[layer]\n")
    (tmp_path / "config.json").write_text("{")
    for name in ("own.toml", "config.json"):
        status, out, err = run(f"--model {tmp_path / name}", capsys)
        assert (status, out) == (2, "")
        assert "is not valid" in err
    (tmp_path / "cut.safetensors").write_bytes(b"\x10" + bytes(7) + b'{"w": {"sha')
    (tmp_path / "folder.toml").mkdir()
    for name, message in (("cut.safetensors", "is no safetensors file"), ("folder.toml", "holds no .safetensors file")):
        status, out, err = run(f"--model {tmp_path / name}", capsys)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert message in err


def test_ones_own_model_and_cluster(tmp_path, capsys):
    (tmp_path / "own.toml").write_text('[[layer]]\nname = "w"\nshape = [64, 32]\ncount = 6\n')
    (tmp_path / "lab.toml").write_text("[inside]\nlatency_us = 5\nbandwidth_gb = 10\n")
    line = f"--model {tmp_path / 'own.toml'} --cluster {tmp_path / 'lab.toml'} --dp 3 --tflops 1 --json"
    found = json.loads(run(line, capsys)[1])
    (layer,) = found["layers"]
    assert (layer["count"], layer["layout"], layer["flops"]) == (6, "layerwise", 2 * flops.newton_schulz(64, 32, 5))
    assert layer["bytes"] == 4 * 2048 * 2


def test_the_list_names_models_and_clusters(capsys):
    status, out, _ = run("--list", capsys)
    assert status == 0
    assert "kimi-k2" in out
    assert "gb300-nvl72" in out


def test_the_figure_is_the_same_every_time(tmp_path, capsys):
    for stem in ("a.pdf", "b"):
        assert run(f"{QWEN} --figure {tmp_path / stem}", capsys)[0] == 0
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert (tmp_path / "a.pdf").read_bytes() == (tmp_path / "b.pdf").read_bytes()


def test_the_command_imports_no_torch():
    code = f"import sys; from muon_lab.plan import main; main({QWEN.split()!r}); print('torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.splitlines()[-1] == "False"


def test_every_reason_belongs_to_a_layout_that_is_shown():
    found = plan("llama-3-8b", "h200-nvlink", Grid(dp=2, tp=4))
    shown = {other.layout for layer in found.layers for other in layer.others if other.reason}
    assert shown == set(REASONS)


def test_what_is_quicker_and_not_chosen_is_marked_and_the_reason_told_once(capsys):
    out = run("--model llama-3-8b --tp 8 --gpus 8", capsys)[1]
    (row,) = [line for line in out.splitlines() if line.startswith("attn.q ")]
    assert "blockwise 6.09*" in row
    assert out.count("* not chosen: another update: each rank") == 1
    assert all(f"not chosen: {REASONS[name]}" in out for name in REASONS)


def test_the_gram_form_has_no_price_at_the_rate_of_another_format(capsys):
    """Its products are float32: a dash in the table, null in JSON, nothing in the figure; float32 rates price it."""
    line = "--model llama-3-8b --tp 8 --gpus 8"
    assert "gram –" in run(line, capsys)[1]
    layer = json.loads(run(f"{line} --json", capsys)[1])["layers"][0]
    (gram,) = [other for other in layer["alternatives"] if other["layout"] == "gram"]
    assert gram["seconds"] is gram["compute_seconds"] is None
    assert gram["not_chosen"] == REASONS["gram"]
    cluster, rate = preset("h200-nvlink"), 5e13
    found = plan("llama-3-8b", cluster, Grid(tp=8), Setting(rate=rate, products="float32")).layers[0]
    (gram,) = [one for one in (found.chosen, *found.others) if one.layout == "gram"]
    assert gram.compute == pytest.approx(gram.flops / rate + 32 * 19 * cluster.overhead)
    assert not gram.reason


def test_whole_experts_go_across_tensor_parallel_ranks():
    """Qwen3-30B-A3B on eight ranks, by hand: a tensor-parallel group of 8, and 128 experts on 8 or 4 of them."""
    one, size = flops.newton_schulz(768, 2048, 5), 768 * 2048
    whole, twice = (plan("qwen3-30b-a3b", "h200-nvlink", Grid(tp=8, ep=ep)) for ep in (8, 4))
    for found, held, owned, layout in ((whole, 48 * 16, 48 * 16, "local"), (twice, 48 * 32, 48 * 16, "layerwise")):
        (gate,) = [layer for layer in found.layers if layer.held.layer.name == "experts.gate"]
        assert (gate.held.count, gate.held.replicas, gate.held.placement) == (held, held // owned, None)
        assert (gate.chosen.layout, gate.chosen.flops) == (layout, owned * one)
        assert gate.chosen.sent == (held - owned) * size * 2  # bfloat16, of two replicas each sends what it owns
    (dense, alone), (_, shared) = whole.deals, twice.deals
    assert (dense.owners.replicas, dense.stride) == (1, 8)
    assert (alone.owners.replicas, alone.stride) == (1, 8)
    assert (shared.owners.replicas, shared.stride) == (2, 4)  # ranks r and r + 4 have the same experts
    assert Grid(tp=8, ep=4).groups("expert_dp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert sum(len(kinds) for kinds in shared.owners.owned) == 3 * 2
    assert [sum(kinds) for kinds in shared.owners.owned] == [48 * 32] * 3


def test_an_axis_of_experts_across_tensor_parallel_ranks_partitions_them():
    for grid in (Grid(dp=2, tp=4, ep=8), Grid(dp=2, tp=4, ep=4, pp=2), Grid(dp=3, tp=4, ep=6)):
        for axis, length in (("ep", grid.ep), ("expert_dp", grid.dp * grid.tp // grid.ep), ("tp", 4), ("dp", grid.dp)):
            groups = grid.groups(axis)
            assert {len(group) for group in groups} == {length}
            assert sorted(rank for group in groups for rank in group) == list(range(grid.size))
    with pytest.raises(ValueError, match=r"must divide dp·tp=2·4=8, but is 3, and 2 is the nearest"):
        Grid(dp=2, tp=4, ep=3)


def test_the_ratios_of_the_figure_have_few_powers_of_two_for_ticks():
    from muon_lab.figures import plan as panel

    row = plan("llama-3-8b", "h200-nvlink", Grid(dp=2, tp=8)).row()
    ratios = panel.draw(row).axes[1]
    assert [tick.get_text() for tick in ratios.get_xticklabels()] == ["0.5", "1", "2", "4", "8"]
    assert not list(ratios.get_xticklabels(minor=True))
    row["layers"][0]["alternatives"] += [{"layout": "blockwise", "seconds": 2.0**20 * row["layers"][0]["seconds"]}]
    assert len(panel.draw(row).axes[1].get_xticks()) <= 6
