"""Model architecture for the embedded engine, read from `config.json`."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from buckeye.base.storage import read_json
from buckeye.errors import InferenceError, UsageError
from buckeye.inference.engine.model_fields import (
    ACTIVATIONS,
    Activation,
    complete_config,
    format_value,
    layer_ropes,
    layer_windows,
)

_LAYERS, _MLP = "num_hidden_layers", "intermediate_size"
_NON_ZERO = (_LAYERS, "hidden_size", "vocab_size", "num_attention_heads")
_SIZES = (
    *_NON_ZERO,
    _MLP,
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

RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope"]
Norms = Literal["before", "after", "both"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeSpec:
    """Rotary position embedding of the first `width` dimensions of a head.

    Cosine and sine are multiplied by `scale`. `factor` is for the kinds "linear", "llama3" and "yarn", and
    `factors` for "longrope", one for each pair of dimensions. `low` and `high` are numbers of rotations
    within the original context: below `low`, "llama3" and "yarn" divide an angle by `factor`; above `high`,
    they keep it. `truncate` rounds the limits of "yarn" to whole dimensions.
    """

    kind: RopeKind
    theta: float
    width: int
    scale: float = 1.0
    factor: float = 1.0
    factors: tuple[float, ...] = ()
    low: float = 1.0
    high: float = 1.0
    original_max_positions: int = 0
    truncate: bool = True


class LayerSpec(NamedTuple):
    """Attention of a layer: its `window` in tokens, and its positions. None: full attention, no positions."""

    window: int | None
    rope: RopeSpec | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsSpec:
    """Mixture of experts: each token uses the `per_token` experts with the highest probabilities.

    `layers` has the indices of the layers with experts. `normalized`: the weights of a token's experts sum to
    1.
    """

    count: int
    per_token: int
    size: int
    layers: tuple[int, ...]
    normalized: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """Decoder with grouped-query attention, rotary positions and gated feed-forward blocks.

    The fields after `eos_token_ids` are the differences of some families. `norms` tells whether a block has
    its norm before, after, or before and after. `qk_norm` normalizes each head, or all heads as one vector.
    `fused`: queries, keys and values are one tensor in the checkpoint, and so are gate and up. A norm's
    weight is `norm_offset` plus the stored one. Logits are divided by `logits_divisor`, and then limited to
    `logits_cap`.
    """

    vocab_size: int
    hidden_size: int
    mlp_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    tied_head: bool
    max_positions: int
    layers: tuple[LayerSpec, ...]
    eos_token_ids: tuple[int, ...]
    norms: Norms = "before"
    qk_norm: Literal["head", "all"] | None = None
    fused: bool = False
    norm_offset: float = 0.0
    activation: Activation = "silu"
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    attention_scale: float | None = None
    logits_divisor: float = 1.0
    logits_cap: float | None = None
    experts: ExpertsSpec | None = None

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def qk_heads(self) -> int:
        """Number of query heads plus number of key heads. These heads are normalized and rotated."""
        return self.num_heads + self.num_kv_heads

    @property
    def is_plain(self) -> bool:
        """True if the model computes as Llama, Qwen2 or Qwen3 do, except for the angles of its positions."""
        (first, *others) = set(self.layers)
        whole = first.rope is not None and first.rope.width == self.head_dim
        scales = (self.embedding_scale, self.residual_scale, self.logits_divisor) == (1.0, 1.0, 1.0)
        limits = (self.attention_scale, self.logits_cap, self.experts, first.window) == (None,) * 4
        kinds = (self.norms, self.activation, self.norm_offset) == ("before", "silu", 0.0)
        return not others and whole and scales and limits and kinds and self.qk_norm != "all"


def model_directory(name: str) -> Path:
    """Return the local directory of a model. Raise `InferenceError` if it does not exist."""
    path = Path(os.path.expanduser(name))
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
            sizes = part.get(key)
            # in a list, there is a number per layer, as in Gemma 3n
            for size in sizes if key == _MLP and isinstance(sizes, list) else [sizes]:
                _check_size(path, key, size, widest, len(shapes))


def _check_size(path: Path, key: str, size: Any, widest: int, tensors: int) -> None:
    if size is None:
        return
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= _MAX_SIZE:
        raise _damage_error(f"{key} is {format_value(size)}; expected a whole number", at=path)
    if size == 0 and key in _NON_ZERO:
        raise _damage_error(f"{key} is 0", at=path)
    if key == _LAYERS and tensors and size > tensors:
        raise _damage_error(f"{key} is {size}, but the weights have {tensors} tensors in all", at=path)
    if key != _LAYERS and size > widest:
        raise _damage_error(
            f"{key} is {size}, but no dimension of the weights is larger than {widest}", at=path
        )


def tensor_shapes(directory: Path) -> dict[str, list[int]]:
    """Return the name and shape of every tensor in the safetensors files of a directory.

    The function reads only the headers of the files. Raise `UsageError` for an incomplete file.
    """
    headers = tensor_headers(directory).values()
    return {name: entry["shape"] for header in headers for name, entry in header.items()}


def tensor_headers(directory: Path) -> dict[Path, dict[str, dict[str, Any]]]:
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
            if not all(
                _is_shape(entry["shape"]) and isinstance(entry["dtype"], str) for entry in header.values()
            ):
                raise ValueError("a shape must be a list of whole numbers, a dtype a text")
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
    for file, header in tensor_headers(directory).items():
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
    head_dim = int(fields["head_dim"] or hidden // heads)
    attention_bias, family = fields.get("attention_bias", False), fields["model_type"]
    ropes = [None if rope is None else _build_rope(rope, fields, head_dim) for rope in layer_ropes(fields)]
    # beyond its original context, "longrope" has other angles for all positions, also for cached keys
    short = [rope.original_max_positions for rope in ropes if rope is not None and rope.kind == "longrope"]
    return ModelSpec(
        vocab_size=int(fields["vocab_size"]),
        hidden_size=hidden,
        mlp_size=int(fields["intermediate_size"]),
        num_heads=heads,
        num_kv_heads=int(fields["num_key_value_heads"] or heads),
        head_dim=head_dim,
        rms_eps=float(fields["rms_norm_eps"]),
        qkv_bias=family == "qwen2" or attention_bias,
        out_bias=attention_bias,
        mlp_bias=fields.get("mlp_bias", False),
        tied_head=fields["tie_word_embeddings"],
        max_positions=min([int(fields["max_position_embeddings"]), *short]),
        layers=tuple(map(LayerSpec, layer_windows(fields), ropes)),
        eos_token_ids=eos_token_ids,
        activation=ACTIVATIONS[fields.get("hidden_activation", fields["hidden_act"])],
        **_differences(fields),
    )


def _differences(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `ModelSpec` in which a family differs from Llama."""
    match fields["model_type"]:
        case "qwen3":
            return {"qk_norm": "head"}
        case "phi3":
            return {"fused": True}
        case "olmo2" | "olmo3":
            return {"norms": "after", "qk_norm": "all"}
        case "granite":
            return {
                "embedding_scale": float(fields["embedding_multiplier"]),
                "residual_scale": float(fields["residual_multiplier"]),
                "attention_scale": float(fields["attention_multiplier"]),
                "logits_divisor": float(fields["logits_scaling"]),
            }
        case "gemma3_text":
            cap = fields["final_logit_softcapping"]
            return {
                "norms": "both",
                "qk_norm": "head",
                "norm_offset": 1.0,
                "embedding_scale": float(fields["hidden_size"]) ** 0.5,
                "attention_scale": float(fields["query_pre_attn_scalar"]) ** -0.5,
                "logits_cap": None if cap is None else float(cap),
            }
        case "qwen3_moe":
            return {"qk_norm": "head", "experts": _build_experts(fields)}
    return {}


