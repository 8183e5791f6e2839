"""Batches, which the orchestrator writes for the trainer, and the archive of trained batches.

A batch is in `<root>/step_<N>/{batch.safetensors, header.msgpack, manifest.json}`. The manifest has the
SHA-256 of the header, and the header has the SHA-256 of each sample. So a rank of the trainer reads and
verifies only the header and the samples that it computes.

Training on batch N, counted from 0, turns version N of the weights into version N + 1. A trained batch is
moved to `<kept>/step_<N>/`. The trainer adds its results as `trained.safetensors` and `record.json`. An
archived batch has at most 21 bytes per token, plus metadata.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import RawIOBase
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load, save

from buckeye.base import storage
from buckeye.base.disk import size_of
from buckeye.base.process import RunIdentity
from buckeye.errors import TransportError
from buckeye.transport.batch_header import (
    BatchHeader,
    SampleFacts,
    Tokens,
    UnreadTokens,
    order_tokens,
    sample_facts,
)

MANIFEST = "manifest.json"
HEADER = "header.msgpack"
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


class BatchDamageError(TransportError):
    """A file of a batch is missing, or differs from the written one."""

    code = "BK-BATCH"


@dataclass(frozen=True, kw_only=True, eq=False)
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

    @cached_property
    def facts(self) -> SampleFacts:
        """Facts about the arrays."""
        return sample_facts(**{name: getattr(self, name) for name in _DTYPES})

    @property
    def tokens(self) -> Tokens | UnreadTokens:
        """Token sequence, to plan with."""
        return self.token_ids


class StoredSample(Sample):
    """Sample number `index` of a batch on disk. Its arrays are read when they are first used."""

    files: _BatchFiles
    index: int

    def __init__(self, files: _BatchFiles, index: int) -> None:
        header = files.header
        self.__dict__.update(
            files=files,
            index=index,
            facts=header.facts[index],
            temperature=header.temperatures[index],
            group=header.groups[index],
        )

    def __getattr__(self, name: str) -> Any:
        if name not in _DTYPES:
            raise AttributeError(name)
        read_samples([self])
        return self.__dict__[name]

    @property
    def is_read(self) -> bool:
        """True if the arrays are in memory."""
        return "token_ids" in self.__dict__

    @property
    def tokens(self) -> UnreadTokens:
        """Token sequence, to plan with."""
        order = self.files.header.order
        return UnreadTokens(
            length=self.facts.length,
            rank=order.ranks[self.index],
            order=order,
            read=lambda: self.token_ids,
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """Samples of one step.

    `orchestrator_state` is the JSON state of the orchestrator after this batch. The trainer writes it to a
    checkpoint, together with its own state.
    """

    step: int
    samples: tuple[Sample, ...]
    orchestrator_state: Mapping[str, Any]


def write_batch(root: Path, batch: Batch, *, identity: RunIdentity, durable: bool = True) -> Path:
    """Write a batch, and return its directory. Raise `TransportError` for arrays of unequal length.

    Without `durable`, a crash of the machine may damage the batch.
    """
    _check_lengths(batch.samples)

    def fill(directory: Path) -> None:
        header = msgspec.msgpack.encode(_make_header(batch.samples))
        (directory / HEADER).write_bytes(header)
        with (directory / DATA).open("wb") as file:  # in parts, so that other threads can run
            file.write(_layout(len(batch.samples), sum(len(s.token_ids) for s in batch.samples))[0])
            file.writelines(_columns(batch.samples))
        manifest = {
            "run_id": identity.run_id,
            "attempt": identity.attempt,
            "step": batch.step,
            "samples": len(batch.samples),
            "header_sha256": hashlib.sha256(header).hexdigest(),
            "orchestrator_state": batch.orchestrator_state,
        }
        (directory / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")

    final = storage.step_directory(root, batch.step)
    storage.write_directory(final, fill, replace=True, durable=durable)
    return final


def batch_bytes(batch: Batch) -> int:
    """Return the approximate size of a batch on disk, without the orchestrator's state."""
    bytes_per_token = sum(np.dtype(dtype).itemsize for dtype in _DTYPES.values())
    return bytes_per_token * sum(len(sample.token_ids) for sample in batch.samples)


