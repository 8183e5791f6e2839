"""Settings of the orchestrator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from buckeye.config.base import BaseConfig
from buckeye.config.shared import (
    DEFAULT_MODEL,
    Fraction,
    LogConfig,
    PositiveInt,
    SharedWeightBroadcastConfig,
    WandbConfig,
)


class ClientConfig(BaseConfig):
    """Where the engines are."""

    base_url: list[str] = ["http://localhost:8000/v1"]
    """Their addresses; filled in by `rl`."""
    timeout: Annotated[float, Field(gt=0.0)] = 1200.0
    """Seconds that a request may take."""
    api_key_var: str = "OPENAI_API_KEY"
    """Environment variable that holds the key."""
    headers: dict[str, str] = {}
    """Further headers."""
    server_type: Literal["vllm", "openai"] = "vllm"
    """What kind of server it is."""

    @field_validator("base_url", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value


class OrchestratorModelConfig(BaseConfig):
    """The model as the orchestrator knows it: its tokenizer and chat template."""

    name: str = DEFAULT_MODEL
    """A local model directory or a Hugging Face id."""
    trust_remote_code: bool = False
    """Run code that comes with the model."""


class SamplingConfig(BaseConfig):
    """How rollouts are sampled."""

    temperature: Annotated[float, Field(ge=0.0)] = 1.0
    """Softmax temperature."""
    max_tokens: PositiveInt | None = None
    """Longest turn; None is what the context leaves."""
    min_tokens: Annotated[int, Field(ge=0)] = 0
    """Shortest turn."""
    repetition_penalty: Annotated[float, Field(gt=0.0)] = 1.0
    """Penalty on tokens seen before; 1 is none."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Sample from the smallest set of tokens with this probability."""
    top_k: Annotated[int, Field(ge=-1)] = -1
    """Sample from the most probable tokens only; -1 is all."""
    seed: int | None = None
    """Seed of sampling; None uses the orchestrator's."""


class EvalSamplingConfig(BaseConfig):
    """How evaluations are sampled; what is None is as in training, but never truncated."""

    temperature: Annotated[float, Field(ge=0.0)] | None = None
    """Softmax temperature; 0 is greedy."""
    max_tokens: PositiveInt | None = None
    """Longest turn."""
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    """Shortest turn."""
    repetition_penalty: Annotated[float, Field(gt=0.0)] | None = None
    """Penalty on tokens seen before."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Sample from the smallest set of tokens with this probability."""
    top_k: Annotated[int, Field(ge=-1)] | None = None
    """Sample from the most probable tokens only."""
    seed: int | None = None
    """Seed of sampling."""


class EnvConfig(BaseConfig):
    """An environment."""

    id: str
    """`owner/name`, `name`, `owner/name@version`, or a local path."""
    args: dict[str, Any] = {}
    """Arguments of its `load_environment`."""
    name: str | None = None
    """Name in logs and metrics; the environment's own by default."""
    ratio: Annotated[float, Field(gt=0.0)] = 1.0
    """Its share of the groups, relative to the others'."""


class EvalEnvConfig(BaseConfig):
    """An environment to evaluate on."""

    id: str
    """`owner/name`, `name`, `owner/name@version`, or a local path."""
    args: dict[str, Any] = {}
    """Arguments of its `load_environment`."""
    name: str | None = None
    """Name in logs and metrics; the environment's own by default."""
    num_examples: Annotated[int, Field(ge=-1)] | None = None
    """How many tasks; -1 is all."""
    rollouts_per_example: PositiveInt | None = None
    """Rollouts of each task."""


class EvalSaveConfig(BaseConfig):
    """Where evaluation results go besides the metrics."""

    disk: bool = False
    """Write them to `evals/`."""
    hf: bool = False
    """Push them to the Hugging Face hub."""
    env_hub: bool = False
    """Push them to the environments hub."""


class EvalConfig(BaseConfig):
    """Evaluation during training."""

    env: Annotated[list[EvalEnvConfig], Field(min_length=1)]
    """The environments."""
    sampling: EvalSamplingConfig = EvalSamplingConfig()
    """How to sample."""
    save: EvalSaveConfig = EvalSaveConfig()
    """Where results go."""
    num_examples: Annotated[int, Field(ge=-1)] = -1
    """How many tasks of each; -1 is all."""
    rollouts_per_example: PositiveInt = 1
    """Rollouts of each task."""
    interval: PositiveInt = 100
    """Every how many steps."""
    eval_base_model: bool = True
    """Also before the first step."""


class ValConfig(BaseConfig):
    """A quick look at held-out reward, shown in the step's log line."""

    num_examples: PositiveInt = 16
    """How many tasks of each environment."""
    rollouts_per_example: PositiveInt = 1
    """Rollouts of each task."""
    interval: PositiveInt = 10
    """Every how many steps."""


class OrchestratorCheckpointConfig(BaseConfig):
    """The orchestrator's part of the checkpoints; the trainer writes them."""

    interval: PositiveInt | None = None
    """Save every so many steps; None saves only on the way out."""
    resume_step: Annotated[int, Field(ge=-1)] | None = None
    """Resume from this step; -1 is the newest checkpoint there is."""
    keep: PositiveInt | None = None
    """Keep only so many of the newest checkpoints; None keeps all."""
    skip_progress: bool = False
    """On resume, start with the tasks anew."""
    skip_buffer: bool = False
    """On resume, do not play the unfinished groups again."""
    buffer_path: Path | None = None
    """Unused; accepted for older files."""


