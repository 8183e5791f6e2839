"""Shards of tensors in several files: read completely or in part, complete or not."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from buckeye.errors import CheckpointError
from buckeye.trainer.parallel.shards import load_shards
from tests.ports import free_port


def write_shards(directory, parts):
    """Write shards; `parts` maps names to (piece, its offset in the whole tensor) for each rank."""
    directory.mkdir()
    for rank, part in enumerate(parts, start=1):
        offsets = json.dumps({name: {"saved_offsets": offset} for name, (_, offset) in part.items()})
        save_file(
            {name: piece.contiguous() for name, (piece, _) in part.items()},
            directory / f"shard-{rank:05}-model-00001-of-00001.safetensors",
            metadata={"DCP_SHARDING_INFO": offsets},
        )


def cuts(length: int) -> st.SearchStrategy[list[int]]:
    inner = st.sets(st.integers(1, length - 1), max_size=3) if length > 1 else st.just(set())
    return inner.map(lambda found: [0, *sorted(found), length])


@settings(max_examples=25)
@given(st.data(), st.integers(1, 7), st.integers(1, 5))
def test_shards_of_any_grid_load_as_the_tensor(tmp_path_factory, data, rows, columns):
    whole = torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns)
    grid = list(product(pairwise(data.draw(cuts(rows))), pairwise(data.draw(cuts(columns)))))
    parts = [{"w": (whole[top:bottom, left:right], (top, left))} for (top, bottom), (left, right) in grid]
    parts[0]["w/step"] = (torch.tensor(4.0), ())
    parts[0]["w/code"] = (torch.arange(3, dtype=torch.uint8), (0,))
    directory = tmp_path_factory.mktemp("state") / "optimizer"
    write_shards(directory, parts)
    loaded = load_shards(directory, lambda name: None)
    assert loaded.keys() == {"w", "w/step", "w/code"}
    assert torch.equal(loaded["w"], whole)
    assert loaded["w/step"] == 4
    assert loaded["w/code"].tolist() == [0, 1, 2]


def test_missing_or_damaged_shard_is_refused(tmp_path, refusal):
    whole = torch.ones(4, 2)
    directory = tmp_path / "optimizer"
    write_shards(directory, [{"w": (whole[:2], (0, 0))}, {"w": (whole[2:], (2, 0))}])
    assert load_shards(directory, lambda name: None)["w"].shape == (4, 2)
    one, two = sorted(directory.iterdir())
    content = one.read_bytes()
    one.unlink()
    with refusal(CheckpointError):
        load_shards(directory, lambda name: None)
    one.write_bytes(content)
    two.write_bytes(b"\0" * 20)
    with pytest.raises(CheckpointError) as caught:
        load_shards(directory, lambda name: None)
    assert str(directory) in str(caught.value)


SAVE = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from buckeye.errors import CheckpointError
from buckeye.launch.preflight.model import fetch_model
from buckeye.trainer.parallel.shards import copy_to_cpu, create_checkpoint_group, load_shards, save_shards

rank, port, directory = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=4)
mesh = init_device_mesh("cpu", (2, 2))
whole = torch.arange(15.0).reshape(5, 3)
local = distribute_tensor(whole.clone(), mesh, [Replicate(), Shard(0)])
tensors = {
    "rows": local,
    "both": distribute_tensor(whole.clone(), mesh, [Shard(1), Shard(0)]),
    "short": distribute_tensor(torch.ones(1), mesh, [Replicate(), Shard(0)]),
    "step": torch.tensor(7.0),
}
copies = copy_to_cpu(tensors)
local.to_local().zero_()
group = create_checkpoint_group(timeout_seconds=60)
save_shards(directory, copies, group)
dist.barrier()
loaded = load_shards(directory, {"rows": tensors["both"], "both": None, "short": local}.get)
assert loaded["rows"].placements == tensors["both"].placements
assert torch.equal(loaded["rows"].full_tensor(), whole)
assert torch.equal(loaded["both"], whole)
assert loaded["short"].tolist() == [1.0] and loaded["step"] == 7
dist.barrier()
if rank == 0:
    (directory.parent / "file").write_text("")
dist.barrier()
try:
    save_shards(directory.parent / "file", copies, group)
except CheckpointError as error:
    assert "rank 3" in str(error), error
else:
    raise AssertionError("not raised")
dist.destroy_process_group()
"""


@pytest.mark.e2e
def test_four_ranks_save_and_load_shards(tmp_path):
    port = str(free_port())
    processes = [
        subprocess.Popen([sys.executable, "-c", SAVE, str(rank), port, str(tmp_path / "optimizer")])
        for rank in range(4)
    ]
    assert [process.wait() for process in processes] == [0] * 4
    suffixes = [path.suffix for path in (tmp_path / "optimizer").iterdir()]
    assert suffixes == [".safetensors"] * 4  # no pickle
