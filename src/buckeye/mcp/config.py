"""The configuration of an MCP environment, as `buckeye rl init` writes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from buckeye.config.problems import Problem, report
from buckeye.config.settings import Layer, Place, Settings
from buckeye.config.shared import BaseConfig, conflict
from buckeye.config.validation import validate
from buckeye.config.yaml_source import read_yaml
from buckeye.errors import ConfigError
from buckeye.mcp.actions.check import ActionTable, compile_actions
from buckeye.mcp.actions.mapping import Action
from buckeye.mcp.grading.reading import as_written, read_graders
from buckeye.mcp.grading.schema import Grader
from buckeye.mcp.workdir.files import beside

ReplyFormat = Literal["xml", "tools"]
SeveralCalls = Literal["first", "error", "all"]
_ACTIONS, _GRADE = "action_mappings", "grade"


class JobConfig(BaseConfig):
    """What the environment is called in logs and reports."""

    name: str = ""
    """Name of the job."""
    metadata: dict[str, Any] = {}
    """Anything else to remember about it."""


class ParserConfig(BaseConfig):
    """How calls are read from the model's replies, and what a well-formed reply is worth."""

    use_thinking: bool = True
    """Whether a reply begins with <think>...</think>."""
    format: ReplyFormat = "xml"
    """`xml`: calls are written as <tool>name(...)</tool>. `tools`: the chat template's own tool calls."""
    several_calls: SeveralCalls = "first"
    """A reply with several calls: the `first` alone is run, it is an `error`, or `all` are run in order."""
    xml_weight: NonNegativeFloat = 0.6
    """Share of the tags in the format score."""
    action_weight: NonNegativeFloat = 0.4
    """Share of the calls in the format score."""

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        if self.xml_weight + self.action_weight <= 0:
            raise conflict("one of them must be above 0", "xml_weight", "action_weight")
        return self


class WeightsConfig(BaseConfig):
    """What each part counts in the reward. A part that is left out counts nothing."""

    task_completion: NonNegativeFloat = 0.0
    """What the graders say, and evaluate_tool."""
    tool_execution: NonNegativeFloat = 0.0
    """Share of the calls that succeeded."""
    format_compliance: NonNegativeFloat = 0.0
    """Mean format score of the replies."""

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        if sum(dict(self).values()) <= 0:
            raise conflict("one of the weights must be above 0", *dict(self))
        return self


class RubricConfig(BaseConfig):
    """How the reward is made up."""

    weights: WeightsConfig = WeightsConfig(task_completion=0.8, tool_execution=0.1, format_compliance=0.1)
    """Weight of each part; the reward is divided by their sum."""


class DefaultsConfig(BaseConfig):
    """Limits of a rollout."""

    max_turns: PositiveInt = 100
    """Most replies of the model."""
    time_limit: PositiveFloat | None = None
    """Seconds after which a rollout is ended and graded as it stands; None is no limit."""
    setup_timeout: PositiveFloat = 120.0
    """Seconds that starting the servers, or one setup call, may take."""
    tool_timeout: PositiveFloat = 60.0
    """Seconds that a call of the model, or an evaluation call, may take."""
    max_result_chars: PositiveInt = 8000
    """Longest result of a call that the model is shown, in characters."""
    preload: bool = True
    """Whether the libraries of a Python server that a task starts as a command are imported once, and its
    sessions forked; false starts every one by itself."""
    workdir_bytes: PositiveInt = 2**30
    """Most bytes that the folder of a rollout may hold, with what its servers write; one that holds more is
    ended."""
    keep_workdir: Annotated[str, Field(min_length=1)] | None = None
    """A folder to which those of rollouts are moved when these end; None removes them."""


class GymConfig(BaseConfig):
    """How a model acts in an MCP environment, and how it is paid."""

    job: JobConfig = JobConfig()
    """What the environment is called."""
    system_prompt: str = ""
    """What the model is told first."""
    parser: ParserConfig = ParserConfig()
    """How calls are read from replies."""
    action_mappings: dict[str, Any] = {}
    """What the model may call, and which MCP tool each stands for."""
    rubric: RubricConfig = RubricConfig()
    """How the model is paid."""
    files: Annotated[str, Field(min_length=1)] | None = None
    """What the folder of every rollout begins with, unless its task says something else: a folder, an
    archive, a script that makes files where it is started, or a single file; beside this one if relative."""
    shared_state: bool = False
    """Whether rollouts may see what others have done, and training goes on though they do."""
    grade: Any = None
    """The graders of all tasks, one or a list of them."""
    defaults: DefaultsConfig = DefaultsConfig()
    """How long a rollout may be."""

    @model_validator(mode="after")
    def _check_presence(self) -> Self:
        if not self.action_mappings:
            raise conflict("must name at least one action", "action_mappings")
        if self.parser.format == "xml" and not self.system_prompt.strip():
            raise conflict("must tell the model which calls there are and how to write them", "system_prompt")
        return self

    @cached_property
    def actions(self) -> Mapping[str, Action]:
        """The actions of `action_mappings`, and `done`. Raises ConfigError if one makes no sense."""
        actions, wrong = compile_actions(self.action_mappings)
        if wrong:
            raise ConfigError(report(_problem(_ACTIONS, one, Settings()) for one in wrong))
        return actions

    @cached_property
    def graders(self) -> Sequence[Grader]:
        """The graders of `grade`. Raises ConfigError if one makes no sense."""
        graders, wrong = read_graders(self.grade)
        if wrong:
            raise ConfigError(report(_problem(_GRADE, one, Settings()) for one in wrong))
        return graders


def load_gym_config(path: Path) -> GymConfig:
    """The configuration in a YAML or JSON file. Raises ConfigError with every problem: file, line, key."""
    settings = read_yaml(path)
    config, problems = validate(GymConfig, settings)
    raw = settings.values.get(_ACTIONS)
    _, wrong = compile_actions(raw) if isinstance(raw, dict) else ({}, [])
    problems += [_problem(_ACTIONS, one, settings) for one in wrong]
    graders, unfit = read_graders(settings.values.get(_GRADE), path.absolute().parent)
    problems += [_problem(_GRADE, one, settings) for one in unfit]
    if config is None or problems:
        whole = Place(str(path), Layer.FILE)
        raise ConfigError(report(one if one.place else replace(one, place=whole) for one in problems))
    config = config.model_copy(update={_GRADE: as_written(graders)}) if graders else config
    return beside(config, path)


def gym_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of the file, for editors."""
    schema = GymConfig.model_json_schema()
    for part in (Grader, ActionTable):
        found = part.model_json_schema()
        schema["$defs"] |= found.pop("$defs") | {part.__name__: found}
    one = {"$ref": "#/$defs/Grader"}
    schema["properties"][_GRADE] |= {"anyOf": [one, {"type": "array", "items": one}, {"type": "null"}]}
    schema["properties"][_ACTIONS]["additionalProperties"] = {"$ref": "#/$defs/ActionTable"}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _problem(table: str, wrong: Problem, settings: Settings) -> Problem:
    path = (table, *wrong.path)
    message = wrong.message if wrong.message.endswith((".", "?")) else f"{wrong.message}."
    return Problem(path=path, place=settings.place(path), message=message)
