"""The chunked head gives the values and gradients of the naive one, and holds few logits at a time."""

import math

import pytest
import torch

from buckeye.trainer.model.logprobs import token_logprobs


def _naive(hidden, weight, targets, temperatures):
    log_p = torch.log_softmax(hidden @ weight.t() / temperatures[:, None], -1)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_equals_the_naive_head_in_float64(chunk):
    torch.manual_seed(0)
    hidden = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 5, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 11, (7,))
    temperatures = torch.tensor([1.0, 0.5, 2.0, 1.0, 0.7, 1.0, 1.3], dtype=torch.float64)
    upstream = torch.randn(2, 7, dtype=torch.float64)
    results = []
    for function in (_naive, lambda *args: token_logprobs(*args, chunk=chunk)):
        hidden.grad = weight.grad = None
        logprobs, entropies = function(hidden, weight, targets, temperatures)
        (upstream[0] @ logprobs + upstream[1] @ entropies).backward()
        results.append((logprobs, entropies, hidden.grad, weight.grad))
    for naive, chunked in zip(*results, strict=True):
        torch.testing.assert_close(chunked, naive, rtol=1e-12, atol=1e-12)


def test_the_gradient_of_a_half_precision_weight_is_summed_in_float32():
    torch.manual_seed(0)
    hidden, weight = torch.randn(2048, 8).bfloat16(), torch.randn(11, 8).bfloat16()
    targets, ones = torch.randint(0, 11, (2048,)), torch.ones(2048)
    gradients = []
    for chunk in (2048, 8):  # 256 sums in bfloat16 would give a relative difference of about 0.1
        weight = weight.detach().requires_grad_()
        token_logprobs(hidden, weight, targets, ones, chunk=chunk)[0].sum().backward()
        gradients.append(weight.grad.float())
    assert weight.grad.dtype == torch.bfloat16
    assert (gradients[1] - gradients[0]).norm() / gradients[0].norm() < 0.01


def test_by_hand():
    # logits 0 and ln 3 at temperature 1: probabilities 1/4 and 3/4
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[0.0], [math.log(3.0)]])
    logprobs, entropies = token_logprobs(hidden, weight, torch.tensor([1]), torch.tensor([1.0]))
    assert logprobs.item() == pytest.approx(math.log(0.75))
    assert entropies.item() == pytest.approx(-0.25 * math.log(0.25) - 0.75 * math.log(0.75))


def test_no_tokens():
    hidden = torch.randn(0, 4, requires_grad=True)
    logprobs, _ = token_logprobs(hidden, torch.randn(9, 4), torch.zeros(0, dtype=torch.long), torch.ones(0))
    logprobs.sum().backward()
    assert hidden.grad.shape == (0, 4)


def test_never_holds_all_logits(monkeypatch):
    largest = 0
    real = torch.log_softmax

    def spy(logits, dim, out):
        nonlocal largest
        largest = max(largest, logits.numel())
        return real(logits, dim, out=out)

    monkeypatch.setattr(torch, "log_softmax", spy)
    hidden = torch.randn(1000, 4, requires_grad=True)
    weight = torch.randn(50_000, 4, requires_grad=True)
    logprobs, _ = token_logprobs(hidden, weight, torch.zeros(1000, dtype=torch.long), torch.ones(1000))
    logprobs.sum().backward()
    assert 0 < largest * 4 <= 128 * 2**20


@pytest.mark.parametrize("chunk", [7, 64])
def test_bfloat16_gradient_of_a_vocabulary_of_several_blocks(chunk):
    """The weight's gradient is summed in float32, block by block of its rows."""
    torch.manual_seed(0)
    hidden = torch.randn(29, 16, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(9001, 16).div_(4).requires_grad_()
    targets, temperatures = torch.randint(0, 9001, (29,)), torch.full((29,), 0.8)
    logprobs, _ = token_logprobs(hidden, weight, targets, temperatures, chunk=chunk)
    factors = torch.randn(29)
    (logprobs * factors).sum().backward()
    exact = weight.detach().bfloat16().float().requires_grad_()
    logits = hidden.detach().float() @ exact.T / 0.8
    (logits.log_softmax(-1).gather(1, targets[:, None])[:, 0] * factors).sum().backward()
    assert weight.grad.dtype is torch.float32
    assert (weight.grad - exact.grad).norm() / exact.grad.norm() < 0.01
    rows = (weight.grad - exact.grad).norm(dim=1) / exact.grad.norm(dim=1)
    assert rows.max() < 0.05
