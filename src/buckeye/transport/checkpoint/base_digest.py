"""Digest that identifies the base model of an adapter, computed quickly from samples of the weights."""

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
    """Return the digest of the base model that an adapter's file contains, or None.

    Raise `OSError` or `ValueError` for a damaged file.
    """
    with adapter_file.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    digest = (header.get("__metadata__") or {}).get(BASE_DIGEST_KEY)
    return digest if isinstance(digest, str) else None


@cache
def base_digest(base: str) -> str | None:
    """Return a SHA-256 that identifies the weights in a model directory, or None without safetensors files.

    The SHA-256 is computed from names, sizes and headers of the files, and from 64 samples of 4 KiB per file.
    Training changes nearly every weight, so models with different weights differ in these samples.
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
