"""Models by name against the list of shapes made apart, and models of the user's own."""

import json
import re
import struct
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

from muon_lab.cost import architecture, inventory, own
from muon_lab.cost.inventory import Layer, held
from muon_lab.parallel.grid import Grid

MODELS = inventory.names()


def listed(name):
    return inventory._content()[name]


@pytest.mark.parametrize("name", MODELS)
def test_the_shapes_are_those_of_the_list_made_apart(name):
    model, expected = inventory.get(name), listed(name)
    assert {layer.name: [*layer.shape, layer.count] for layer in model.matrices} == expected["matrices"]
    totals = expected["totals"]
    assert model.count == totals["n_matrices"]
    assert model.matrix_parameters == totals["matrix_params"]
    assert model.vectors == totals["vector_params"]
    assert model.parameters == totals["total_params"]
    assert model.source


@pytest.mark.parametrize(
    ("name", "matrices", "billions"), [("kimi-k2", 69_668, 1026.4), ("qwen3-30b-a3b", 18_672, 30.53)]
)
def test_totals_that_are_known(name, matrices, billions):
    model = inventory.get(name)
    assert (model.count, round(model.parameters / 1e9, 1 if billions > 100 else 2)) == (matrices, billions)


def test_published_totals_are_met_to_their_rounding():
    """GLM-4.5's 355 billion count its layer of multi-token prediction, which is left out here; Kimi K2's are 1 T."""
    far = {
        name
        for name in MODELS
        if (told := listed(name)["published_billions"]) and abs(inventory.get(name).parameters / 1e9 / told - 1) > 5e-3
    }
    assert far == {"kimi-k2", "glm-4.5", "glm-4.5-air"}


def test_fusing_keeps_every_entry_and_splitting_undoes_it():
    for name in ("llama-3-8b", "gpt2", "kimi-k2"):
        fused = inventory.get(name, qkv="fused", gate_up="fused")
        split = inventory.get(name, qkv="split", gate_up="split")
        assert fused.parameters == split.parameters == inventory.get(name).parameters
        assert fused.count < split.count
    assert inventory.get("llama-3-8b", qkv="fused").layer("attn.qkv").shape == (6144, 4096)
    assert inventory.get("qwen3-30b-a3b", gate_up="fused").layer("experts.gate_up").count == 48 * 128
    assert inventory.get("kimi-k2", qkv="fused").count == 69_668  # latent projections stay apart


@pytest.mark.parametrize("grid", [Grid(), Grid(pp=4), Grid(dp=64, pp=4, ep=64), Grid(dp=8, tp=4, ep=8, pp=3)])
def test_stages_and_ranks_hold_the_model_once(grid):
    model = inventory.get("kimi-k2")
    for expert_tp in {1, grid.tp}:
        entries = 0
        for stage in range(grid.pp):
            for part in held(model, grid, stage, expert_tp):
                ranks = grid.dp * grid.tp
                uncut = 1 if part.placement is not None or part.layer.expert else grid.tp
                entries += part.parameters * ranks // part.replicas // uncut
        rows = {layer.name: layer.shape[0] % grid.tp for layer in model.layers if layer.excluded}
        assert not any(rows.values())
        assert entries == model.parameters - model.vectors


def test_what_does_not_divide_is_said_with_numbers():
    with pytest.raises(ValueError, match=r"ep=5 does not divide the 384 experts.*but ep=1 divides them and dp·tp=5"):
        held(inventory.get("kimi-k2"), Grid(dp=5, ep=5))
    with pytest.raises(ValueError, match=r"ep=64 does not divide the 160 experts.*but ep=32 divides them and dp·tp=64"):
        held(inventory.get("glm-4.5"), Grid(dp=8, tp=8, ep=64))
    with pytest.raises(ValueError, match=r"tp=3 does not divide the 4096 rows of 'attn.q'.*but tp=2 divides all"):
        held(inventory.get("llama-3-8b", qkv="split"), Grid(tp=3))
    with pytest.raises(ValueError, match="pp=13 stages need a block each, but the model has 12"):
        held(inventory.get("gpt2"), Grid(pp=13))
    with pytest.raises(ValueError, match="expert_tp must be 1 or tp=4, not 2"):
        held(inventory.get("gpt2"), Grid(tp=4), 0, 2)


