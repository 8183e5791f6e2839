"""A model's weights in the form the decoder computes with: projections of the same input fused into one
matrix.

The storages are made once. Loading, the first time and every time after, copies a checkpoint into them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from buckeye.errors import InferenceError
from buckeye.inference.architecture import ModelSpec
from buckeye.storage import read_json

_BFLOAT16_PARAMETERS = 5_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """One layer. Matrices are [out, in]. `qk_norm` is [query heads + key heads, head_dim]."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    qk_norm: torch.Tensor | None
    out: torch.Tensor
    out_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


class _Place(NamedTuple):
    """Where a tensor of a checkpoint goes, and the shape it must have there (it may be broadcast)."""

    storage: torch.Tensor
    shape: tuple[int, ...]


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
    """What to compute in where nothing is asked for: bfloat16 on a GPU; on a CPU float32, which agrees with
    the trainer to the last digits, unless the model is large and the processor multiplies in bfloat16."""
    if device.type != "cpu":
        return torch.bfloat16
    fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    large = sum(math.prod(checkpoint.shape(name)) for name in checkpoint.names) >= _BFLOAT16_PARAMETERS
    return torch.bfloat16 if fast and large else torch.float32


class Weights:
    """The fused weights of a decoder: `embed` and `head` are [vocab, hidden], one storage where they are
    tied."""

    def __init__(self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        self._spec = spec
        self._dtype = dtype
        self._device = device
        self._places: dict[str, _Place] = {}
        self.embed = self._storage(spec.vocab_size, spec.hidden_size)
        self._put("model.embed_tokens.weight", self.embed)
        self.head = self.embed
        if not spec.tied_head:
            self.head = self._storage(spec.vocab_size, spec.hidden_size)
            self._put("lm_head.weight", self.head)
        self.final_norm = self._storage(spec.hidden_size)
        self._put("model.norm.weight", self.final_norm)
        self.layers = [self._layer(f"model.layers.{index}.") for index in range(spec.num_layers)]

    @property
    def num_parameters(self) -> int:
        """The number of parameters of the model as published (a tied head counts once)."""
        return sum(math.prod(place.shape) for place in self._places.values())

    def check(self, checkpoint: Checkpoint) -> None:
        """Raise `InferenceError` unless the checkpoint has exactly this model's tensors, each in its
        shape."""
        ignored = {n for n in checkpoint.names if n.endswith("rotary_emb.inv_freq")}
        if self._spec.tied_head:
            ignored.add("lm_head.weight")
        missing = sorted(self._places.keys() - checkpoint.names)
        unknown = sorted(checkpoint.names - self._places.keys() - ignored)
        wrong = [
            f"{name} is {list(checkpoint.shape(name))}, not {list(place.shape)}"
            for name, place in self._places.items()
            if name not in missing and checkpoint.shape(name) != place.shape
        ]
        for kind, names in (
            ("lacks", missing),
            ("has unknown tensors", unknown),
            ("has wrong shapes:", wrong),
        ):
            if names:
                shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
                raise InferenceError(f"The checkpoint {checkpoint.directory} {kind} {shown}.")

    def load(self, checkpoint: Checkpoint) -> None:
        """Copy a checkpoint that has passed `check` into the storages, converting the dtype."""
        for name, place in self._places.items():
            place.storage.copy_(checkpoint.tensor(name))

    def _storage(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _put(self, name: str, storage: torch.Tensor, shape: tuple[int, ...] | None = None) -> None:
        self._places[name] = _Place(storage, shape or tuple(storage.shape))

    def _fused(self, names: list[str], rows: list[int], columns: int) -> torch.Tensor:
        """One matrix [sum(rows), columns] whose row blocks are the tensors `names`; a vector if `columns` is
        0."""
        fused = self._storage(sum(rows), columns) if columns else self._storage(sum(rows))
        for name, block in zip(names, fused.split(rows), strict=True):
            self._put(name, block)
        return fused

    def _linear(
        self, prefix: str, names: list[str], rows: list[int], columns: int, *, bias: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        weight = self._fused([f"{prefix}{name}.weight" for name in names], rows, columns)
        return weight, self._fused([f"{prefix}{n}.bias" for n in names], rows, 0) if bias else None

    def _layer(self, prefix: str) -> LayerWeights:
        spec = self._spec
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        qkv, qkv_bias = self._linear(
            attention,
            ["q_proj", "k_proj", "v_proj"],
            [q_rows, kv_rows, kv_rows],
            spec.hidden_size,
            bias=spec.qkv_bias,
        )
        out, out_bias = self._linear(attention, ["o_proj"], [spec.hidden_size], q_rows, bias=spec.out_bias)
        gate_up, gate_up_bias = self._linear(
            mlp, ["gate_proj", "up_proj"], [spec.mlp_size] * 2, spec.hidden_size, bias=spec.mlp_bias
        )
        down, down_bias = self._linear(
            mlp, ["down_proj"], [spec.hidden_size], spec.mlp_size, bias=spec.mlp_bias
        )
        return LayerWeights(
            input_norm=self._fused([f"{prefix}input_layernorm.weight"], [spec.hidden_size], 0),
            qkv=qkv,
            qkv_bias=qkv_bias,
            qk_norm=self._qk_norm(attention) if spec.qk_norm else None,
            out=out,
            out_bias=out_bias,
            mlp_norm=self._fused([f"{prefix}post_attention_layernorm.weight"], [spec.hidden_size], 0),
            gate_up=gate_up,
            gate_up_bias=gate_up_bias,
            down=down,
            down_bias=down_bias,
        )

    def _qk_norm(self, prefix: str) -> torch.Tensor:
        spec = self._spec
        norm = self._storage(spec.qk_heads, spec.head_dim)
        self._put(f"{prefix}q_norm.weight", norm[: spec.num_heads], (spec.head_dim,))
        self._put(f"{prefix}k_norm.weight", norm[spec.num_heads :], (spec.head_dim,))
        return norm


def _safetensors_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(read_json(index)["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InferenceError(f"{index} cannot be read: {error!r}") from error
        return [directory / name for name in names]
    single = directory / "model.safetensors"
    if not single.is_file():
        raise InferenceError(f"{directory} has no model.safetensors (nor an index of several).")
    return [single]
