"""A model's weights in the form the decoder computes with: projections of the same input fused into one
matrix, and matrices laid out for the processor.

An update makes a whole new set beside the one in use, and then puts it in its place.
"""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from buckeye.errors import InferenceError
from buckeye.inference.architecture import ModelSpec
from buckeye.inference.dtype import auto_compute_dtype
from buckeye.inference.projection import Projection
from buckeye.storage import read_json

_EMBED, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_INPUT_NORM, _MLP_NORM = "input_layernorm.weight", "post_attention_layernorm.weight"
_QK_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
_FINAL_NORM = "model.norm.weight"


class _Matrix(NamedTuple):
    """A projection: the modules whose weights are its blocks of rows, with their numbers of rows."""

    modules: dict[str, int]
    columns: int
    bias: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """One layer. The norms are [hidden]; `qk_norm` is [query heads + key heads, head_dim]."""

    input_norm: torch.Tensor
    qkv: Projection
    qk_norm: torch.Tensor | None
    out: Projection
    mlp_norm: torch.Tensor
    gate_up: Projection
    down: Projection


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelWeights:
    """All weights of a model, ready to compute with. `embed` is [vocab, hidden], `final_norm` [hidden], and
    `head` projects to the vocabulary."""

    embed: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: Projection


class Checkpoint:
    """The safetensors of a model directory, opened and mapped, none read yet."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[str, Any] = {}
        for path in _safetensors_files(directory):
            try:
                file = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise InferenceError(f"{path} cannot be read: {error}") from error
            self._files |= dict.fromkeys(file.keys(), file)

    @property
    def names(self) -> set[str]:
        """The names of all tensors."""
        return set(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""
        return tuple(self._files[name].get_slice(name).get_shape())

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor, on the CPU, as it is stored."""
        return self._files[name].get_tensor(name)


