"""Client of one or several inference servers. This package does not import torch."""

from buckeye.inference.client.client import InferenceClient, SamplingSession
from buckeye.inference.client.replica import ReplyTimeoutError
from buckeye.inference.types import Generation, SamplingParams

__all__ = ["Generation", "InferenceClient", "ReplyTimeoutError", "SamplingParams", "SamplingSession"]
