"""Digest of an adapter's base model: cheap to compute, and different for models with different weights."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path

BASE_DIGEST_KEY = "buckeye_base"
"""Key of the base model's digest in the metadata of an adapter's safetensors file."""

_SAMPLES = 64
_SAMPLE_BYTES = 4096


def read_base_digest(adapter_file: Path) -> str | None:
    """Return the digest of an adapter's base model, or None if the file has none.

    Raise `OSError` or `ValueError` for a damaged file.
    """
    with adapter_file.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    digest = (header.get("__metadata__") or {}).get(BASE_DIGEST_KEY)
    return digest if isinstance(digest, str) else None


@cache
def base_digest(base: str) -> str | None:
    """Return a SHA-256 of a model directory's safetensors files, or None without such files.

    It covers their names, sizes and headers, and samples of 4 KiB at 64 evenly spaced positions in each.

    Training changes nearly every weight, so two models of one shape differ in the samples.
    """
    files = sorted(Path(base).glob("*.safetensors"))
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            header = int.from_bytes(prefix, "little")
            digest.update(f"{path.name} {size} ".encode() + prefix + file.read(header))
            start = 8 + header
            for index in range(_SAMPLES):
                file.seek(start + (size - start) * index // _SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest() if files else None
