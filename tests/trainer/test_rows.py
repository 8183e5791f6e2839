"""Packed rows: positions of tokens, shared prefixes, and the attention mask."""

import numpy as np
import pytest
import torch

from buckeye.errors import TransportError
from buckeye.trainer.data.packing import pack_micro_batch
from buckeye.trainer.model.attention import packed_attention

CPU = torch.device("cpu")


def _row(samples, trained_from, **options):
    arrays = [np.array(ids, dtype=np.int32) for ids in samples]
    masks = [np.arange(len(ids)) >= trained_from for ids in arrays]
    return pack_micro_batch(arrays, masks, CPU, **options)


def test_shared_prefix_is_in_the_row_once():
    row = _row([[1, 2, 3, 4, 5], [9, 8], [1, 2, 3, 4, 6, 7]], 4)
    # alone, prefix, then the longer suffix first
    assert row.token_ids.tolist() == [9, 8, 1, 2, 3, 4, 6, 7, 5]
    assert row.position_ids.tolist() == [0, 1, 0, 1, 2, 3, 4, 5, 4]
    assert row.row_indices.tolist() == [2, 3, 4, 5, 8, 0, 1, 2, 3, 4, 5, 6, 7]
    assert row.targets.tolist() == [5, 6, 7]
    assert row.sources.tolist() == [5, 5, 6]
    assert row.sequences.tolist() == [0, 2, 2]


def test_without_sharing_every_sample_is_whole():
    row = _row([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6, 7]], 4, share_prefixes=False)
    assert row.token_ids.tolist() == [1, 2, 3, 4, 6, 7, 1, 2, 3, 4, 5]
    assert row.sources.tolist() == [9, 3, 4]


def test_varlen_layout():
    layout = _row([[1, 2, 3, 4, 5], [9, 8], [1, 2, 3, 4, 6, 7]], 4).layout
    assert layout.query_ends.tolist() == [0, 2, 6, 8, 9]
    assert layout.key_ends.tolist() == [0, 2, 6, 12, 17]
    assert layout.keys.tolist() == [0, 1, *range(2, 6), *range(2, 8), *range(2, 6), 8]
    assert (layout.longest_query, layout.longest_keys) == (4, 6)


def test_one_token():
    row = _row([[7]], 1)
    assert (row.token_ids.tolist(), len(row.targets)) == ([7], 0)


def test_trained_first_token_is_refused():
    with pytest.raises(TransportError, match="first token"):
        _row([[1, 2]], 0)


@pytest.mark.parametrize("window", [None, 3])
def test_a_token_sees_its_own_sample_up_to_itself(window):
    """With zero scores, a token's output is the mean of the values that it attends to."""
    samples = [[1, 2, 3, 4, 5, 6], [9, 8, 7], [1, 2, 3, 4, 7]]
    row = _row(samples, 5)
    values = torch.arange(len(row.token_ids), dtype=torch.float32).view(1, 1, -1, 1).expand(1, 1, -1, 2)
    for dtype in (torch.float32, torch.bfloat16):
        zeros = torch.zeros_like(values, dtype=dtype)
        output, _ = packed_attention(
            torch.nn.Identity(),
            zeros,
            zeros,
            values.to(dtype),
            None,
            layout=row.layout,
            scaling=1.0,
            sliding_window=window,
        )
        start = 0
        for ids in samples:
            places = row.row_indices[start : start + len(ids)]
            start += len(ids)
            for position, place in enumerate(places):
                first = 0 if window is None else max(0, position + 1 - window)
                expected = places[first : position + 1].float().mean()
                torch.testing.assert_close(
                    output[0, place, 0, 0].float(),
                    expected,
                    rtol=0.01 if dtype == torch.bfloat16 else 1e-6,
                    atol=0,
                )
