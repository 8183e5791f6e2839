"""Pieces of tensors in several files: put together, read in part, complete or not."""

from __future__ import annotations

import json
import threading
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from buckeye.errors import CheckpointError
from buckeye.transport.checkpoint.shards import (
    Region,
    await_parts,
    complete_model,
    finish_part,
    has_shards,
    part_path,
    read_shards,
)

TOKEN = 7


def write_shards(state: Path, parts: list[dict[str, tuple[np.ndarray, tuple[int, ...], tuple[int, ...]]]]):
    """`parts`: for each rank name -> (piece, shape of the whole, where the piece begins)."""
    directory = state / "shards"
    directory.mkdir(parents=True)
    for rank, part in enumerate(parts):
        save_file(
            {name: np.ascontiguousarray(p) for name, (p, _, _) in part.items()}, part_path(directory, rank)
        )
        finish_part(
            directory, rank, TOKEN, {name: (shape, offset) for name, (_, shape, offset) in part.items()}
        )


def cuts(length: int) -> st.SearchStrategy[list[int]]:
    inner = st.sets(st.integers(1, length - 1), max_size=3) if length > 1 else st.just(set())
    return inner.map(lambda found: [0, *sorted(found), length])


@settings(max_examples=25)
@given(st.data(), st.integers(1, 7), st.integers(1, 5))
def test_any_grid_of_pieces_makes_the_tensor(tmp_path_factory, data, rows, columns):
    whole = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
    vector = np.arange(rows, dtype=np.float32) - 3
    grid = list(product(pairwise(data.draw(cuts(rows))), pairwise(data.draw(cuts(columns)))))
    parts = [
        {"model/w": (whole[top:bottom, left:right], whole.shape, (top, left))}
        for (top, bottom), (left, right) in grid
    ]
    parts[0]["model/v"] = (vector, vector.shape, (0,))
    parts[0]["optimizer/w/adamw.step"] = (np.float32(4).reshape(()), (), ())
    state = tmp_path_factory.mktemp("state")
    write_shards(state, parts)
    (state / "model").mkdir()
    (state / "model" / "config.json").write_text("{}")
    directory = complete_model(state)
    merged = {
        name: array for path in directory.glob("*.safetensors") for name, array in load_file(path).items()
    }
    assert merged.keys() == {"w", "v"}
    np.testing.assert_array_equal(merged["w"], whole)
    np.testing.assert_array_equal(merged["v"], vector)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * (whole.size + vector.size)
    assert (directory / "config.json").exists()
    before = (directory / "model.safetensors.index.json").stat().st_mtime_ns
    assert complete_model(state) == directory  # once is enough
    assert (directory / "model.safetensors.index.json").stat().st_mtime_ns == before


@given(st.data())
def test_the_common_part_of_two_boxes(data):
    def box() -> Region:
        numbers = (
            [data.draw(st.integers(0, 6)) for _ in range(2)],
            [data.draw(st.integers(1, 6)) for _ in range(2)],
        )
        return Region(tuple(numbers[0]), tuple(numbers[1]))

    def cells(region: Region) -> set[tuple[int, ...]]:
        ranges = [range(o, o + n) for o, n in zip(region.offset, region.shape, strict=True)]
        return set(product(*ranges))

    one, other = box(), box()
    common = one.common(other)
    assert (cells(common) if common is not None else set()) == cells(one) & cells(other)
    if common is not None:
        field = np.zeros((20, 20), int)
        field[one.within(Region((0, 0), (20, 20)))][common.within(one)] = 1
        assert {tuple(map(int, cell)) for cell in np.argwhere(field)} == cells(common)


def test_a_part_that_is_missing_is_noticed(tmp_path):
    whole = np.ones((4, 2), np.float32)
    parts = [{"model/w": (whole[:2], (4, 2), (0, 0))}, {"model/w": (whole[2:], (4, 2), (2, 0))}]
    write_shards(tmp_path, parts)
    assert has_shards(tmp_path)
    assert read_shards(tmp_path)["model/w"].shape == (4, 2)
    (tmp_path / "shards" / "rank_1.json").unlink()
    with pytest.raises(CheckpointError, match=r"have 4 elements of model/w and not 8: a rank's file"):
        read_shards(tmp_path)
    (tmp_path / "shards" / "rank_0.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_shards(tmp_path)


def test_the_parts_of_all_ranks_are_awaited(tmp_path):
    piece = {"w": np.ones(3, np.float32)}
    for rank, token in ((0, TOKEN), (1, TOKEN - 1)):  # the second is of another attempt
        save_file(piece, part_path(tmp_path, rank))
        finish_part(tmp_path, rank, token, {"w": ((6,), (3 * rank,))})
    late = threading.Timer(0.2, finish_part, (tmp_path, 1, TOKEN, {"w": ((6,), (3,))}))
    with pytest.raises(CheckpointError, match=r"Trainer rank 1 did not write its shards .* within 0.1 s"):
        await_parts(tmp_path, 2, TOKEN, timeout_seconds=0.1)
    late.start()
    hashes = await_parts(tmp_path, 2, TOKEN, timeout_seconds=60)
    late.join()
    assert hashes.keys() == {"rank_0.safetensors", "rank_1.safetensors"}
    assert all(len(digest) == 64 for digest in hashes.values())
