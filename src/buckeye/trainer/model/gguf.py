"""Conversion of a GGUF file to a model directory, with dequantized weights, tokenizer and chat template."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from buckeye.base.distribution import need
from buckeye.base.storage import write_directory
from buckeye.errors import THIRD_PARTY_ERRORS, BuckeyeError, UsageError, first_line

Precision = Literal["auto", "float32", "bfloat16"]

_SHARE = re.compile(r"(\d+)%\|")
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ROPE_FACTORS = "rope_freqs.weight"
"""Name of the tensor with the factors of rotary frequencies. Llama 3.1 and later have it."""
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Parameters of the rotary frequencies in all published Llama models with factors. Only `factor` differs."""


def import_gguf(
    file: Path, directory: Path, *, report: Callable[[str], None], precision: Precision = "auto"
) -> int:
    """Write the model in a GGUF file to a model directory. Return the number of parameters.

    `report` gets the state of the conversion, because a large file takes minutes. With the precision
    `auto`, weights are float32 if all weights in the file are, else bfloat16. Raise `UsageError` if
    transformers cannot read the whole model, or if the directory exists.
    """
    need("gguf", "A GGUF file")
    if directory.exists():
        raise UsageError(
            f"{directory} exists already; nothing was overwritten",
            code="BK-FILE-EXISTS",
            hint="choose another name",
        )
    _check_header(file)
    report(f"reading {file}")
    try:
        content = _read_content(file)
        report(f"converting {content.elements:,} weights and the tokenizer")
        model, tokenizer = _load(file, content, report)
    except BuckeyeError:
        raise
    except THIRD_PARTY_ERRORS as error:
        reason = first_line(error)
        raise _unsupported_error(file, reason) from error
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if parameters != content.elements:
        reason = f"it has {content.elements:,} weights, and the model {parameters:,}"
        raise _unsupported_error(file, reason)
    keeps = precision == "float32" or (precision == "auto" and content.is_float32)
    model = model.to(torch.float32 if keeps else torch.bfloat16)
    _forget_quantization(model)
    model.generation_config.eos_token_id = tokenizer.eos_token_id

    def fill(target: Path) -> None:
        with contextlib.redirect_stderr(io.StringIO()):  # transformers' progress bars cannot be turned off
            model.save_pretrained(target)
        tokenizer.save_pretrained(target)

    report(f"writing {directory}")
    directory.parent.mkdir(parents=True, exist_ok=True)
    write_directory(directory, fill)
    return parameters


def _unsupported_error(file: Path, reason: str) -> UsageError:
    return UsageError(
        f"transformers cannot read {file}: {reason}",
        code="BK-MODEL-UNSUPPORTED",
        hint="use the model's folder in Hugging Face's format",
    )


def _check_header(file: Path) -> None:
    """Raise `UsageError` unless the file begins like a GGUF file of version 2 or 3."""
    hint = "name a .gguf file"
    try:
        with file.open("rb") as opened:
            head = opened.read(8)
    except OSError as error:
        message = f"cannot read {file}: {error.strerror}"
        code = "BK-FILE-NOT-FOUND" if isinstance(error, FileNotFoundError) else "BK-FILE-UNREADABLE"
        raise UsageError(message, code=code, hint=hint) from None
    if len(head) < 8 or head[:4] != _MAGIC or struct.unpack("<I", head[4:])[0] not in _VERSIONS:
        raise UsageError(f"{file} is not a GGUF file of version 2 or 3", code="BK-FILE-FORMAT", hint=hint)


@dataclass(frozen=True, slots=True)
class _Content:
    """Properties of a GGUF file that transformers does not read, or does not check."""

    elements: int
    """Number of weights, without the factors of the rotary frequencies."""
    is_float32: bool
    head_dim: int | None
    rope_factors: torch.Tensor | None


