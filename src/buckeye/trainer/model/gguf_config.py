"""Configuration of the model in a GGUF file, from the settings in the file.

Each setting must be known, so that no part of a model is left out. `ValueError` has the reason if one is not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import CONFIG_MAPPING


@dataclass(frozen=True, slots=True)
class Family:
    """Differences of an architecture in GGUF files from the other architectures."""

    model_type: str | None
    """Model type of transformers. None: only files with a sliding window are read."""
    windowed_type: str | None = None
    """Model type for files with a sliding window. None: they are refused."""
    pairs_neighbors: bool = False
    """The rotary embedding pairs neighbors, so rows of queries and keys have another order."""
    adds_one: bool = False
    """1 was added to the weights of norms."""
    required: tuple[str, ...] = ()
    """llama.cpp and transformers have different defaults for these settings."""


FAMILIES = {
    "arcee": Family("arcee", pairs_neighbors=True),
    "ernie4_5": Family("ernie4_5"),
    "gemma": Family("gemma", adds_one=True),
    "gemma2": Family(None, "gemma2", adds_one=True),
    "gemma3": Family(None, "gemma3_text", adds_one=True),
    "granite": Family("granite", pairs_neighbors=True, required=("attention.scale",)),
    "llama": Family("llama", "mistral", pairs_neighbors=True),
    "olmo2": Family("olmo2", "olmo3"),
    "phi3": Family("phi3", "phi3"),
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3"),
    "qwen3moe": Family("qwen3_moe", required=("expert_used_count",)),
    "seed_oss": Family("seed_oss"),
    "smollm3": Family("smollm3", pairs_neighbors=True),
}
"""Architectures that can be imported, by their names in GGUF files."""
ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS = (
    f"rope_{name}.weight" for name in ("freqs", "factors_long", "factors_short")
)
ROPE_TENSORS = (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS)
"""Tensors with factors of rotary frequencies. They are settings, not weights."""

_FIELDS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
"""Fields of transformers' configurations, by the names of settings in GGUF files."""
_REQUIRED = (
    "context_length",
    "block_count",
    "embedding_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
)
_IMPLIED = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned")
"""Settings that other settings or the tensors imply."""
_WINDOW = "attention.sliding_window"
_THETA = 10_000.0
"""llama.cpp's default base of the rotary frequencies."""
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Parameters of the rotary frequencies in all published Llama models with factors. Only `factor` differs."""
_LAYERS_OF_LARGEST_GEMMA = {"gemma2": 46, "gemma3_text": 62}
"""Numbers of layers of the models of 27B. Only they scale queries by the width per head."""


def model_config(
    family: Family,
    settings: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    factors: Mapping[str, torch.Tensor],
) -> Any:
    """Return transformers' configuration of a model.

    Args:
        family: the architecture in the file.
        settings: the settings of the architecture, by their names without it.
        shapes: shapes of the weights, by their names in the file.
        factors: tensors with factors of rotary frequencies, by their names.
    """
    left = {name: value for name, value in settings.items() if _says_something(name, value)}
    for name in (*_REQUIRED, *family.required):
        if name not in left:
            raise ValueError(f"it has no setting {name}")
    model_type = family.windowed_type if _WINDOW in left else family.model_type
    if model_type is None:
        raise ValueError(f"{_WINDOW} = {left.get(_WINDOW, 0)} is not supported")
    kind = CONFIG_MAPPING[model_type]
    known = kind().to_dict().keys() | kind.attribute_map.keys()
    fields = {_FIELDS[name]: _number(left, name) for name in list(left) if _FIELDS.get(name) in known}
    _check_layers(fields["num_hidden_layers"], shapes)
    fields |= _heads(left, fields)
    fields["rope_parameters"] = _rope_parameters(left, model_type, fields, factors)
    if _WINDOW in left:
        fields |= _window(left, model_type, fields)
    optional = {
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_up.bias" in shapes,
        "norm_topk_prob": True,
    }
    if left:
        raise ValueError(f"its setting {min(left)} is not supported")
    has_usual_heads = fields["head_dim"] * fields["num_attention_heads"] == fields["hidden_size"]
    if has_usual_heads and "head_dim" not in known:
        del fields["head_dim"]
    return kind(
        **fields,
        **{name: value for name, value in optional.items() if name in known},
        vocab_size=shapes["token_embd.weight"][0],
        tie_word_embeddings="output.weight" not in shapes,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    )


def _says_something(name: str, value: Any) -> bool:
    """Return True unless other settings or tensors imply the setting. llama.cpp ignores a 0."""
    return name not in _IMPLIED and (value is False or value != 0)


def _number(left: dict[str, Any], name: str, default: float | None = None) -> Any:
    """Remove a setting, and return its number. A list of equal numbers, one per layer, is one number."""
    value = left.pop(name, default)
    if isinstance(value, list) and len(set(value)) == 1:
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"its setting {name} is not one positive number")
    return value


def _check_layers(count: int, shapes: Mapping[str, tuple[int, ...]]) -> None:
    found = len({name.split(".")[1] for name in shapes if name.startswith("blk.")})
    if found != count:
        raise ValueError(f"it has tensors of {found} layers instead of {count}")


def _heads(left: dict[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    heads = fields["num_attention_heads"]
    head_dim = _number(left, "attention.key_length", fields["hidden_size"] // heads)
    if _number(left, "attention.value_length", head_dim) != head_dim:
        raise ValueError("its keys and values have different sizes")
    return {"num_key_value_heads": _number(left, "attention.head_count_kv", heads), "head_dim": head_dim}


def _window(left: dict[str, Any], model_type: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of models with a sliding window."""
    found = {"sliding_window": _number(left, _WINDOW)}
    layers = fields["num_hidden_layers"]
    if model_type == "olmo3":
        pattern = left.pop(f"{_WINDOW}_pattern", None)
        if not isinstance(pattern, list) or len(pattern) != layers:
            raise ValueError(f"its setting {_WINDOW}_pattern is not a list of {layers} values")
        found["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in pattern]
    if (largest := _LAYERS_OF_LARGEST_GEMMA.get(model_type)) is not None:
        per_head = fields["hidden_size"] // fields["num_attention_heads"]
        found["query_pre_attn_scalar"] = per_head if layers == largest else fields["head_dim"]
    return found


def _rope_parameters(
    left: dict[str, Any], model_type: str, fields: dict[str, Any], factors: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    theta = _number(left, "rope.freq_base", _THETA)
    rope = {"rope_type": "default", "rope_theta": theta}
    if model_type == "phi3":
        original = _number(left, "rope.scaling.original_context_length", fields["max_position_embeddings"])
        fields["original_max_position_embeddings"] = original
        rope |= _longrope(left, fields, factors)
    elif ROPE_FACTORS in factors:
        rope |= _llama3_rope(theta, factors[ROPE_FACTORS])
    else:
        rope |= _scaling(left)
    head_dim = fields["head_dim"]
    if (rotated := _number(left, "rope.dimension_count", head_dim)) != head_dim:
        if model_type != "phi3":
            raise ValueError(f"rope.dimension_count = {rotated} is not supported")
        rope["partial_rotary_factor"] = rotated / head_dim
    if model_type not in ("gemma3_text", "olmo3"):
        return rope
    local = _number(left, "rope.freq_base_swa", _THETA if model_type == "gemma3_text" else theta)
    return {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": local}}


def _scaling(left: dict[str, Any]) -> dict[str, Any]:
    kind = left.pop("rope.scaling.type", "none")
    if kind == "none":
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": _number(left, "rope.scaling.factor")}
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": _number(left, "rope.scaling.factor"),
            "original_max_position_embeddings": _number(left, "rope.scaling.original_context_length"),
            "beta_fast": _number(left, "rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": _number(left, "rope.scaling.yarn_beta_slow", 1.0),
        }
    raise ValueError(f"the scaling {kind!r} of its rotary embedding is not supported")


def _longrope(
    left: dict[str, Any], fields: Mapping[str, Any], factors: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    if LONG_FACTORS not in factors or SHORT_FACTORS not in factors:
        return {}
    original = fields["original_max_position_embeddings"]
    share = fields["max_position_embeddings"] / original
    expected = math.sqrt(1 + math.log(share) / math.log(original)) if share > 1 else 1.0
    if not math.isclose(_number(left, "rope.scaling.attn_factor", expected), expected, rel_tol=1e-4):
        raise ValueError("rope.scaling.attn_factor is not that of its context lengths")
    return {
        "rope_type": "longrope",
        "original_max_position_embeddings": original,
        "long_factor": factors[LONG_FACTORS].tolist(),
        "short_factor": factors[SHORT_FACTORS].tolist(),
    }


def _llama3_rope(theta: float, factors: torch.Tensor) -> dict[str, Any]:
    """Return transformers' rotary parameters for `factors`, if they are those of Llama 3."""
    factor = float(factors.max())
    wavelengths = 2 * math.pi * theta ** (torch.arange(len(factors)) / len(factors))
    low, high = _LLAMA3_ROPE["low_freq_factor"], _LLAMA3_ROPE["high_freq_factor"]
    rotations = _LLAMA3_ROPE["original_max_position_embeddings"] / wavelengths
    share = ((rotations - low) / (high - low)).clamp(0, 1)  # 1 is unchanged, 0 is divided by `factor`
    if not torch.allclose(1 / ((1 - share) / factor + share), factors.float(), rtol=1e-3):
        raise ValueError(f"the factors in {ROPE_FACTORS} are not those of Llama 3")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3_ROPE}
