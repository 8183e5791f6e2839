"""Tables of the keys of a `config.json` that the embedded engine supports, and checks of their values.

The engine reads a key that changes the computation, or rejects its value. It ignores a key without effect. It
rejects an unknown key, unless the value is false or empty. A missing key has the default of transformers'
configuration class.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from buckeye.errors import InferenceError

_SIZES = dict.fromkeys(
    ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
)
_COMMON: Mapping[str, Any] = {
    **_SIZES,
    "head_dim": None,
    "hidden_act": "silu",
    "is_causal": True,
    "layer_types": None,
    "partial_rotary_factor": None,
    "quantization_config": None,
    "rms_norm_eps": 1e-6,
    "rope_parameters": None,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_QWEN: Mapping[str, Any] = {
    **_COMMON,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_FAMILIES = {
    "Qwen3ForCausalLM": {**_QWEN, "model_type": "qwen3", "head_dim": 128, "attention_bias": False},
    "Qwen2ForCausalLM": {**_QWEN, "model_type": "qwen2"},
    "LlamaForCausalLM": {
        **_COMMON,
        "model_type": "llama",
        "num_key_value_heads": None,
        "max_position_embeddings": 2048,
        "attention_bias": False,
        "mlp_bias": False,
    },
}
"""Keys that change the computation, with their defaults, by architecture."""
SUPPORTED = tuple(_FAMILIES)

_FLAGS = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window")
_SILU = ("silu", "swish")
_FULL_ATTENTION = "full_attention"
_MAX_SHOWN_CHARACTERS = 60

_ROPE = frozenset({"rope_type", "type", "rope_theta"})
ROPE_KINDS = {
    "default": _ROPE,
    "linear": _ROPE | {"factor"},
    "llama3": _ROPE | {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
}
"""Supported keys of each kind of rotary position embedding."""

_NAMES = """
architectures transformers_version torch_dtype dtype name_or_path initializer_range use_cache
attention_dropout attn_implementation pretraining_tp chunk_size_feed_forward keys_to_ignore_at_inference
output_attentions output_hidden_states return_dict return_dict_in_generate output_scores torchscript
gradient_checkpointing use_bfloat16 is_decoder tf_legacy_loss neftune_noise_alpha
bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id
forced_bos_token_id forced_eos_token_id tokenizer_class tokenizer_model_max_length model_max_length
max_sequence_length prefix vocab_file task_specific_params problem_type finetuning_task
id2label label2id num_labels classifier_dropout
max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups temperature top_k
top_p typical_p repetition_penalty length_penalty diversity_penalty no_repeat_ngram_size
encoder_no_repeat_ngram_size bad_words_ids num_return_sequences remove_invalid_values
exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
is_llama_config unsloth_version unsloth_fixed transformers.js_config mergekit_version
"""
_NO_EFFECT = frozenset(_NAMES.split())
"""Keys that do not change the logits, such as the dtype on disk, and settings of training and generation."""


def complete_config(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the keys of a `config.json` that change the computation. Missing keys have their defaults.

    `model_type` of the result is "qwen3", "qwen2" or "llama". `path` is only for error messages.

    Raise `InferenceError`, with all reasons, if the embedded engine does not support the model.
    """
    names = config.get("architectures") or ["(none)"]
    architecture = names[0] if isinstance(names, list) else names
    family = _FAMILIES.get(architecture) if isinstance(architecture, str) else None
    if family is None:
        raise InferenceError(
            f"the embedded engine does not support the architecture {architecture}; it supports "
            f"{', '.join(SUPPORTED)} (Qwen3, Qwen2 and 2.5, Llama, SmolLM2)",
            code="BK-MODEL-UNSUPPORTED",
            at=str(path),
            hint='use vLLM (inference.backend = "vllm") or another model',
        )
    fields = {key: config.get(key, default) for key, default in family.items()}
    problems = [*_unknown_keys(config, family), *_unsupported_values(fields), *_rope_problems(fields)]
    if problems:
        raise InferenceError(
            f"the embedded engine cannot run this model: {'; '.join(problems)}",
            code="BK-MODEL-UNSUPPORTED",
            at=str(path),
            hint='use vLLM (inference.backend = "vllm") or another model, or remove keys without effect from '
            "the file",
        )
    return fields


