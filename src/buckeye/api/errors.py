"""Errors of the Python interface: keywords in place of flags, and a short traceback."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

from buckeye.api.environment import missing_argument
from buckeye.errors import DEBUG_VARIABLE, BuckeyeError

P = ParamSpec("P")
T = TypeVar("T")

_RESUME = re.compile(r"buckeye rl resume ('[^']+'|[^\s`]+)((?: --[a-z][\w-]* [^\s`]+)*)")
_FLAG = re.compile(
    r"(?P<command>`(?:buckeye|rl|uv|pip) [^`]*`|^ +(?:buckeye|rl|uv|pip) .*$)"  # keeps its flags
    r"|(?<![\w-])--(?P<name>[a-z][\w.-]*)(?:[ =](?P<value>[^\s:`]+(?=:\s|`)))?",
    re.MULTILINE,
)


def with_python_errors(function: Callable[P, T]) -> Callable[P, T]:
    """Wrap a function to adapt its errors to Python.

    The errors name Python keywords instead of flags. The traceback ends at the call of the function. With
    BUCKEYE_DEBUG=1 the whole traceback is printed too.
    """

    @wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> T:
        try:
            return function(*args, **keywords)
        except BuckeyeError as error:
            raise _with_keywords(error) from (error if os.environ.get(DEBUG_VARIABLE) else None)

    return call


def _with_keywords(error: BuckeyeError) -> BuckeyeError:
    adapted = copy.copy(error)
    adapted.message = _keywords(error.message)
    adapted.at = error.at and _keywords(f"{error.at}:").removesuffix(":")
    adapted.hint = error.hint and _keywords(error.hint)
    adapted.args = (adapted.message,)
    return adapted


def _keywords(text: str) -> str:
    """Return a text with keywords in place of flags: `--model x: ...` is `model=x: ...`."""
    text = _RESUME.sub(_resume_call, text)
    return _FLAG.sub(lambda match: match["command"] or _keyword(match), text)


def _keyword(flag: re.Match[str]) -> str:
    name, is_subject = flag["name"].replace("-", "_"), flag.string[flag.end() :].startswith(":")
    return name if is_subject and not flag["value"] else f"{name}={flag['value'] or ''}"


def _resume_call(command: re.Match[str]) -> str:
    run, flags = command[1].strip("'"), command[2].split(" --")[1:]
    missing = missing_argument(Path(run))
    keywords = [f"{missing}=..."] if missing else []
    keywords += [flag.replace("-", "_").replace(" ", "=") for flag in flags]
    return f"buckeye.open_run({run!r}).resume({', '.join(keywords)})"
