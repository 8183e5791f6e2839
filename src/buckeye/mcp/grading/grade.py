"""Run one grader on a finished rollout, and return its verdict."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from buckeye.envs.base import Message
from buckeye.mcp.client.errors import McpEnvironmentError
from buckeye.mcp.client.session import CallResult
from buckeye.mcp.grading.grader_processes import GraderError, judge_in_worker, run_command, run_function
from buckeye.mcp.grading.judge import GraderVerdict, RecordedCall
from buckeye.mcp.grading.schema import Grader, StateGrader, needs_math

_WORKDIR = "{workdir}"
_MAX_RESULT_CHARS = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedRollout:
    """Data of a finished rollout that graders read.

    `reply` is the last reply without thoughts and calls. `workdir` is the rollout's folder, or None. The
    parameters of `call_tool` are the name of a tool, its arguments, and a timeout in seconds.
    """

    task: Mapping[str, Any]
    messages: Sequence[Message]
    reply: str
    calls: Sequence[RecordedCall]
    workdir: Path | None
    call_tool: Callable[[str, Mapping[str, Any], float], Awaitable[CallResult]]


def record_call(tool: str, arguments: Mapping[str, Any], result: CallResult) -> RecordedCall:
    """Return the record of a call that graders read.

    If the text is longer than 2**20 characters, cut the text and drop the structured content.
    """
    text = result.text[:_MAX_RESULT_CHARS]
    data = result.structured if len(result.text) <= _MAX_RESULT_CHARS else None
    return RecordedCall(tool=tool, arguments=arguments, text=text, data=data, error=result.is_error)


async def run_grader(grader: Grader, rollout: FinishedRollout) -> GraderVerdict:
    """Return a grader's verdict on a rollout. Raises GraderError if the grader reaches no verdict.

    `fill_metadata` must have replaced the references `{metadata.NAME}` in the grader.
    """
    if grader.needs_folder and rollout.workdir is not None and rollout.workdir.is_symlink():
        return GraderVerdict(0.0, "the rollout's folder was replaced by a link")
    request: dict[str, Any] = {"grader": grader.model_dump(mode="json", exclude_unset=True)}
    if grader.python is not None:
        return await run_function(grader.python, _arguments(rollout), grader.timeout)
    if grader.reply is not None:
        request |= {"text": rollout.reply}
    elif grader.state is None:
        request |= {"calls": [asdict(call) for call in rollout.calls]}
    elif grader.needs_folder and rollout.workdir is None:
        raise GraderError("the grader reads the rollout's folder, but no server of the task has a `command`")
    elif grader.state.tool is not None:
        result = await _call_tool(grader, grader.state, rollout)
        if result.is_error:
            return GraderVerdict(0.0, f"{grader.state.tool} failed: {result.text[:200]}")
        request |= {"text": result.text, "data": result.structured}
    elif grader.state.command is not None:
        assert rollout.workdir is not None
        argv = [arg.replace(_WORKDIR, str(rollout.workdir)) for arg in grader.state.command]
        code, output = await run_command(argv, rollout.workdir, grader.timeout)
        if code != grader.state.exit_code:
            found = f"timeout after {grader.timeout:g} s" if code is None else f"exit code {code}"
            tail = output.strip()[-200:]
            return GraderVerdict(0.0, f"expected exit code {grader.state.exit_code}, found {found}: {tail}")
        if not grader.state.tests and grader.state.json_path is None:
            return GraderVerdict(1.0, f"exit code {code}")
        request |= {"text": output}
    else:
        request |= {"folder": str(rollout.workdir)}
    return await judge_in_worker(request, library="math_verify" if needs_math(grader) else None)


async def _call_tool(grader: Grader, state: StateGrader, rollout: FinishedRollout) -> CallResult:
    assert state.tool is not None
    try:
        return await rollout.call_tool(state.tool, state.arguments, grader.timeout)
    except McpEnvironmentError as fault:
        raise GraderError(fault.message, code=fault.code, at=fault.at, hint=fault.hint) from fault


def _arguments(rollout: FinishedRollout) -> dict[str, Any]:
    """Return the keyword arguments of a user's grader function."""
    return {
        "task": dict(rollout.task),
        "messages": list(rollout.messages),
        "calls": [{"tool": call.tool, "arguments": call.arguments} for call in rollout.calls],
        "results": [{"text": call.text, "data": call.data, "error": call.error} for call in rollout.calls],
        "workdir": None if rollout.workdir is None else str(rollout.workdir),
    }