def _read_content(file: Path) -> _Content:
    from gguf import GGMLQuantizationType, GGUFReader

    reader = GGUFReader(file)

    def value(name: str) -> Any:
        field = reader.get_field(name)
        return None if field is None else field.contents()

    architecture = value("general.architecture")
    if (value("split.count") or 1) > 1:
        raise UsageError(
            f"{file} is one of {value('split.count')} parts of a model",
            code="BK-MODEL-UNSUPPORTED",
            hint="join the parts: `llama-gguf-split --merge FIRST_PART.gguf MODEL.gguf`",
        )
    scaling = value(f"{architecture}.rope.scaling.type")
    if scaling not in (None, "none"):
        raise _unsupported_error(file, f"the scaling {scaling!r} of its rotary embedding is not supported")
    weights = {tensor.name: tensor for tensor in reader.tensors}
    factors = weights.pop(_ROPE_FACTORS, None)
    return _Content(
        elements=sum(int(tensor.n_elements) for tensor in weights.values()),
        is_float32=all(tensor.tensor_type == GGMLQuantizationType.F32 for tensor in weights.values()),
        head_dim=value(f"{architecture}.attention.key_length"),
        rope_factors=None if factors is None else torch.tensor(factors.data.copy()),
    )


class _Progress(io.StringIO):
    """Stream that reports the share of transformers' progress bars, which cannot be turned off."""

    def __init__(self, report: Callable[[str], None]) -> None:
        super().__init__()
        self._report = report

    def write(self, text: str) -> int:
        if (share := _SHARE.search(text)) is not None:
            self._report(f"converting the weights: {share[1]} %")
        return len(text)


def _load(file: Path, content: _Content, report: Callable[[str], None]) -> tuple[Any, Any]:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    logging.getLogger("transformers").setLevel(logging.ERROR)  # hides the warning about dequantization
    names = {"pretrained_model_name_or_path": str(file.absolute().parent), "gguf_file": file.name}
    with contextlib.redirect_stderr(_Progress(report)):
        tokenizer = AutoTokenizer.from_pretrained(**names, local_files_only=True)
        config = AutoConfig.from_pretrained(**names, local_files_only=True)
        if content.head_dim is not None and hasattr(config, "head_dim"):
            config.head_dim = content.head_dim
        if content.rope_factors is not None:
            config.rope_parameters = _llama3_rope(file, config, content.rope_factors)
        model, loaded = AutoModelForCausalLM.from_pretrained(
            **names,
            config=config,
            dtype=torch.float32,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    if loaded["missing_keys"]:
        raise _unsupported_error(file, f"it has no weights for {min(loaded['missing_keys'])}")
    for name, found, expected in sorted(loaded["mismatched_keys"]):
        raise _unsupported_error(file, f"{name} has the shape {tuple(found)} instead of {tuple(expected)}")
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise _unsupported_error(file, f"{name} has a value that is NaN or infinite")
    return model, tokenizer


def _llama3_rope(file: Path, config: Any, factors: torch.Tensor) -> dict[str, Any]:
    """Return transformers' rotary parameters for `factors`. Raise `UsageError` if they are not Llama's."""
    theta, factor = config.rope_parameters["rope_theta"], float(factors.max())
    wavelengths = 2 * math.pi * theta ** (torch.arange(len(factors)) / len(factors))
    low, high = _LLAMA3_ROPE["low_freq_factor"], _LLAMA3_ROPE["high_freq_factor"]
    rotations = _LLAMA3_ROPE["original_max_position_embeddings"] / wavelengths
    share = ((rotations - low) / (high - low)).clamp(0, 1)  # 1 is unchanged, 0 is divided by `factor`
    if not torch.allclose(1 / ((1 - share) / factor + share), factors.float(), rtol=1e-3):
        raise _unsupported_error(file, f"the factors in {_ROPE_FACTORS} are not those of Llama 3")
    return {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **_LLAMA3_ROPE}


def _forget_quantization(model: Any) -> None:
    """Remove the quantization settings of a model, so that transformers can save it.

    The weights of the model are already dequantized.
    """
    for name in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(model.config, name):
            delattr(model.config, name)
    model.is_quantized = False
    model.hf_quantizer = None
