"""Environment variables as settings: `PRIME_MAX_STEPS`, `PRIME_TRAINER__MODEL__NAME`."""

from __future__ import annotations

from collections.abc import Mapping

from buckeye.config.base import BaseConfig
from buckeye.config.names import resolve, unknown_setting
from buckeye.config.problems import Problem
from buckeye.config.settings import Layer, Place, Settings
from buckeye.config.values import parse_text

PREFIX = "PRIME_"
SEPARATOR = "__"


def read_variables(model: type[BaseConfig], environ: Mapping[str, str]) -> tuple[Settings, list[Problem]]:
    """The settings that environment variables make, and what is wrong with them.

    A variable whose first part is no setting of `model` (as PRIME_API_KEY) is somebody else's.
    """
    settings, problems = Settings(), []
    for name in sorted(environ):
        words = name.removeprefix(PREFIX).lower().split(SEPARATOR)
        if not name.startswith(PREFIX) or resolve(model, words[:1]).shape is None:
            continue
        place = Place(name, Layer.VARIABLE)
        target = resolve(model, words)
        if target.shape is None:
            problems.append(unknown_setting(model, target.path, place, target.owner))
            continue
        if any(isinstance(key, int) for key in target.path):
            message = "a list is set as a whole, as JSON."
            problems.append(Problem(path=target.path, place=place, message=message))
            continue
        try:
            settings.put(target.path, parse_text(environ[name], target.shape), place)
        except ValueError as error:
            problems.append(Problem(path=target.path, place=place, message=f"{error}."))
    return settings, problems
