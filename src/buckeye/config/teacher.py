"""Settings of on-policy distillation."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat

from buckeye.config.shared import BaseConfig, Conflicts, address_conflicts, as_list


class TeacherConfig(BaseConfig):
    """Larger model with the policy's tokenizer. Its log-probs of the sampled tokens are trained toward."""

    model: str
    """Name of the teacher on its servers."""
    base_url: Annotated[list[str], BeforeValidator(as_list), Field(min_length=1)]
    """Addresses of its servers (`buckeye serve` or vLLM), each as http://host:port/v1."""
    weight: PositiveFloat = 1.0
    """Weight of log teacher - log sampler, which is added to the advantage of each token."""
    reward_weight: NonNegativeFloat = 0.0
    """Weight of the advantages from rewards. 0: learn from the teacher only."""
    timeout: PositiveFloat = 600.0
    """Seconds to repeat a request that failed or got no reply, before the run fails."""
    api_key_var: str = "OPENAI_API_KEY"
    """Environment variable with the key of its servers."""

    def conflicts(self) -> Conflicts:
        yield from address_conflicts(self.base_url)
