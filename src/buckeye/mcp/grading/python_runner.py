"""Program that calls a grader's function: `python -I python_runner.py FILE FUNCTION RESULT`.

Reads the arguments of the function as JSON from stdin. Writes the score with its explanation, or the error,
to the file RESULT. Runs as a separate script, so it imports nothing of Buckeye.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import math
import re
import sys
import traceback
from pathlib import Path
from typing import Any


def main(file: str, function: str, result: str) -> None:
    """Call the function, and write its score or error to the file `result`."""
    try:
        reply = _call_function(file, function, json.load(sys.stdin))
    except BaseException as error:  # any error of the function, including SystemExit
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        where = f" ({Path(file).name}:{frames[-1].lineno})" if frames else ""
        reply = {"failed": f"{type(error).__name__}: {error}"[:500] + where}
    Path(result).write_text(json.dumps(reply), encoding="utf-8")


def _call_function(file: str, function: str, arguments: dict[str, Any]) -> dict[str, Any]:
    sys.path.insert(0, str(Path(file).parent))
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    if arguments["workdir"] is not None:
        arguments["workdir"] = Path(arguments["workdir"])
    grade = getattr(module, function)
    returned = grade(**arguments)
    score, explanation = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, "")
    if not isinstance(score, int | float) or not math.isfinite(score):
        raise TypeError(_describe_wrong_score(grade, score))
    return {"score": float(score), "explanation": str(explanation)[:1000]}


def _describe_wrong_score(grade: Any, score: Any) -> str:
    code = getattr(grade, "__code__", None)
    where = "" if code is None else f" ({Path(code.co_filename).name}:{code.co_firstlineno})"
    shown = re.sub(r" at 0x[0-9a-fA-F]+", "", repr(score))  # addresses differ in every process
    if inspect.iscoroutine(score):
        score.close()
        shown = "a coroutine that was not awaited"
    return f"{grade.__name__}{where} returned {shown}: expected a number, or a number and a text"[:300]


if __name__ == "__main__":
    main(*sys.argv[1:])
