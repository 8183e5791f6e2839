"""Import of a GGUF file: the weights without quantization, the tokenizer and its chat template."""

from __future__ import annotations

import contextlib
import io
import logging
import struct
from pathlib import Path
from typing import Any, Literal

import torch

from buckeye.base.distribution import need
from buckeye.base.storage import write_directory
from buckeye.errors import THIRD_PARTY_ERRORS, UsageError

Precision = Literal["auto", "float32", "bfloat16"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)


def import_gguf(file: Path, directory: Path, *, precision: Precision = "auto") -> int:
    """Write a model directory with the content of a GGUF file. Return the number of parameters.

    `auto` keeps a file of float32 weights unchanged, and rounds all weights of any other file to bfloat16.
    Raises UsageError if the file is not a model that transformers can read, and if the directory exists.
    """
    need("gguf", "A GGUF file")
    if directory.exists():
        raise UsageError(
            f"{directory} exists already; nothing was overwritten",
            code="BK-FILE-EXISTS",
            hint="choose another name",
        )
    _check_header(file)
    try:
        model, tokenizer = _load(file)
    except THIRD_PARTY_ERRORS as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UsageError(
            f"transformers cannot read {file}: {reason}",
            code="BK-MODEL-UNSUPPORTED",
            hint="use the model's folder in Hugging Face's format",
        ) from error
    keeps = precision == "float32" or (precision == "auto" and not _is_quantized(file))
    model = model.to(torch.float32 if keeps else torch.bfloat16)
    _forget_quantization(model)
    model.generation_config.eos_token_id = tokenizer.eos_token_id

    def fill(target: Path) -> None:
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)

    write_directory(directory, fill)
    return sum(parameter.numel() for parameter in model.parameters())


def _check_header(file: Path) -> None:
    """Raise UsageError unless the file begins as a GGUF file does."""
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


def _load(file: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    logging.getLogger("transformers").setLevel(logging.ERROR)  # warns of dequantization
    names = {"pretrained_model_name_or_path": str(file.absolute().parent), "gguf_file": file.name}
    with contextlib.redirect_stderr(io.StringIO()):  # progress bars cannot be turned off
        tokenizer = AutoTokenizer.from_pretrained(**names, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(**names, dtype=torch.float32, local_files_only=True)
    return model, tokenizer


def _is_quantized(file: Path) -> bool:
    """Return True if any tensor of the file is not float32."""
    from gguf import GGMLQuantizationType, GGUFReader

    return any(tensor.tensor_type != GGMLQuantizationType.F32 for tensor in GGUFReader(file).tensors)


def _forget_quantization(model: Any) -> None:
    """Remove the quantization settings of a model, so that transformers can save it.

    Its weights are dequantized already.
    """
    for name in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(model.config, name):
            delattr(model.config, name)
    model.is_quantized = False
    model.hf_quantizer = None