def read_rope(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary position embedding as one table.

    Older versions of transformers write `rope_scaling`, and transformers 5 writes `rope_parameters`. If both
    exist, `rope_scaling` is used, as transformers does.
    """
    rope = dict(fields["rope_scaling"] or fields["rope_parameters"] or {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    outside = {key: fields[key] for key in ("rope_theta", "partial_rotary_factor")}
    return {**outside, **rope, "rope_type": kind}


def format_value(value: Any) -> str:
    """Return the repr of a value from a file, shortened to one line."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else f"{text[:_MAX_SHOWN_CHARACTERS]}..."


def _unknown_keys(config: Mapping[str, Any], family: Mapping[str, Any]) -> Iterator[str]:
    """Yield a problem for a wrong `model_type`, and for each unknown key whose value is not false or empty.

    An unknown key with a false or empty value adds nothing to the computation.
    """
    if config.get("model_type", family["model_type"]) != family["model_type"]:
        yield f"model_type is {format_value(config['model_type'])}, not {family['model_type']!r}"
    for key, value in config.items():
        known = key in family or key in _NO_EFFECT or key.startswith("_")
        if not known and value:
            yield f"{key} is {format_value(value)}, an unknown key"


def _unsupported_values(fields: Mapping[str, Any]) -> Iterator[str]:
    if fields["quantization_config"]:
        yield "the weights are quantized (quantization_config)"
    if fields["hidden_act"] not in _SILU:
        yield f"hidden_act is {format_value(fields['hidden_act'])}, not 'silu'"
    if fields["is_causal"] is not True:
        yield f"is_causal is {format_value(fields['is_causal'])}, not true"
    for key in _FLAGS:
        if key in fields and not isinstance(fields[key], bool):
            yield f"{key} is {format_value(fields[key])}; expected true or false"
    yield from _window_problems(fields)


def _window_problems(fields: Mapping[str, Any]) -> Iterator[str]:
    """Yield a problem for layers without full attention.

    `layer_types` names the attention of each layer. Without it, `use_sliding_window` applies to the layers
    from `max_window_layers` on.
    """
    kinds = fields["layer_types"]
    if kinds is not None:
        others = kinds if not isinstance(kinds, list) else [kind for kind in kinds if kind != _FULL_ATTENTION]
        if others:
            sliding = " (sliding-window attention)" if "sliding_attention" in str(others) else ""
            yield f"layer_types has {format_value(others)}{sliding}, not only {_FULL_ATTENTION!r}"
    elif fields.get("use_sliding_window") and fields["sliding_window"] is not None:
        full, layers = fields["max_window_layers"], fields["num_hidden_layers"]
        if full < layers:
            yield (
                f"use_sliding_window is true, sliding_window {fields['sliding_window']} and "
                f"max_window_layers {full}: the last {layers - max(full, 0)} of {layers} layers have "
                "sliding-window attention"
            )


def _rope_problems(fields: Mapping[str, Any]) -> Iterator[str]:
    rope = read_rope(fields)
    kind = rope["rope_type"]
    keys = ROPE_KINDS.get(kind)
    if keys is None:
        yield f"rope type {format_value(kind)} is not supported (supported: {', '.join(ROPE_KINDS)})"
        return
    for key, value in rope.items():
        whole = key == "partial_rotary_factor" and value == 1.0
        if key not in keys and value is not None and not whole:
            yield f"{key} is {format_value(value)}, which is not supported for rope type {kind!r}"
    if kind == "llama3" and rope["high_freq_factor"] <= rope["low_freq_factor"]:
        yield f"high_freq_factor is {format_value(rope['high_freq_factor'])}, not larger than low_freq_factor"
