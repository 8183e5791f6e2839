"""What the embedded engine must know of a model, read from its `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from buckeye.errors import InferenceError
from buckeye.storage import read_json

SUPPORTED = ("Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM")

RopeKind = Literal["default", "linear", "llama3"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeSpec:
    """Rotary position embedding; the last three fields belong to "llama3" scaling, `factor` also to
    "linear"."""

    kind: RopeKind
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_positions: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A pre-norm decoder with grouped-query attention, rotary positions and a gated SiLU feed-forward
    part."""

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
        """Query and key heads together: those that are normalised and rotated."""
        return self.num_heads + self.num_kv_heads


def model_directory(name: str) -> Path:
    """The local directory that a model's name stands for. Raises `InferenceError` if there is none."""
    path = Path(name).expanduser()
    if not path.is_dir():
        raise InferenceError(
            f"The model {name} is not a directory: fetch it, or give the path of a local model."
        )
    return path


def read_spec(directory: Path) -> ModelSpec:
    """The spec of the model in `directory`. Raises `InferenceError` for anything this engine would compute
    wrongly."""
    path = directory / "config.json"
    config = _read_config(path)
    architecture = (config.get("architectures") or ["none named"])[0]
    if architecture not in SUPPORTED:
        raise InferenceError(
            f"{path}: the architecture is {architecture}; the embedded engine supports "
            f"{', '.join(SUPPORTED)} (Qwen3, Qwen2 and 2.5, Llama, SmolLM2)."
        )
    _refuse_variants(config, path)
    try:
        return _build_spec(config, architecture, _eos_token_ids(config, directory), path)
    except (KeyError, TypeError, ValueError) as error:
        raise InferenceError(f"{path}: the key {error} is missing or not a number.") from error


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = read_json(path)
    except FileNotFoundError:
        raise InferenceError(f"{path.parent} has no config.json: it is not a Hugging Face model.") from None
    except (OSError, ValueError) as error:
        raise InferenceError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise InferenceError(f"{path} is not a JSON object.")
    return config


def _refuse_variants(config: Mapping[str, Any], path: Path) -> None:
    problems = []
    if config.get("quantization_config"):
        problems.append("the weights are quantised")
    if config.get("hidden_act", "silu") != "silu":
        problems.append(f"hidden_act is {config['hidden_act']!r}, not 'silu'")
    if "sliding_attention" in (config.get("layer_types") or ()):
        problems.append("it uses sliding-window attention")
    if problems:
        raise InferenceError(f"{path}: the embedded engine cannot run this model: {'; '.join(problems)}.")


def _build_spec(
    config: Mapping[str, Any], architecture: str, eos_token_ids: tuple[int, ...], path: Path
) -> ModelSpec:
    heads = int(config["num_attention_heads"])
    hidden = int(config["hidden_size"])
    qwen2 = architecture == "Qwen2ForCausalLM"
    attention_bias = not qwen2 and bool(config.get("attention_bias", False))
    positions = int(config.get("max_position_embeddings", 2048))
    return ModelSpec(
        vocab_size=int(config["vocab_size"]),
        hidden_size=hidden,
        mlp_size=int(config["intermediate_size"]),
        num_layers=int(config["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        rms_eps=float(config.get("rms_norm_eps", 1e-6)),
        qk_norm=architecture == "Qwen3ForCausalLM",
        qkv_bias=qwen2 or attention_bias,
        out_bias=attention_bias,
        mlp_bias=architecture == "LlamaForCausalLM" and bool(config.get("mlp_bias", False)),
        tied_head=bool(config.get("tie_word_embeddings", False)),
        max_positions=positions,
        rope=_read_rope(config, positions, path),
        eos_token_ids=eos_token_ids,
    )


def _read_rope(config: Mapping[str, Any], positions: int, path: Path) -> RopeSpec:
    """From `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before)."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise InferenceError(f"{path}: partial_rotary_factor is not supported by the embedded engine.")
    if kind == "default":
        return RopeSpec(kind="default", theta=theta)
    if kind == "linear":
        return RopeSpec(kind="linear", theta=theta, factor=float(rope["factor"]))
    if kind == "llama3":
        return RopeSpec(
            kind="llama3",
            theta=theta,
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_positions=int(rope.get("original_max_position_embeddings") or positions),
        )
    raise InferenceError(f"{path}: rope type {kind!r} is not supported; default, linear and llama3 are.")


def _eos_token_ids(config: Mapping[str, Any], directory: Path) -> tuple[int, ...]:
    """The ids that end a generation: those of generation_config.json, else those of config.json."""
    path = directory / "generation_config.json"
    generation = _read_config(path) if path.is_file() else {}
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (int(eos),)
