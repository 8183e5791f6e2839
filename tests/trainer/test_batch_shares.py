"""Each rank of a trainer reads and verifies only the samples that it computes."""

import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.ranks import launch
from tests.trainer.rl_runs import put, records
from tests.trainer.trainer_config import trainer_config
from tests.waiting import HANG

SCRIPT = Path(__file__).parent / "counting_rank.py"
BYTES_PER_TOKEN = 17


# no token is masked, so rounding cannot change the mask
NO_MASK = {"loss": {"mask_ratio_low": 0.0, "mask_ratio_high": 1e9}}


@pytest.fixture
def many(batches):
    """Two batches of 90 samples in groups of three. A third of the samples have no advantage."""
    rng = np.random.default_rng(1)

    def varied(sample, number):
        ids = rng.integers(0, 256, len(sample.token_ids)).astype(np.int32)
        scale = np.float32(number % 3 > 0)
        return replace(sample, token_ids=ids, advantages=scale * sample.advantages, group=number // 3)

    return [
        replace(batch, samples=tuple(varied(s, i) for i, s in enumerate(batch.samples * 10)))
        for batch in batches[:2]
    ]


def _launch(model, run, **settings):
    config = trainer_config(model, run, **NO_MASK, **settings)
    (run / "config.json").write_text(config.model_dump_json())
    launch(2, str(SCRIPT), str(run / "config.json"))


def _assert_equal_weights(run, other, steps):
    one, two = (load_file(r / "weights" / f"step_{steps}" / "model.safetensors") for r in (run, other))
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=0, atol=1e-3, msg=name)


@pytest.mark.e2e
@pytest.mark.parametrize("settings", [{}, {"mini_batches": 2}])
def test_two_ranks_read_half_of_a_batch_each(tmp_path, train, tiny_model, many, settings):
    train(tmp_path / "one", many, **NO_MASK, **settings)
    put(tmp_path / "two", many)
    _launch(tiny_model, tmp_path / "two", max_steps=2, **settings)
    computed = [s for batch in many for s in batch.samples if s.advantages.any()]
    expected = BYTES_PER_TOKEN * sum(len(s.token_ids) for s in computed)
    read = [int((tmp_path / "two" / f"read_{rank}").read_text()) for rank in range(2)]
    assert expected <= sum(read) <= 1.1 * expected  # some samples twice, to measure the policy change
    assert max(read) <= 0.55 * expected
    _assert_equal_weights(tmp_path / "one", tmp_path / "two", 2)
    for one, two in zip(records(tmp_path / "one"), records(tmp_path / "two"), strict=True):
        for name in ("samples", "tokens", "trained_tokens", "zero_advantage_share", "staleness_mean"):
            assert two[name] == one[name], name


@pytest.mark.e2e
def test_damage_in_the_share_of_a_rank_is_found_by_it_and_all_ranks_wait(
    tmp_path, train, tiny_model, many, capfd
):
    """The batch is written again, as the orchestrator does, and the step is as without damage."""
    batch, two = many[0], tmp_path / "two"
    train(tmp_path / "one", [batch], **NO_MASK)
    put(two, [batch])
    data = two / "batches" / "step_0" / "batch.safetensors"
    content = bytearray(data.read_bytes())
    content[-1] ^= 1  # the loss mask of the last sample
    data.write_bytes(content)
    again = threading.Thread(target=_write_again, args=(two, batch))
    again.start()
    _launch(tiny_model, two, max_steps=1)
    again.join()
    log = capfd.readouterr()
    text = log.out + log.err
    assert text.count("the SHA-256 of sample 89 differs") == 1
    assert text.count("found damage in the batch") == 1
    assert (two / "skipped" / "damaged_step_0" / "batch.safetensors").exists()
    _assert_equal_weights(tmp_path / "one", two, 1)


def _write_again(run, batch):
    deadline = time.monotonic() + HANG
    while (run / "batches" / "step_0").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    put(run, [batch])
