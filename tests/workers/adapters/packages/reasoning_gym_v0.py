"""Environment of `verifiers` itself."""

from verifiers import ReasoningGymEnv as load_environment

__all__ = ["load_environment"]