def read_batch(root: Path, step: int, *, identity: RunIdentity) -> Batch | None:
    """Return the batch of a step, or None if it does not exist, or another run or attempt wrote it.

    Raise `BatchDamageError` if the batch is damaged.
    """
    found = read_header(root, step, identity=identity)
    if found is None:
        return None
    batch = open_batch(root, step, *found)
    read_samples(batch.samples)
    return batch


def read_header(root: Path, step: int, *, identity: RunIdentity) -> tuple[bytes, Mapping[str, Any]] | None:
    """Return the header of the batch of a step and the orchestrator's state, as for `open_batch`.

    Return None if the batch does not exist, or another run or attempt wrote it. Raise `BatchDamageError` if a
    file is missing or damaged. The samples are not read.
    """
    directory = storage.step_directory(root, step)
    try:
        manifest = storage.read_json(directory / MANIFEST)
        if (manifest["run_id"], manifest["attempt"]) != (identity.run_id, identity.attempt):
            return None
        header = (directory / HEADER).read_bytes()
        if hashlib.sha256(header).hexdigest() != manifest["header_sha256"]:
            raise BatchDamageError(
                f"{directory / HEADER} is damaged: its SHA-256 differs from the written one"
            )
        return header, manifest["orchestrator_state"]
    except FileNotFoundError as error:
        # The file name in the error shows which file was missing. Do not check for the manifest again: the
        # orchestrator may have published the batch meanwhile.
        if Path(error.filename).name == HEADER:
            raise BatchDamageError(
                f"{directory} has no {HEADER}: the file was deleted, or an earlier version wrote the batch"
            ) from None
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BatchDamageError(f"the batch in {directory} cannot be read: {error!r}") from error


def open_batch(
    root: Path, step: int, header: bytes, orchestrator_state: Mapping[str, Any] | None = None
) -> Batch:
    """Return the batch of a step without reading its samples. They are read when they are first used.

    Raise `BatchDamageError` if another version of Buckeye wrote the header.
    """
    directory = storage.step_directory(root, step)
    try:
        decoded = msgspec.msgpack.decode(header, type=BatchHeader)
    except msgspec.DecodeError as error:
        raise BatchDamageError(f"another version wrote {directory / HEADER}: {error}") from None
    files = _BatchFiles.of(directory, decoded)
    samples = tuple(StoredSample(files, index) for index in range(len(decoded.facts)))
    return Batch(step=step, samples=samples, orchestrator_state=orchestrator_state or {})


def read_samples(samples: Iterable[Sample]) -> None:
    """Read and verify those samples of a batch that are not in memory yet.

    Raise `BatchDamageError` if one is damaged.
    """
    unread = {s.index: s for s in samples if isinstance(s, StoredSample) and not s.is_read}
    if unread:
        files = next(iter(unread.values())).files
        for index, arrays in files.read(sorted(unread)):
            unread[index].__dict__.update(arrays)


