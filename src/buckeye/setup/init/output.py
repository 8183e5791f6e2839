"""Texts that `buckeye rl init` prints."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from buckeye.base.columns import counted
from buckeye.setup.init.generate import GeneratedConfig
from buckeye.setup.init.trial import TrialResult


def summary_text(generated: GeneratedConfig, path: Path, files: Path | None) -> str:
    """Return the list of written files, and the decisions left to a person."""
    plan = generated.plan
    lines = [f"{path}: {counted(len(plan.actions), 'action')}, and done()"]
    if files is not None:
        lines.append(f"{files}: copied for every rollout")
    if plan.flagged:
        lines.append(f"not mapped, check: {', '.join(flagged.action.name for flagged in plan.flagged)}")
    lines += [f"note: {note}" for note in generated.notes]
    if plan.flagged:
        lines.append(f"{counted(len(plan.flagged), 'decision')} for you: the lines marked CHECK in the file")
    return "\n".join(lines)


def trials_text(result: TrialResult, environment: str, without_failed: Sequence[str] = ()) -> str:
    """Return the result of the trial; `without_failed` is the command without failed actions."""
    lines = [f"Trial of {environment}"]
    width = max((len(trial.action) for trial in result.trials), default=0)
    for trial in result.trials:
        call = trial.call if trial.ending in ("worked", "refused", "failed") else ""
        line = f"  {trial.action:{width}}  {trial.ending:9}  {call}"
        lines.append((line + (f"  {trial.message}" if trial.message else "")).rstrip())
    if result.note:
        lines.append(f"note: {result.note}")
    if result.reward is not None:
        lines.append(f"  reward of the first task: {result.reward:g}")
    if result.passed:
        is_tried = any(trial.call for trial in result.trials)
        text = "Passed: the calls reached the tools." if is_tried else "Not tried: all actions are held back."
        lines.append(text)
    else:
        lines.append(f"Failed: {_failure_text(result, without_failed)}")
    return "\n".join(lines)


def next_step_text(path: Path, tasks: Path | None) -> str:
    """Return the next command to type, with `tasks` if they are known."""
    train = ["buckeye", "rl", "--config", str(path), "--dataset", str(tasks or "tasks.json")]
    return f"Next: train on tasks from a JSON file or a dataset (`buckeye hf`)\n  {shlex.join(train)}"


def _failure_text(result: TrialResult, without_failed: Sequence[str]) -> str:
    if result.problem:
        return f"{result.problem}\nThe configuration was written. Check the environment."
    if result.failed:
        calls = "\n".join(f"  {trial.call or trial.action}: {trial.message}" for trial in result.failed)
        text = f"{counted(len(result.failed), 'call')} did not succeed\n{calls}\n"
        text += "The configuration was written. Fix the server, then retry with --force."
        if without_failed:
            text += f"\nTo continue without the failed actions:\n  {shlex.join(without_failed)}"
        return text
    if all(trial.ending == "not tried" for trial in result.trials):
        return "no action was tried. Check the lines marked CHECK in the file, or add --include TOOL."
    return "every tool refused the generated arguments. Add --dataset with tasks that set up the environment."
