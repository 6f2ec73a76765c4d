"""From the numbers of a configuration to the matrices of a transformer.

Keys are those of Hugging Face ``config.json`` files of the llama, qwen, glm and deepseek families; `normalised` maps
the synonyms of other families onto them, and `families` has what no key says. With h the hidden size and d the length
of a head:

=================  ====================================================================================================
grouped attention  q heads·d × h, k and v kv heads·d × h, o h × heads·d
latent attention   q_a q_lora × h, q_b heads (nope + rope) × q_lora (or q × h), kv_a (kv_lora + rope) × h,
                   kv_b heads (nope + v) × kv_lora, o h × heads·v
sparse indexer     wq_b heads·d × q_lora, wk d × h, weights_proj heads × h
gated layers       gate and up f × h, down h × f; of experts, f is their own width; router experts × h
plain layers       fc f × h, proj h × f
=================  ====================================================================================================
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from muon_lab.cost import families
from muon_lab.cost.inventory import Layer, Model
from muon_lab.nearest import nearest

Config = Mapping[str, Any]

#: What other families call the keys, most specific first.
SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "num_hidden_layers": ("n_layer", "num_layers"),
    "hidden_size": ("n_embd", "d_model"),
    "intermediate_size": ("n_inner", "ffn_hidden_size"),
    "num_attention_heads": ("n_head",),
    "num_key_value_heads": ("multi_query_group_num",),
    "max_position_embeddings": ("n_positions", "n_ctx"),
    "n_routed_experts": ("num_experts", "num_local_experts"),
    "num_experts_per_tok": ("moe_k",),
}

NEEDED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")


def model(config: Config, name: str) -> Model:
    """Return the model of a configuration, with the parts of fused matrices apart.

    Raises
    ------
    ValueError
        If a key is missing or has a value that is no positive whole number; says which, and the nearest that is there.

    Examples
    --------
    >>> small = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 10,
    ...          "intermediate_size": 24, "num_key_value_heads": 1}
    >>> [(layer.name, layer.shape) for layer in model(small, "small").matrices]
    ... # doctest: +NORMALIZE_WHITESPACE
    [('attn.q', (8, 8)), ('attn.k', (4, 8)), ('attn.v', (4, 8)), ('attn.o', (8, 8)), ('mlp.gate', (24, 8)),
     ('mlp.up', (24, 8)), ('mlp.down', (8, 24))]
    """
    known = normalised(config, name)
    layers = (*_attention(known, name), *_indexer(known, name), *_mlp(known, name), *_outside(known, name))
    return Model(name, layers, known["num_hidden_layers"], vectors(known, name), active=_active(known, layers, name))


def _active(config: Config, layers: Iterable[Layer], name: str) -> float | None:
    """Return the parameters of one token's way through its experts, or None if there are none or nobody says how many.

    Norms and biases are left out.
    """
    if not config.get("n_routed_experts") or config.get("num_experts_per_tok") is None:
        return None
    top = _number(config, "num_experts_per_tok", name)
    return sum(layer.parameters * (top / layer.per_block if layer.expert else 1.0) for layer in layers)


def normalised(config: Config, name: str) -> Config:
    """Return a configuration in the keys that this module reads; raises ``ValueError`` where one is missing."""
    config = worded(config)
    known = dict(families.meant(config, name))
    for key, others in SYNONYMS.items():
        found = next((config[other] for other in others if config.get(other) is not None), None)
        if known.get(key) is None and found is not None:
            known[key] = found
    known.setdefault("qkv_bias", bool(config.get("attention_bias")))
    known.setdefault("qk_norm", bool(config.get("use_qk_norm")))
    for key in NEEDED:
        _number(known, key, name, config)
    if str(config.get("model_type")) == "gpt2" and known.get("intermediate_size") is None:
        known["intermediate_size"] = 4 * known["hidden_size"]
    return known


def fused(config: Config) -> tuple[str, ...]:
    """Return which groups of matrices the model's own code keeps as one: "qkv", "gate_up".

    Examples
    --------
    >>> fused({"fused_qkv": True})
    ('qkv',)
    """
    return tuple(group for group in ("qkv", "gate_up") if config.get(f"fused_{group}"))


def worded(config: Config) -> Config:
    """Return the part of a configuration that describes the language model, of those that also see or hear."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def vectors(config: Config, name: str) -> int:
    """Return the entries of norms and biases; routers have none.

    Examples
    --------
    >>> vectors({"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2}, "small")
    40
    """
    h, blocks = config["hidden_size"], config["num_hidden_layers"]
    if str(config.get("mlp", "")).startswith("relu2"):  # norms without weights
        return 0
    biased = bool(config.get("biases"))
    norm = 2 * h if biased or config.get("norm_bias") else h
    norms = config.get("norms")
    block = (2 if norms is None else norms) * norm
    if _latent(config):
        block += (config.get("q_lora_rank") or 0) + config["kv_lora_rank"]
        block += 2 * config["index_head_dim"] if config.get("index_n_heads") else 0
    else:
        q, kv, d = _heads(config, name)
        block += 2 * d if config.get("qk_norm") else 0
        block += (q + 2 * kv) * d if config.get("qkv_bias") or biased else 0
        block += 2 * h + config["intermediate_size"] if biased else 0
    final = 0 if norms == 0 else norm
    return blocks * block + final + (config["vocab_size"] if config.get("head_bias") else 0)


