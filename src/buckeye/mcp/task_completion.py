"""Task completion score of a rollout, from evaluate_tool and the graders."""

from __future__ import annotations

from dataclasses import dataclass, replace

from buckeye.mcp.client.errors import EvaluateError, McpEnvironmentError, TaskError
from buckeye.mcp.client.rollout_sessions import RolloutSessions
from buckeye.mcp.config import GymConfig
from buckeye.mcp.evaluation_result import parse_reward
from buckeye.mcp.grading.grade import FinishedRollout, run_grader
from buckeye.mcp.grading.grader_processes import GraderError
from buckeye.mcp.grading.judge import GraderVerdict
from buckeye.mcp.grading.schema import Grader
from buckeye.mcp.grading.task_graders import resolve_graders
from buckeye.mcp.rollout_resources import RolloutResources, open_rollout_resources, run_task_call
from buckeye.mcp.tasks.task_schema import McpTask

_EVALUATE = "evaluate_tool"


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskCompletion:
    """Completion score of one rollout.

    `score` is the weighted mean of all verdicts. `components` has each verdict's score and the other numbers
    of evaluate_tool. `explanations` has the explanation of each verdict.
    """

    score: float
    components: dict[str, float]
    explanations: dict[str, str]


async def grade_rollout(
    task: McpTask, config: GymConfig, resources: RolloutResources, rollout: FinishedRollout
) -> TaskCompletion:
    """Return the completion score of a finished rollout.

    If evaluate_tool or a grader fails, repeat it on a fresh session without the model's calls. If it then
    succeeds, the model caused the failure: its score is 0, and `graders_failed` counts it. If it fails again,
    the environment caused the failure: raise EvaluateError, or TaskError if no retry can succeed.
    """
    verdicts: list[tuple[str, float, GraderVerdict]] = []
    numbers: dict[str, float] = {}
    failed = 0
    graders = resolve_graders(task, config)
    if task.evaluate_tool:
        try:
            reward, numbers = await _run_evaluation(task, config, resources.sessions)
            verdict = GraderVerdict(reward, f"reward {reward:g}")
        except (EvaluateError, TaskError) as error:
            await _check_evaluation(task, config, error)
            verdict = GraderVerdict(0.0, f"failed because of the model's calls: {error}")
            failed += 1
        verdicts.append((_EVALUATE, 1.0, verdict))
    for grader in graders:
        try:
            verdict = await run_grader(grader, rollout)
        except GraderError as error:
            await _check_grader(grader, task, config, rollout, error)
            verdict = GraderVerdict(0.0, f"failed because of the model's output: {error}")
            failed += 1
        verdicts.append((grader.name, grader.weight, verdict))
    total = sum(weight for _, weight, _ in verdicts)
    score = sum(weight * verdict.score for _, weight, verdict in verdicts) / total if verdicts else 0.0
    if not graders and not failed:
        return TaskCompletion(score=score, components=numbers, explanations={})
    numbers["graders_failed"] = float(failed)
    if not graders:
        return TaskCompletion(score=score, components=numbers, explanations={_EVALUATE: verdict.explanation})
    explanations = {f"grade/{name}": verdict.explanation for name, _, verdict in verdicts}
    scores = {f"grade/{name}": verdict.score for name, _, verdict in verdicts}
    return TaskCompletion(score=score, components=numbers | scores, explanations=explanations)


async def _run_evaluation(
    task: McpTask, config: GymConfig, sessions: RolloutSessions
) -> tuple[float, dict[str, float]]:
    """Run the calls of evaluate_tool. Return the reward and the other numbers of the last call.

    Raises EvaluateError or TaskError if a call fails.
    """
    outcome: tuple[float, dict[str, float]] = 0.0, {}
    for call in task.evaluate_tool:
        seconds = config.defaults.tool_timeout
        result = await run_task_call(_EVALUATE, call, sessions, seconds, EvaluateError)
        outcome = parse_reward(f"{_EVALUATE} {call.name}", result)
    return outcome


async def _check_evaluation(task: McpTask, config: GymConfig, error: McpEnvironmentError) -> None:
    """Raise `error` unless evaluate_tool succeeds on a fresh session, without any call of the model."""
    try:
        async with open_rollout_resources(task, config) as fresh:
            await _run_evaluation(task, config, fresh.sessions)
    except McpEnvironmentError:
        raise error from None


async def _check_grader(
    grader: Grader, task: McpTask, config: GymConfig, rollout: FinishedRollout, error: GraderError
) -> None:
    """Raise EvaluateError unless the grader gives a verdict on a fresh session without any model output."""
    try:
        async with open_rollout_resources(task, config) as fresh:
            untouched = replace(
                rollout,
                messages=[message for message in rollout.messages[:2] if message["role"] != "assistant"],
                reply="",
                calls=(),
                workdir=fresh.workdir.path,
                call_tool=fresh.sessions.call,
            )
            await run_grader(grader, untouched)
    except (McpEnvironmentError, GraderError) as fresh_error:
        differs = fresh_error.message != error.message
        raise EvaluateError(
            f"grade {grader.name} fails, with and without the model's output: {error.message}"
            + (f"; without it: {fresh_error.message}" if differs else ""),
            code=error.code,
            at=error.at,
            hint=error.hint,
        ) from None
