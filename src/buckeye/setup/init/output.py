"""Output of `buckeye rl init`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from buckeye.base.columns import counted
from buckeye.setup.init.generate import GeneratedConfig
from buckeye.setup.init.scripted_rollout import TrialResult


def summary_text(generated: GeneratedConfig, path: Path, files: Path | None) -> str:
    """Return the list of written files, and the decisions left to a person."""
    plan = generated.plan
    lines = [f"{path}: {counted(len(plan.actions), 'action')}, and done()"]
    if files is not None:
        lines.append(f"{files}: what every rollout begins with")
    if plan.flagged:
        lines.append(f"not mapped, to be looked at: {', '.join(one.action.name for one in plan.flagged)}")
    lines += [f"note: {note}" for note in generated.notes]
    if generated.decisions:
        lines.append(f"{counted(len(generated.decisions), 'decision')} for you; see CHECK in the file")
    return "\n".join(lines)


def trials_text(proof: TrialResult, shown: str, without: Sequence[str] = ()) -> str:
    """Return the result of the scripted rollout; `without` is the command that leaves out failed actions."""
    lines = [f"Scripted rollout on {shown}"]
    width = max((len(trial.action) for trial in proof.trials), default=0)
    for trial in proof.trials:
        what = trial.call if trial.ending in ("worked", "refused", "failed") else ""
        line = f"  {trial.action:{width}}  {trial.ending:9}  {what}"
        lines.append((line + (f"  {trial.message}" if trial.message else "")).rstrip())
    if proof.note:
        lines.append(f"note: {proof.note}")
    if proof.reward is not None:
        lines.append(f"  the first task's grading gave {proof.reward:g}")
    if proof.passed:
        lines.append("The rollout went through the configuration to the tools, and ended with done().")
    else:
        lines.append(f"not proven: {_why(proof, without)}")
    return "\n".join(lines)


def next_step_text(path: Path, tasks: Path | None) -> str:
    """Return the next command to type, with `tasks` if they are known."""
    train = ["buckeye", "rl", "--config", str(path), "--dataset", str(tasks or "tasks.json")]
    return (
        "Next: train on its tasks, which may be a JSON file or a dataset (`buckeye hf`).\n"
        f"  {shlex.join(train)}"
    )


def _why(proof: TrialResult, without: Sequence[str]) -> str:
    if proof.problem:
        return f"{proof.problem}\nThe file stays; look at the environment."
    if proof.failed:
        failed = "\n".join(f"  {trial.call or trial.action}: {trial.message}" for trial in proof.failed)
        what, it = ("this call", "it") if len(proof.failed) == 1 else ("these calls", "them")
        text = f"{what} failed:\n{failed}\nThe file stays. Fix the server, then try again with --force."
        if without:
            text += f"\nTo continue without {it}:\n  {shlex.join(without)}"
        return text
    if all(trial.ending == "not tried" for trial in proof.trials):
        return "no action could be tried. Look at what is marked CHECK in the file, or add --include TOOL."
    if proof.stop_reason != "done":
        return f"the rollout ended with {proof.stop_reason}, not with done."
    return "every tool refused made-up arguments. Name tasks that prepare the environment with --dataset."
