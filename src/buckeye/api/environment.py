"""Environment of `buckeye.train` and `buckeye.evaluate`: flags of a command, or a Python object."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from buckeye.base.storage import read_json, write_file
from buckeye.dataset.environment import RewardSpec, make_environment
from buckeye.dataset.prompts import Dataset, load_prompts
from buckeye.envs.base import Environment
from buckeye.envs.registry import CALLER, CALLER_FILE
from buckeye.errors import UsageError

Rewards = RewardSpec | Sequence[RewardSpec]
"""One or several rewards: functions, files, modules, or built-in rewards."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentArguments:
    """Arguments of `train` and `evaluate` that name the environment."""

    dataset: Dataset | None = None
    reward: Rewards | None = None
    reward_weights: Sequence[float] | None = None
    eval_dataset: Dataset | None = None
    split: str | None = None
    prompt_column: str | None = None
    answer_column: str | None = None
    env: Any = None
    rewards: tuple[RewardSpec, ...] = field(init=False)

    def __post_init__(self) -> None:
        """Raises UsageError unless the arguments name exactly one environment."""
        object.__setattr__(self, "rewards", _reward_tuple(self.reward))
        if (self.env is None) == (self.dataset is None):
            raise UsageError(
                "name one environment", code="BK-CLI-MISSING", hint="pass dataset= and reward=, or env="
            )
        if (self.dataset is None) != (not self.rewards):
            raise UsageError("dataset= and reward= belong together", code="BK-CLI-MISSING", hint="pass both")

    @property
    def is_object(self) -> bool:
        """True if a part of the environment exists in this process only."""
        parts = [*self.rewards, self.dataset, self.eval_dataset, self.env]
        return not all(part is None or isinstance(part, str | Path) for part in parts)

    @property
    def name(self) -> str:
        """Name for the run directory."""
        if isinstance(self.dataset, str | Path):
            return Path(self.dataset).stem
        if self.env is None:
            return "dataset"
        return Path(str(getattr(self.env, "name", self.env))).stem

    def flags(self) -> list[str]:
        """Return the flags of `buckeye rl` for the environment."""
        if self.is_object:
            return ["--env", CALLER]
        values: dict[str, Any] = {
            "--env": self.env,
            "--dataset": self.dataset,
            "--eval-dataset": self.eval_dataset,
            "--split": self.split,
            "--prompt-column": self.prompt_column,
            "--answer-column": self.answer_column,
        }
        flags = [word for name, value in values.items() if value is not None for word in (name, str(value))]
        flags += [word for reward in self.rewards for word in ("--reward", str(reward))]
        if self.reward_weights is not None:
            flags += ["--reward-weights", json.dumps(list(self.reward_weights), default=_plain_value)]
        return flags

    def make(self) -> Environment:
        """Return the environment as an object. Raises UsageError."""
        if self.dataset is None:
            return _checked(self.env)
        prompts = load_prompts(
            self.dataset,
            eval_dataset=self.eval_dataset,
            split=self.split,
            prompt_column=self.prompt_column,
            answer_column=self.answer_column,
        )
        return make_environment(prompts, self.rewards, self.reward_weights)

    def id_and_args(self) -> tuple[str, dict[str, Any]]:
        """Return the id and the arguments of an environment that is not an object of this process."""
        if self.dataset is None:
            return str(self.env), {}
        args: dict[str, Any] = {"path": str(self.dataset), "reward": [str(reward) for reward in self.rewards]}
        options = {
            "reward_weights": self.reward_weights,
            "eval_path": self.eval_dataset and str(self.eval_dataset),
            "split": self.split,
            "prompt_column": self.prompt_column,
            "answer_column": self.answer_column,
        }
        return "dataset", args | {name: value for name, value in options.items() if value is not None}

    def save(self, folder: Path) -> None:
        """Write all arguments except functions and objects. A resume must pass these two again."""
        options = {
            "reward_weights": None if self.reward_weights is None else list(self.reward_weights),
            "split": self.split,
            "prompt_column": self.prompt_column,
            "answer_column": self.answer_column,
            "dataset": _saved(self.dataset),
            "eval_dataset": _saved(self.eval_dataset),
        }
        try:
            text = json.dumps(options, ensure_ascii=False)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"the rows of the dataset cannot be written as JSON: {error}",
                code="BK-DATA-FORMAT",
                hint="convert the values to text, numbers, lists and dictionaries",
            ) from None
        write_file(folder / CALLER_FILE, text)


