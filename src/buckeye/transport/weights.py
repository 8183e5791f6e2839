"""Versions of the weights, which the trainer publishes to the engines in `<root>/step_<N>/`.

Each directory has a manifest, and a Hugging Face model or an adapter in peft's format. Version N is the model
after N optimizer steps. Version 0 is the initial model.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec

from buckeye.base import storage
from buckeye.base.foreign_files import check_file_name
from buckeye.base.process import RunIdentity
from buckeye.errors import TransportError
from buckeye.transport.weights_digest import digest_files

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Canary:
    """Reference output of a version of the weights. The output of an engine is compared with it.

    `token_ids` are the greedy continuation of `prompt_ids`, and `logprobs` their log-probs at temperature 1.
    The trainer computed them in `dtype`. `margins` are the differences between the log-probs of each token
    and of the second most likely one.
    """

    dtype: str
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    margins: list[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsManifest:
    """Content of a weights directory.

    `files` maps each safetensors file to its digest. `checksum` is their `combined_checksum`. If `adapter`
    is true, the files are an adapter for the base model of the run, and `canary` is the output of the adapted
    model.
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
    """Return the SHA-256 over the lines `name:digest`, ordered by name."""
    lines = "".join(f"{name}:{digest}\n" for name, digest in sorted(files.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def make_manifest(
    step: int,
    files: Mapping[str, str],
    *,
    identity: RunIdentity,
    dtype: str,
    canary: Canary | None = None,
    adapter: bool = False,
) -> WeightsManifest:
    """Return the manifest of version `step`. `files` has the digest of each safetensors file."""
    return WeightsManifest(
        run_id=identity.run_id,
        attempt=identity.attempt,
        step=step,
        dtype=dtype,
        files=dict(files),
        checksum=combined_checksum(dict(files)),
        canary=canary,
        adapter=adapter,
    )


def publish_weights(
    root: Path,
    step: int,
    fill: Callable[[Path], Mapping[str, str] | None],
    *,
    identity: RunIdentity,
    dtype: str,
    canary: Canary | None = None,
    adapter: bool = False,
    durable: bool = True,
) -> Path:
    """Publish version `step` in `root`. `fill(directory)` writes the files. Replace an existing version.

    If `fill` returns the digest of each safetensors file, the files are not read.

    Without `durable`, nothing is synced to disk. After a crash of the machine, checksums detect damaged
    files, and a resumed run publishes the version again.
    """

    def fill_and_sign(directory: Path) -> None:
        digests = fill(directory)
        with ThreadPoolExecutor(1, "sync") as disk:  # sync to disk while the digests are computed
            flushed = disk.submit(storage.sync_tree, directory) if durable else None
            names = sorted(path.name for path in directory.glob("*.safetensors"))
            files = _digests(directory, names) if digests is None else dict(digests)
            if flushed is not None:
                flushed.result()
        if not files:
            raise TransportError(
                f"the weights of step {step} cannot be published: no .safetensors file was written",
                code="BK-WEIGHTS-DAMAGED",
            )
        manifest = make_manifest(step, files, identity=identity, dtype=dtype, canary=canary, adapter=adapter)
        (directory / MANIFEST).write_text(json.dumps(asdict(manifest), indent=1), encoding="utf-8")

    final = storage.step_directory(root, step)
    storage.write_directory(final, fill_and_sign, replace=True, durable=durable)
    return final


def read_weights_manifest(directory: Path) -> WeightsManifest:
    """Return the manifest of a weights directory.

    Raise `TransportError` if the manifest is missing or damaged, or if one of the files is missing.
    """
    path = directory / MANIFEST
    try:
        manifest = msgspec.convert(storage.read_json(path), WeightsManifest)
        missing = [name for name in manifest.files if not (directory / check_file_name(name)).is_file()]
        is_consistent = combined_checksum(manifest.files) == manifest.checksum
    except FileNotFoundError:
        raise _damage_error(f"{directory} has no published weights: {MANIFEST} is missing") from None
    except (OSError, ValueError) as error:
        raise _damage_error(f"{path} cannot be read: {error}") from error
    if missing:
        raise _damage_error(f"the weights in {directory} are incomplete: {', '.join(missing)} missing")
    if not is_consistent:
        raise _damage_error(f"{path} is damaged: its checksum does not match its list of files")
    return manifest


def find_weights_manifest(directory: Path) -> WeightsManifest | None:
    """Return the manifest of a weights directory, or None if the directory has no complete weights."""
    try:
        return read_weights_manifest(directory)
    except TransportError as error:
        logger.debug("Skipping %s: %s", directory, error)
        return None


def verify_weights(directory: Path) -> WeightsManifest:
    """Check the digest of every file in a weights directory, and return the manifest.

    Raise `TransportError` if a file is missing or damaged.
    """
    manifest = read_weights_manifest(directory)
    for name, digest in _digests(directory, list(manifest.files)).items():
        if digest != manifest.files[name]:
            raise _damage_error(f"{directory / name} is damaged: its digest differs from the published one")
    return manifest


def newest_weights(root: Path, *, identity: RunIdentity, above: int = -1) -> tuple[int, Path] | None:
    """Return step and directory of the highest version that this attempt of this run published.

    Return None if no such version is higher than `above`. Lower ones are not read.
    """
    for step, directory in reversed(storage.step_directories(root).items()):
        if step <= above:
            return None
        manifest = find_weights_manifest(directory)
        if manifest and (manifest.run_id, manifest.attempt) == (identity.run_id, identity.attempt):
            return step, directory
    return None


def has_weights(root: Path, step: int, *, run_id: str) -> bool:
    """Return True if `root` has complete weights of this version that any attempt of the run published."""
    manifest = find_weights_manifest(storage.step_directory(root, step))
    return manifest is not None and manifest.run_id == run_id


def prune_weights(root: Path, run_id: str, *, keep: Callable[[int], bool]) -> None:
    """Delete every version of this run unless `keep(step)` is true. Do not delete weights of other runs."""
    for step, directory in storage.step_directories(root).items():
        if not keep(step) and has_weights(root, step, run_id=run_id):
            storage.remove_directory(directory)


def _damage_error(message: str) -> TransportError:
    return TransportError(message, code="BK-WEIGHTS-DAMAGED", hint="publish the weights again")


def _digests(directory: Path, names: Sequence[str]) -> dict[str, str]:
    return dict(zip(names, digest_files(directory / name for name in names), strict=True))