def auto_dtype(checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    """What to compute a checkpoint in where nothing is asked for."""
    return auto_compute_dtype(sum(math.prod(checkpoint.shape(name)) for name in checkpoint.names), device)


class Weights:
    """The weights that a decoder computes with, once there was a `load`: what `ModelWeights` has."""

    embed: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: Projection

    def __init__(self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        self._spec = spec
        self._dtype = dtype
        self._device = device
        self._shapes = _shapes(spec)

    @property
    def num_parameters(self) -> int:
        """The number of parameters of the model as published (a tied head counts once)."""
        return sum(map(math.prod, self._shapes.values()))

    def check(self, checkpoint: Checkpoint) -> None:
        """Raise `InferenceError` unless the checkpoint has exactly this model's tensors, each in its
        shape."""
        ignored = {n for n in checkpoint.names if n.endswith("rotary_emb.inv_freq")}
        if self._spec.tied_head:
            ignored.add("lm_head.weight")
        missing = sorted(self._shapes.keys() - checkpoint.names)
        unknown = sorted(checkpoint.names - self._shapes.keys() - ignored)
        wrong = [
            f"{name} is {list(checkpoint.shape(name))}, not {list(shape)}"
            for name, shape in self._shapes.items()
            if name not in missing and checkpoint.shape(name) != shape
        ]
        for kind, names in (
            ("lacks", missing),
            ("has unknown tensors", unknown),
            ("has wrong shapes:", wrong),
        ):
            if names:
                shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
                raise InferenceError(f"The checkpoint {checkpoint.directory} {kind} {shown}.")

    def prepare(self, checkpoint: Checkpoint) -> ModelWeights:
        """Read a checkpoint that has passed `check`, convert the dtype and lay it out for `load`: nearly all
        the work of an update, which may be done while the old weights are in use. Until then there are two
        models in memory."""
        # In a thread that ends: PyTorch keeps a pool of compute threads for every thread that has computed,
        # and beside a second pool the engine's own no longer waits for work awake.
        with ThreadPoolExecutor(1, "weights") as worker:
            return worker.submit(_Reader(self._spec, checkpoint, self._dtype, self._device).model).result()

    def load(self, new: ModelWeights | Checkpoint) -> None:
        """Compute with other weights from now on: prepared ones, or a checkpoint that has passed `check`."""
        model = self.prepare(new) if isinstance(new, Checkpoint) else new
        self.embed, self.layers = model.embed, model.layers
        self.final_norm, self.head = model.final_norm, model.head


class _Reader:
    """Builds a model's weights from a checkpoint."""

    def __init__(
        self, spec: ModelSpec, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._spec = spec
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device

    def model(self) -> ModelWeights:
        """All of them. A tied head is the embedding in another layout."""
        embed = self._tensor(_EMBED)
        return ModelWeights(
            embed=embed,
            layers=tuple(self._layer(f"model.layers.{index}.") for index in range(self._spec.num_layers)),
            final_norm=self._tensor(_FINAL_NORM),
            head=Projection(embed if self._spec.tied_head else self._tensor(_HEAD)),
        )

    def _layer(self, prefix: str) -> LayerWeights:
        matrices = _matrices(self._spec)
        return LayerWeights(
            input_norm=self._tensor(f"{prefix}{_INPUT_NORM}"),
            qk_norm=self._qk_norm(prefix) if self._spec.qk_norm else None,
            mlp_norm=self._tensor(f"{prefix}{_MLP_NORM}"),
            **{name: self._projection(prefix, matrix) for name, matrix in matrices.items()},
        )

    def _projection(self, prefix: str, matrix: _Matrix) -> Projection:
        weight = torch.cat([self._tensor(f"{prefix}{module}.weight") for module in matrix.modules])
        biases = [self._tensor(f"{prefix}{module}.bias") for module in matrix.modules if matrix.bias]
        return Projection(weight, torch.cat(biases) if biases else None)

    def _qk_norm(self, prefix: str) -> torch.Tensor:
        query, key = (self._tensor(f"{prefix}{name}") for name in _QK_NORMS)
        return torch.cat([query.expand(self._spec.num_heads, -1), key.expand(self._spec.num_kv_heads, -1)])

    def _tensor(self, name: str) -> torch.Tensor:
        # a copy: the file, which is mapped, may change or go away
        return self._checkpoint.tensor(name).to(self._device, self._dtype, copy=True)


def _shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The tensors that a checkpoint of the model has, by name."""
    shapes: dict[str, tuple[int, ...]] = {_EMBED: (spec.vocab_size, spec.hidden_size)}
    shapes[_FINAL_NORM] = (spec.hidden_size,)
    if not spec.tied_head:
        shapes[_HEAD] = shapes[_EMBED]
    for index in range(spec.num_layers):
        prefix = f"model.layers.{index}."
        for matrix in _matrices(spec).values():
            for module, rows in matrix.modules.items():
                shapes[f"{prefix}{module}.weight"] = (rows, matrix.columns)
                if matrix.bias:
                    shapes[f"{prefix}{module}.bias"] = (rows,)
        shapes |= dict.fromkeys((f"{prefix}{_INPUT_NORM}", f"{prefix}{_MLP_NORM}"), (spec.hidden_size,))
        if spec.qk_norm:
            shapes |= dict.fromkeys((f"{prefix}{name}" for name in _QK_NORMS), (spec.head_dim,))
    return shapes


def _matrices(spec: ModelSpec) -> dict[str, _Matrix]:
    """The projections of a layer, by their names in `LayerWeights`."""
    hidden = spec.hidden_size
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    qkv = {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}
    gate_up = {"mlp.gate_proj": spec.mlp_size, "mlp.up_proj": spec.mlp_size}
    return {
        "qkv": _Matrix(qkv, hidden, spec.qkv_bias),
        "out": _Matrix({"self_attn.o_proj": hidden}, queries, spec.out_bias),
        "gate_up": _Matrix(gate_up, hidden, spec.mlp_bias),
        "down": _Matrix({"mlp.down_proj": hidden}, spec.mlp_size, spec.mlp_bias),
    }


def _safetensors_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(map(os.fspath, read_json(index)["weight_map"].values())))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InferenceError(f"{index} cannot be read: {error!r}") from error
        return [directory / name for name in names]
    single = directory / "model.safetensors"
    if not single.is_file():
        raise InferenceError(f"{directory} has no model.safetensors (nor an index of several).")
    return [single]
