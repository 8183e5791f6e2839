"""Random tiny models of any family of transformers."""

import copy

import torch
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

LAYERS, VOCAB, MAX_PARAMETERS = 2, 96, 2_000_000
SMALL = {
    "vocab_size": VOCAB,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "dff", "dim_ff"), 48),
    "vocab_size_per_layer_input": VOCAB,
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    "head_dim": 8,
    "rotary_dim": 8,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "word_embed_proj_dim": 32,
    "attention_types": [[["global", "local"], 1]],
    "window_size": 4,
    "sliding_window": 4,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 24
    ),
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
}
EXCEPTIONS = {"num_key_value_heads": 4, "head_dim": 8, "rope_interleave": True}
"""Keys of models with latent attention."""
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_PART = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
_OTHERS = {
    "cohere_compass_text": {
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": {key: {"rope_theta": 1000.0} for key in ("full_attention", "sliding_attention")},
    },
    "cwm": _IDS,
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1000.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48, "moe_top_k": 2},
    },
    "fuyu": {"text_config": _PART | _IDS | {"model_type": "persimmon"}},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "intermediate_size": [48] * 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "laurel_rank": 4,
        "hidden_size_per_layer_input": 8,
    },
    "lfm2_moe": {"layer_types": ["full_attention"] * LAYERS, "num_dense_layers": 1},
    "modernbert-decoder": _IDS,
    "whisper": {"decoder_attention_heads": 4, "encoder_attention_heads": 4},
}
"""Keys of families that need other ones."""
QUICK = (
    *(
        "gpt2",
        "gpt_neox",
        "gptj",
        "gpt_neo",
        "falcon",
        "bloom",
        "mpt",
        "phi",
        "opt",
        "stablelm",
        "starcoder2",
    ),
    *(
        "gemma",
        "gemma2",
        "cohere",
        "cohere2",
        "nemotron",
        "glm4",
        "arcee",
        "mixtral",
        "deepseek_v3",
        "phimoe",
    ),
    "gpt_oss",
)
"""Families without a built-in decoder that cover all kinds of attention, positions, heads and routing."""


_FIXED = (
    "chunk_size",
    "token_id",
    "dropout",
    "init",
    "encoder",
    "cross_attention",
    "output_",
    "return_dict",
    "use_cache",
)
_EXCLUDED = (
    "is_causal",
    "keep_window_size",  # limits the length of samples to fewer tokens than tests have
    "slow_but_exact",  # refused together with `pretraining_tp`
)
_ROPES = (
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
)


def field_values(family):
    """Return other values of each field of a configuration class, except sizes and fields without effect."""
    values = {}
    for key, default in CONFIG_MAPPING[family]().to_dict().items():
        if any(part in key for part in _FIXED) or key in _EXCLUDED:
            continue
        if isinstance(default, bool):
            values[key] = [not default]
        elif isinstance(default, float):
            values[key] = [default / 2, default * 3]
        elif isinstance(default, int) and key not in SMALL:
            values[key] = [number for number in (0, 1, 2, 3) if number != default]
        elif isinstance(default, str) and "act" in key:
            values[key] = ["gelu", "silu", "relu", "gelu_pytorch_tanh"]
        elif key == "rope_parameters":
            values[key] = _ROPES
    heads = {"num_key_value_heads": [1, 2, 4], "num_attention_heads": [2], "head_dim": [4, 16]}
    return values | {key: heads[key] for key in heads if key in CONFIG_MAPPING[family]().to_dict()}


@st.composite
def changed_fields(draw, family):
    """Draw up to three changed fields of a configuration."""
    values = field_values(family)
    keys = draw(st.lists(st.sampled_from(sorted(values)), max_size=3, unique=True))
    return {key: copy.deepcopy(draw(st.sampled_from(values[key]))) for key in keys}


class NotTinyError(Exception):
    """A family needs other sizes than those of `SMALL`."""


def tiny_config(family, **changes):
    """Return a configuration of two layers; `changes` apply to the keys that its class has."""
    kind = CONFIG_MAPPING[family]
    known = kind().to_dict().keys() | kind.attribute_map.keys()
    sizes = SMALL | (EXCEPTIONS if "kv_lora_rank" in known else {}) | _OTHERS.get(family, {}) | changes
    return kind(**copy.deepcopy({key: value for key, value in sizes.items() if key in known}))


def tiny_model(family, *, seed=0, **changes):
    """Return a random model whose next-token distributions differ between positions."""
    torch.manual_seed(seed)
    try:
        model = _build(tiny_config(family, **changes))
        model(torch.ones(1, 4, dtype=torch.int64), use_cache=False)
    except Exception as error:  # transformers raises arbitrary exceptions for sizes that do not fit
        raise NotTinyError(f"{family}: {error}") from error
    model.get_input_embeddings().padding_idx = None  # the embedding of this token is trained as any other
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter) * 0.2
            parameter.copy_(noise if parameter.dim() > 1 else parameter + noise)
    return model


def save_uncomputable(family, directory, **changes) -> bool:
    """Save a model whose forward pass fails. Return False if transformers cannot even make it."""
    try:
        _build(tiny_config(family, **changes)).save_pretrained(directory)
    except Exception:  # transformers raises arbitrary exceptions for values that do not fit
        return False
    return True


def _build(config):
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(copy.deepcopy(config)).parameters())
    if size > MAX_PARAMETERS:
        raise ValueError(f"the model has {size} parameters")
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
