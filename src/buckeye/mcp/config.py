"""Configuration of an MCP environment, as `buckeye rl init` writes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, ValidationError, model_validator

from buckeye.config.problems import Problem, config_error
from buckeye.config.settings import Layer, Location
from buckeye.config.shared import BaseConfig, conflict
from buckeye.config.validation import validate
from buckeye.config.yaml_source import read_yaml
from buckeye.mcp.actions.action_schema import Action, ActionTables, build_actions
from buckeye.mcp.grading.grader_parser import Graders
from buckeye.mcp.problems import collect_problems
from buckeye.mcp.workdir.initial_files import resolve_files

ReplyFormat = Literal["xml", "tools"]
SeveralCalls = Literal["first", "error", "all"]
_TABLES = (("action_mappings",), ("grade",))
"""Paths of the tables with many forms, which need other messages."""


class JobConfig(BaseConfig):
    """Name of the environment in logs and reports."""

    name: str = ""
    """Name of the job."""
    metadata: dict[str, Any] = {}
    """Free-form metadata."""


class ParserConfig(BaseConfig):
    """Reply format: parsing of tool calls and weights of the format score."""

    use_thinking: bool = True
    """Require replies to begin with <think>...</think>."""
    format: ReplyFormat = "xml"
    """`xml`: the model writes calls as <tool>name(...)</tool>. `tools`: it uses native tool calls."""
    several_calls: SeveralCalls = "first"
    """If a reply has several calls: run only the `first`, reject the reply with an `error`, or run `all`."""
    xml_weight: NonNegativeFloat = 0.6
    """Weight of the tags in the format score."""
    action_weight: NonNegativeFloat = 0.4
    """Weight of the calls in the format score."""

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        if self.xml_weight + self.action_weight <= 0:
            raise conflict("one of the weights must be above 0", "xml_weight", "action_weight")
        return self


class WeightsConfig(BaseConfig):
    """Weights of the reward's parts. An omitted part has weight 0."""

    task_completion: NonNegativeFloat = 0.0
    """Weight of the score from evaluate_tool and the graders."""
    tool_execution: NonNegativeFloat = 0.0
    """Weight of the share of the model's calls that succeeded."""
    format_compliance: NonNegativeFloat = 0.0
    """Weight of the mean format score of the replies."""

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        if sum(dict(self).values()) <= 0:
            raise conflict("one of the weights must be above 0", *dict(self))
        return self

    def mean(self, parts: Mapping[str, float]) -> float:
        """Return the weighted mean of `parts`, which must have a value for each weight."""
        weights = dict(self)
        assert parts.keys() == weights.keys(), "a part is missing or unknown"
        return sum(weights[name] * parts[name] for name in weights) / sum(weights.values())


class RubricConfig(BaseConfig):
    """Composition of the reward."""

    weights: WeightsConfig = WeightsConfig(task_completion=0.8, tool_execution=0.1, format_compliance=0.1)
    """Weight of each part. The reward is the weighted mean."""


class DefaultsConfig(BaseConfig):
    """Limits of a rollout."""

    max_turns: PositiveInt = 100
    """Maximum number of model replies."""
    time_limit: PositiveFloat | None = None
    """Maximum duration of a rollout in seconds. Then the rollout stops, and is graded. None: no limit."""
    setup_timeout: PositiveFloat = 120.0
    """Timeout in seconds for the start of the servers, and for each setup call."""
    tool_timeout: PositiveFloat = 60.0
    """Timeout in seconds for a tool call of the model, or a call of `evaluate_tool`."""
    max_result_chars: PositiveInt = 8000
    """Maximum length of a call result in characters. Longer results are cut before the model reads them."""
    preload: bool = True
    """Import the libraries of a Python server once in a process, and fork this process for each session.

    Applies to servers that a task starts as a command. If false, every session starts a new process.
    """
    workdir_bytes: PositiveInt = 2**30
    """Maximum size of a rollout's folder in bytes. The rollout ends if the folder is larger.

    Files that the servers write count too.
    """
    keep_workdir: Annotated[str, Field(min_length=1)] | None = None
    """Directory that keeps the folders of finished rollouts. None: delete these folders."""


class GymConfig(BaseConfig):
    """Actions and rewards of a model in an MCP environment."""

    job: JobConfig = JobConfig()
    """Name of the environment."""
    system_prompt: str = ""
    """System message of every conversation."""
    parser: ParserConfig = ParserConfig()
    """Reply format."""
    action_mappings: ActionTables = {}
    """Actions that the model may call, each with its MCP tool."""
    rubric: RubricConfig = RubricConfig()
    """Composition of the reward."""
    files: Annotated[str, Field(min_length=1)] | None = None
    """Path of the initial content of every rollout's folder. A task can override this path.

    The content is a folder, an archive, a single file, or a script that creates files in its current
    directory. A relative path starts at the folder of the configuration file.
    """
    shared_state: bool = False
    """Allow training although rollouts share state: skip the isolation check."""
    grade: Graders = []
    """Graders of all tasks: one grader or a list."""
    defaults: DefaultsConfig = DefaultsConfig()
    """Limits of a rollout."""

    @model_validator(mode="after")
    def _check_presence(self) -> Self:
        if not self.action_mappings:
            raise conflict("must name at least one action", "action_mappings")
        if self.parser.format == "xml" and not self.system_prompt.strip():
            raise conflict("must tell the model which calls exist and how to write them", "system_prompt")
        return self

    @cached_property
    def actions(self) -> Mapping[str, Action]:
        """Actions of `action_mappings`, and the action `done`."""
        return build_actions(self.action_mappings)


def load_gym_config(path: Path) -> GymConfig:
    """Load a YAML or JSON configuration file.

    Raises ConfigError with the file, line and key of every problem.
    """
    settings = read_yaml(path)
    found: list[Problem] = []
    try:
        config = GymConfig.model_validate(settings.values, context={"folder": path.absolute().parent})
    except ValidationError as error:
        found = [
            replace(problem, location=settings.location(problem.path))
            for problem in collect_problems(GymConfig, settings.values, error)
            if problem.path[:1] in _TABLES
        ]
    invalid = {problem.path[:1] for problem in found}
    others = {key: value for key, value in settings.values.items() if (key,) not in invalid}
    problems = validate(GymConfig, replace(settings, values=others))[1]
    problems = [problem for problem in problems if problem.path[:1] not in invalid] + found
    if problems:
        file = Location(str(path), Layer.FILE)
        raise config_error(replace(problem, location=problem.location or file) for problem in problems)
    return resolve_files(config, path)


def gym_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of the configuration file, for editors."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **GymConfig.model_json_schema(),
    }
