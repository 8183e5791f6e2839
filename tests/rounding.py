"""Bound of the difference that rounding alone causes between two computations of log-probs."""

import math

import torch

_PRODUCTS = 6  # of a layer, in sequence: key, score, value, output, up, down
_SIZE = 8.0  # of the logits and log-probs of a model with sharp distributions


def logprob_error(*, layers, width, dtype=torch.float32):
    """Return the bound for a model with `layers` layers and sums of up to `width` terms, computed in `dtype`.

    The rounding errors of a sum of n terms have random signs, so they grow with sqrt(n). Consecutive matrix
    products, those of each layer and of the vocabulary, add their errors. The order and grouping of the terms
    differ between processors, batch sizes and libraries.
    """
    return torch.finfo(dtype).eps * math.sqrt(width) * (_PRODUCTS * layers + 1) * _SIZE
