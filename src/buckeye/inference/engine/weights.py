"""Model weights in the decoder's layout.

Projections of the same input, such as queries, keys and values, are fused into one matrix. Matrices are
stored in the layout in which the processor multiplies fastest.

An update of a small model builds a second set of weights and then swaps the two sets. An update of a larger
model on a CPU first releases the old weights, so that memory never holds two models.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from buckeye.base.storage import read_json
from buckeye.errors import InferenceError
from buckeye.inference.engine.architecture import ModelSpec
from buckeye.inference.engine.model_fields import is_rounded
from buckeye.inference.engine.projection import Projection
from buckeye.inference.engine.rounded_weights import (
    is_packed,
    rounded,
    unpack,
    unpacked_shapes,
)
from buckeye.inference.engine.tensor_layout import (
    EMBED,
    FINAL_NORM,
    HEAD,
    NORMS,
    QK_NORMS,
    Matrix,
    check_tensors,
    expert_matrices,
    has_experts,
    layer_matrices,
    tensor_shapes_of,
)

_BFLOAT16_PARAMETERS = 5_000_000
_MAX_SECOND_SET_BYTES = 2**26
"""Largest size, in bytes, of weights that an update on a CPU loads as a second set. Loading this set slows
down sampling, which uses the same cores.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertWeights:
    """Weights of a mixture of experts. `router` projects to the scores of the experts."""

    router: Projection
    gate_up: tuple[Projection, ...]
    down: tuple[Projection, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """Weights of one layer. Norms are [hidden].

    `qk_norm` is [query heads + key heads, head_dim], or one vector if the heads are normalized together. A
    layer has either `gate_up` and `down`, or `experts`.
    """

    qkv: Projection
    qk_norm: torch.Tensor | None
    out: Projection
    gate_up: Projection | None = None
    down: Projection | None = None
    experts: ExpertWeights | None = None
    input_norm: torch.Tensor | None = None
    out_norm: torch.Tensor | None = None
    mlp_norm: torch.Tensor | None = None
    down_norm: torch.Tensor | None = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors, in an order that depends only on the model."""
        norms = (self.input_norm, self.qk_norm, self.out_norm, self.mlp_norm, self.down_norm)
        experts = self.experts
        mixed = () if experts is None else (experts.router, *experts.gate_up, *experts.down)
        projections = (self.qkv, self.out, self.gate_up, self.down, *mixed)
        tensors = [norm for norm in norms if norm is not None]
        return [*tensors, *(t for part in projections if part is not None for t in part.tensors)]


class LoadableWeights:
    """Base class of weights that an engine can load: a checkpoint, or weights that were read from one."""

    __slots__ = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelWeights(LoadableWeights):
    """Weights of a model, ready for computation.

    `embed` is [vocab, hidden], and `final_norm` is [hidden]. `head` projects to the vocabulary. The weights
    come from `directory`. A model with a separate adapter shares all other weights with `base`, which is the
    model without the adapter.
    """

    directory: Path
    base: ModelWeights | None = None
    embed: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: Projection

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors, in an order that depends only on the model. A tied embedding appears twice."""
        tensors = [self.embed, self.final_norm, *self.head.tensors]
        return tensors + [tensor for layer in self.layers for tensor in layer.tensors]


class PartialUpdateError(InferenceError):
    """An update released the old weights, and failed before it loaded all new ones. The process must end."""

    code = "BK-WEIGHTS-UPDATE"


class Checkpoint(LoadableWeights):
    """Safetensors files of a model directory.

    A file is mapped only while one of its tensors is read, because the pages of a mapped file count as memory
    of this process.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.replaced: dict[str, torch.Tensor] = {}
        """Tensors that an adapter replaces."""
        self.low_rank: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        """Matrices A [rank, in] and B [out, rank] of an adapter, float32, by name of the adapted tensor."""
        self.quantization: str | None = None
        """Rounding of linear matrices: "4bit", "8bit", or None."""
        self._files: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Shape of every tensor, by name."""
        for path in _safetensors_files(directory):
            with _open_safetensors(path) as file:
                for name in file.keys():  # noqa: SIM118, not a dict
                    self._files[name] = path
                    self.shapes[name] = tuple(file.get_slice(name).get_shape())
        self.shapes = unpacked_shapes(self.shapes, self._stored)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor on the CPU, from `replaced` or else from the file. `low_rank` is not added."""
        if name in self.replaced:
            return self.replaced[name]
        if is_packed(name, self._files):
            parts = [part for part in self._files if part == name or part.startswith(f"{name}.")]
            return unpack(name, {part: self._stored(part) for part in parts})
        if self.quantization is not None and is_rounded(name):
            return rounded(self._stored(name), self.quantization)
        return self._stored(name)

    def _stored(self, name: str) -> torch.Tensor:
        with _open_safetensors(self._files[name]) as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor

    def merged(self, name: str) -> torch.Tensor:
        """Return a tensor with `low_rank` added. The sum is float32."""
        weight, pair = self.tensor(name), self.low_rank.get(name)
        return weight if pair is None else torch.addmm(weight.float(), pair[1], pair[0])


class ReceivedCheckpoint(Checkpoint):
    """Tensors that a broadcast brought, by name, and the `directory` that their files are written to."""

    def __init__(self, directory: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        self.directory = directory
        self.replaced, self.low_rank = {}, {}
        self._files = dict.fromkeys(tensors, directory)
        self._tensors = tensors
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    def _stored(self, name: str) -> torch.Tensor:
        return self._tensors[name]


def auto_dtype(checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    """Return the default compute dtype of a checkpoint."""
    return auto_compute_dtype(sum(map(math.prod, checkpoint.shapes.values())), device)


@contextmanager
def _open_safetensors(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    # a file name in an index may raise UnicodeEncodeError
    except (OSError, SafetensorError, UnicodeEncodeError) as error:
        raise InferenceError(f"cannot read {path}: {error}", code="BK-MODEL-DAMAGED") from error


class DecoderWeights:
    """Weights of a decoder. `current` has the weights of the last `load`."""

    moves = 0
    """Number of times that the tensors moved in memory."""
    _loaded: ModelWeights | None = None
    _in_main_memory: ModelWeights | None = None

    def __init__(
        self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device, quantization: str | None = None
    ) -> None:
        self._spec = spec
        self._quantization = quantization
        self._dtype = dtype
        self.device = device
        self._shapes = tensor_shapes_of(spec)

    @property
    def current(self) -> ModelWeights:
        """Weights to compute with."""
        assert self._loaded is not None
        return self._loaded

    @property
    def is_loaded(self) -> bool:
        """True unless the weights were released."""
        return self._loaded is not None

    def release(self, *, keep: bool) -> None:
        """Free the memory of the weights. With `keep`, move them to main memory, for `restore`."""
        if keep and self.device.type == "cpu":
            return
        if keep and self._loaded is not None:
            self._in_main_memory = moved_weights(self._loaded, torch.device("cpu"))
        self._loaded = None

    def restore(self) -> None:
        """Move weights back that `release` has moved to main memory."""
        if self._in_main_memory is not None and self._loaded is None:
            self._loaded = moved_weights(self._in_main_memory, self.device)
            self.moves += 1
        self._in_main_memory = None

    @property
    def num_parameters(self) -> int:
        """Number of parameters. A head that is tied to the embedding adds none."""
        return sum(map(math.prod, self._shapes.values()))

    def check(self, checkpoint: Checkpoint) -> None:
        """Raise `InferenceError` unless the checkpoint has exactly this model's tensors, with their shapes.

        If a tied head is stored too, it must equal the embedding.
        """
        check_tensors(checkpoint.directory, self._spec, checkpoint.shapes)
        has_two_heads = self._spec.tied_head and HEAD in checkpoint.shapes
        if has_two_heads and not torch.equal(checkpoint.tensor(HEAD), checkpoint.tensor(EMBED)):
            raise InferenceError(
                f"tie_word_embeddings is true, but the weights have a {HEAD} that differs from {EMBED}",
                code="BK-MODEL-DAMAGED",
                at=f"{checkpoint.directory}/config.json",
                hint="set it to false if the model has a separate head",
            )

    def prepare(self, checkpoint: Checkpoint) -> ModelWeights | Checkpoint:
        """Read a checkpoint that passed `check`, and convert its dtype and layout for `load`.

        `prepare` does nearly all the work of an update, while the engine still uses the old weights. Memory
        holds two models until `load`. For a large model on a CPU, `prepare` reads nothing and returns the
        checkpoint.

        For an adapter of 16-bit weights, `prepare` reads only the adapter. The adapter stays separate,
        because rounding would remove most of a merged adapter.
        """
        large = self.num_parameters * self._dtype.itemsize > _MAX_SECOND_SET_BYTES
        if large and self.device.type == "cpu" and not self._has_separate_adapter(checkpoint):
            return checkpoint
        # PyTorch keeps a pool of compute threads for every live thread that has computed. With a second pool,
        # the threads of the engine's pool would stop busy-waiting for work. So use a thread that ends here.
        with ThreadPoolExecutor(1, "weights") as worker:
            return worker.submit(self._read, checkpoint).result()

    def _read(self, checkpoint: Checkpoint) -> ModelWeights:
        checkpoint.quantization = self._quantization
        base = None
        if self._has_separate_adapter(checkpoint):
            base = self._loaded and (self._loaded.base or self._loaded)
            if base is None or base.directory != checkpoint.directory:
                base = self._read(Checkpoint(checkpoint.directory))
        return _Reader(self._spec, checkpoint, self._dtype, self.device, base).model()

    def _has_separate_adapter(self, checkpoint: Checkpoint) -> bool:
        return bool(checkpoint.low_rank) and self._dtype.itemsize < 4

    def load(self, new: LoadableWeights) -> None:
        """Replace the current weights by the result of `prepare`, or by a checkpoint that passed `check`.

        Raise `PartialUpdateError` if reading fails after the current weights were released.
        """
        assert isinstance(new, ModelWeights | Checkpoint)
        if isinstance(new, ModelWeights):
            model = new
        elif self._has_separate_adapter(new):
            model = self._read(new)
        else:
            self._loaded = None
            try:
                model = self._read(new)
            except Exception as error:
                raise PartialUpdateError(
                    f"only a part of the weights in {new.directory} was loaded: {error}"
                ) from error
        if self.device.type == "cuda" and self._loaded is not None and copy_over(self._loaded, model):
            self._loaded = replace(self._loaded, directory=model.directory)
            return
        self.moves += 1
        self._loaded = model


def moved_weights(weights: ModelWeights, device: torch.device) -> ModelWeights:
    """Return a copy of the weights on another device. Main memory is pinned, so that copies are fast."""
    shared: dict[int, Any] = {}
    for tensor in (*weights.tensors, *(weights.base.tensors if weights.base is not None else ())):
        pinned = device.type == "cpu" and tensor.is_cuda
        target = torch.empty_like(tensor, device=device, pin_memory=pinned)
        shared[id(tensor)] = target.copy_(tensor)
    return copy.deepcopy(weights, shared)  # takes the tensors from `shared`


def copy_over(old: ModelWeights, new: ModelWeights) -> bool:
    """Copy new weights over the old ones in place.

    On a GPU the copy takes less than a millisecond, and captured graphs stay valid. Return False, without
    copying, if shapes differ, or if one of the models has a separate adapter.
    """
    pairs = list(zip(old.tensors, new.tensors, strict=False))
    same_shapes = len(old.tensors) == len(new.tensors) and all(a.shape == b.shape for a, b in pairs)
    if not same_shapes or old.base is not None or new.base is not None:
        return False
    for target, source in pairs:
        target.copy_(source)
    return True


class _Reader:
    """Builder of a model's weights from a checkpoint.

    With `base`, only the tensors that an adapter replaces are read. All other tensors are those of `base`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        base: ModelWeights | None = None,
    ) -> None:
        self._spec = spec
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        self._base = base

    def model(self) -> ModelWeights:
        embed = self.embed()
        return ModelWeights(
            directory=self._checkpoint.directory,
            base=self._base,
            embed=embed,
            layers=tuple(self.layer(index) for index in range(self._spec.num_layers)),
            final_norm=self.final_norm(),
            head=self.head(embed),
        )

    def embed(self) -> torch.Tensor:
        return self._base_or_own(self._base and self._base.embed, EMBED)

    def final_norm(self) -> torch.Tensor:
        """Return the norm before the head."""
        return self._norm(self._base and self._base.final_norm, FINAL_NORM)

    def head(self, embed: torch.Tensor) -> Projection:
        """Return the projection to the vocabulary. A tied head is the embedding in another layout."""
        name = EMBED if self._spec.tied_head else HEAD
        if self._base is not None and name not in self._checkpoint.replaced:
            return self._with_adapter(self._base.head, {name: self._spec.vocab_size})
        return Projection(embed if self._spec.tied_head else self._tensor(HEAD))

    def layer(self, index: int) -> LayerWeights:
        prefix = f"model.layers.{index}."
        base = self._base.layers[index] if self._base is not None else None
        parts: dict[str, Any] = {
            name: self._projection(prefix, matrix, getattr(base, name, None))
            for name, matrix in layer_matrices(self._spec, index).items()
        }
        for field, name in NORMS[self._spec.norms].items():
            parts[field] = self._norm(getattr(base, field, None), f"{prefix}{name}")
        if has_experts(self._spec, index):
            parts["experts"] = self._experts(prefix, None if base is None else base.experts)
        return LayerWeights(qk_norm=self._qk_norm(prefix) if self._spec.qk_norm else None, **parts)

    def _experts(self, prefix: str, base: ExpertWeights | None) -> ExpertWeights:
        router, *matrices = expert_matrices(self._spec)
        return ExpertWeights(
            router=self._projection(prefix, router, None if base is None else base.router),
            gate_up=self._projections(prefix, matrices[::2], None if base is None else base.gate_up),
            down=self._projections(prefix, matrices[1::2], None if base is None else base.down),
        )

    def _projections(
        self, prefix: str, matrices: Sequence[Matrix], bases: Sequence[Projection] | None
    ) -> tuple[Projection, ...]:
        return tuple(
            self._projection(prefix, matrix, None if bases is None else bases[index])
            for index, matrix in enumerate(matrices)
        )

    def _projection(self, prefix: str, matrix: Matrix, base: Projection | None) -> Projection:
        weights = {f"{prefix}{module}.weight": rows for module, rows in matrix.modules.items()}
        biases = [f"{prefix}{module}.bias" for module in matrix.modules if matrix.bias]
        if base is None or not self._checkpoint.replaced.keys().isdisjoint((*weights, *biases)):
            bias = torch.cat(list(map(self._tensor, biases))) if biases else None
            base = Projection(torch.cat(list(map(self._tensor, weights))), bias)
        return self._with_adapter(base, weights)

    def _with_adapter(self, projection: Projection, weights: Mapping[str, int]) -> Projection:
        """Add the adapter's low-rank matrices to a fused projection.

        `weights` has the fused tensors with their row counts. The A of these tensors are stacked, and their B
        form a block-diagonal matrix.
        """
        present = [self._checkpoint.low_rank[name] for name in weights if name in self._checkpoint.low_rank]
        if self._base is None or not present:
            return projection
        b = torch.zeros(sum(weights.values()), sum(len(a) for a, _ in present))
        row = column = 0
        for name, rows in weights.items():
            if name in self._checkpoint.low_rank:
                pair = self._checkpoint.low_rank[name]
                b[row : row + rows, column : column + len(pair[0])] = pair[1]
                column += len(pair[0])
            row += rows
        return projection.with_adapter(
            torch.cat([a for a, _ in present]).to(self._device), b.to(self._device)
        )

    def _base_or_own(self, base: torch.Tensor | None, name: str) -> torch.Tensor:
        if base is None or name in self._checkpoint.replaced:
            return self._tensor(name)
        return base

    def _norm(self, base: torch.Tensor | None, name: str) -> torch.Tensor:
        weight = self._base_or_own(base, name)
        if not self._spec.norm_offset or weight is base:
            return weight
        # float32, because rounding the sum would change the stored weight
        return self._checkpoint.tensor(name).to(self._device, torch.float32) + self._spec.norm_offset

    def _qk_norm(self, prefix: str) -> torch.Tensor:
        spec = self._spec
        query, key = (self._norm(None, f"{prefix}{name}") for name in QK_NORMS)
        if spec.qk_norm == "all":
            return torch.cat([query, key])
        return torch.cat([query.expand(spec.num_heads, -1), key.expand(spec.num_kv_heads, -1)])

    def _tensor(self, name: str) -> torch.Tensor:
        # copy, because the mapped file may change or disappear
        read = self._checkpoint.merged if self._base is None else self._checkpoint.tensor
        return read(name).to(self._device, self._dtype, copy=True)


def _safetensors_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(map(os.fspath, read_json(index)["weight_map"].values())))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InferenceError(f"cannot read {index}: {error!r}", code="BK-MODEL-DAMAGED") from error
        return [directory / name for name in names]
    single = directory / "model.safetensors"
    if not single.is_file():
        message = f"no model.safetensors in {directory}, and no index of several files"
        raise InferenceError(message, code="BK-MODEL-DAMAGED")
    return [single]


def auto_compute_dtype(parameters: int, device: torch.device) -> torch.dtype:
    """Return the default compute dtype: bfloat16 on a GPU, float32 on a CPU.

    In float32, the log-probs of engine and trainer differ only in the last digits. A model of 5 million
    parameters or more uses bfloat16 on a CPU that has bfloat16 matrix instructions.
    """
    if device.type != "cpu":
        return torch.bfloat16
    fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if fast and parameters >= _BFLOAT16_PARAMETERS else torch.float32
