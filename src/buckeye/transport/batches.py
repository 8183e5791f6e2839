"""Batches, which the orchestrator writes for the trainer, and the archive of trained batches.

A batch is in `<root>/step_<N>/{batch.safetensors, manifest.json}`. Training on batch N, counted from 0, turns
version N of the weights into version N + 1. A trained batch is moved to `<kept>/step_<N>/`. The trainer adds
its results as `trained.safetensors` and `record.json`. An archived batch has at most 21 bytes per
token, plus metadata.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load, save

from buckeye.base import storage
from buckeye.base.process import RunIdentity
from buckeye.errors import TransportError

MANIFEST = "manifest.json"
DATA = "batch.safetensors"
TRAINED = "trained.safetensors"
RECORD = "record.json"

_DTYPES: dict[str, Any] = {
    "token_ids": np.int32,
    "logprobs": np.float32,
    "versions": np.int32,
    "advantages": np.float32,
    "loss_mask": np.bool_,
}
_SAMPLE_DTYPES: dict[str, Any] = {"lengths": np.int64, "temperatures": np.float64, "groups": np.int64}
_NAMES = {np.int32: "I32", np.float32: "F32", np.bool_: "BOOL", np.int64: "I64", np.float64: "F64"}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sample:
    """Sequence of T tokens, with data for each token.

    `token_ids` is i32[T]. `loss_mask` bool[T] is True if the policy sampled the token and it is trained.
    `logprobs` f32[T] has the log-probs of the sampler, with 0 for untrained tokens. `versions` i32[T] has the
    policy versions that sampled the tokens, with -1 for untrained tokens. `advantages` is f32[T].
    `temperature` is the sampling temperature. Samples with an equal `group` belong to one group of the batch.
    """

    token_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    advantages: npt.NDArray[np.float32]
    temperature: float
    group: int = 0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """Samples of one step.

    `orchestrator_state` is the JSON state of the orchestrator after this batch. The trainer writes it to a
    checkpoint, together with its own state.
    """

    step: int
    samples: tuple[Sample, ...]
    orchestrator_state: Mapping[str, Any]


def write_batch(root: Path, batch: Batch, *, identity: RunIdentity) -> Path:
    """Write a batch, and return its directory. Raise `TransportError` for arrays of unequal length."""
    parts: Sequence[bytes | memoryview] = (_header(batch.samples), *_columns(batch.samples))

    def fill(directory: Path) -> None:
        digest = hashlib.sha256()
        with (directory / DATA).open("wb") as file:  # in parts, so that other threads can run
            for part in parts:
                digest.update(part)
                file.write(part)
        manifest = {
            "run_id": identity.run_id,
            "attempt": identity.attempt,
            "step": batch.step,
            "samples": len(batch.samples),
            "sha256": digest.hexdigest(),
            "orchestrator_state": batch.orchestrator_state,
        }
        (directory / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")

    final = storage.step_directory(root, batch.step)
    storage.write_directory(final, fill, replace=True)
    return final


def batch_bytes(batch: Batch) -> int:
    """Return the approximate size of a batch on disk, without the orchestrator's state."""
    bytes_per_token = sum(np.dtype(dtype).itemsize for dtype in _DTYPES.values())
    return bytes_per_token * sum(len(sample.token_ids) for sample in batch.samples)


def read_batch(root: Path, step: int, *, identity: RunIdentity) -> Batch | None:
    """Return the batch of a step, or None if it does not exist, or another run or attempt wrote it.

    Raise `TransportError` if the batch is damaged.
    """
    directory = storage.step_directory(root, step)
    try:
        manifest = storage.read_json(directory / MANIFEST)
        if (manifest["run_id"], manifest["attempt"]) != (identity.run_id, identity.attempt):
            return None
        data = (directory / DATA).read_bytes()
        if hashlib.sha256(data).hexdigest() != manifest["sha256"]:
            raise _damage_error(f"{directory / DATA} is damaged: its SHA-256 differs from the written one")
        samples = unpack_samples(data)
        state = manifest["orchestrator_state"]
    except FileNotFoundError as error:
        # The file name in the error shows which file was missing. Do not check for the manifest again: the
        # orchestrator may have published the batch meanwhile.
        if Path(error.filename).name == DATA:
            raise _damage_error(f"{directory} has a manifest but no {DATA}: the file was deleted") from None
        return None
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise _damage_error(f"the batch in {directory} cannot be read: {error!r}") from error
    return Batch(step=step, samples=samples, orchestrator_state=state)


def remove_batch(root: Path, step: int) -> None:
    """Delete a trained batch, if it exists."""
    storage.remove_directory(storage.step_directory(root, step))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainedBatch:
    """Results of the trainer for a batch, computed with the weights before the update.

    K samples of the batch ran through the model. `samples` i32[K] has their indices in the batch. `logprobs`
    f32[M] has the log-probs of their M trained tokens, sample after sample. `record` has the metrics of the
    step, and facts about the trainer, such as its device. In a step of several updates, `record` has
    `first_update`: the indices of the samples of the first one. The log-probs of the other samples are from
    the weights before their own first update.
    """

    samples: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    record: Mapping[str, Any]


