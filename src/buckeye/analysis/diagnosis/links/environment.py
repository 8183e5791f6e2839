"""Checks of the environment: failures, time, and observations that depend on what the policy does."""

from __future__ import annotations

import numpy as np

from buckeye.analysis.diagnosis.facts import RECENT, TRAINED, DiagnosisFacts
from buckeye.analysis.diagnosis.statistics import is_below, share_interval
from buckeye.monitor.finding import Finding

_MIN_ROLLOUTS = 30
_READ = 24  # rollouts
_MIN_OBSERVATIONS = 12
_HEAD = 40  # characters


def failing_rollouts(facts: DiagnosisFacts) -> Finding | str | None:
    """Find a high share of rollouts without a reward."""
    rows = facts.query(
        "SELECT reward IS NULL, error, step FROM rollouts WHERE split = 'train' AND step <= {until} AND "
        "step > ?",
        facts.last - RECENT,
    )
    failed = [row for row in rows if row[0]]
    if len(rows) < _MIN_ROLLOUTS:
        return None
    measured = f"{len(failed)} of the last {len(rows)} rollouts have no reward"
    if share_interval(len(failed), len(rows))[0] < 0.1:
        return f"{measured} (at most 10 %)"
    errors = [row[1] for row in failed if row[1]]
    common = max(set(errors), key=errors.count) if errors else ""
    return facts.finding(
        "rollouts_fail",
        measured,
        f"they fail, most often with: {common[:200]}",
        "fix the environment; failures that the policy causes should have a reward",
        evidence=[("the failed rollouts", facts.rollouts(failed[-1][2], "--errored"))],
        confidence="sure",
        share=len(failed) / len(rows),
    )


def slow_environment(facts: DiagnosisFacts) -> Finding | str | None:
    """Find an environment so slow that trainer and engines wait for it."""
    recent = facts.batch_steps[-RECENT:]
    environment = [step.value("orchestrator/time/rollout/environment/mean") or 0.0 for step in recent]
    sampling = [step.value("orchestrator/time/rollout/sampling/mean") or 0.0 for step in recent]
    idle = [
        step.value("sampler/idle_ratio") or step.value("orchestrator/sampler/idle_ratio") or 0.0
        for step in recent
    ]
    if len(recent) < 3 or not any(sampling):
        return None
    measured = (
        f"a rollout spends {np.median(environment):.1f} s in the environment and {np.median(sampling):.1f} s "
        "waiting for tokens"
    )
    share = sum(environment) / max(1e-9, sum(environment) + sum(sampling))
    is_slow = np.median(environment) >= 0.5 and is_below(sampling, environment) and share >= 0.6
    if not is_slow or np.median(idle) < 0.5:
        return measured
    return facts.finding(
        "environment_slow",
        f"{measured[0].upper()}{measured[1:]}; engines are idle {np.median(idle):.0%} of the time",
        "the environment is slow, and the engines wait for it",
        "make it faster, or run it in its own workers (isolation, workers) with more concurrent rollouts "
        "(orchestrator.max_concurrent)",
        evidence=[
            (
                "the times by step",
                facts.metrics("time/rollout/environment/mean", "time/rollout/sampling/mean"),
            )
        ],
        share=share,
    )


def observations(facts: DiagnosisFacts) -> Finding | str | None:
    """Find observations that are empty, equal for all actions, or missing in what the model reads."""
    empty = missing = count = 0
    by_text, actions = dict[str, int](), set[str]()
    step = facts.last
    for place in facts.query(
        f"SELECT path, at, bytes, grp, number FROM rollouts WHERE {TRAINED} AND turns > 1 "  # noqa: S608
        f"ORDER BY step DESC, grp, number LIMIT {_READ}"
    ):
        rollout = facts.run.text_at(*place)
        if rollout is None:
            continue
        told = "".join("".join(rollout.text).split())
        replies = [at for at, one in enumerate(rollout.messages) if one.get("role") == "assistant"]
        for at in range(replies[0] + 1, replies[-1]) if replies else ():
            content = rollout.messages[at].get("content")
            if at in replies:
                continue
            actions.add(str(rollout.messages[at - 1].get("content")))
            text = "".join(content.split()) if isinstance(content, str) else None
            if text is None:
                continue
            count += 1
            empty += not text
            missing += text[:_HEAD] not in told and text[-_HEAD:] not in told
            by_text[text] = by_text.get(text, 0) + 1
    if count < _MIN_OBSERVATIONS:
        return None
    same = max(by_text.values())
    alike = same if len(actions) > 2 else 0
    shares = {
        "empty": (empty, "observations are empty"),
        "missing": (missing, "observations are not in the text that the model reads"),
        "alike": (alike, f"observations are equal, after {len(actions)} different actions"),
    }
    for kind, (number, what) in shares.items():
        if share_interval(number, count, 2.0)[0] > 0.8:
            return facts.finding(
                "observations_lost",
                f"{number} of {count} {what}",
                "the policy does not see what its actions did, so it cannot learn from more than one turn",
                "return the result of a tool as the content of its message; check how the chat template "
                "shows it",
                evidence=[("messages, and the text of the model", facts.rollouts(step, "--json"))],
                confidence="possible" if kind == "alike" else "likely",
                share=number / count,
            )
    return f"{empty} of {count} observations empty, {missing} missing in the model's text, {same} equal"


CHECKS = (failing_rollouts, slow_environment, observations)
