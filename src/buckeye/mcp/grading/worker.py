"""Worker process that judges requests: `python -I -m buckeye.mcp.grading.worker`.

Reads one JSON request per line from stdin, and writes one JSON reply per line to stdout.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

from buckeye.mcp.grading.judge import (
    GraderVerdict,
    RecordedCall,
    judge_calls,
    judge_results,
    judge_schema,
    judge_text,
)
from buckeye.mcp.grading.judge_state import judge_state
from buckeye.mcp.grading.schema import Grader


def judge_request(request: dict[str, Any]) -> GraderVerdict:
    """Return the verdict of `grader` on the request's `text`, `data`, `calls` or `folder`.

    If the request has `schema` instead of `grader`, test the JSON in `text` against this JSON Schema.
    """
    if "schema" in request:
        return judge_schema(request["schema"], request["text"])
    grader = Grader.model_validate(request["grader"])
    calls = [RecordedCall(**call) for call in request.get("calls", ())]
    if grader.calls is not None:
        return judge_calls(grader.calls, calls)
    if grader.result is not None:
        return judge_results(grader.result, calls)
    if grader.state is not None and (grader.state.file or grader.state.database):
        return judge_state(grader.state, Path(request["folder"]))
    match = grader.reply or grader.state
    assert match is not None
    return judge_text(match, request["text"], request.get("data"))


def main() -> None:
    """Reply to each request until stdin ends.

    A request with the key `import` only imports the module of this name.
    """
    sys.setrecursionlimit(10_000)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        try:
            if "import" in request:
                importlib.import_module(request["import"])
                reply: dict[str, Any] = {}
            else:
                verdict = judge_request(request)
                reply = {"score": verdict.score, "explanation": verdict.explanation}
        except (MemoryError, RecursionError, OverflowError) as error:
            reply = {"score": 0.0, "explanation": f"too large to judge ({type(error).__name__})"}
        except Exception as error:  # a bug in Buckeye or a library
            reply = {"failed": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
