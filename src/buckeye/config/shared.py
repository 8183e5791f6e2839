"""Base class of settings, and settings of several processes: logging, trackers, checkpoints, clients."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)
from pydantic_core import PydanticCustomError

CONFLICT = "conflict"
"""Error type in pydantic of `conflict`."""


class BaseConfig(BaseModel):
    """Immutable settings. Unknown keys are errors; the string under a field is its help text."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, defer_build=True
    )

    def warnings(self) -> Iterator[tuple[str, str]]:
        """Yield settings that are valid and have an effect that may be unexpected: (name, message)."""
        yield from ()


def conflict(message: str, *fields: str) -> PydanticCustomError:
    """Return an error for conflicting settings, to raise in a validator; `fields` are those settings."""
    return PydanticCustomError(CONFLICT, "{message}", {"message": message, "fields": list(fields)})


def variant(default: str) -> Discriminator:
    """Return a discriminator of a union's classes by `type`, which may be omitted for the default one."""

    def tag(value: Any) -> str | None:
        if isinstance(value, dict):
            return str(value.get("type", default))
        return getattr(value, "type", None)

    return Discriminator(tag)


class UserFunctionConfig(BaseConfig):
    """User function."""

    import_path: str
    """Where it is: `module:function`, or `path/to/file.py:function`."""
    kwargs: dict[str, Any] = {}
    """Its further arguments."""

    @model_validator(mode="after")
    def _names_a_function(self) -> Self:
        module, _, function = self.import_path.rpartition(":")
        if not module or not function.isidentifier():
            raise conflict(
                f"import_path = {self.import_path!r} names no function; write module:function or "
                "path/to/file.py:function",
                "import_path",
            )
        return self


LogLevel = Literal["debug", "info", "success", "warning", "warn", "error", "critical"]
Port = Annotated[int, Field(ge=1, le=65535)]
ResumeStep = Annotated[int, Field(ge=-1)]


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _one_or_more(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class LogConfig(BaseConfig):
    """Logging of a process."""

    level: Annotated[LogLevel, BeforeValidator(_lower)] = "info"
    """Least important messages to show."""


class WandbExtrasConfig(BaseConfig):
    """Additional data for Weights & Biases besides numbers."""

    samples: bool = True
    """Log a table of sample rollouts."""
    distributions: bool = True
    """Log distributions of rewards and lengths."""
    interval: PositiveInt = 10
    """Steps between two such logs."""


class WandbConfig(BaseConfig):
    """Logging to Weights & Biases. All processes are one run there."""

    project: str = "buckeye"
    """The project."""
    name: str | None = None
    """The run's name; None is that of the output directory."""
    offline: bool = False
    """Write to disk only; `wandb sync` sends it later."""
    id: str | None = None
    """The run's id; None is an id of the output directory, so that a resumed run continues."""
    log_extras: WandbExtrasConfig | None = WandbExtrasConfig()
    """What is logged besides numbers; None for numbers only."""


class TrackioConfig(BaseConfig):
    """Logging to Trackio. All processes are one run there."""

    project: str = "buckeye"
    """The project."""
    name: str | None = None
    """The run's name; None is that of the output directory."""
    space: str | None = None
    """A Space of the Hugging Face hub as ORG/NAME, made private if it is new; None is this machine."""


class TensorboardConfig(BaseConfig):
    """Logging for TensorBoard."""

    log_dir: Path | None = None
    """The directory; None is `tensorboard/` of the output directory."""


class TrackedConfig(BaseConfig):
    """Trackers of a run in addition to Weights & Biases."""

    trackio: TrackioConfig | None = None
    """Log the run to Trackio."""
    tensorboard: TensorboardConfig | None = None
    """Log the run for TensorBoard."""

    def trackers(self, wandb: WandbConfig | None) -> list[WandbConfig | TrackioConfig | TensorboardConfig]:
        """Return the settings of all trackers."""
        return [one for one in (wandb, self.trackio, self.tensorboard) if one is not None]


class CheckpointConfig(BaseConfig):
    """Checkpoint settings: interval, retention, and the checkpoint to start from."""

    interval: PositiveInt | None = 10
    """Steps between two checkpoints; None writes one at the end only."""
    resume_step: ResumeStep | None = None
    """Go on from the checkpoint of this step; -1 is the newest, None starts from the model."""
    keep: PositiveInt | None = 3
    """How many of the newest checkpoints remain, and the best by evaluation; None keeps all."""
    store: str | None = None
    """An object store that has them, too: s3://bucket/prefix or gs://bucket/prefix, a prefix for each run."""
    store_timeout: PositiveInt = 1800
    """Seconds that the end of a run waits for uploads."""

    @model_validator(mode="after")
    def _has_a_place(self) -> Self:
        kind, _, place = (self.store or "s3://bucket/prefix").rstrip("/").partition("://")
        bucket, *prefix = place.split("/")
        if kind not in ("s3", "gs"):
            raise conflict("a store is s3://bucket/prefix or gs://bucket/prefix", "store")
        if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]", bucket):
            raise conflict(
                f"{kind}://bucket/prefix is expected, with the plain name of a bucket; keys are looked for "
                "where the store's own programs find them, and another endpoint in AWS_ENDPOINT_URL",
                "store",
            )
        if not prefix or not all(re.fullmatch(r"(?!\.+$)[\w.=+-]+", part, re.ASCII) for part in prefix):
            raise conflict(
                f"{kind}://{bucket}/prefix is expected: a prefix for each run, of letters, digits and ._=+-/",
                "store",
            )
        return self


class ClientConfig(BaseConfig):
    """Access to inference servers."""

    base_url: Annotated[list[str], BeforeValidator(_one_or_more), Field(min_length=1)] = [
        "http://localhost:8000/v1"
    ]
    """The servers, each as http://host:port/v1."""
    timeout: PositiveFloat = 1200.0
    """Seconds that one request may take."""
    api_key_var: str = "OPENAI_API_KEY"
    """The environment variable that holds the servers' key."""


class PolicyModelConfig(BaseConfig):
    """Model that samples tokens."""

    name: str = "Qwen/Qwen3-0.6B"
    """A model directory, or a name on the Hugging Face hub."""


class EvalSamplingConfig(BaseConfig):
    """Sampling of an evaluation; None is the value of training, or the server's."""

    temperature: Annotated[float, Field(ge=0)] | None = None
    """0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Sample from the most likely tokens that together have this probability."""
    top_k: Annotated[int, Field(ge=-1)] | None = None
    """Sample from that many most likely tokens; -1 is all."""
    max_tokens: PositiveInt | None = None
    """Longest reply, in tokens."""
    min_tokens: NonNegativeInt | None = None
    """Shortest reply, in tokens."""


def max_token_age(max_async_level: int, max_off_policy_steps: int) -> int:
    """Return the maximum age of a trained token in policy versions: `max_off_policy_steps`, or 0 in a
    synchronous run.
    """
    return max_off_policy_steps if max_async_level else 0


# Problems of a configuration, and their messages.