def missing_argument(folder: Path) -> str | None:
    """Return the argument that a resume of the run in `folder` needs: `reward`, `env` or None."""
    if not (folder / CALLER_FILE).exists():
        return None
    return "env" if read_json(folder / CALLER_FILE)["dataset"] is None else "reward"


def rows_of(dataset: Dataset | None) -> Dataset | None:
    """Return the rows of a dataset as a list. Return a path, a hub id or None unchanged."""
    if dataset is None or isinstance(dataset, str | Path):
        return dataset
    if hasattr(dataset, "iterrows"):  # a DataFrame, which iterates over its columns
        return list(dataset.to_dict("records"))  # type: ignore[attr-defined]
    return list(dataset)


def saved_arguments(folder: Path, reward: Rewards | None, env: Any) -> EnvironmentArguments | None:
    """Return the saved arguments of a run whose environment a Python process served, else None.

    The caller passes the functions and objects again. Raises UsageError if they are missing.
    """
    missing = missing_argument(folder)
    if missing is None:
        return None
    if env is not None:
        return EnvironmentArguments(env=env)
    if missing == "env" or reward is None:
        raise UsageError(
            f"the environment of {folder} was an object of a Python process",
            code="BK-ENV-CALLER",
            hint=f"pass it again: resume({missing}=...)",
        )
    return EnvironmentArguments(**read_json(folder / CALLER_FILE), reward=reward)


def _reward_tuple(reward: Any) -> tuple[RewardSpec, ...]:
    if reward is None:
        return ()
    rewards = list(reward) if isinstance(reward, list | tuple) else [reward]
    for part in rewards:
        if not isinstance(part, str | Path) and not callable(part):
            raise UsageError(
                f"reward= is {part!r}, not a function",
                code="BK-REWARD",
                hint="pass a function, a file, a built-in reward such as 'exact', or a list of them",
            )
    return tuple(str(part) if isinstance(part, Path) else part for part in rewards)


def _saved(dataset: Dataset | None) -> Any:
    if dataset is None:
        return None
    if not isinstance(dataset, str | Path):
        return [dict(row) for row in dataset]
    path = Path(os.path.expanduser(dataset)).absolute()
    return str(path if path.exists() else dataset)  # else an id on the hub


def _checked(env: Any) -> Environment:
    missing = [name for name in ("name", "tasks", "rollout") if not hasattr(env, name)]
    if missing:
        raise UsageError(
            f"env= is a {type(env).__name__} without {', '.join(missing)}",
            code="BK-ENV-LOAD",
            hint="pass an id, a path, or an object with all members of buckeye.envs.base.Environment",
        )
    return env  # type: ignore[no-any-return]


def flatten_settings(settings: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Convert settings to flags: `trainer={"optim": {"lr": 1e-6}}` becomes `--trainer.optim.lr=1e-06`."""
    flags: list[str] = []
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            flags += flatten_settings(value, f"{prefix}{name}.")
        else:
            is_text = isinstance(value, str | Path | None)
            text = str(value) if is_text else json.dumps(value, default=_plain_value)
            flags.append(f"--{prefix}{name}={text}")
    return flags


def _plain_value(value: Any) -> Any:
    """Return a path, or a number or array of numpy, as a value of JSON. Raise `UsageError` for others."""
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    message = f"a setting has the type {type(value).__name__}"
    raise UsageError(message, code="BK-CONFIG-VALUE", hint="pass a number, a text, a list or a dictionary")
