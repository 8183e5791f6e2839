"""Checks of the outcome: the reward rises and stays, and the evaluation measures the same task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from buckeye.analysis.diagnosis.facts import DiagnosisFacts
from buckeye.analysis.diagnosis.statistics import is_below, mean_interval
from buckeye.monitor.finding import Finding
from buckeye.monitor.learning_findings import find_fall

_NOT_COMPARED = ("split", "num_examples", "rollouts_per_example", "seed", "limit", "name")


def reward_fell(facts: DiagnosisFacts) -> Finding | str | None:
    """Find a reward that is significantly below its earlier level."""
    peak = find_fall(facts.batch_steps)
    if facts.outcome is None:
        return None
    if peak is None:
        return _no_rise(facts, str(facts.outcome)) if facts.outcome.is_flat else str(facts.outcome)
    return facts.finding(
        "reward_fell",
        f"The reward was {peak.reward:.3f} around step {peak.step}, and is {peak.last:.3f} now",
        f"something broke the policy after step {peak.step}",
        f"resume from a checkpoint of about step {peak.step}, with a lower trainer.optim.lr",
        evidence=[
            ("reward, entropy and gradient by step", facts.metrics("reward/mean", "entropy", "grad_norm")),
            ("what happened in the run", facts.command("logs", "--events")),
        ],
        since=peak.step,
        best=peak.reward,
        last=peak.last,
    )


def _no_rise(facts: DiagnosisFacts, said: str) -> Finding:
    """Return the `possible` finding of a reward that has not risen."""
    return facts.finding(
        "no_rise",
        said[0].upper() + said[1:],
        "the reward has not risen, and no link before explains it",
        "train longer, or with more rollouts a step; `--try` tests the links that are unknown",
        evidence=[("the reward by step", facts.metrics("reward/mean"))],
        confidence="possible",
    )


def evaluated_otherwise(facts: DiagnosisFacts) -> Finding | str | None:
    """Find conditions of the evaluation that training lacks: prompts, arguments, limits."""
    trains = {_name(env): env for env in facts.run.setting("orchestrator.env") or []}
    evals = facts.run.setting("orchestrator.eval.env") or []
    if not trains or not evals:
        return None
    differences = list(_other_settings(trains, evals))
    prompts = _system_prompts(facts)
    if prompts is not None and prompts[0] != prompts[1]:
        train, evaluated = prompts
        differences.insert(0, f"system prompt {evaluated[:80]!r} in evaluation, {train[:80]!r} in training")
    elif not differences or not _evaluation_lags(facts):
        return f"{len(differences)} differences between the conditions of evaluation and training"
    return facts.finding(
        "evaluated_otherwise",
        f"Evaluation and training differ: {'; '.join(differences)}",
        "the evaluation does not measure what is trained",
        "give [[orchestrator.env]] and [[orchestrator.eval.env]] the same arguments, prompts and limits",
        evidence=[
            ("a rollout of training", facts.rollouts(facts.last)),
            ("both settings", f"grep -n '' {facts.run.path / 'configs' / 'rl.json'}"),
        ],
    )


def _name(env: Mapping[str, Any]) -> str:
    return str(env.get("id"))


def _other_settings(trains: Mapping[str, Any], evals: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the differences between the settings of an environment in evaluation and in training."""
    for env in evals:
        train = trains.get(_name(env))
        if train is None:
            yield f"`{_name(env)}` is not trained"
            continue
        ours, theirs = ({**(one.get("args") or {})} for one in (train, env))
        ours["max_turns"], theirs["max_turns"] = train.get("max_turns"), env.get("max_turns")
        for key in sorted(ours.keys() | theirs.keys()):
            if key not in _NOT_COMPARED and ours.get(key) != theirs.get(key):
                yield f"{key} is {theirs.get(key)!r} in evaluation, {ours.get(key)!r} in training"


def _system_prompts(facts: DiagnosisFacts) -> tuple[str, str] | None:
    """Return the most common system prompt of training and of evaluation, "" for none; None if unknown."""
    found = list[str]()
    for split in ("train", "eval"):
        rows = facts.query(
            "SELECT path, at, bytes, grp, number FROM rollouts WHERE split = ? AND reward IS NOT NULL "
            "AND step <= {until} ORDER BY step DESC, grp LIMIT 9",
            split,
        )
        messages = [
            one.messages for row in rows if (one := facts.run.text_at(*row)) is not None and one.messages
        ]
        if len(messages) < 3:
            return None
        systems = [
            str(each[0].get("content")) if each[0].get("role") == "system" else "" for each in messages
        ]
        found.append(max(set(systems), key=systems.count) if len(set(systems)) < len(systems) else "")
    return found[0], found[1]


def _evaluation_lags(facts: DiagnosisFacts) -> bool:
    """Return True if training improves and the evaluation does not."""
    rows = facts.query(
        "SELECT step, reward FROM rollouts WHERE split = 'eval' AND reward IS NOT NULL AND step <= {until}"
    )
    steps = sorted({step for step, _ in rows})
    if len(steps) < 2 or not facts.has_risen:
        return False
    first, last = ([reward for step, reward in rows if step == at] for at in (steps[0], steps[-1]))
    return not is_below(first, last, 2.0)


def training_without_transfer(facts: DiagnosisFacts) -> Finding | str | None:
    """Find a training reward that rises while the reward on held-out tasks does not."""
    rows = facts.query(
        "SELECT step, avg(reward), count(reward) FROM rollouts WHERE split = 'eval' AND step <= {until} "
        "GROUP BY step"
    )
    rewards = [reward for step in facts.batch_steps if (reward := step.sampled_reward) is not None]
    if len(rows) < 2 or len(rewards) < 6 or min(row[2] for row in rows) < 10:
        return None
    third = max(2, len(rewards) // 3)
    first, last = (_evaluated(facts, rows[at][0]) for at in (0, -1))
    gained = float(np.mean(rewards[-third:]) - np.mean(rewards[:third]))
    low, high = mean_interval(last, 2.0)
    measured = (
        f"training gained {gained:.2f}, the held-out tasks {np.mean(last) - np.mean(first):.2f} "
        f"({low:.2f} to {high:.2f} now, {np.mean(first):.2f} at the start)"
    )
    if not is_below(rewards[:third], rewards[-third:], 3.0) or float(np.mean(first)) + 0.3 * gained < high:
        return measured
    return facts.finding(
        "no_transfer",
        measured[0].upper() + measured[1:],
        "the policy does not generalize: a leak, a grader that can be gamed, or too few tasks",
        "read the rollouts with the highest rewards; `buckeye env check` finds leaks and gaming",
        evidence=[("training and evaluation by step", facts.metrics("reward/mean", 'eval/[^"]*'))],
        gained=gained,
    )


def _evaluated(facts: DiagnosisFacts, step: int) -> Sequence[float]:
    rows = facts.query(
        "SELECT reward FROM rollouts WHERE split = 'eval' AND reward IS NOT NULL AND step = ?", step
    )
    return [row[0] for row in rows]


CHECKS = (evaluated_otherwise, training_without_transfer, reward_fell)