def _build_experts(fields: Mapping[str, Any]) -> ExpertsSpec:
    step, dense = int(fields["decoder_sparse_step"]), fields["mlp_only_layers"] or ()
    layers = range(int(fields[_LAYERS]))
    return ExpertsSpec(
        count=int(fields["num_local_experts"] or fields["num_experts"]),
        per_token=int(fields["num_experts_per_tok"]),
        size=int(fields["moe_intermediate_size"]),
        layers=tuple(index for index in layers if index not in dense and (index + 1) % step == 0),
        normalized=fields["norm_topk_prob"],
    )


def _build_rope(rope: Mapping[str, Any], fields: Mapping[str, Any], head_dim: int) -> RopeSpec:
    kind, positions = rope["rope_type"], int(fields["max_position_embeddings"])
    original = int(rope.get("original_max_position_embeddings") or positions)
    width = int(head_dim * (rope.get("partial_rotary_factor") or 1.0))
    spec = RopeSpec(kind=kind, theta=float(rope["rope_theta"]), width=width, original_max_positions=original)
    if kind == "dynamic":  # within the context of the model, its angles are the default ones
        return replace(spec, kind="default")
    if kind == "linear":
        return replace(spec, factor=float(rope["factor"]))
    if kind == "llama3":
        low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
        return replace(spec, factor=float(rope["factor"]), low=low, high=high)
    factor, scale = rope.get("factor"), rope.get("attention_factor")
    factor = positions / original if factor is None else float(factor)
    if kind == "yarn":
        return replace(
            spec,
            factor=factor,
            low=float(rope.get("beta_slow") or 1),
            high=float(rope.get("beta_fast") or 32),
            truncate=bool(rope.get("truncate", True)),
            scale=_yarn_scale(rope, factor) if scale is None else float(scale),
        )
    if kind == "longrope":
        factors = tuple(map(float, rope["short_factor"]))
        if len(factors) != width // 2:
            raise ValueError(f"rope type 'longrope' has {len(factors)} factors for {width // 2} angles")
        growth = math.log(factor) / math.log(original) if factor > 1 else 0.0
        return replace(spec, factors=factors, scale=(1 + growth) ** 0.5 if scale is None else float(scale))
    return spec


def _yarn_scale(rope: Mapping[str, Any], factor: float) -> float:
    """Return the scale of cosine and sine (Peng et al. 2023, arXiv:2309.00071, eq. 22)."""
    own, all_dims = rope.get("mscale"), rope.get("mscale_all_dim")
    growth = 0.1 * math.log(factor) if factor > 1 else 0.0
    return (1 + own * growth) / (1 + all_dims * growth) if own and all_dims else 1 + growth


def eos_token_ids(config: Mapping[str, Any], directory: Path) -> tuple[int, ...]:
    """Return the token ids that end a generation, from generation_config.json or else from `config`."""
    path = directory / "generation_config.json"
    generation: Mapping[str, Any] = read_model_config(path) if path.is_file() else {}
    if "eos_token_id" not in generation:
        path, generation = directory / "config.json", config
    eos = generation.get("eos_token_id")
    tokens = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(type(token) is int for token in tokens):
        raise _damage_error("eos_token_id must be a token id, or a list of token ids", at=path)
    return tuple(tokens)
