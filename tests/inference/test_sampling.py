"""Sampling of tokens: distribution, log-probs and random state."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from buckeye.inference.engine.sampling import SamplingBatch, mix, sample, uniforms

PLAIN = SamplingBatch(inverse_temperature=None, greedy=None, top_k=None, top_p=None)


def truncation(count, vocab, *, top_k=None, top_p=None):
    return SamplingBatch(
        inverse_temperature=None,
        greedy=None,
        top_k=torch.full((count, 1), top_k or vocab),
        top_p=torch.full((count, 1), top_p or 2.0, dtype=torch.float64),
    )


def draw(probabilities, batch=PLAIN, count=40_000):
    logits = torch.tensor(probabilities).log().repeat(count, 1)
    random = torch.from_numpy(uniforms(mix(np.arange(count, dtype=np.uint64)), np.full(count, 7)))
    return sample(logits, batch, random)


def chi_square(counts, probabilities):
    expected = np.array(probabilities) * counts.sum()
    used = expected > 0
    assert not counts[~used].any()
    return float((((counts - expected) ** 2)[used] / expected[used]).sum()), int(used.sum()) - 1


@pytest.mark.parametrize("vocab", [5, 64, 130])
def test_tokens_have_the_distribution_of_the_logits(vocab):
    probabilities = np.random.default_rng(0).dirichlet(np.ones(vocab) * 0.8)
    tokens, logprobs = draw(probabilities.tolist())
    statistic, freedom = chi_square(np.bincount(tokens.numpy(), minlength=vocab), probabilities)
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)  # about 1 in 10^4 fail; the draw is fixed
    assert logprobs.numpy() == pytest.approx(np.log(probabilities)[tokens.numpy()], abs=1e-5)


def test_top_k_and_top_p_keep_the_right_tokens_and_rescale():
    probabilities = [0.1, 0.4, 0.05, 0.25, 0.2]
    tokens, logprobs = draw(probabilities, truncation(40_000, 5, top_k=3))
    assert set(tokens.tolist()) == {1, 3, 4}
    assert logprobs[tokens == 1][0].item() == pytest.approx(math.log(0.4 / 0.85), abs=1e-6)
    tokens, logprobs = draw(probabilities, truncation(40_000, 5, top_p=0.6))
    assert set(tokens.tolist()) == {1, 3}  # 0.4 alone is below 0.6; 0.4 + 0.25 is not
    assert logprobs[tokens == 3][0].item() == pytest.approx(math.log(0.25 / 0.65), abs=1e-6)
    tokens, _ = draw(probabilities, truncation(40_000, 5, top_k=3, top_p=0.45))
    assert set(tokens.tolist()) == {1}  # top-p applies after top-k: 0.4 / 0.85 is above 0.45


def test_rows_of_one_batch_keep_their_own_settings():
    logits = torch.tensor([[0.0, 1.0, 2.0]] * 4)
    batch = SamplingBatch(
        inverse_temperature=torch.tensor([[1.0], [2.0], [1.0], [1.0]]),
        greedy=torch.tensor([True, False, False, False]),
        top_k=torch.tensor([[3], [3], [1], [3]]),
        top_p=torch.tensor([[2.0], [2.0], [2.0], [2.0]], dtype=torch.float64),
    )
    tokens, logprobs = sample(logits.clone(), batch, torch.zeros(4, dtype=torch.float64))
    assert tokens.tolist() == [2, 0, 2, 0]  # a draw of 0 picks the first token with a nonzero weight
    plain, halved = logits[0].log_softmax(-1), (2 * logits[0]).log_softmax(-1)
    assert logprobs.tolist() == pytest.approx(
        [plain[2].item(), halved[0].item(), 0.0, plain[0].item()], abs=1e-6
    )


@given(
    logits=st.lists(st.floats(-40, 40, width=32) | st.just(float("-inf")), min_size=1, max_size=200).filter(
        lambda values: max(values) > float("-inf")
    ),
    number=st.sampled_from([0.0, 1 - 2**-53, 0.5, 2**-53]) | st.floats(0, 1, exclude_max=True),
)
def test_sampled_token_has_a_positive_probability(logits, number):
    tokens, logprobs = sample(torch.tensor([logits]), PLAIN, torch.tensor([number], dtype=torch.float64))
    assert 0 <= tokens[0] < len(logits)
    assert logits[tokens[0]] > float("-inf")
    assert torch.isfinite(logprobs).all()
    expected = torch.tensor(logits, dtype=torch.float64).log_softmax(-1)[tokens[0]]
    assert logprobs[0].item() == pytest.approx(expected.item(), abs=1e-4)


def test_last_tokens_of_a_large_vocabulary_are_sampled():
    vocab = 151_936
    tokens, _ = draw([1 / vocab] * vocab, count=64)
    assert tokens.float().mean().item() == pytest.approx(vocab / 2, rel=0.2)
    last, _ = sample(torch.zeros(1, vocab), PLAIN, torch.tensor([1 - 2**-53], dtype=torch.float64))
    assert last.item() == vocab - 1


def test_random_numbers_are_uniform_and_depend_on_stream_and_position_only():
    streams = mix(np.arange(1000, dtype=np.uint64))
    grid = np.stack([uniforms(streams, np.full(1000, position)) for position in range(50)])
    counts = np.histogram(grid, bins=100, range=(0, 1))[0]
    statistic, freedom = chi_square(counts, np.full(100, 0.01))
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)
    for shifted in (
        grid[1:, :] * grid[:-1, :],
        grid[:, 1:] * grid[:, :-1],
    ):  # neither neighbor affects the row
        assert shifted.mean() == pytest.approx(0.25, abs=0.005)
    assert uniforms(streams[3:4], np.array([49]))[0] == grid[49, 3]
    assert len(np.unique(grid)) == grid.size
