"""Names and shapes of the tensors of a model in a checkpoint. This module does not import torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from buckeye.errors import InferenceError
from buckeye.inference.engine.architecture import ModelSpec

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_AFTER_ATTENTION = "post_attention_layernorm.weight"
NORMS: Mapping[str, Mapping[str, str]] = {
    "before": {"input_norm": "input_layernorm.weight", "mlp_norm": _AFTER_ATTENTION},
    "after": {"out_norm": _AFTER_ATTENTION, "down_norm": "post_feedforward_layernorm.weight"},
    "both": {
        "input_norm": "input_layernorm.weight",
        "out_norm": _AFTER_ATTENTION,
        "mlp_norm": "pre_feedforward_layernorm.weight",
        "down_norm": "post_feedforward_layernorm.weight",
    },
}
"""Names of a layer's norms in a checkpoint, by their fields in `LayerWeights`, for each `ModelSpec.norms`."""
QK_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
FINAL_NORM = "model.norm.weight"
_LAYER = re.compile(r".*?\.\d+(?=\.)")
_HINTS = {
    "missing tensors": "download or copy the model again",
    "unknown tensors": "remove them, or use vLLM or another model",
    "wrong shapes": "correct the sizes in config.json, or download the model again",
}
"""Actions of the user, by the difference between weights and configuration."""


class Matrix(NamedTuple):
    """Fused projection. `modules` has the modules whose weights are stacked, with their row counts."""

    modules: dict[str, int]
    columns: int
    bias: bool


def tensor_shapes_of(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor that a checkpoint of the model must have."""
    shapes: dict[str, tuple[int, ...]] = {EMBED: (spec.vocab_size, spec.hidden_size)}
    shapes[FINAL_NORM] = (spec.hidden_size,)
    if not spec.tied_head:
        shapes[HEAD] = shapes[EMBED]
    for index in range(spec.num_layers):
        prefix = f"model.layers.{index}."
        experts = expert_matrices(spec) if has_experts(spec, index) else ()
        for matrix in (*layer_matrices(spec, index).values(), *experts):
            for module, rows in matrix.modules.items():
                shapes[f"{prefix}{module}.weight"] = (rows, matrix.columns)
                if matrix.bias:
                    shapes[f"{prefix}{module}.bias"] = (rows,)
        norms = NORMS[spec.norms].values()
        shapes |= dict.fromkeys((f"{prefix}{name}" for name in norms), (spec.hidden_size,))
        if spec.qk_norm:
            heads = (spec.num_heads, spec.num_kv_heads) if spec.qk_norm == "all" else (1, 1)
            for name, count in zip(QK_NORMS, heads, strict=True):
                shapes[f"{prefix}{name}"] = (count * spec.head_dim,)
    return shapes


def layer_matrices(spec: ModelSpec, index: int) -> dict[str, Matrix]:
    """Return the projections of layer `index`, except experts, by their names in `LayerWeights`."""
    hidden = spec.hidden_size
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    qkv = {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}
    gate_up = {"mlp.gate_proj": spec.mlp_size, "mlp.up_proj": spec.mlp_size}
    if spec.fused:
        qkv, gate_up = {"self_attn.qkv_proj": sum(qkv.values())}, {"mlp.gate_up_proj": 2 * spec.mlp_size}
    matrices = {
        "qkv": Matrix(qkv, hidden, spec.qkv_bias),
        "out": Matrix({"self_attn.o_proj": hidden}, queries, spec.out_bias),
    }
    if not has_experts(spec, index):
        matrices["gate_up"] = Matrix(gate_up, hidden, spec.mlp_bias)
        matrices["down"] = Matrix({"mlp.down_proj": hidden}, spec.mlp_size, spec.mlp_bias)
    return matrices


def has_experts(spec: ModelSpec, index: int) -> bool:
    return spec.experts is not None and index in spec.experts.layers


def expert_matrices(spec: ModelSpec) -> list[Matrix]:
    """Return the router, and for each expert "gate and up" and "down"."""
    experts = spec.experts
    assert experts is not None
    matrices = [Matrix({"mlp.gate": experts.count}, spec.hidden_size, bias=False)]
    for expert in range(experts.count):
        name = f"mlp.experts.{expert}"
        both = {f"{name}.gate_proj": experts.size, f"{name}.up_proj": experts.size}
        matrices.append(Matrix(both, spec.hidden_size, bias=False))
        matrices.append(Matrix({f"{name}.down_proj": spec.hidden_size}, experts.size, bias=False))
    return matrices


def layer_of_weight(name: str) -> str | None:
    """Return the name of the layer that has the weight `name`; None for other tensors."""
    match = _LAYER.match(name)
    return match[0] if match and name.endswith(".weight") else None


def check_tensors(
    directory: Path, spec: ModelSpec, stored: Mapping[str, Sequence[int]], *, allow_unknown: bool = False
) -> None:
    """Raise `InferenceError` unless the tensors of a checkpoint are exactly those of the model.

    `stored` has their names and shapes. A tied head may be stored too. With `allow_unknown`, tensors that
    belong to none of its layers may be stored too.
    """
    expected = tensor_shapes_of(spec)
    ignored = {name for name in stored if name.endswith("rotary_emb.inv_freq")}
    ignored |= {HEAD} if spec.tied_head else set()
    if allow_unknown:
        layers = {layer_of_weight(name) for name in expected} - {None}
        ignored |= {name for name in stored if layer_of_weight(name) not in layers}
    problems = {
        "missing tensors": sorted(expected.keys() - stored.keys()),
        "unknown tensors": sorted(stored.keys() - expected.keys() - ignored),
        "wrong shapes": [
            f"{name} is {list(stored[name])}, not {list(shape)}"
            for name, shape in expected.items()
            if name in stored and tuple(stored[name]) != shape
        ],
    }
    for kind, names in problems.items():
        if names:
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise InferenceError(
                f"the weights in {directory} do not fit the model: {kind}: {shown}",
                code="BK-MODEL-DAMAGED",
                hint=_HINTS[kind],
            )