def archive_trained_batch(
    root: Path, kept: Path, batch: Batch, trained: TrainedBatch, *, identity: RunIdentity
) -> None:
    """Move a trained batch and its results to `kept`. Replace an archived batch of this step.

    The archive is only for inspection, so nothing is synced to disk. Raise `OSError` on failure.
    """
    source, final = storage.step_directory(root, batch.step), storage.step_directory(kept, batch.step)
    if not source.is_dir():
        write_batch(root, batch, identity=identity)
    arrays = {"samples": trained.samples, "logprobs": trained.logprobs}
    (source / TRAINED).write_bytes(save(arrays))
    (source / RECORD).write_text(json.dumps(trained.record), encoding="utf-8")
    storage.remove_directory(final)
    kept.mkdir(exist_ok=True)
    source.rename(final)


def prune_trained_batches(kept: Path, *, keep: int | None, max_bytes: int) -> None:
    """Delete the oldest trained batches beyond `keep` batches or `max_bytes` bytes."""
    for number, directory in enumerate(reversed(storage.step_directories(kept).values())):
        max_bytes -= (directory / DATA).stat().st_size + (directory / TRAINED).stat().st_size
        if max_bytes < 0 or (keep is not None and number >= keep):
            storage.remove_directory(directory)


def remove_trained_batches(kept: Path, start: int) -> None:
    """Delete the trained batches of step `start` and later."""
    for step, directory in reversed(storage.step_directories(kept).items()):
        if step >= start:  # last step first, so that an interrupted call leaves no gap
            storage.remove_directory(directory)


def read_trained_batch(kept: Path, step: int) -> tuple[Batch, TrainedBatch]:
    """Return an archived batch and its results, from any attempt of the run.

    Raise `TransportError` if the batch or the results are missing or damaged.
    """
    directory = storage.step_directory(kept, step)
    owner = _owner(directory)
    batch = read_batch(kept, step, identity=owner) if owner is not None else None
    if batch is None:
        raise TransportError(
            f"{directory} does not exist: batch {step} was not kept, or not trained on",
            code="BK-RUN-NO-DATA",
            hint="raise trainer.trained.keep and trainer.trained.max_bytes to keep more batches",
        )
    try:
        arrays = load((directory / TRAINED).read_bytes())
        record = storage.read_json(directory / RECORD)
        trained = TrainedBatch(samples=arrays["samples"], logprobs=arrays["logprobs"], record=record)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise _damage_error(f"the results of batch {step} in {directory} cannot be read: {error}") from None
    return batch, trained


def pack_samples(samples: Sequence[Sample]) -> bytes:
    """Return samples as bytes in safetensors format. Raise `TransportError` for arrays of unequal length."""
    return b"".join((_header(samples), *_columns(samples)))


def _header(samples: Sequence[Sample]) -> bytes:
    """Return the start of a file in safetensors format, up to the data.

    Raise `TransportError` for arrays of unequal length.
    """
    for index, sample in enumerate(samples):
        lengths = {name: len(getattr(sample, name)) for name in _DTYPES}
        if len(set(lengths.values())) != 1 or not len(sample.token_ids):
            raise _damage_error(
                f"sample {index} of the batch is empty, or its arrays differ in length: {lengths}"
            )
    rows = dict.fromkeys(_DTYPES, sum(len(sample.token_ids) for sample in samples))
    rows = dict.fromkeys(_SAMPLE_DTYPES, len(samples)) | rows
    entries, start = dict[str, Any](), 0
    for name, dtype in (_SAMPLE_DTYPES | _DTYPES).items():
        end = start + rows[name] * np.dtype(dtype).itemsize
        entries[name] = {"dtype": _NAMES[dtype], "shape": [rows[name]], "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _columns(samples: Sequence[Sample]) -> Iterator[memoryview]:
    """Yield the data in the order of the header."""
    yield np.array([len(s.token_ids) for s in samples], np.int64).data
    yield np.array([s.temperature for s in samples], np.float64).data
    yield np.array([s.group for s in samples], np.int64).data
    for name, dtype in _DTYPES.items():
        for sample in samples:
            yield np.ascontiguousarray(getattr(sample, name), dtype).data


def unpack_samples(data: bytes) -> tuple[Sample, ...]:
    """Unpack the bytes that `pack_samples` returned, and return the samples."""
    arrays = load(data)
    ends = np.cumsum(arrays["lengths"])[:-1]
    columns = {name: np.split(arrays[name], ends) for name in _DTYPES}
    return tuple(
        Sample(
            temperature=float(temperature), group=int(group), **{name: columns[name][i] for name in _DTYPES}
        )
        for i, (temperature, group) in enumerate(zip(arrays["temperatures"], arrays["groups"], strict=True))
    )


def _owner(directory: Path) -> RunIdentity | None:
    try:
        manifest = storage.read_json(directory / MANIFEST)
        return RunIdentity(run_id=manifest["run_id"], attempt=manifest["attempt"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _damage_error(message: str) -> TransportError:
    return TransportError(message, code="BK-BATCH")
