"""Graders of a `grade` value, and its problems."""

from pydantic import ValidationError

from buckeye.mcp.config import GymConfig
from buckeye.mcp.problems import collect_problems


def read_graders(grade, folder=None):
    """Return the graders; paths of Python files start at `folder`."""
    given = {"system_prompt": "Call.", "action_mappings": {"stop": {"_tool": None}}, "grade": grade}
    return GymConfig.model_validate(given, context=folder and {"folder": folder}).grade


def problems_of(grade, folder=None):
    """Return the problems of an invalid value."""
    try:
        read_graders(grade, folder)
    except ValidationError as error:
        return collect_problems(GymConfig, {"grade": grade}, error)
    raise AssertionError("the value is valid")
