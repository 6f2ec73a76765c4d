"""What families of models have though no key of their configuration says so, and families that nothing here describes.

A configuration says numbers; whether a layer has a gate, whether head and embedding are one matrix, what has a bias is
in the code of its family (Hugging Face ``transformers``, ``modeling_*.py`` and ``configuration_*.py``).
"""

from collections.abc import Mapping
from typing import Any, Final

Config = Mapping[str, Any]

#: Two plain matrices, LayerNorms with biases, and a bias on every projection.
_PLAIN: Final[Config] = {"mlp": "gelu-2mat", "biases": True}

_TIED: Final[Config] = {"tie_word_embeddings": True}

#: By ``model_type``, what is meant where a configuration does not say; the keys are those of `architecture`.
KNOWN: Final[Mapping[str, Config]] = {
    "llama": {},
    "mistral": {},
    "mixtral": {},
    "qwen2": {"qkv_bias": True},
    "qwen2_moe": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "qwen3_moe": {"qk_norm": True},
    "deepseek_v2": {},
    "deepseek_v3": {},
    "deepseek_v32": {},
    "kimi_k2": {},
    "glm4_moe": {},
    "glm_moe_dsa": {},
    "olmo": {"norms": 0},
    "granite": {},
    "gemma": _TIED,
    "gemma2": {**_TIED, "norms": 4},
    "gemma3_text": {**_TIED, "norms": 4, "qk_norm": True},
    "phi3": {"fused_qkv": True, "fused_gate_up": True},
    "gpt_oss": {"qkv_bias": True, "fused_gate_up": True},
    "llama4_text": {},
    "gpt2": {**_PLAIN, **_TIED, "fused_qkv": True, "learned_positions": True},
    "bert": {**_PLAIN, **_TIED, "learned_positions": True},
    "roberta": {**_PLAIN, **_TIED, "learned_positions": True},
    "gpt_neox": {**_PLAIN, "fused_qkv": True},
    "phi": {**_PLAIN, "norms": 1, "head_bias": True},
    "starcoder2": {**_PLAIN, **_TIED},
    "nemotron": {"mlp": "relu-squared-2mat", "norm_bias": True},
}

#: Families that mix other blocks in, or whose matrices these keys do not describe.
FOREIGN: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"), "has blocks that are neither attention nor an MLP"
    ),
    **dict.fromkeys(
        (
            *("nemotron_h", "jamba", "bamba", "zamba", "zamba2", "falcon_h1", "granitemoehybrid", "recurrent_gemma"),
            *("lfm2", "lfm2_moe", "qwen3_next", "kimi_linear", "minimax", "qwen3_5_text", "qwen3_5_moe_text"),
        ),
        "mixes attention with state-space, convolution or linear-attention blocks",
    ),
    **dict.fromkeys(
        ("t5", "mt5", "umt5", "bart", "mbart", "pegasus", "whisper", "marian"), "has an encoder and a decoder"
    ),
    **dict.fromkeys(
        ("falcon", "mpt", "bloom", "opt", "gpt_neo", "gptj", "codegen", "gpt_bigcode", "albert", "deberta-v2"),
        "has other keys or layers than those that are read here",
    ),
}

#: Keys that only models with other blocks have.
HYBRID: Final[tuple[str, ...]] = (
    "hybrid_override_pattern",
    "hybrid_layer_ids",
    "linear_num_key_heads",
    "linear_attn_config",
    "full_attention_interval",
    "attn_layer_period",
    "layers_block_type",
    "mamba_num_heads",
    "mamba_d_state",
    "mamba_n_heads",
    "ssm_cfg",
    "ssm_state_size",
    "conv_L_cache",
    "time_step_rank",
)

#: Kinds of blocks in ``layer_types`` that are attention.
ATTENTION: Final[tuple[str, ...]] = ("full_attention", "sliding_attention", "chunked_attention")

_INSTEAD: Final = "give its .safetensors files or a .toml list of its layers"


def meant(config: Config, name: str) -> Config:
    """Return a configuration with what its family has beside it; its own keys win.

    Raises
    ------
    ValueError
        If the family has blocks or keys that nothing here describes.

    Examples
    --------
    >>> meant({"model_type": "gemma", "hidden_size": 8}, "small")["tie_word_embeddings"]
    True
    """
    family = _family(config)
    if why := _foreign(config, family):
        raise ValueError(f"the configuration of {name} {why}: {_INSTEAD}")
    found = {**config, **{key: value for key, value in KNOWN.get(family, {}).items() if config.get(key) is None}}
    return {**found, **_llama4(found)} if family == "llama4_text" else found


def note(config: Config) -> tuple[str, ...]:
    """Return a note where nobody said how the family is built.

    Examples
    --------
    >>> note({"model_type": "llama"}), note({"model_type": "mine"})
    ((), ("family 'mine' is unknown: read as llama-like, with a gated MLP and untied embeddings where no key says so",))
    """
    family = _family(config)
    if family in KNOWN:
        return ()
    told = f"family {family!r} is unknown" if family else "the configuration names no family (model_type)"
    return (f"{told}: read as llama-like, with a gated MLP and untied embeddings where no key says so",)


def _family(config: Config) -> str:
    return str(config.get("model_type") or "")


def _foreign(config: Config, family: str) -> str:
    """Return why a configuration cannot be read, "" if it can."""
    if family in FOREIGN:
        return f"is of family {family!r}, which {FOREIGN[family]}"
    key = next((key for key in HYBRID if config.get(key)), "")
    if key:
        return f"has the key {key!r}, as models that mix attention with other blocks do"
    if config.get("is_encoder_decoder"):
        return "is of an encoder and a decoder"
    kinds = config.get("layer_types")
    other = [kind for kind in kinds if kind not in ATTENTION] if isinstance(kinds, list) else []
    return f"has blocks of type {other[0]!r} in 'layer_types'" if other else ""


def _llama4(config: Config) -> Config:
    """Return the widths of Llama 4 by their usual names: of experts and of the shared one, and of dense layers."""
    width, dense = config.get("intermediate_size"), config.get("intermediate_size_mlp")
    return {
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": width,
        "intermediate_size": width if dense is None else dense,
        "decoder_sparse_step": config.get("interleave_moe_layer_step") or 1,
    }
