"""Client of one or several inference servers. Does not import torch."""

from buckeye.inference.client.client import InferenceClient, Session
from buckeye.inference.client.replica import SilentError
from buckeye.inference.types import Generation, SamplingParams

__all__ = ["Generation", "InferenceClient", "SamplingParams", "Session", "SilentError"]
