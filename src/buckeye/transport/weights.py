"""Weights from the trainer to the engines, in `<root>/step_<N>/`.

Each directory has a manifest, and a Hugging Face model or an adapter in peft's format.

Version N is the model after N optimizer steps; version 0 is the initial model.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from buckeye.base import storage
from buckeye.base.foreign_files import check_file_name
from buckeye.base.process import RunIdentity
from buckeye.errors import TransportError

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Canary:
    """Reference output of the weights, to verify the output of an engine.

    It has the greedy continuation of `prompt_ids`, and its log-probs at temperature 1, computed in `dtype`.
    """

    dtype: str
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsManifest:
    """Content of a weights directory.

    `files` maps each safetensors file to its SHA-256; `checksum` covers all of them (`combined_checksum`).
    With `adapter`, the files are an adapter for the run's base model, and `canary` was computed with both.
    `canary` may be None.
    """

    run_id: str
    attempt: int
    step: int
    dtype: str
    files: dict[str, str]
    checksum: str
    canary: Canary | None = None
    adapter: bool = False


def combined_checksum(files: dict[str, str]) -> str:
    """Return the SHA-256 over the lines `name:sha256`, ordered by name."""
    lines = "".join(f"{name}:{digest}\n" for name, digest in sorted(files.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def publish_weights(
    root: Path,
    step: int,
    fill: Callable[[Path], None],
    *,
    identity: RunIdentity,
    dtype: str,
    canary: Canary | None = None,
    adapter: bool = False,
    durable: bool = True,
) -> Path:
    """Publish version `step` under `root`, and replace an earlier one. `fill(directory)` writes the files.

    Without `durable` nothing is synced to disk: checksums detect damage, and a resumed run publishes the
    version again.
    """

    def fill_and_sign(directory: Path) -> None:
        fill(directory)
        with ThreadPoolExecutor(1, "sync") as disk:  # syncs to disk while the hashes are computed
            flushed = disk.submit(storage.sync_tree, directory) if durable else None
            files = _hashes(directory, sorted(path.name for path in directory.glob("*.safetensors")))
            if flushed is not None:
                flushed.result()
        if not files:
            raise TransportError(
                f"the weights of step {step} cannot be published: no .safetensors file was written",
                code="BK-WEIGHTS-DAMAGED",
            )
        manifest = WeightsManifest(
            run_id=identity.run_id,
            attempt=identity.attempt,
            step=step,
            dtype=dtype,
            files=files,
            checksum=combined_checksum(files),
            canary=canary,
            adapter=adapter,
        )
        (directory / MANIFEST).write_text(json.dumps(asdict(manifest), indent=1), encoding="utf-8")

    final = storage.step_directory(root, step)
    storage.write_directory(final, fill_and_sign, replace=True, durable=durable)
    return final


def read_weights_manifest(directory: Path) -> WeightsManifest:
    """Return the manifest of a weights directory.

    Raise `TransportError` if it, or one of its files, is missing.
    """
    path = directory / MANIFEST
    try:
        manifest = msgspec.convert(storage.read_json(path), WeightsManifest)
        missing = [name for name in manifest.files if not (directory / check_file_name(name)).is_file()]
        is_consistent = combined_checksum(manifest.files) == manifest.checksum
    except FileNotFoundError:
        raise _damage(f"{directory} has no published weights: {MANIFEST} is missing") from None
    except (OSError, ValueError) as error:
        raise _damage(f"{path} cannot be read: {error}") from error
    if missing:
        raise _damage(f"the weights in {directory} are incomplete: {', '.join(missing)} missing")
    if not is_consistent:
        raise _damage(f"{path} is damaged: its checksum does not match its list of files")
    return manifest


def find_weights_manifest(directory: Path) -> WeightsManifest | None:
    """Return the manifest of a weights directory, or None if no complete weights are published there."""
    try:
        return read_weights_manifest(directory)
    except TransportError as error:
        logger.debug("Skipping %s: %s", directory, error)
        return None


def verify_weights(directory: Path) -> WeightsManifest:
    """Return the manifest of a weights directory after checking the content of every file.

    Raise `TransportError` if a file is missing or differs.
    """
    manifest = read_weights_manifest(directory)
    for name, digest in _hashes(directory, list(manifest.files)).items():
        if digest != manifest.files[name]:
            raise _damage(f"{directory / name} is damaged: its SHA-256 differs from the published one")
    return manifest


def newest_weights(root: Path, *, identity: RunIdentity) -> tuple[int, Path] | None:
    """Return the highest version published by this attempt of this run, or None.

    Weights of other attempts are ignored.
    """
    for step, directory in reversed(storage.step_directories(root).items()):
        manifest = find_weights_manifest(directory)
        if manifest and (manifest.run_id, manifest.attempt) == (identity.run_id, identity.attempt):
            return step, directory
    return None


def has_weights(root: Path, step: int, *, run_id: str) -> bool:
    """Return True if an attempt of a run has published this version, and it still exists."""
    manifest = find_weights_manifest(storage.step_directory(root, step))
    return manifest is not None and manifest.run_id == run_id


def prune_weights(root: Path, run_id: str, *, keep: Callable[[int], bool]) -> None:
    """Delete every version of this run unless `keep(step)` is true. Directories of other runs stay."""
    for step, directory in storage.step_directories(root).items():
        if not keep(step) and has_weights(root, step, run_id=run_id):
            storage.remove_directory(directory)


def _damage(message: str) -> TransportError:
    return TransportError(message, code="BK-WEIGHTS-DAMAGED", hint="publish the weights again")


def _hashes(directory: Path, names: Sequence[str]) -> dict[str, str]:
    """Return name -> SHA-256 of files in a directory."""
    return dict(zip(names, storage.sha256_files([directory / name for name in names]), strict=True))