def _number(config: Config, key: str, name: str, given: Config | None = None) -> int:
    """Return a positive whole number; what lacks is told with the nearest key of what was given."""
    value = config.get(key)
    if value is None:
        near = nearest(key, config if given is None else given)
        hint = f", the nearest key is {near!r}" if near else ""
        raise ValueError(f"the configuration of {name} has no {key!r}{hint}")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key!r} in the configuration of {name} must be a positive whole number, not {value!r}")
    return value


def _none_or_more(config: Config, key: str, name: str) -> int:
    """Return a whole number of at least 0, which is also what a missing key means."""
    return _number(config, key, name) if config.get(key) else 0


def _latent(config: Config) -> bool:
    return config.get("kv_lora_rank") is not None


def _heads(config: Config, name: str) -> tuple[int, int, int]:
    """Return query heads, key-value heads, and the length of one."""
    q = _number(config, "num_attention_heads", name)
    if config.get("head_dim") is None and config["hidden_size"] % q:
        raise ValueError(
            f"the configuration of {name} has no 'head_dim', and {q} heads do not divide a hidden size of "
            f"{config['hidden_size']}"
        )
    kv = q if config.get("num_key_value_heads") is None else _number(config, "num_key_value_heads", name)
    d = config["hidden_size"] // q if config.get("head_dim") is None else _number(config, "head_dim", name)
    return q, kv, d


