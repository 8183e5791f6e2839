"""The client of one or several inference servers that speak the contract. Imports no torch."""

from buckeye.inference.client.client import InferenceClient, Session
from buckeye.inference.client.replica import SilentError
from buckeye.inference.types import Generation, SamplingParams

__all__ = ["Generation", "InferenceClient", "SamplingParams", "Session", "SilentError"]
