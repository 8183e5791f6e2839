"""Separate the flags of `buckeye rl` itself from the settings of a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from buckeye.config.flag_values import parse_bool
from buckeye.config.flags import apply_flags, parse_flags
from buckeye.config.problems import closest, config_error
from buckeye.config.rl import RLConfig
from buckeye.config.settings import Settings
from buckeye.config.shared import BaseConfig, UserPath
from buckeye.config.structure import fields_of, resolve
from buckeye.config.validation import validate
from buckeye.errors import UsageError

_WITH_FILES = {"as_json", "dry_run", "model", "output_dir", "provider", "yes"}
_PASSED_ON = {"model": "--model.name", "output_dir": "--output-dir"}
"""Flags of the command that become settings of a complete run, with the names of these settings."""
_TEXT_LISTS = ("reward",)
"""Flags with one text per use, which may contain commas."""
_DATASET_ONLY = ("reward_weights", "eval_dataset", "split", "prompt_column", "answer_column")
_OTHER_NAMES = {
    "--dataset": ("data_path", "prompts", "task", "tasks", "train_dataset"),
    "--env": ("env.id", "env_id", "environment", "environments"),
    "--eval-dataset": ("eval_data", "test_dataset", "validation_dataset"),
    "--max-steps": ("epochs", "iterations", "num_epochs", "num_steps", "num_train_epochs", "steps"),
    "--model": ("base_model", "model_name", "model_name_or_path", "model_path"),
    "--orchestrator.rollouts-per-example": ("group_size", "num_generations", "rollouts"),
    "--orchestrator.sampling.max-tokens": ("max_completion_length", "max_new_tokens", "max_tokens"),
    "--orchestrator.sampling.temperature": ("temperature",),
    "--output-dir": ("out", "out_dir", "output", "run_dir"),
    "--reward": ("reward_fn", "reward_func", "reward_funcs", "reward_function", "reward_functions", "rubric"),
    "--trainer.model.experimental.lora": ("lora", "peft", "use_lora", "use_peft"),
    "--trainer.optim.lr": ("learning_rate", "lr"),
    **dict.fromkeys(
        ("--count", "--examples", "--sample"),
        ("limit", "max_examples", "max_samples", "num_examples", "num_samples", "num_tasks"),
    ),
}
"""Flags of commands, and the names that other programs have for them."""
_RESUME = "--resume"
_REMOTE_ONLY = {"host", "region", "max_price", "max_hours", "keep", "disk_gb", "identity_file"}
_REMOTE = {"gpus"} | _REMOTE_ONLY
_EVALUATION = ("orchestrator", "eval")
_WANDB = "wandb"
_COMPLETE = ("--trainer", "--orchestrator")  # sections that every complete configuration has
_REPLACED = {
    ("clean",): ("a composed run has a new folder", "Leave it out"),
    ("resume",): ("a composed run is a new run", "To resume a run: `buckeye rl resume RUN`"),
}
"""Settings that a composed run does not accept: the reason, and what to do."""


class TrainFlags(BaseConfig):
    """Flags of `buckeye rl` for the parts of a run and its machine."""

    model: str | None = None
    """Folder, or name on the Hugging Face hub."""
    dataset: str | None = None
    """File or folder of prompts or tasks (JSON Lines, JSON, CSV, Parquet), or hub name."""
    reward: list[str] = Field(default_factory=list)
    """FILE.py, FILE.py:FUNCTION, MODULE:FUNCTION, or a built-in reward."""
    reward_weights: list[float] = Field(default_factory=list)
    """Weight of each reward. Default: 1."""
    eval_dataset: str | None = None
    """Prompts to evaluate on. Default: a tenth of the dataset."""
    split: str | None = None
    """Split of the dataset to train on."""
    prompt_column: str | None = None
    """Column with the prompts."""
    answer_column: str | None = None
    """Column with the answers, for built-in rewards and the parameter `answer`."""
    env: str | None = None
    """Environment: ID, PATH, or ID:name=value."""
    config: UserPath | None = None
    """Configuration of an MCP environment, from `buckeye rl init`."""
    gpus: str | None = None
    """Number and type. Default: all GPUs of this machine."""
    provider: Literal["local", "prime", "ssh"] | None = None
    """This machine, a rented one, or your host."""
    output_dir: UserPath | None = None
    """Run directory."""
    no_eval: bool = False
    """Do not evaluate on held-out tasks."""
    no_wandb: bool = False
    """Do not log to Weights & Biases."""
    max_price: PositiveFloat | None = None
    """Maximum price of a rented machine, in US $ per hour."""
    max_hours: PositiveFloat | None = None
    """Stop the run after this time."""
    keep: bool = False
    """Do not end the rented machine, which continues to cost."""
    host: list[str] = Field(default_factory=list)
    """Host for ssh: [USER@]HOST[:PORT]."""
    region: list[str] = Field(default_factory=list)
    """Rent only in these regions."""
    disk_gb: PositiveInt | None = None
    """Disk to rent. Default: an estimate for the run."""
    identity_file: UserPath | None = None
    """Private key for ssh."""
    dry_run: bool = False
    """Show the plan; write and start nothing."""
    trust: bool = False
    """Trust the programs and addresses of the hub's tasks."""
    yes: bool = False
    """Do not prompt: use defaults, or report a missing flag."""
    quiet: bool = False
    """Do not print the plan."""
    as_json: bool = False
    """Print the plan as one JSON object."""

    @property
    def remote(self) -> bool:
        """True if the run is on another machine."""
        return self.provider not in (None, "local")


