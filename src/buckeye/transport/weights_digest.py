"""Digests of weights files. Threads hash the parts of large files, because most models are in one file.

The digest of a file is the SHA-256 of its content. Above `PART_BYTES`, it is the SHA-256 of the digests of
the parts, each 32 bytes. This module imports only the standard library: vLLM's workers load it in a separate
environment.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

PART_BYTES = 2**25
_BLOCK_BYTES = 2**20
_THREADS = 8


def digest_files(paths: Iterable[Path]) -> list[str]:
    """Return the digest of each file, in hexadecimal."""
    return _digests(
        [[partial(_hash_part, path, part) for part in _parts(path.stat().st_size)] for path in paths]
    )


def digest_contents(contents: Mapping[str, memoryview]) -> dict[str, str]:
    """Return the digest of each content of a file, in hexadecimal, by name."""
    parts = [
        [partial(_sha256, content[part]) for part in _parts(content.nbytes)] for content in contents.values()
    ]
    return dict(zip(contents, _digests(parts), strict=True))


def _parts(size: int) -> list[slice]:
    return [slice(start, start + PART_BYTES) for start in range(0, max(size, 1), PART_BYTES)]


def _digests(files: Sequence[Sequence[Callable[[], bytes]]]) -> list[str]:
    """Return the digest of each file, from functions that hash its parts."""
    tasks = [hash_part for parts in files for hash_part in parts]
    with ThreadPoolExecutor(min(_THREADS, len(tasks)) or 1, "digest") as threads:
        hashed = threads.map(lambda hash_part: hash_part(), tasks)
        digests = [[next(hashed) for _ in parts] for parts in files]
    return [(parts[0] if len(parts) == 1 else _sha256(b"".join(parts))).hex() for parts in digests]


def _hash_part(path: Path, part: slice) -> bytes:
    digest, position = hashlib.sha256(), part.start
    with path.open("rb", buffering=0) as file:
        file.seek(part.start)
        while block := file.read(min(_BLOCK_BYTES, part.stop - position)):
            digest.update(block)
            position += len(block)
    return digest.digest()


def _sha256(content: bytes | memoryview) -> bytes:
    return hashlib.sha256(content).digest()
