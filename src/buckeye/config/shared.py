"""Base class of settings, and settings of several processes: logging, trackers, checkpoints and clients."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
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

_VARIABLE = re.compile(r"\$([A-Za-z_]|\{)")

CONFLICT = "conflict"
"""Type of the pydantic errors that `conflict` returns."""

HAS_VARIABLE = "has_variable"
"""Type of the pydantic error of a path with a variable."""

Conflicts = Iterator[PydanticCustomError]


class BaseConfig(BaseModel):
    """Base class of immutable settings. Unknown keys are errors. The string after a field is its help."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, defer_build=True
    )

    def warnings(self) -> Iterator[str]:
        """Yield a message about each valid setting that may have an unexpected effect.

        The first name in backticks in the message is the name of this setting.
        """
        yield from ()

    def conflicts(self) -> Conflicts:
        """Yield an error, made by `conflict`, for each conflict between valid settings."""
        yield from ()

    @model_validator(mode="after")
    def _has_no_conflict(self) -> Self:
        for error in self.conflicts():
            raise error
        return self


def named_settings(message: str) -> list[str]:
    """Return the names of settings that a message has in backticks."""
    return list(dict.fromkeys(re.findall(r"`([\w.]+)`", message)))


def conflict(
    message: str, *fields: str, hint: str | None = None, code: str = "BK-CONFIG-CONFLICT"
) -> PydanticCustomError:
    """Return an error about conflicting settings. A validator raises it.

    `fields` are the conflicting settings. By default, they are the names in backticks in `message`. In
    `message` and `hint`, names in backticks become full keys: `lr` becomes `trainer.optim.lr`.
    """
    named = list(fields) or named_settings(message)
    context = {"message": message, "fields": named, "hint": hint, "code": code}
    return PydanticCustomError(CONFLICT, "{message}", context)


def address_conflicts(urls: Iterable[str]) -> Conflicts:
    """Yield an error for each `base_url` that is not an address such as http://host:port/v1."""
    for url in urls:
        with suppress(ValueError):  # of the port
            parts = urlsplit(url)
            if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
                continue
        yield conflict(
            f"`base_url` is {url!r}, which is not the address of a server",
            hint="write it as http://HOST:PORT/v1",
            code="BK-CONFIG-VALUE",
        )


def variant(default: str) -> Discriminator:
    """Return a discriminator of pydantic that selects a class of a union by the value of `type`.

    Without `type`, it selects the class with the tag `default`.
    """

    def tag(value: Any) -> str | None:
        if isinstance(value, dict):
            return str(value.get("type", default))
        return getattr(value, "type", None)

    return Discriminator(tag)


class UserFunctionConfig(BaseConfig):
    """Function of the user, and its keyword arguments."""

    import_path: str
    """Function to load: `module:function` or `path/to/file.py:function`."""
    kwargs: dict[str, Any] = {}
    """Additional keyword arguments of the function."""

    def conflicts(self) -> Conflicts:
        module, _, function = self.import_path.rpartition(":")
        if not module or not function.isidentifier():
            yield conflict(
                f"`import_path` = {self.import_path!r} does not name a function",
                "import_path",
                hint="write `module:function` or `path/to/file.py:function`",
                code="BK-CONFIG-VALUE",
            )


def _expand_home(text: str) -> str:
    """Return a path with the home directory in place of `~`. Raise an error if it has a variable."""
    if _VARIABLE.search(text):
        raise PydanticCustomError(HAS_VARIABLE, "has a variable")
    return os.path.expanduser(text)  # `~user` stays unchanged for an unknown user


def _expand_home_of_path(path: Path) -> Path:
    return Path(_expand_home(str(path)))


UserPath = Annotated[Path, AfterValidator(_expand_home_of_path)]
"""Path of a setting. `~` at its start is the home directory."""
ModelName = Annotated[str, AfterValidator(_expand_home)]
"""Model directory, or a name on the hub. `~` at its start is the home directory."""

Quantization = Literal["4bit", "8bit"]
LogLevel = Literal["debug", "info", "success", "warning", "warn", "error", "critical"]
Port = Annotated[int, Field(ge=1, le=65535)]
ResumeStep = Annotated[int, Field(ge=-1)]


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class LogConfig(BaseConfig):
    """Logging of a process."""

    level: Annotated[LogLevel, BeforeValidator(_lower)] = "info"
    """Minimum level of messages to show."""


class WandbExtrasConfig(BaseConfig):
    """Data for Weights & Biases in addition to metrics."""

    samples: bool = True
    """Log a table of sample rollouts."""
    distributions: bool = True
    """Log distributions of rewards and lengths."""
    interval: PositiveInt = 10
    """Steps between two logs of samples and distributions."""


