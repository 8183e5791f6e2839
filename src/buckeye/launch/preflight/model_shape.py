"""Sizes of a model, for the memory plan and the forecast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buckeye.base.storage import read_json
from buckeye.config.trainer import LoRAConfig
from buckeye.launch.preflight.disk import count_parameters

_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Sizes of a model, for the forecast. `tied`: the embedding is also the output projection.

    In a mixture of experts, all layers except the first `dense_layers` have `experts` experts of `expert_mlp`
    units. A token passes through `active_experts` of them, and through `shared_experts` more.
    """

    vocabulary: int
    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool
    max_positions: int
    parameters: int
    experts: int = 0
    active_experts: int = 0
    shared_experts: int = 0
    expert_mlp: int = 0
    dense_layers: int = 0

    @property
    def embeddings(self) -> int:
        """Number of elements of the embedding and, if it is a separate tensor, the output projection."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def layer(self) -> int:
        """Number of elements of one layer."""
        return (self.parameters - self.embeddings) // self.layers

    @property
    def queries(self) -> int:
        """Number of columns of all queries of a layer."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Number of columns of all keys of a layer."""
        return self.kv_heads * self.head_dim

    @property
    def units(self) -> int:
        """Number of feed-forward units that a token passes in a layer."""
        return (self.active_experts + self.shared_experts) * self.expert_mlp if self.experts else self.mlp

    @property
    def active_expert_elements(self) -> int:
        """Number of elements of the experts, except shared ones, that a token is multiplied with."""
        return 3 * (self.layers - self.dense_layers) * self.active_experts * self.hidden * self.expert_mlp

    @property
    def matrix_elements(self) -> int:
        """Number of elements of all other matrices that a token is multiplied with."""
        idle = 3 * (self.layers - self.dense_layers) * self.experts * self.hidden * self.expert_mlp
        return self.parameters - idle - self.embeddings + self.vocabulary * self.hidden

    def adapter(self, lora: LoRAConfig) -> int:
        """Return the number of parameters of a LoRA adapter for the model."""
        routed = (self.experts + self.shared_experts) * (self.hidden + self.expert_mlp)
        sparse = self.layers - self.dense_layers if self.experts else 0
        feed_forward = (self.layers - sparse) * (self.hidden + self.mlp) + sparse * routed
        dimensions = {
            "q_proj": self.layers * (self.hidden + self.queries),
            "k_proj": self.layers * (self.hidden + self.keys),
            "v_proj": self.layers * (self.hidden + self.keys),
            "qkv_proj": self.layers * (self.hidden + self.queries + 2 * self.keys),
            "o_proj": self.layers * (self.queries + self.hidden),
            "gate_proj": feed_forward,
            "up_proj": feed_forward,
            "gate_up_proj": self.layers * (self.hidden + 2 * self.mlp),
            "down_proj": feed_forward,
        }
        adapted = sum(dimensions.get(name.rpartition(".")[2], 0) for name in lora.target_modules)
        whole = [name for name in lora.modules_to_save if name in ("embed_tokens", "lm_head")]
        return lora.rank * adapted + len(whole) * self.vocabulary * self.hidden


def read_shape(model_path: Path) -> ModelShape | None:
    """Return the sizes of a local model, or None if its `config.json` does not have them."""
    try:
        config = read_json(model_path / "config.json")
        return parse_shape(config, parameters=count_parameters(model_path))
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
        return None


def parse_shape(config: Mapping[str, Any], *, parameters: int | None = None) -> ModelShape:
    """Return the sizes in a `config.json`.

    `parameters` is the number of parameters in the weight files. Without local files, pass None: the number
    is computed. Raises KeyError, TypeError or ValueError if a size is missing or invalid.
    """
    hidden, layers, heads = (
        int(config[name]) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")
    )
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or hidden // heads)
    mlp, vocabulary = int(config["intermediate_size"]), int(config["vocab_size"])
    tied = bool(config.get("tie_word_embeddings", False))
    experts = next((int(config[name]) for name in _EXPERTS if config.get(name)), 0)
    shared, dense = int(config.get("n_shared_experts") or 0), int(config.get("first_k_dense_replace") or 0)
    expert_mlp = int(config.get("moe_intermediate_size") or mlp)
    layer = hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * mlp + 2 * hidden
    moe = hidden * (3 * (experts + shared) * expert_mlp + experts - 3 * mlp) if experts else 0
    computed = layers * layer + (layers - dense) * moe + vocabulary * hidden * (1 if tied else 2) + hidden
    return ModelShape(
        vocabulary=vocabulary,
        hidden=hidden,
        mlp=mlp,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        tied=tied,
        max_positions=int(config.get("max_position_embeddings", 2048)),
        parameters=parameters or computed,
        experts=experts,
        active_experts=int(config.get("num_experts_per_tok") or 0) if experts else 0,
        shared_experts=shared,
        expert_mlp=expert_mlp if experts else 0,
        dense_layers=dense,
    )
