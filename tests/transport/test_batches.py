"""Batches are bitwise equal after transport; those of other runs are ignored, damaged ones are errors."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import load

from buckeye.base import storage
from buckeye.base.process import RunIdentity
from buckeye.errors import TransportError
from buckeye.transport.batches import (
    Batch,
    BatchDamageError,
    Sample,
    TrainedBatch,
    archive_trained_batch,
    open_batch,
    prune_trained_batches,
    read_batch,
    read_header,
    read_samples,
    remove_batch,
    write_batch,
)

ME = RunIdentity(run_id="run", attempt=1)
FIELDS = ("token_ids", "loss_mask", "logprobs", "versions", "advantages")


def make_sample(length: int = 3, temperature: float = 1.0) -> Sample:
    return Sample(
        token_ids=np.arange(length, dtype=np.int32),
        loss_mask=np.arange(length) > 0,
        logprobs=np.full(length, -0.5, np.float32),
        versions=np.zeros(length, np.int32),
        advantages=np.ones(length, np.float32),
        temperature=temperature,
    )


ONE = Batch(step=0, samples=(make_sample(),), orchestrator_state={})


@st.composite
def samples(draw) -> Sample:
    length = draw(st.integers(1, 6))
    floats = hnp.arrays(np.float32, length, elements=st.floats(-10, 10, width=32))
    ints = hnp.arrays(np.int32, length, elements=st.integers(-1, 2**31 - 1))
    return Sample(
        token_ids=draw(ints),
        loss_mask=draw(hnp.arrays(np.bool_, length)),
        logprobs=draw(floats),
        versions=draw(ints),
        advantages=draw(floats),
        temperature=draw(st.floats(0.1, 2.0)),
        group=draw(st.integers(0, 9)),
    )


@settings(max_examples=25)
@given(st.lists(samples(), max_size=4))
def test_round_trip(tmp_path_factory, written):
    root = tmp_path_factory.mktemp("batches")
    state = {"frontier": [1, 2], "name": "ŋ"}
    write_batch(root, Batch(step=5, samples=tuple(written), orchestrator_state=state), identity=ME)
    batch = read_batch(root, 5, identity=ME)
    assert batch is not None
    assert batch.step == 5
    assert batch.orchestrator_state == state
    assert len(batch.samples) == len(written)
    for read, sample in zip(batch.samples, written, strict=True):
        assert (read.temperature, read.group) == (sample.temperature, sample.group)
        assert read.facts == sample.facts
        for name in FIELDS:
            assert getattr(read, name).dtype == getattr(sample, name).dtype
            assert np.array_equal(getattr(read, name), getattr(sample, name))


def test_missing_batch_or_batch_of_another_attempt_is_none(tmp_path):
    assert read_batch(tmp_path, 0, identity=ME) is None
    write_batch(tmp_path, ONE, identity=RunIdentity(run_id="run", attempt=2))
    assert read_batch(tmp_path, 0, identity=ME) is None
    write_batch(tmp_path, ONE, identity=ME)
    assert read_batch(tmp_path, 0, identity=ME) is not None


def test_batch_that_appears_during_the_read_is_none(tmp_path, monkeypatch):
    read_json = storage.read_json

    def too_early(path):
        try:
            return read_json(path)
        except FileNotFoundError:
            write_batch(tmp_path, ONE, identity=ME)
            raise

    monkeypatch.setattr(storage, "read_json", too_early)
    assert read_batch(tmp_path, 0, identity=ME) is None
    assert read_batch(tmp_path, 0, identity=ME) is not None


def test_damage_is_an_error(tmp_path, refusal):
    directory = write_batch(tmp_path, ONE, identity=ME)
    content = bytearray((directory / "batch.safetensors").read_bytes())
    content[-1] ^= 1
    (directory / "batch.safetensors").write_bytes(content)
    with refusal(TransportError):
        read_batch(tmp_path, 0, identity=ME)
    (directory / "batch.safetensors").unlink()
    with refusal(TransportError):
        read_batch(tmp_path, 0, identity=ME)
    header = (directory / "header.msgpack").read_bytes()
    (directory / "header.msgpack").write_bytes(header[:-1])
    with refusal(TransportError):
        read_batch(tmp_path, 0, identity=ME)
    (directory / "header.msgpack").unlink()
    with refusal(TransportError):
        read_batch(tmp_path, 0, identity=ME)
    (directory / "manifest.json").write_text(json.dumps({"run_id": "run"}))
    with refusal(TransportError):
        read_batch(tmp_path, 0, identity=ME)


def test_only_the_used_samples_are_read_and_verified(tmp_path):
    three = Batch(step=0, samples=tuple(make_sample(n) for n in (3, 4, 5)), orchestrator_state={})
    data = write_batch(tmp_path, three, identity=ME) / "batch.safetensors"
    content = bytearray(data.read_bytes())
    content[-6] ^= 1  # the last of the 4 loss masks of the second sample
    data.write_bytes(content)
    header, state = read_header(tmp_path, 0, identity=ME)
    first, second, third = open_batch(tmp_path, 0, header, state).samples
    read_samples([third, first])
    assert (first.loss_mask.tolist(), third.token_ids.tolist()) == ([False, True, True], [0, 1, 2, 3, 4])
    assert (second.facts.length, second.facts.trained_tokens) == (4, 3)
    with pytest.raises(BatchDamageError, match="sample 1 ") as raised:
        read_samples([second])
    assert raised.value.code == "BK-BATCH"
    with pytest.raises(BatchDamageError):
        second.token_ids.sum()


def test_data_file_is_in_safetensors_format(tmp_path):
    directory = write_batch(tmp_path, ONE, identity=ME)
    columns = load((directory / "batch.safetensors").read_bytes())
    assert columns["lengths"].tolist() == [3]
    assert columns["token_ids"].tolist() == [0, 1, 2]
    assert columns["loss_mask"].tolist() == [False, True, True]


@pytest.mark.parametrize("name", FIELDS)
def test_sample_with_unequal_lengths_is_refused(tmp_path, name, refusal):
    arrays = {field: getattr(make_sample(), field) for field in FIELDS}
    arrays[name] = arrays[name][:-1]
    bad = Batch(step=0, samples=(Sample(temperature=1.0, **arrays),), orchestrator_state={})
    with refusal(TransportError):
        write_batch(tmp_path, bad, identity=ME)
    assert list(tmp_path.iterdir()) == []


def test_oldest_trained_batches_are_deleted_also_after_a_loss_of_files(tmp_path):
    for step in range(4):
        results = TrainedBatch(samples=np.zeros(1, np.int32), logprobs=np.zeros(2, np.float32), record={})
        batch = replace(ONE, step=step)
        archive_trained_batch(tmp_path / "batches", tmp_path / "trained", batch, results, identity=ME)
    (tmp_path / "trained" / "step_2" / "batch.safetensors").unlink()
    prune_trained_batches(tmp_path / "trained", keep=2, max_bytes=10**9)
    assert list(storage.step_directories(tmp_path / "trained")) == [2, 3]
    prune_trained_batches(tmp_path / "trained", keep=None, max_bytes=1)
    assert list(storage.step_directories(tmp_path / "trained")) == []


def test_remove(tmp_path):
    write_batch(tmp_path, Batch(step=0, samples=(), orchestrator_state={}), identity=ME)
    remove_batch(tmp_path, 0)
    remove_batch(tmp_path, 0)
    assert list(tmp_path.iterdir()) == []