class WandbConfig(BaseConfig):
    """Logging to Weights & Biases, as one run for all processes."""

    project: str = "buckeye"
    """Name of the project."""
    name: str | None = None
    """Name of the run. None: the name of the output directory."""
    offline: bool = False
    """Write the data only to disk. `wandb sync` uploads it later."""
    id: str | None = None
    """Id of the run. None: derived from the output directory, so that a resumed run keeps it."""
    log_extras: WandbExtrasConfig | None = WandbExtrasConfig()
    """Data in addition to metrics. None: metrics only."""


class TrackioConfig(BaseConfig):
    """Logging to Trackio, as one run for all processes."""

    project: str = "buckeye"
    """Name of the project."""
    name: str | None = None
    """Name of the run. None: the name of the output directory."""
    space: str | None = None
    """Space on the Hugging Face hub as ORG/NAME. A new Space is private. None: log on this machine."""


class TensorboardConfig(BaseConfig):
    """Logging for TensorBoard."""

    log_dir: UserPath | None = None
    """Directory of the logs. None: `tensorboard/` in the output directory."""


class TrackedConfig(BaseConfig):
    """Trackers of a run in addition to Weights & Biases."""

    trackio: TrackioConfig | None = None
    """Log the run to Trackio."""
    tensorboard: TensorboardConfig | None = None
    """Log the run for TensorBoard."""

    def trackers(self, wandb: WandbConfig | None) -> list[WandbConfig | TrackioConfig | TensorboardConfig]:
        """Return the settings of all trackers."""
        trackers = (wandb, self.trackio, self.tensorboard)
        return [tracker for tracker in trackers if tracker is not None]


_STORE = re.compile(r"(s3|gs)://[a-z0-9][a-z0-9._-]{1,220}[a-z0-9](/(?!\.+(/|$))[\w.=+-]+)+/*", re.ASCII)


class CheckpointConfig(BaseConfig):
    """Checkpoint settings: interval, retention, and the checkpoint to start from."""

    interval: PositiveInt | None = 10
    """Steps between two checkpoints. None: one at the end only."""
    resume_step: ResumeStep | None = None
    """Resume from the checkpoint of this step. -1: the newest. None: start from the model."""
    keep: PositiveInt | None = 3
    """Number of newest checkpoints to keep, in addition to the one with the best evaluation. None: all."""
    store: str | None = None
    """Object store for copies of checkpoints: s3://bucket/prefix or gs://bucket/prefix, with one prefix per
    run."""
    store_timeout: PositiveInt = 1800
    """Time limit for remaining uploads at the end of a run, in seconds."""

    def conflicts(self) -> Conflicts:
        if self.store is not None and not _STORE.fullmatch(self.store):
            yield conflict(  # the address may contain a key, so it is not shown
                "`store` is not a valid address: expected s3://bucket/prefix or gs://bucket/prefix, with a "
                "prefix of A-Z a-z 0-9 . _ = + - /",
                hint="use one prefix per run; set credentials where the store's own tools read them, and the "
                "address of another S3 service in AWS_ENDPOINT_URL",
                code="BK-CONFIG-VALUE",
            )


class ClientConfig(BaseConfig):
    """Access to inference servers."""

    base_url: Annotated[list[str], BeforeValidator(as_list), Field(min_length=1)] = [
        "http://localhost:8000/v1"
    ]
    """Addresses of the servers, each as http://host:port/v1."""
    timeout: PositiveFloat = 1200.0
    """Timeout of a request, in seconds."""
    api_key_var: str = "OPENAI_API_KEY"
    """Environment variable with the key of the servers."""

    def conflicts(self) -> Conflicts:
        yield from address_conflicts(self.base_url)


class PolicyModelConfig(BaseConfig):
    """Model that samples tokens."""

    name: ModelName = "Qwen/Qwen3-0.6B"
    """A model directory, or a name on the Hugging Face hub."""


class EvalSamplingConfig(BaseConfig):
    """Sampling settings of an evaluation. None: the value of training, or else the default of the server."""

    temperature: Annotated[float, Field(ge=0)] | None = None
    """Sampling temperature. 0: greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Sample from the most likely tokens with this total probability."""
    top_k: Annotated[int, Field(ge=-1)] | None = None
    """Sample from this number of most likely tokens. -1: all."""
    max_tokens: PositiveInt | None = None
    """Maximum length of a reply, in tokens."""
    min_tokens: NonNegativeInt | None = None
    """Minimum length of a reply, in tokens."""


def max_token_age(max_async_level: int, max_off_policy_steps: int) -> int:
    """Return the maximum age of a trained token in policy versions.

    This is `max_off_policy_steps`, or 0 in a synchronous run.
    """
    return max_off_policy_steps if max_async_level else 0