@dataclass(frozen=True, slots=True)
class TrainArgs:
    """A command line: the flags of the command, and the args that are `settings` of the run."""

    flags: TrainFlags
    settings: tuple[str, ...]

    @property
    def has_files(self) -> bool:
        """True if the settings include files, which then define the whole run."""
        return any(arg.startswith("@") for arg in self.settings)

    @property
    def is_composed(self) -> bool:
        """True if the command composes a run from parts, such as a model and a dataset."""
        given = self.flags.model_fields_set - {"as_json", "dry_run", "output_dir"}
        is_complete = all(any(arg.startswith(name) for arg in self.settings) for name in _COMPLETE)
        return not self.has_files and (bool(given) or not is_complete)

    def check_composed(self) -> None:
        """Check the args of a composed run before any model or dataset is read.

        Raises ConfigError for args that are not settings, and UsageError for args that exclude each other.
        """
        parsed = parse_flags(RLConfig, self.settings)
        if parsed.problems:
            raise config_error(parsed.problems)
        for assignment in parsed.assignments:
            flag, path = assignment.location.text, assignment.path
            if path in _REPLACED:
                reason, hint = _REPLACED[path]
                raise UsageError(f"{flag}: {reason}", code="BK-CLI-CONFLICT", hint=hint)
            if path[:2] == _EVALUATION and self.flags.no_eval:
                raise _conflict(flag, "--no-eval")
            if self.flags.no_wandb and _WANDB in path:
                raise _conflict(flag, "--no-wandb")
        self._check_environment()
        remote_flags = sorted(self.flags.model_fields_set & _REMOTE_ONLY)
        if remote_flags and not self.flags.remote:
            raise UsageError(
                f"--{flag_name(remote_flags[0])} is for a run on a remote machine",
                code="BK-CLI-CONFLICT",
                hint="Add --provider prime or --provider ssh, or leave it out",
            )

    def _check_environment(self) -> None:
        """Raise UsageError unless the flags name one kind of environment."""
        given = self.flags.model_fields_set
        for name in ("dataset", "config", "reward"):
            if "env" in given and name in given:
                raise _conflict(f"--{flag_name(name)}", "--env")
        if "reward" in given and "config" in given:
            raise _conflict("--config", "--reward")
        if "reward" in given and self.flags.dataset is None:
            hint = "Add --dataset: a file or folder of prompts, or ORG/NAME on the Hugging Face hub"
            raise UsageError("--reward needs the prompts", code="BK-CLI-MISSING", hint=hint)
        for name in _DATASET_ONLY:
            if name in given and "reward" not in given:
                hint = "Add --reward, or leave it out"
                message = f"--{flag_name(name)} is for a dataset with a reward"
                raise UsageError(message, code="BK-CLI-CONFLICT", hint=hint)

    @property
    def seq_len(self) -> int | None:
        """The `--seq-len` among the settings; None if it is missing or not a number."""
        return self._number("seq_len")

    @property
    def reply_tokens(self) -> int | None:
        """The `--orchestrator.sampling.max-tokens` among the settings; None if it is missing."""
        return self._number("orchestrator", "sampling", "max_tokens")

    @property
    def composed_flags(self) -> TrainFlags:
        """The flags, with the model that the settings name. Raises UsageError for two models."""
        name = self._setting("model", "name")
        if name is not None and self.flags.model not in (None, name):
            raise _conflict("--model", "--model.name")
        return self.flags if name is None else self.flags.model_copy(update={"model": str(name)})

    def _number(self, *path: str) -> int | None:
        value = self._setting(*path)
        return value if isinstance(value, int) else None

    def _setting(self, *path: str) -> Any:
        """Return the value that the settings assign to a path, or None."""
        assignments = parse_flags(RLConfig, self.settings).assignments
        return next((one.value for one in reversed(assignments) if one.path == path), None)

    @property
    def selects_tracker(self) -> bool:
        """True if the settings select a tracker."""
        assignments = parse_flags(RLConfig, self.settings).assignments
        names = {name for assignment in assignments for name in assignment.path}
        return not names.isdisjoint({_WANDB, "trackio", "tensorboard"})

    def plain_settings(self) -> list[str]:
        """Return the settings of a complete run. Raises UsageError for flags of a composed run."""
        flags = self.flags.model_fields_set - _WITH_FILES
        flags -= _REMOTE if self.flags.remote else set()
        if flags:
            first = sorted(flags)[0]
            hint = "Leave one of them out"
            hint += "; for a remote machine, add --provider" if first in _REMOTE else ""
            message = f"--{flag_name(first)} is a flag of a composed run, and @ FILE is a complete run"
            raise UsageError(message, code="BK-CLI-CONFLICT", hint=hint)
        settings = list(self.settings)
        for name, setting in _PASSED_ON.items():
            if name in self.flags.model_fields_set:
                settings += [setting, str(getattr(self.flags, name))]
        if "dry_run" in self.flags.model_fields_set:
            settings.append(f"--dry-run={self.flags.dry_run}".lower())
        return settings

    @property
    def is_resume(self) -> bool:
        """True if the command resumes an earlier run."""
        return _RESUME in self.settings

    def only_file(self) -> Path:
        """Return the only file of a remote run. Raises UsageError if there are other settings."""
        args = [arg for arg in self.settings if arg != _RESUME]
        name = args[1] if args[:1] == ["@"] and len(args) == 2 else args[0][1:] if len(args) == 1 else ""
        if not name:
            raise UsageError(
                "--provider: a remote run accepts one file, and --resume",
                code="BK-CLI-CONFLICT",
                hint="Put all settings into the file: `buckeye rl @ run.toml --provider ...`",
            )
        return Path(name)


