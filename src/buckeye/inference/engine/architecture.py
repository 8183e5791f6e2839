"""Model architecture for the embedded engine, read from `config.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from buckeye.base.storage import read_json
from buckeye.errors import InferenceError, UsageError
from buckeye.inference.engine.model_fields import ROPE_KINDS, complete_config, format_value, read_rope

_LAYERS = "num_hidden_layers"
_NON_ZERO = (_LAYERS, "hidden_size", "vocab_size", "num_attention_heads")
_SIZES = (
    *_NON_ZERO,
    "intermediate_size",
    "moe_intermediate_size",
    "num_key_value_heads",
    "head_dim",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
)
"""Keys of a `config.json` that determine the memory size of a model."""
_MAX_SIZE = 2**40
_FETCH_AGAIN = "fetch or copy the model again"
_MAX_HEADER_BYTES = 100_000_000  # the limit of safetensors itself

RopeKind = Literal["default", "linear", "llama3"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeSpec:
    """Rotary position embedding.

    `factor` is for the kinds "linear" and "llama3". The fields after `factor` are for "llama3" only.
    """

    kind: RopeKind
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_positions: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """Pre-norm decoder with grouped-query attention, rotary positions and a gated SiLU feed-forward block."""

    vocab_size: int
    hidden_size: int
    mlp_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    qk_norm: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    tied_head: bool
    max_positions: int
    rope: RopeSpec
    eos_token_ids: tuple[int, ...]

    @property
    def qk_heads(self) -> int:
        """Number of query heads plus number of key heads. These heads are normalized and rotated."""
        return self.num_heads + self.num_kv_heads


def model_directory(name: str) -> Path:
    """Return the local directory of a model. Raise `InferenceError` if it does not exist."""
    path = Path(name).expanduser()
    if not path.is_dir():
        raise InferenceError(
            f"the model {name} is not a directory",
            code="BK-MODEL-NOT-FOUND",
            hint="fetch the model, or give the path of a local one",
        )
    return path


def read_spec(directory: Path) -> ModelSpec:
    """Return the spec of the model in `directory`.

    Raise `InferenceError` if `config.json` is damaged, or if the embedded engine does not support the model.
    """
    path = directory / "config.json"
    config = read_model_config(path)
    check_sizes(directory)
    try:
        return _build_spec(complete_config(config, path), eos_token_ids(config, directory))
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise _damage_error(f"a key is missing or has the wrong type: {error}", at=path) from error


def check_sizes(directory: Path) -> None:
    """Check the sizes in the `config.json` of a model, before a large wrong size uses up the memory.

    Raise `InferenceError` if a size is not a whole number, or if it does not fit the weights in `directory`:
    it is larger than every dimension, or there are more layers than tensors.
    """
    path = directory / "config.json"
    config = read_model_config(path)
    shapes = tensor_shapes(directory)
    widest = max((side for shape in shapes.values() for side in shape), default=_MAX_SIZE)
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        for key in _SIZES:
            size = part.get(key)
            if size is None:
                continue
            if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= _MAX_SIZE:
                raise _damage_error(f"{key} is {format_value(size)}; expected a whole number", at=path)
            if size == 0 and key in _NON_ZERO:
                raise _damage_error(f"{key} is 0", at=path)
            if key == _LAYERS and shapes and size > len(shapes):
                raise _damage_error(
                    f"{key} is {size}, but the weights have {len(shapes)} tensors in all", at=path
                )
            if key != _LAYERS and size > widest:
                raise _damage_error(
                    f"{key} is {size}, but no dimension of the weights is larger than {widest}", at=path
                )


def tensor_shapes(directory: Path) -> dict[str, list[int]]:
    """Return the name and shape of every tensor in the safetensors files of a directory.

    The function reads only the headers of the files. Raise `UsageError` for an incomplete file.
    """
    headers = _tensor_headers(directory).values()
    return {name: entry["shape"] for header in headers for name, entry in header.items()}


def _tensor_headers(directory: Path) -> dict[Path, dict[str, dict[str, Any]]]:
    """Return the header of each safetensors file. Raise `UsageError` for an incomplete file."""
    headers: dict[Path, dict[str, dict[str, Any]]] = {}
    for file in sorted(directory.glob("*.safetensors")):
        try:
            if not file.is_file():  # opening a pipe would block
                raise ValueError("not a regular file")
            with file.open("rb") as handle:
                length = int.from_bytes(handle.read(8), "little")
                header = json.loads(handle.read(min(length, _MAX_HEADER_BYTES)))
            header.pop("__metadata__", None)
            if not all(_is_shape(entry["shape"]) for entry in header.values()):
                raise ValueError("a shape must be a list of whole numbers")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            message = f"{file} is not a complete safetensors file"
            raise UsageError(message, code="BK-MODEL-DAMAGED", hint=_FETCH_AGAIN) from None
        headers[file] = header
    return headers


def is_untrained(directory: Path) -> bool:
    """Return True if a model has its initial weights.

    In initial weights, all elements of a norm are equal; training makes them differ. Return False if the
    weights cannot be read.
    """
    try:
        return _has_initial_norms(directory)
    except (OSError, UsageError, KeyError, ValueError, TypeError):
        return False


def _has_initial_norms(directory: Path) -> bool:
    has_norms = False
    for file, header in _tensor_headers(directory).items():
        with file.open("rb") as handle:
            start = int.from_bytes(handle.read(8), "little") + 8
            for name, entry in header.items():
                if name.endswith("norm.weight") and len(entry["shape"]) == 1 and entry["shape"][0] > 1:
                    first, end = entry["data_offsets"]
                    handle.seek(start + first)
                    if not _is_constant(handle.read(end - first), entry["shape"][0]):
                        return False
                    has_norms = True
    return has_norms


def _is_constant(data: bytes, elements: int) -> bool:
    """Return True if all `elements` numbers in `data` are equal."""
    return data == data[: len(data) // elements] * elements


def read_model_config(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raise `InferenceError` if the file is missing or invalid."""
    try:
        config = read_json(path)
    except FileNotFoundError:
        raise InferenceError(
            f"{path.parent} is not a Hugging Face model: no config.json",
            code="BK-MODEL-NOT-FOUND",
            hint="check the path of the model",
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise _damage_error(f"cannot read {path}: {error}") from error
    if not isinstance(config, dict):
        raise _damage_error(f"{path} is not a JSON object")
    return config


def _damage_error(message: str, *, at: Path | None = None) -> InferenceError:
    where = None if at is None else str(at)
    return InferenceError(message, code="BK-MODEL-DAMAGED", at=where, hint=_FETCH_AGAIN)


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and all(type(side) is int and 0 <= side <= _MAX_SIZE for side in value)


def _build_spec(fields: Mapping[str, Any], eos_token_ids: tuple[int, ...]) -> ModelSpec:
    heads, hidden = int(fields["num_attention_heads"]), int(fields["hidden_size"])
    attention_bias = fields.get("attention_bias", False)
    positions = int(fields["max_position_embeddings"])
    return ModelSpec(
        vocab_size=int(fields["vocab_size"]),
        hidden_size=hidden,
        mlp_size=int(fields["intermediate_size"]),
        num_layers=int(fields["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(fields["num_key_value_heads"] or heads),
        head_dim=int(fields["head_dim"] or hidden // heads),
        rms_eps=float(fields["rms_norm_eps"]),
        qk_norm=fields["model_type"] == "qwen3",
        qkv_bias=fields["model_type"] == "qwen2" or attention_bias,
        out_bias=attention_bias,
        mlp_bias=fields.get("mlp_bias", False),
        tied_head=fields["tie_word_embeddings"],
        max_positions=positions,
        rope=_build_rope(read_rope(fields), positions),
        eos_token_ids=eos_token_ids,
    )


def _build_rope(rope: Mapping[str, Any], positions: int) -> RopeSpec:
    kind = rope["rope_type"]
    factors = {key: float(rope[key]) for key in ROPE_KINDS[kind] if key.endswith("factor")}
    return RopeSpec(
        kind=kind,
        theta=float(rope["rope_theta"]),
        original_max_positions=int(rope.get("original_max_position_embeddings") or positions),
        **factors,
    )


def eos_token_ids(config: Mapping[str, Any], directory: Path) -> tuple[int, ...]:
    """Return the token ids that end a generation, from generation_config.json or else from `config`."""
    path = directory / "generation_config.json"
    generation = read_model_config(path) if path.is_file() else {}
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    tokens = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(isinstance(token, int) for token in tokens):
        raise _damage_error("eos_token_id must be a token id, or a list of token ids", at=path)
    return tuple(tokens)
