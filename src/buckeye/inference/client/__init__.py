"""Client of one or several inference servers. This package does not import torch."""

from buckeye.inference.client.client import InferenceClient, SamplingSession
from buckeye.inference.client.replica import ReplyTimeoutError
from buckeye.inference.client.weight_update import Broadcast
from buckeye.inference.types import Generation, SamplingParams

__all__ = [
    "Broadcast",
    "Generation",
    "InferenceClient",
    "ReplyTimeoutError",
    "SamplingParams",
    "SamplingSession",
]
