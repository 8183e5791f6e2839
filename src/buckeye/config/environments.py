"""Settings of environments: where they run, their limits, and how several are mixed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from buckeye.config.shared import (
    BaseConfig,
    conflict,
)

AllOrCount = Annotated[int, Field(ge=-1)]


class EnvSamplingConfig(BaseConfig):
    """Sampling settings of one environment; None uses those of the others."""

    temperature: Annotated[float, Field(ge=0)] | None = None
    """Above 1 evens the distribution out, below 1 sharpens it; 0 is greedy and only for evaluations."""
    max_tokens: PositiveInt | None = None
    """Longest reply, in tokens."""


class EnvConfig(BaseConfig):
    """Environment of a run."""

    id: str = ""
    """NAME, OWNER/NAME, OWNER/NAME@VERSION, or a path; nothing is played without one."""
    args: dict[str, Any] = {}
    """Arguments for its `load_environment`."""
    name: str | None = None
    """What it is called in logs and metrics; None is the id without owner and version."""
    isolation: Literal["auto", "none", "process"] = "auto"
    """Where it runs: in the orchestrator's process (none), or in worker processes of its own (process); auto
    isolates what was not written for Buckeye."""
    python: Path | None = None
    """The interpreter of its workers; None is the one that it is installed in."""
    workers: PositiveInt = 1
    """How many worker processes share its rollouts."""
    variables: list[str] = []
    """Names of variables that its workers are given, with their values in the environment or in .env."""
    max_memory_gb: PositiveFloat | None = None
    """A worker that takes more memory is replaced; None is no limit."""
    max_turns: PositiveInt | None = None
    """Most calls of the policy in a rollout; None leaves it to the environment."""
    max_tokens: PositiveInt | None = None
    """Most tokens that are sampled in a rollout, over all its calls; None is no limit but that of seq_len."""
    rollout_timeout: PositiveFloat | None = None
    """Seconds that a rollout may take, from when an engine has a place for it; None is as for the others."""
    max_concurrent: PositiveInt | None = None
    """Most of its rollouts at a time; None is no limit of its own."""
    rate_limit: PositiveFloat | None = None
    """Most of its rollouts that are started in a second; None is no limit."""
    sampling: EnvSamplingConfig = EnvSamplingConfig()
    """How the policy samples in it."""

    @model_validator(mode="after")
    def _limits_are_held_by_workers(self) -> EnvConfig:
        for name in ("max_turns", "max_tokens", "max_memory_gb", "python", "variables"):
            if self.isolation == "none" and getattr(self, name) not in (None, []):
                raise conflict(
                    f'{name} is kept by worker processes, and isolation = "none" starts none: leave one of '
                    "the two out",
                    name,
                    "isolation",
                )
        return self

    @model_validator(mode="after")
    def _variables_are_names(self) -> EnvConfig:
        wrong = sum(not (name.isascii() and name.isidentifier()) for name in self.variables)
        if wrong:  # a wrong entry may be a secret, so it is not shown
            raise conflict(
                f"variables holds names alone, as SEARCH_API_KEY, and {wrong} of its entries are none. "
                "Write a value into .env, or set it: buckeye auth set NAME",
                "variables",
            )
        return self


class TrainEnvConfig(EnvConfig):
    """Environment to train on."""

    ratio: PositiveFloat = 1.0
    """Its share of the groups, relative to the other environments'."""
    rollouts_per_example: PositiveInt | None = None
    """Rollouts of one of its tasks; None is the orchestrator's rollouts_per_example."""
    placement: Annotated[list[NonNegativeInt], Field(min_length=1)] | None = None
    """Nodes that share its rollouts; None is node 0. Each has a gateway for its MCP servers on `localhost`,
    or, where it has no such, `workers` of its own."""

    @model_validator(mode="after")
    def _keeps_a_distribution(self) -> TrainEnvConfig:
        if self.sampling.temperature == 0:
            raise conflict(
                "temperature = 0 always samples the same reply, from which nothing can be learned: use e.g. "
                "1.0",
                "sampling.temperature",
            )
        return self


class EvalEnvConfig(EnvConfig):
    """Environment to evaluate on during training."""

    split: str | None = None
    """Which of its tasks; None is eval, or train where it has no eval tasks."""
    num_examples: AllOrCount | None = None
    """How many tasks; None is the value of `eval`."""
    rollouts_per_example: PositiveInt | None = None
    """How many rollouts of each; None is the value of `eval`."""


class EnvPauseConfig(BaseConfig):
    """Pause of a failing environment, while the others continue."""

    after_failures: PositiveInt = 8
    """Groups in a row in which every rollout failed, and not because no engine answered."""
    seconds: PositiveFloat = 30.0
    """How long the first pause is. Then one group is tried; if it fails, the next pause is twice as long."""
    max_seconds: PositiveFloat = 600.0
    """The longest pause."""
    give_up_seconds: PositiveFloat = 3600.0
    """The run ends if all environments have failed for so long."""