@pytest.mark.parametrize("name", MODELS)
def test_a_tp_that_is_told_instead_is_accepted(name):
    model, refused = inventory.get(name), 0
    for expert_tp in (1, 2):
        for tp in range(2, 130):
            try:
                inventory.check_tp(model, tp, expert_tp)
            except ValueError as error:
                told = int(re.search(r"but tp=(\d+) divides", str(error))[1])
                inventory.check_tp(model, told, expert_tp)
                held(model, Grid(tp=told), 0, told if expert_tp > 1 else 1)
                refused += 1
    assert refused > 100


def test_unknown_names_have_a_nearest_one():
    with pytest.raises(ValueError, match="did you mean 'kimi-k2'"):
        inventory.get("kimi2")
    with pytest.raises(ValueError, match="did you mean 'fused'"):
        inventory.get("gpt2", qkv="fuse")
    with pytest.raises(ValueError, match=r"or give a \.toml list"):
        own.read("llama3-8b")


@pytest.mark.parametrize(
    "bad", [{"role": "atention"}, {"shape": (0, 3)}, {"per_block": 0}, {"blocks": ()}, {"cut": 2}, {"blocks": (-1,)}]
)
def test_a_layer_that_cannot_be_is_refused(bad):
    good = {"name": "w", "role": "mlp", "shape": (2, 3)}
    Layer(**good)
    with pytest.raises(ValueError, match=r"role|shape|per|cut|needs"):
        Layer(**(good | bad))


LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
QWEN = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
GPT2 = {"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024, "vocab_size": 50257}


@pytest.mark.parametrize(("config", "name"), [(LLAMA, "llama-3-8b"), (QWEN, "qwen3-30b-a3b"), (GPT2, "gpt2")])
def test_a_published_configuration_gives_the_named_model(config, name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    read, known = own.read(str(tmp_path / "config.json")), inventory.get(name)
    assert [(one.name, one.shape, one.count) for one in read.layers] == [
        (one.name, one.shape, one.count) for one in known.layers
    ]
    assert read.parameters == known.parameters


def test_a_deepseek_configuration_gives_the_named_model(tmp_path):
    keys = {key: value for key, value in listed("deepseek-v3")["config"].items() if key != "attention"}
    (tmp_path / "config.json").write_text(json.dumps(keys | {"model_type": "deepseek_v3", "moe_layer_freq": 1}))
    assert own.read(str(tmp_path / "config.json")).parameters == inventory.get("deepseek-v3").parameters


def test_a_configuration_says_what_it_lacks():
    with pytest.raises(ValueError, match="has no 'hidden_size', the nearest key is 'hiden_size'"):
        architecture.model({"hiden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 4}, "mine")
    with pytest.raises(ValueError, match="'num_attention_heads' in the configuration of x must be a positive whole"):
        architecture.model(LLAMA | {"num_attention_heads": "32"}, "x")


def config(family, blocks, hidden, width, heads, vocabulary, **more):
    keys = ("model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    return dict(zip(keys, (family, blocks, hidden, width, heads, vocabulary), strict=True)) | more


SCOUT = config("llama4_text", 48, 5120, 8192, 40, 202048, head_dim=128, num_key_value_heads=8, num_local_experts=16)


@pytest.mark.parametrize(
    ("given", "parameters"),
    [
        (config("phi", 32, 2560, 10240, 32, 51200), 2_779_683_840),
        (config("starcoder2", 30, 3072, 12288, 24, 49152, num_key_value_heads=2), 3_030_371_328),
        (config("gpt_neox", 6, 512, 2048, 8, 50304), 70_426_624),
        (config("gemma", 18, 2048, 16384, 8, 256000, head_dim=256, num_key_value_heads=1), 2_506_172_416),
        (config("nemotron", 32, 3072, 9216, 24, 256000, head_dim=128, num_key_value_heads=8), 4.19e9),
        (config("bert", 12, 768, 3072, 12, 30522, max_position_embeddings=512), 0.109e9),
        ({"model_type": "llama4", "text_config": SCOUT | {"interleave_moe_layer_step": 1}}, 107.77e9),
        (config("gpt_oss", 24, 2880, 2880, 64, 201088, head_dim=64, num_key_value_heads=8, num_experts=32), 20.91e9),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else "",
)
def test_families_have_the_parameters_that_are_published(given, parameters, tmp_path):
    """Exactly where the count is published so (phi-2, StarCoder2-3B, Pythia-70m, Gemma-2B), else to its digits."""
    (tmp_path / "config.json").write_text(json.dumps(given))
    found = own.read(str(tmp_path / "config.json"))
    exact = isinstance(parameters, int)
    assert found.parameters == (parameters if exact else pytest.approx(parameters, rel=1.5e-3))
    assert not any("llama-like" in note for note in found.notes)


def test_an_unknown_family_is_read_with_a_note(tmp_path):
    for given, told in ((LLAMA | {"model_type": "mine"}, "family 'mine' is unknown"), ({**LLAMA}, None)):
        (tmp_path / "config.json").write_text(json.dumps(given))
        notes = own.read(str(tmp_path / "config.json")).notes
        assert notes == () if told is None else told in notes[0] and "gated MLP" in notes[0]


@pytest.mark.parametrize(
    "key",
    [
        {"model_type": "nemotron_h"},
        {"model_type": "qwen3_next"},
        {"model_type": "falcon"},
        {"hybrid_override_pattern": "M-M*"},
        {"linear_num_key_heads": 16},
        {"full_attention_interval": 4},
        {"layer_types": ["linear_attention", "full_attention"]},
        {"is_encoder_decoder": True},
    ],
    ids=str,
)
def test_a_family_of_other_blocks_is_refused(key):
    with pytest.raises(ValueError, match=r"the configuration of mine (is of|has).*give its \.safetensors files or"):
        architecture.model(LLAMA | key, "mine")


def refusal(config):
    """Return why a configuration is refused, or None."""
    try:
        architecture.model(config, "mine")
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", ["kimi-k2", "qwen3-30b-a3b", "gpt2", "glm-5"])
@pytest.mark.parametrize("value", [None, "x", -1, 1.5, [], [1], {}, True])
def test_no_value_of_a_configuration_ends_in_a_traceback(name, value):
    config = dict(listed(name)["config"])
    for key in config:
        for broken in ({**config, key: value}, {other: config[other] for other in config if other != key}):
            said = refusal(broken)
            assert said is None or ("mine" in said and "\n" not in said), key


def test_a_token_passes_some_of_the_experts(tmp_path):
    """A block's attention and router, 8 of 128 experts, and both embeddings; what the list says, the note without."""
    model = architecture.model(QWEN, "x")
    dense = sum(layer.parameters for layer in model.layers if not layer.expert)
    assert model.active == dense + 48 * 8 * 3 * 2048 * 768
    assert architecture.model(LLAMA, "x").active is None
    path = tmp_path / "mine.toml"
    path.write_text(LIST + "active = 2\n")
    assert own.read(str(path)).active == 4 * 2048 + 4 * 2 * 512
    path.write_text(LIST)
    assert "how many experts a token passes is unknown" in own.read(str(path)).notes[0]
    path.write_text(LIST + "active = 9\n")
    with pytest.raises(ValueError, match=r"layer 2: 'active' is 9, of 8 experts"):
        own.read(str(path))
    path = tmp_path / "config.json"
    path.write_text(json.dumps({key: value for key, value in QWEN.items() if key != "num_experts_per_tok"}))
    assert "how many experts a token passes is unknown" in own.read(str(path)).notes[0]


def test_experts_in_every_second_block():
    model = architecture.model(QWEN | {"decoder_sparse_step": 2, "mlp_only_layers": [3]}, "x")
    assert model.layer("router").blocks == (1, *range(5, 48, 2))
    assert model.layer("mlp.up").count == 25


def saved(tmp_path):
    arrays = {"model.embed_tokens.weight": (10, 4), "lm_head.weight": (10, 4), "model.norm.weight": (4,)}
    for block in range(3):
        at = f"model.layers.{block}."
        arrays |= {at + "self_attn.q_proj.weight": (8, 4), at + "self_attn.o_proj.weight": (4, 8)}
        arrays |= {at + "mlp.gate.weight": (2, 4), at + "input_layernorm.weight": (4,)}
        for expert in range(2):
            arrays |= {f"{at}mlp.experts.{expert}.{part}_proj.weight": (6, 4) for part in ("gate", "up")}
            arrays[f"{at}mlp.experts.{expert}.down_proj.weight"] = (4, 6)
    save_file({name: np.zeros(shape, np.float32) for name, shape in arrays.items()}, tmp_path / "m.safetensors")
    return arrays


def test_a_safetensors_header_gives_roles_cuts_blocks_and_experts(tmp_path):
    arrays = saved(tmp_path)
    model = own.read(str(tmp_path / "m.safetensors"))
    assert model.parameters == sum(int(np.prod(shape)) for shape in arrays.values())
    found = {one.name: (one.role, one.shape, one.blocks, one.per_block, one.cut) for one in model.layers}
    assert found == {
        "embed_tokens": ("embedding", (10, 4), (0,), 1, 0),
        "lm_head": ("head", (10, 4), (2,), 1, 0),
        "self_attn.q_proj": ("attention", (8, 4), (0, 1, 2), 1, 0),
        "self_attn.o_proj": ("attention", (4, 8), (0, 1, 2), 1, 1),
        "mlp.gate": ("router", (2, 4), (0, 1, 2), 1, None),
        "mlp.experts.gate_proj": ("expert", (6, 4), (0, 1, 2), 2, 0),
        "mlp.experts.up_proj": ("expert", (6, 4), (0, 1, 2), 2, 0),
        "mlp.experts.down_proj": ("expert", (4, 6), (0, 1, 2), 2, 1),
    }
    assert own.read(str(tmp_path)).count == model.count == 3 * (3 + 6)


def test_queries_keys_and_values_of_safetensors_are_joined_and_split_if_asked(tmp_path):
    path = str(tmp_path / "m.safetensors")

    def shapes(**asked):
        model = own.read(path, **asked)
        return {
            layer.name: (layer.shape, layer.count) for layer in model.matrices if layer.role in ("attention", "mlp")
        }

    parts = {
        f"model.layers.{block}.self_attn.{part}_proj.weight": (rows, 4)
        for block in (0, 1)
        for part, rows in (("q", 4), ("k", 2), ("v", 2))
    }
    save_file({name: np.zeros(shape, np.float32) for name, shape in parts.items()}, path)
    assert shapes(qkv="fused") == {"self_attn.qkv": ((8, 4), 2)}
    assert shapes(qkv="split") == shapes()
    with pytest.raises(ValueError, match="gate_up is 'fused', but m has no gate and up-projection"):
        own.read(path, gate_up="fused")
    with pytest.raises(ValueError, match="did you mean 'fused'"):
        own.read(path, qkv="fuse")
    whole = {"h.0.mlp.gate_up_proj.weight": (12, 4), "h.0.attn.qkv_proj.weight": (12, 4)}
    save_file({name: np.zeros(shape, np.float32) for name, shape in whole.items()}, path)
    split = shapes(qkv="split", gate_up="split")
    assert split == {f"attn.{part}": ((4, 4), 1) for part in "qkv"} | {
        f"mlp.{one}": ((6, 4), 1) for one in ("gate", "up")
    }
    save_file({"h.0.attn.qkv_proj.weight": np.zeros((8, 4), np.float32)}, path)
    with pytest.raises(ValueError, match=r"keeps 'attn.qkv_proj' of shape \(8, 4\) as one, and shapes do not say"):
        own.read(path, qkv="split")


def test_what_is_stored_as_inputs_by_outputs_is_turned_and_noted(tmp_path):
    """GPT-2's Conv1D layers, unlike layers of the same names in other code; experts in one array."""
    linear = {"attn.c_attn": (12, 4), "attn.c_proj": (4, 4), "mlp.c_fc": (16, 4), "mlp.c_proj": (4, 16)}
    stacked = {"mlp.experts.gate_up_proj": (3, 4, 12), "mlp.experts.down_proj": (3, 6, 4)}
    for arrays, turned in (
        (linear, False),
        ({name: shape[::-1] for name, shape in linear.items()}, True),
        (stacked, True),
        ({name: (e, n, m) for name, (e, m, n) in stacked.items()}, False),
    ):
        zeros = {f"h.0.{name}.weight": np.zeros(shape, np.float32) for name, shape in arrays.items()}
        save_file(zeros, tmp_path / "m.safetensors")
        model = own.read(str(tmp_path / "m.safetensors"))
        found = {layer.name: layer.shape for layer in model.layers}
        wanted = (
            linear
            if arrays.keys() == linear.keys()
            else {"mlp.experts.gate_up_proj": (12, 4), "mlp.experts.down_proj": (4, 6)}
        )
        assert found == wanted
        assert any("inputs × outputs" in note for note in model.notes) == turned


def test_only_the_header_of_safetensors_is_read(tmp_path):
    header = json.dumps({"w": {"dtype": "F32", "shape": [2**20, 2**20], "data_offsets": [0, 2**42]}}).encode()
    (tmp_path / "big.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert own.read(str(tmp_path / "big.safetensors")).parameters == 2**40


@pytest.mark.parametrize("content", [b"", b"1234567", struct.pack("<Q", 100) + b"{}", struct.pack("<Q", 2) + b"[]"])
def test_what_is_no_safetensors_file_is_refused(content, tmp_path):
    (tmp_path / "bad.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"bad\.safetensors is no safetensors file"):
        own.read(str(tmp_path / "bad.safetensors"))


LIST = """
name = "mine"
blocks = 4
vectors = 7
[[layer]]
name = "attn.q"
shape = [64, 32]
cut = "rows"
[[layer]]
name = "experts.up"
shape = [16, 32]
experts = 8
"""


def test_a_list_of_layers(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(LIST)
    model = own.read(str(path))
    assert (model.name, model.count, model.parameters) == ("mine", 4 + 32, 4 * 2048 + 32 * 512 + 7)
    assert model.layer("experts.up").expert
    assert model.layer("attn.q").cut == 0


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("shape = [64, 32]", "shape = [64]", "layer 1: 'shape' must be two positive whole numbers"),
        ("shape = [64, 32]", "shpae = [64, 32]", "unknown key 'shpae': did you mean 'shape'"),
        ('cut = "rows"', 'cut = "row"', "did you mean 'rows'"),
        ("blocks = 4", "blocks = 0", "'blocks' must be a whole number of at least 1, not 0"),
        ("experts = 8", "experts = 8\ncount = 9", "8 experts in each block do not make up the 9 matrices"),
        ('name = "experts.up"', 'name = "attn.q"', "each layer needs a name of its own"),
        ("[[layer]]", "[layer", "is not valid TOML"),
    ],
)
def test_a_list_with_a_mistake_is_refused_in_one_sentence(old, new, message, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(LIST.replace(old, new))
    with pytest.raises(ValueError, match=r"mine\.toml") as refused:
        own.read(str(path))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_missing_file_names_the_nearest(tmp_path):
    (tmp_path / "mine.toml").write_text(LIST)
    with pytest.raises(ValueError, match=r"did you mean 'mine\.toml'"):
        own.read(str(tmp_path / "mien.toml"))


def test_nothing_of_it_imports_torch():
    code = "from muon_lab.cost import architecture, flops, inventory, network, own, plan, volume; import sys; "
    code += "print('torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False"
