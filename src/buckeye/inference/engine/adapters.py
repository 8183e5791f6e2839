"""LoRA adapters (Hu et al. 2021, arXiv:2106.09685) in peft's format, applied to the served model.

Float32 weights are merged with the adapter into W + scale * B @ A, at no extra cost per token. With 16-bit
weights, rounding would remove most of a merged adapter, so the adapter stays separate, in float32. An adapter
is always applied to the unchanged base weights on disk, so no part of an earlier adapter remains.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from buckeye.base.storage import read_json, sha256_file
from buckeye.errors import TransportError
from buckeye.inference.engine.architecture import ModelSpec
from buckeye.inference.engine.general_spec import read_served_spec
from buckeye.inference.engine.weights import Checkpoint
from buckeye.transport.weights import MANIFEST, combined_checksum, verify_weights

_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_MATRIX = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_TIED = ("lm_head.weight", "model.embed_tokens.weight")
_MERGEABLE: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": (None, "none"),
    # peft's other initializations also change the base weights
    "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal"),
    **dict.fromkeys(
        (
            "use_dora",
            "use_qalora",
            "use_bdlora",
            "fan_in_fan_out",
            "lora_bias",
            "layer_replication",
            "alora_invocation_tokens",
            "arrow_config",
            "kasa_config",
            "monteclora_config",
        ),
        (None, False),
    ),
}
"""Settings of an adapter, with their supported values. Others do not compute exactly W + scale * B @ A."""


class AdaptedCheckpoint(Checkpoint):
    """Checkpoint of a base model with an adapter applied. `checksum` is that of the adapter's files."""

    def __init__(self, base: Path, adapter: Path) -> None:
        super().__init__(base)
        self.checksum = verified_checksum(adapter)
        scale = _read_scale(adapter / _CONFIG)
        self._file = adapter / _WEIGHTS
        pairs: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in _read_tensors(self._file).items():
            plain = name.removeprefix(_PREFIX)
            if match := _MATRIX.fullmatch(plain):
                pairs.setdefault(match["module"], {})[match["side"]] = tensor.float()
            else:
                self.replaced[plain] = tensor
        adapted = {f"{module}.weight" for module in pairs} | self.replaced.keys()
        spec = read_served_spec(base)
        self._has_module_names = isinstance(spec, ModelSpec)
        if (tied := adapted.intersection(_TIED)) and spec.tied_head:
            raise self._error(
                f"the adapter changes {', '.join(sorted(tied))}, but head and embedding are tied in "
                f"{self.directory}",
                hint="use an adapter that changes neither head nor embedding",
            )
        for module, sides in pairs.items():
            a, b = self._checked_pair(f"{module}.weight", sides)
            self.low_rank[f"{module}.weight"] = a, b * scale(module, len(a))
        for name, tensor in self.replaced.items():
            self._check_target(name, tuple(tensor.shape))

    def _checked_pair(
        self, name: str, sides: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A and B for the tensor `name`. Raise `TransportError` if their shapes do not fit it."""
        if sides.keys() != {"A", "B"}:
            raise self._error(f"{name} needs a matrix lora_A and a matrix lora_B; one of them is missing")
        a, b = sides["A"], sides["B"]
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
            raise self._error(
                f"lora_A {list(a.shape)} and lora_B {list(b.shape)} of {name} have shapes that do not match"
            )
        self._check_target(name, (b.shape[0], a.shape[1]))
        return a, b

    def _check_target(self, name: str, shape: tuple[int, ...]) -> None:
        if not self._has_module_names:  # the general path compares the names with the loaded model
            return
        hint = "use an adapter of this model"
        if name not in self.shapes:
            raise self._error(f"the model {self.directory} has no tensor {name}", hint=hint)
        if self.shapes[name] != shape:
            raise self._error(
                f"the adapter is for {name} of shape {list(shape)}; in {self.directory} it has shape "
                f"{list(self.shapes[name])}",
                hint=hint,
            )

    def _error(self, message: str, hint: str | None = None) -> TransportError:
        return TransportError(message, code="BK-ADAPTER", at=str(self._file), hint=hint)


def verified_checksum(adapter: Path) -> str:
    """Return one SHA-256 for all files of an adapter. If the adapter has a manifest, check the files first.

    Raise `TransportError` for a damaged or missing file.
    """
    if (adapter / MANIFEST).is_file():
        return verify_weights(adapter).checksum
    path = adapter / _WEIGHTS
    if not path.is_file():
        raise TransportError(
            f"{adapter} is not an adapter in peft's format: no {_WEIGHTS}", code="BK-ADAPTER"
        )
    return combined_checksum({_WEIGHTS: sha256_file(path)})


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise TransportError(f"cannot read {path}: {error}", code="BK-ADAPTER") from error


def _read_scale(path: Path) -> Callable[[str, int], float]:
    """Return a function that computes the scale of B @ A from the name of a module and the rank.

    The scale is alpha / rank, or with `use_rslora` alpha / sqrt(rank) (Kalajdzievski 2023, arXiv:2312.03732).
    alpha is `lora_alpha`, unless a pattern in `alpha_pattern` matches the name of the module.
    """
    try:
        config = read_json(path)
        unsupported = [
            f"{key} = {config.get(key)!r}"
            for key, values in _MERGEABLE.items()
            if config.get(key) not in values
        ]
        default, root = float(config["lora_alpha"]), bool(config.get("use_rslora"))
        patterns = config.get("alpha_pattern") or {}
        alphas = {re.compile(rf"(.*\.)?({name})"): float(alpha) for name, alpha in patterns.items()}
    except FileNotFoundError:
        message = f"{path.parent} is not an adapter in peft's format: no {path.name}"
        raise TransportError(message, code="BK-ADAPTER") from None
    except (OSError, ValueError, TypeError, AttributeError, KeyError, OverflowError, re.error) as error:
        raise TransportError(f"cannot read {path}: {error!r}", code="BK-ADAPTER") from error
    if unsupported:
        raise TransportError(
            f"the embedded engine cannot merge an adapter with {', '.join(unsupported)}",
            code="BK-ADAPTER",
            at=str(path),
        )

    def scale(module: str, rank: int) -> float:
        alpha = next((alphas[pattern] for pattern in alphas if pattern.fullmatch(module)), default)
        return float(alpha / (rank**0.5 if root else rank))

    return scale