class AdvantageConfig(BaseConfig):
    """Advantages: reward minus the mean of the group, and variants."""

    std_norm: Literal["local", "global"] | None = None
    """Divide by the deviation of the group, or of the batch."""
    length_weighted_mean: bool = False
    """Weigh the mean by completion length."""
    leave_one_out: bool = False
    """The mean of the others."""
    neg_clipped: bool = False
    """Negative advantages become 0."""


class BufferConfig(BaseConfig):
    """Which groups are worth training on."""

    type: Literal["simple", "difficulty-pool", "online-difficulty"] = "simple"
    """Kind of buffer; online-difficulty is simple with online_difficulty_filtering."""
    seed: int | None = None
    """Seed of the pools."""
    from_scratch: bool = True
    """Start with empty pools."""
    easy_fraction: Fraction = 0.0
    """Share of tasks from the easy pool."""
    hard_fraction: Fraction = 0.0
    """Share of tasks from the hard pool."""
    easy_threshold: float | None = None
    """Mean reward from which a task is easy."""
    hard_threshold: float | None = None
    """Mean reward up to which a task is hard."""
    easy_border: float = 0.8
    """Mean reward from which a task is easy (older name)."""
    hard_border: float = 0.2
    """Mean reward up to which a task is hard (older name)."""
    min_reward: float = 0.01
    """Lowest mean reward of a group that is kept."""
    max_reward: float = 0.99
    """Highest mean reward of a group that is kept."""
    oversampling_factor: Annotated[float, Field(ge=1.0)] = 1.0
    """Groups played for each that is used."""
    online_difficulty_filtering: bool = False
    """Drop groups whose mean reward is exactly 0 or 1, and play others."""


class EnvMixConfig(BaseConfig):
    """How several environments are mixed; see also `ratio` of an environment."""

    strategy: Literal["interleave", "concatenate"] = "interleave"
    """Interleave by ratio."""
    probabilities: list[float] | None = None
    """Shares of the environments in their order; same as their ratios."""
    stopping_strategy: Literal["all_exhausted", "first_exhausted"] = "all_exhausted"
    """Tasks are dealt again when they run out."""
    seed: int | None = None
    """Seed of the order."""


class OrchestratorConfig(BaseConfig):
    """The orchestrator: tasks in, batches of rollouts out."""

    aliases: ClassVar[dict[str, str]] = {"async_level": "max_async_level"}

    model: OrchestratorModelConfig = OrchestratorModelConfig()
    """The model."""
    env: list[EnvConfig] = []
    """The environments to train on, `[[env]]`."""
    client: ClientConfig = ClientConfig()
    """Where the engines are."""
    sampling: SamplingConfig = SamplingConfig()
    """How rollouts are sampled."""
    batch_size: PositiveInt = 128
    """Rollouts of a step."""
    rollouts_per_example: PositiveInt = 1
    """Rollouts of one task: the size of a group."""
    seq_len: PositiveInt = 2048
    """Longest sample in tokens, prompt included."""
    max_steps: PositiveInt | None = None
    """Stop at this step; None goes on for ever."""
    max_async_level: Annotated[int, Field(ge=0)] = 1
    """How many steps the rollouts may lag behind; 0 is synchronous."""
    strict_async_level: bool = True
    """Era's name; the newest weights are always used, within the bound."""
    max_off_policy_steps: Annotated[int, Field(ge=0)] = 8
    """Groups during which more weight updates happened are dropped."""
    oversampling_factor: Annotated[float, Field(ge=1.0)] = 1.0
    """Groups in flight for each that is needed."""
    max_concurrent: PositiveInt | None = None
    """Rollouts in flight at most."""
    num_train_workers: PositiveInt = 1
    """Trainer ranks; filled in by `rl`."""
    advantage: AdvantageConfig | None = AdvantageConfig()
    """Advantages; None uses the raw rewards."""
    zero_spread: Literal["keep", "drop"] = "keep"
    """Groups whose rewards are all equal: keep them, or drop them and play others."""
    buffer: BufferConfig = BufferConfig()
    """Which groups are worth training on."""
    env_mix: EnvMixConfig = EnvMixConfig()
    """How environments are mixed."""
    mask_env_responses: bool = True
    """Tokens of the environment are never trained on."""
    mask_truncated_completions: bool = False
    """Do not train on truncated rollouts."""
    zero_truncated_completions: bool = False
    """Truncated rollouts get reward 0."""
    eval: EvalConfig | None = None
    """Evaluation at intervals."""
    val: ValConfig | None = None
    """Validation reward in the log line."""
    ckpt: OrchestratorCheckpointConfig | None = None
    """Checkpoints."""
    weight_broadcast: SharedWeightBroadcastConfig = SharedWeightBroadcastConfig()
    """How weights reach the engines."""
    rollout_timeout: Annotated[float, Field(gt=0.0)] = 600.0
    """Seconds that a rollout may take."""
    max_rollout_retries: Annotated[int, Field(ge=0)] = 1
    """How often an errored rollout is played again."""
    max_empty_batches: PositiveInt = 10
    """Give up after so many batches' worth of dropped groups in a row."""
    weights_timeout: Annotated[float, Field(gt=0.0)] = 3600.0
    """Seconds to wait for new weights when nothing else is going on."""
    log: LogConfig = LogConfig()
    """What is logged."""
    wandb: WandbConfig | None = None
    """Weights & Biases."""
    output_dir: Path = Path("outputs")
    """The run directory."""
    seed: int = 42
    """Seed of tasks and sampling."""
    bench: bool = False
    """Measure speed."""