def _attention(config: Config, name: str) -> Iterator[Layer]:
    h, every = config["hidden_size"], tuple(range(config["num_hidden_layers"]))

    def one(part: str, rows: int, cols: int, cut: int | None, joins: str = "", head: int = 1) -> Layer:
        return Layer(f"attn.{part}", "attention", (rows, cols), every, cut=cut, joins=joins, unit=head)

    if not _latent(config):
        q, kv, d = _heads(config, name)
        for part, heads in (("q", q), ("k", kv), ("v", kv)):
            yield one(part, heads * d, h, 0, "attn.qkv", d)
        yield one("o", h, q * d, 1, head=d)
        return
    keys = ("num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    heads, low, nope, rope, v = (_number(config, key, name) for key in keys)
    if config.get("q_lora_rank"):
        q_low = _number(config, "q_lora_rank", name)
        yield one("q_a", q_low, h, None)
        yield one("q_b", heads * (nope + rope), q_low, 0, head=nope + rope)
    else:
        yield one("q", heads * (nope + rope), h, 0, head=nope + rope)
    yield one("kv_a", low + rope, h, None)
    yield one("kv_b", heads * (nope + v), low, 0, head=nope + v)
    yield one("o", h, heads * v, 1, head=v)


def _indexer(config: Config, name: str) -> Iterator[Layer]:
    """Yield the matrices of sparse attention's indexer, which tensor parallelism leaves whole."""
    if not config.get("index_n_heads"):
        return
    heads, d, q_low = (_number(config, key, name) for key in ("index_n_heads", "index_head_dim", "q_lora_rank"))
    h, every = config["hidden_size"], tuple(range(config["num_hidden_layers"]))
    for part, shape in (("wq_b", (heads * d, q_low)), ("wk", (d, h)), ("weights_proj", (heads, h))):
        yield Layer(f"indexer.{part}", "indexer", shape, every)


def _mlp(config: Config, name: str) -> Iterator[Layer]:
    h, experts = config["hidden_size"], _none_or_more(config, "n_routed_experts", name)
    dense, sparse = _depths(config, experts, name)
    if str(config.get("mlp", "")).endswith("2mat"):
        f = _number(config, "intermediate_size", name)
        yield Layer("mlp.fc", "mlp", (f, h), dense, cut=0)
        yield Layer("mlp.proj", "mlp", (h, f), dense, cut=1)
        return
    if dense:
        yield from _gated("mlp", "mlp", h, _number(config, "intermediate_size", name), dense, 1)
    if not sparse:
        return
    own = "moe_intermediate_size" if config.get("moe_intermediate_size") is not None else "intermediate_size"
    width = _number(config, own, name)
    yield from _gated("experts", "expert", h, width, sparse, _number(config, "n_routed_experts", name))
    shared = _none_or_more(config, "shared_expert_intermediate_size", name)
    shared = shared or width * _none_or_more(config, "n_shared_experts", name)
    if shared:
        yield from _gated("shared", "shared", h, shared, sparse, 1)
    yield Layer("router", "router", (experts, h), sparse)


def _depths(config: Config, experts: int, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the blocks with a dense layer and those with experts."""
    every = range(config["num_hidden_layers"])
    if not experts:
        return tuple(every), ()
    first, only = _none_or_more(config, "first_k_dense_replace", name), config.get("mlp_only_layers") or ()
    if not isinstance(only, list | tuple):
        raise ValueError(f"'mlp_only_layers' in the configuration of {name} must be a list of blocks, not {only!r}")
    period, frequency = _none_or_more(config, "decoder_sparse_step", name) or 1, config.get("moe_layer_freq") or 1
    if not isinstance(frequency, list):
        frequency = _none_or_more(config, "moe_layer_freq", name) or 1
    if isinstance(frequency, list):  # one flag a block
        sparse = tuple(block for block in every if block < len(frequency) and frequency[block])
    else:
        sparse = tuple(
            block
            for block in every
            if block >= first and block % frequency == 0 and (block + 1) % period == 0 and block not in only
        )
    return tuple(block for block in every if block not in set(sparse)), sparse


def _gated(prefix: str, role: str, h: int, width: int, blocks: tuple[int, ...], per_block: int) -> Iterator[Layer]:
    for part in ("gate", "up"):
        yield Layer(f"{prefix}.{part}", role, (width, h), blocks, per_block, cut=0, joins=f"{prefix}.gate_up")
    yield Layer(f"{prefix}.down", role, (h, width), blocks, per_block, cut=1)


def _outside(config: Config, name: str) -> Iterator[Layer]:
    h, vocab, last = config["hidden_size"], config["vocab_size"], config["num_hidden_layers"] - 1
    yield Layer("embedding", "embedding", (vocab, h), (0,), cut=0)
    if config.get("learned_positions"):
        yield Layer("positions", "position", (_number(config, "max_position_embeddings", name), h), (0,))
    if not config.get("tie_word_embeddings"):
        yield Layer("head", "head", (vocab, h), (last,), cut=0)
