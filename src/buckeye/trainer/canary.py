"""What the present weights say about a fixed prompt; the engines are asked the same after an update."""

from __future__ import annotations

import torch

from buckeye.trainer.model.policy import Policy
from buckeye.transport.weights import Canary

_PROMPT_TOKENS = 8
_TOKENS = 4


@torch.no_grad()
def greedy_canary(policy: Policy, stored: torch.dtype = torch.float32) -> Canary:
    """The four most likely tokens, one after the other, after eight that are spread over the vocabulary, as
    precise as the weights that are `stored`."""
    training = policy.model.training
    policy.model.eval()  # an adapter may have dropout
    vocabulary = policy.model.config.vocab_size
    prompt = [i * vocabulary // _PROMPT_TOKENS for i in range(_PROMPT_TOKENS)]
    tokens: list[int] = []
    logprobs: list[float] = []
    for _ in range(_TOKENS):
        ids = torch.tensor([*prompt, *tokens], device=policy.device)
        hidden = policy.hidden_states(ids, [len(ids)])[-1]
        best = (policy.head_weight.to(hidden.dtype) @ hidden).float().log_softmax(-1).max(-1)
        tokens.append(int(best.indices))
        logprobs.append(float(best.values))
    policy.model.train(training)
    return Canary(
        dtype=str(min(policy.compute_dtype, stored, key=lambda dtype: dtype.itemsize)).removeprefix("torch."),
        prompt_ids=prompt,
        token_ids=tokens,
        logprobs=logprobs,
    )
