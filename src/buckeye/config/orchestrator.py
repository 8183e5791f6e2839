"""Settings of the orchestrator."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from buckeye.config.buffer import BufferConfig, SimpleBufferConfig
from buckeye.config.environments import (
    AllOrCount,
    EnvConfig,
    EnvPauseConfig,
    EnvSamplingConfig,
    EvalEnvConfig,
    TrainEnvConfig,
)
from buckeye.config.rewards import (
    AdvantageConfig,
    GroupAdvantageConfig,
    MaxRLAdvantageConfig,
    RewardShapingConfig,
)
from buckeye.config.shared import (
    BaseConfig,
    CheckpointConfig,
    ClientConfig,
    EvalSamplingConfig,
    LogConfig,
    PolicyModelConfig,
    WandbConfig,
    conflict,
    max_token_age,
)

_LOCKSTEP = "cannot be kept with max_async_level = 0, which runs all rollouts of a step at once"


class SamplingConfig(BaseConfig):
    """Sampling settings of rollouts."""

    temperature: PositiveFloat = 1.0
    """Above 1 evens the distribution out, below 1 sharpens it."""
    max_tokens: PositiveInt | None = None
    """Longest reply, in tokens; None is what is left of seq_len."""
    seed: int | None = None
    """Seed of the sampling; None is the orchestrator's seed."""


class EvalConfig(BaseConfig):
    """Evaluation during training, on held-out tasks."""

    env: list[EvalEnvConfig] = []
    """The environments; none are those of the run."""
    sampling: EvalSamplingConfig = EvalSamplingConfig()
    """How it samples."""
    num_examples: AllOrCount = -1
    """How many tasks of each environment; -1 is all."""
    rollouts_per_example: PositiveInt = 1
    """How many rollouts of each task."""
    interval: PositiveInt = 100
    """Steps between two evaluations."""
    eval_base_model: bool = True
    """Also evaluate before the first step."""


class RolloutsConfig(BaseConfig):
    """Content of `rollouts/`: the text of every rollout, with its reward."""

    keep: PositiveInt | None = None
    """Of how many of the newest steps; None keeps all."""
    show_first: bool = True
    """`rl` shows the first one of a run, before it has been trained on."""