def parse_train_args(argv: Sequence[str]) -> TrainArgs:
    """Separate the flags of the command from the settings of the run. Raises ConfigError for wrong flags."""
    command_args, settings = _split_args(list(argv))
    parsed = parse_flags(TrainFlags, command_args)
    for assignment in parsed.assignments:
        if assignment.value == "":
            raise UsageError(
                f"{assignment.location.text} is empty", code="BK-CLI-MISSING", hint="Add a value"
            )
    values = Settings()
    problems = [*parsed.problems, *apply_flags(parsed.assignments, values)]
    flags, invalid = validate(TrainFlags, values)
    problems += invalid
    if flags is None or problems:
        raise config_error(problems)
    return TrainArgs(flags, tuple(settings))


def _conflict(flag: str, other: str) -> UsageError:
    message = f"{flag} and {other} exclude each other"
    return UsageError(message, code="BK-CLI-CONFLICT", hint="Leave one of them out")


def _split_args(args: list[str]) -> tuple[list[str], list[str]]:
    """Return the args of the command's flags, and the args of settings."""
    command_args: list[str] = []
    settings: list[str] = []
    while args:
        arg = args.pop(0)
        arg = "--as-json" if arg == "--json" else arg
        name = _field_of(arg)
        if name is None or (name == "model" and _is_section(arg, args)):
            _refuse_misspelled(arg)
            settings.append(arg)
            continue
        command_args.append(arg)
        if name in _TEXT_LISTS:
            command_args[-1:] = _as_list(arg, args)
            continue
        if "=" in arg:
            continue
        following = args[0] if args else "--"
        if fields_of(TrainFlags)[name].is_flag:
            command_args += [args.pop(0)] if parse_bool(following) is not None else []
        elif not following.startswith(("--", "@")):
            command_args.append(args.pop(0))
    return command_args, settings


