"""How far apart rounding alone may bring two computations of the same log-probs."""

import math

import torch

_PRODUCTS = 6  # of a layer, one after another: key, score, value, output, up, down
_SIZE = 8.0  # of the logits and log-probs of a model whose distributions are sharp


def logprob_error(*, layers, width, dtype=torch.float32):
    """For a model with `layers` layers, whose longest sums have `width` terms, computed in `dtype`.

    The rounding errors of a sum of n terms have either sign, so they grow with sqrt(n). The products of
    matrices that follow one another, of each layer and of the vocabulary, add theirs. In which order terms
    are added, and how many at a time, differs between processors, batch sizes and libraries.
    """
    return torch.finfo(dtype).eps * math.sqrt(width) * (_PRODUCTS * layers + 1) * _SIZE
