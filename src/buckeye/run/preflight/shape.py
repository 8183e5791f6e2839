"""The sizes of a model, from its `config.json` and the headers of its files: what memory is counted from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buckeye.config.trainer import LoRAConfig
from buckeye.run.disk import count_parameters
from buckeye.storage import read_json


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Sizes of a decoder whose embedding and output projection may be one tensor (`tied`)."""

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

    @property
    def embeddings(self) -> int:
        """Elements of the embedding and the output projection."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def layer(self) -> int:
        """Elements of one layer."""
        return (self.parameters - self.embeddings) // self.layers

    def adapter(self, lora: LoRAConfig) -> int:
        """Parameters that an adapter has."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        sides = {
            "q_proj": self.hidden + queries,
            "k_proj": self.hidden + keys,
            "v_proj": self.hidden + keys,
            "o_proj": queries + self.hidden,
            "gate_proj": self.hidden + self.mlp,
            "up_proj": self.hidden + self.mlp,
            "down_proj": self.mlp + self.hidden,
        }
        chosen = sum(sides.get(name.rpartition(".")[2], 0) for name in lora.target_modules)
        whole = [name for name in lora.modules_to_save if name in ("embed_tokens", "lm_head")]
        return self.layers * lora.rank * chosen + len(whole) * self.vocabulary * self.hidden


def read_shape(model_path: Path) -> ModelShape | None:
    """The sizes of a local model; None if its `config.json` does not say them."""
    try:
        config = read_json(model_path / "config.json")
        return shape_of(config, parameters=count_parameters(model_path))
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
        return None


def shape_of(config: Mapping[str, Any], *, parameters: int | None = None) -> ModelShape:
    """The sizes that a `config.json` says. `parameters` are those counted in the model's files, where they
    are here. Raises KeyError, TypeError or ValueError if something is missing."""
    hidden, layers, heads = (
        int(config[name]) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")
    )
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or hidden // heads)
    mlp, vocabulary = int(config["intermediate_size"]), int(config["vocab_size"])
    tied = bool(config.get("tie_word_embeddings", False))
    layer = hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * mlp + 2 * hidden
    counted = layers * layer + vocabulary * hidden * (1 if tied else 2) + hidden
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
        parameters=parameters or counted,
    )