def _as_list(arg: str, following: list[str]) -> list[str]:
    """Return the args of `--flag TEXT` with TEXT as a JSON list. Remove TEXT from `following`."""
    flag, sign, value = arg.partition("=")
    if not sign and following and not following[0].startswith(("--", "@")):
        sign, value = "=", following.pop(0)
    return [flag, value if value.startswith("[") or not value else json.dumps([value])] if sign else [flag]


def _field_of(arg: str) -> str | None:
    """Return the field that a flag of the command sets, or None for other args."""
    if not arg.startswith("--"):
        return None
    name = arg[2:].partition("=")[0].replace("-", "_")
    return name if name in fields_of(TrainFlags) else None


def flag_name(field: str) -> str:
    """Return the name of a flag as users type it, without dashes in front."""
    return "json" if field == "as_json" else field.replace("_", "-")


def _is_section(arg: str, following: Sequence[str]) -> bool:
    """Return True if `--model` is the settings section `model`: before a file, before JSON, or alone."""
    value = arg.partition("=")[2] if "=" in arg else (following[0] if following else "--")
    return value.startswith(("@", "{", "--"))


def usual_flag(name: str, exists: Callable[[str], bool]) -> str | None:
    """Return the existing flag that other programs call `name`, or None."""
    field = name.replace("-", "_")
    return next((flag for flag, others in _OTHER_NAMES.items() if field in others and exists(flag)), None)


def _has_flag(flag: str) -> bool:
    return _field_of(flag) is not None or resolve(RLConfig, flag[2:].split(".")).shape is not None


def _refuse_misspelled(arg: str) -> None:
    """Raise UsageError for an unknown flag that resembles a flag of the command."""
    name = arg[2:].partition("=")[0]
    if arg.startswith("--") and (used := usual_flag(name, _has_flag)) is not None:
        raise UsageError(f"no such option: --{name}", code="BK-CLI-UNKNOWN", hint=f"Did you mean {used}?")
    if not arg.startswith("--") or len(arg) == 2 or "." in arg:
        return
    known = [flag_name(field) for field in fields_of(TrainFlags)]
    near = closest(name, known)
    bare = name.removeprefix("no-").removeprefix("no_")
    if near and resolve(RLConfig, [bare]).shape is None and resolve(RLConfig, [name]).shape is None:
        hint = f"Did you mean --{near[0]}?"
        raise UsageError(f"no such option: --{name}", code="BK-CLI-UNKNOWN", hint=hint)