@dataclass(frozen=True, slots=True, eq=False)
class _BatchFiles:
    """Files of a batch on disk. `starts` has the position in the data file of each column.

    Sample i has the tokens from `ends[i]` to `ends[i + 1]` of each column.
    """

    data: Path
    header: BatchHeader
    starts: Mapping[str, int]
    ends: Sequence[int]

    @classmethod
    def of(cls, directory: Path, header: BatchHeader) -> _BatchFiles:
        ends = [0, *accumulate(facts.length for facts in header.facts)]
        return cls(directory / DATA, header, _layout(len(header.facts), ends[-1])[1], ends)

    def read(self, indices: Sequence[int]) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Yield the arrays of samples, which are verified. `indices` are in ascending order.

        Neighbors are read at once, and their arrays are views of one array per column.
        """
        try:
            with self.data.open("rb", buffering=0) as file:
                for _, run in groupby(enumerate(indices), lambda pair: pair[1] - pair[0]):
                    members = [index for _, index in run]
                    first, last = self.ends[members[0]], self.ends[members[-1] + 1]
                    columns = {name: np.zeros(last - first, dtype) for name, dtype in _DTYPES.items()}
                    for name, column in columns.items():
                        file.seek(self.starts[name] + first * column.itemsize)
                        _read_into(file, column.data.cast("B"))
                    for index in members:
                        begin, end = self.ends[index] - first, self.ends[index + 1] - first
                        arrays = {name: column[begin:end] for name, column in columns.items()}
                        if _sha256(arrays) != self.header.sha256[index]:
                            raise BatchDamageError(
                                f"{self.data} is damaged: the SHA-256 of sample {index} differs from the "
                                "written one"
                            )
                        yield index, arrays
        except OSError as error:
            raise BatchDamageError(f"{self.data} cannot be read: {error.strerror}") from error


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
        write_batch(root, batch, identity=identity, durable=False)
    arrays = {"samples": trained.samples, "logprobs": trained.logprobs}
    (source / TRAINED).write_bytes(save(arrays))
    (source / RECORD).write_text(json.dumps(trained.record), encoding="utf-8")
    storage.remove_directory(final)
    kept.mkdir(exist_ok=True)
    source.rename(final)


def prune_trained_batches(kept: Path, *, keep: int | None, max_bytes: int) -> None:
    """Delete the oldest trained batches beyond `keep` batches or `max_bytes` bytes."""
    for number, directory in enumerate(reversed(storage.step_directories(kept).values())):
        max_bytes -= size_of(directory)
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
        raise BatchDamageError(
            f"the results of batch {step} in {directory} cannot be read: {error}"
        ) from None
    return batch, trained


def _read_into(file: RawIOBase, buffer: memoryview) -> None:
    """Read until `buffer` is full or the file ends. A single read has a limit of 2 GiB."""
    while buffer and (count := file.readinto(buffer)):
        buffer = buffer[count:]


def _check_lengths(samples: Sequence[Sample]) -> None:
    for index, sample in enumerate(samples):
        lengths = {name: len(getattr(sample, name)) for name in _DTYPES}
        if len(set(lengths.values())) != 1 or not len(sample.token_ids):
            raise TransportError(
                f"sample {index} of the batch is empty, or its arrays differ in length: {lengths}",
                code="BK-BATCH",
            )


def _make_header(samples: Sequence[Sample]) -> BatchHeader:
    arrays = [{name: _array(sample, name) for name in _DTYPES} for sample in samples]
    return BatchHeader(
        facts=[sample_facts(**columns) for columns in arrays],
        temperatures=[float(sample.temperature) for sample in samples],
        groups=[int(sample.group) for sample in samples],
        sha256=[_sha256(columns) for columns in arrays],
        order=order_tokens([columns["token_ids"] for columns in arrays]),
    )


def _array(sample: Sample, name: str) -> npt.NDArray[Any]:
    return np.ascontiguousarray(getattr(sample, name), _DTYPES[name])


def _sha256(arrays: Mapping[str, npt.NDArray[Any]]) -> bytes:
    digest = hashlib.sha256()
    for name in _DTYPES:
        digest.update(arrays[name].data)
    return digest.digest()


def _layout(samples: int, tokens: int) -> tuple[bytes, dict[str, int]]:
    """Return the start of a data file in safetensors format, and the position of each column in the file."""
    rows = dict.fromkeys(_SAMPLE_DTYPES, samples) | dict.fromkeys(_DTYPES, tokens)
    entries, starts, end = dict[str, Any](), dict[str, int](), 0
    for name, dtype in (_SAMPLE_DTYPES | _DTYPES).items():
        starts[name], end = end, end + rows[name] * np.dtype(dtype).itemsize
        entries[name] = {"dtype": _NAMES[dtype], "shape": [rows[name]], "data_offsets": [starts[name], end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, {name: s + 8 + len(text) for name, s in starts.items()}


def _columns(samples: Sequence[Sample]) -> Iterator[memoryview]:
    """Yield the data in the order of the layout."""
    yield np.array([len(s.token_ids) for s in samples], np.int64).data
    yield np.array([s.temperature for s in samples], np.float64).data
    yield np.array([s.group for s in samples], np.int64).data
    for name in _DTYPES:
        for sample in samples:
            yield _array(sample, name).data


def _owner(directory: Path) -> RunIdentity | None:
    try:
        manifest = storage.read_json(directory / MANIFEST)
        return RunIdentity(run_id=manifest["run_id"], attempt=manifest["attempt"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