class OrchestratorConfig(BaseConfig):
    """Rollouts with the policy, and batches of them."""

    batch_size: PositiveInt = 128
    """Rollouts in a batch. It holds whole groups; where they differ in size, as many as reach this number."""
    rollouts_per_example: PositiveInt = 1
    """Rollouts of one task: the group that is compared. An environment may have its own number."""
    seq_len: PositiveInt = 2048
    """Longest rollout in tokens, prompt included."""
    max_steps: PositiveInt | None = None
    """Batches to make; None never ends."""
    max_async_level: NonNegativeInt = 1
    """How many steps sampling may run ahead of training, up to max_off_policy_steps; 0 is synchronous."""
    deterministic: bool | None = None
    """Sample in lockstep: a synchronous run is the same to the bit every time, and waits for the slowest
    rollout of each turn. None does so where max_async_level is 0 and the engine can: the embedded one."""
    max_off_policy_steps: NonNegativeInt = 8
    """How many steps old a token may be when it is trained on: a batch waits for groups that the next one
    would be too late for. 0 in a synchronous run."""
    oversampling_factor: Annotated[float, Field(ge=1)] = 1.0
    """How many times the groups that batches have room for are played. Where that is more than
    max_off_policy_steps lets wait, those that finish first are taken: short ones, as collection/bias says."""
    max_concurrent: PositiveInt | None = None
    """Most rollouts at a time; None is no limit."""
    zero_spread: Literal["keep", "drop"] = "keep"
    """What becomes of groups whose rewards are all equal."""
    mask_truncated_completions: bool = False
    """Do not train on rollouts that were cut off."""
    zero_truncated_completions: bool = False
    """Give rollouts that were cut off a reward of 0."""
    seed: int = 42
    """Seed of tasks and sampling."""
    rollout_timeout: PositiveFloat = 600.0
    """Seconds that a rollout may take, from when an engine has a place for it."""
    max_rollout_retries: NonNegativeInt = 1
    """How often a rollout is played again that failed before the policy was asked, or as its engine or worker
    was lost."""
    min_group_size: PositiveInt | None = None
    """A group with fewer rollouts that have a reward is dropped, one with more is trained without those that
    failed; None is half of rollouts_per_example, rounded up, and at least 2."""
    rollouts: RolloutsConfig = RolloutsConfig()
    """What `rollouts/` holds: the text of every rollout, with its reward."""
    max_empty_batches: PositiveInt = 10
    """Give up after that many batches' worth of groups of which none was usable."""
    weights_timeout: PositiveFloat = 3600.0
    """Seconds to wait for new weights before giving up."""
    model: PolicyModelConfig = PolicyModelConfig()
    """The policy."""
    client: ClientConfig = ClientConfig()
    """How the engines are reached."""
    sampling: SamplingConfig = SamplingConfig()
    """How rollouts are sampled."""
    env: Annotated[list[TrainEnvConfig], Field(min_length=1)] = [TrainEnvConfig()]
    """The environments."""
    env_pause: EnvPauseConfig = EnvPauseConfig()
    """When an environment that fails is left alone for a while; the others go on."""
    reward_shaping: RewardShapingConfig | None = None
    """Changes to the rewards of training rollouts."""
    advantage: AdvantageConfig | None = GroupAdvantageConfig()
    """How rewards become advantages; None uses the rewards."""
    buffer: BufferConfig = SimpleBufferConfig()
    """Which groups make a batch."""
    eval: EvalConfig | None = None
    """Evaluation during training."""
    ckpt: CheckpointConfig | None = CheckpointConfig()
    """Checkpoints at an interval; None writes one at the end only."""
    log: LogConfig = LogConfig()
    """What is logged."""
    wandb: WandbConfig | None = None
    """Log to Weights & Biases."""
    output_dir: Path = Path("outputs")
    """Where everything is written."""

    @property
    def run_ahead(self) -> int:
        """Maximum number of steps that sampling runs ahead."""
        return min(self.max_async_level, self.max_off_policy_steps)

    @property
    def max_token_age(self) -> int:
        """Maximum age of a trained token, in steps."""
        return max_token_age(self.max_async_level, self.max_off_policy_steps)

    @property
    def max_concurrent_rollouts(self) -> int:
        """Maximum number of concurrent rollouts."""
        concurrent = math.ceil(self.batch_size * self.oversampling_factor) * (1 + self.run_ahead)
        return min(concurrent, self.max_concurrent or concurrent)

    @property
    def evaluation_environments(self) -> list[EvalEnvConfig]:
        """Environments of `eval`. If it names none, those of the run, with the sampling settings of
        `eval`.
        """
        if self.eval is None:
            return []
        told = EnvConfig.model_fields.keys() - {"sampling"}
        return self.eval.env or [
            EvalEnvConfig(
                **{name: getattr(env, name) for name in told},
                sampling=EnvSamplingConfig(max_tokens=env.sampling.max_tokens),
            )
            for env in self.env
        ]

    @property
    def group_sizes(self) -> list[int]:
        """Number of rollouts per task, by environment."""
        return [env.rollouts_per_example or self.rollouts_per_example for env in self.env]

    @model_validator(mode="after")
    def _whole_groups(self) -> OrchestratorConfig:
        size = self.group_sizes[0]
        if len(set(self.group_sizes)) == 1 and self.batch_size % size:
            below = self.batch_size // size * size
            near = " or ".join(str(n) for n in (below, below + size) if n)
            raise conflict(
                f"batch_size = {self.batch_size} is not a multiple of rollouts_per_example = "
                f"{size}: a batch holds whole groups; use e.g. batch_size = {near}",
                "batch_size",
                "rollouts_per_example",
            )
        return self

    def warnings(self) -> Iterator[tuple[str, str]]:
        if min(self.group_sizes) == 1 and self.advantage is not None:
            yield (
                "rollouts_per_example",
                "is 1: a rollout without siblings has nothing to be compared with, so every advantage is 0 "
                "and nothing is learned. Use e.g. 8 or 16.",
            )
        if self.max_concurrent is not None and self._samples_in_lockstep:
            yield "max_concurrent", f"{_LOCKSTEP}: it is ignored."

    @property
    def _samples_in_lockstep(self) -> bool:
        return self.max_async_level == 0 and self.deterministic is not False

    @model_validator(mode="after")
    def _limits_can_be_kept(self) -> OrchestratorConfig:
        evaluated = self.eval.env if self.eval is not None else []
        for name, environments in (("env", self.env), ("eval.env", evaluated)):
            for index, environment in enumerate(environments):
                if environment.max_concurrent is not None and self._samples_in_lockstep:
                    raise conflict(
                        f"{_LOCKSTEP}: leave it out, or set deterministic = false",
                        f"{name}.{index}.max_concurrent",
                    )
        return self

    @model_validator(mode="after")
    def _deterministic_is_synchronous(self) -> OrchestratorConfig:
        if self.deterministic and self.max_async_level:
            raise conflict(
                "deterministic = true is for synchronous runs, and max_async_level is "
                f"{self.max_async_level}: set max_async_level = 0",
                "deterministic",
                "max_async_level",
            )
        return self

    @model_validator(mode="after")
    def _groups_can_be_used(self) -> OrchestratorConfig:
        smallest = min(self.group_sizes)
        if self.min_group_size is not None and self.min_group_size > smallest:
            raise conflict(
                f"min_group_size = {self.min_group_size} is more than rollouts_per_example = {smallest}: "
                "no group could be used",
                "min_group_size",
                "rollouts_per_example",
            )
        return self

    @model_validator(mode="after")
    def _shaping_is_whole(self) -> OrchestratorConfig:
        shaping = self.reward_shaping
        if shaping is None:
            return self
        if self.zero_truncated_completions and (shaping.stop_reason_rewards or shaping.stop_reason_penalties):
            raise conflict(
                "zero_truncated_completions and reward_shaping both change rewards by stop reason: leave it "
                "out and set length = 0.0 in reward_shaping.stop_reason_rewards",
                "zero_truncated_completions",
                "reward_shaping",
            )
        longest = shaping.max_length or self.sampling.max_tokens
        if shaping.measures_length and longest is None:
            raise conflict(
                "a length penalty needs to know the longest rollout: set reward_shaping.max_length or "
                "sampling.max_tokens",
                "reward_shaping.max_length",
                "sampling.max_tokens",
            )
        if longest is not None and (shaping.overlong_cache or 0) > longest:
            raise conflict(
                f"reward_shaping.overlong_cache = {shaping.overlong_cache} is more than the longest rollout, "
                f"{longest} tokens",
                "reward_shaping.overlong_cache",
            )
        if isinstance(self.advantage, MaxRLAdvantageConfig) and shaping.may_go_below_zero:
            raise conflict(
                "max_rl advantages are for rewards of 0 or more, and this reward_shaping can make them less: "
                'leave its penalties out, or set advantage.type = "group"',
                "advantage.type",
                "reward_shaping",
            )
        return self
