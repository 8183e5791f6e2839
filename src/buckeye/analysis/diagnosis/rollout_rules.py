"""Rules on rollouts: rewards, tasks, and the assignment of advantages."""

from __future__ import annotations

import numpy as np

from buckeye.analysis.diagnosis.facts import DiagnosisFacts
from buckeye.analysis.diagnosis.statistics import is_below, mean_interval, share_interval
from buckeye.monitor.finding import Finding

_TRAINED = "split = 'train' AND retried = 0 AND reward IS NOT NULL AND step <= {until}"
_RECENT = 10
_EQUAL = 1e-6


def advantages_against_rewards(facts: DiagnosisFacts) -> Finding | None:
    """Find groups in which the rollout with the higher reward has the lower advantage."""
    # CROSS and the plus make SQLite look up each rollout's group instead of joining all pairs of rollouts
    rows = facts.query(
        "SELECT a.step, a.grp, a.shaped_reward - b.shaped_reward, a.advantage - b.advantage FROM rollouts a "
        "CROSS JOIN rollouts b ON b.split = a.split AND b.step = +a.step AND b.grp = a.grp AND b.at > a.at "
        "AND b.path = a.path WHERE a.split = 'train' AND a.dropped IS NULL AND b.dropped IS NULL "
        "AND a.retried = 0 AND b.retried = 0 AND a.turns = 1 "
        "AND b.turns = 1 AND a.step <= {until} AND a.step > ? AND abs(a.shaped_reward - b.shaped_reward) "
        "> 1e-6 "
        "AND a.advantage IS NOT NULL AND b.advantage IS NOT NULL LIMIT 100000",
        facts.last - 30,
    )
    wrong = [(step, group) for step, group, reward, advantage in rows if reward * advantage < -1e-12]
    low, _ = share_interval(len(wrong), len(rows))
    if len(rows) < 20 or low < 0.02:
        return _misplaced(facts)
    share, (step, group) = len(wrong) / len(rows), wrong[-1]
    turned = share_interval(len(wrong), len(rows))[0] > 0.7
    return facts.finding(
        "advantage_sign" if turned else "advantages_misplaced",
        f"In {share:.0%} of {len(rows)} pairs of rollouts, the rollout with the higher reward has the "
        "lower advantage",
        "the advantages have the wrong sign, so training makes the worst rollouts more likely"
        if turned
        else "advantages belong to other rollouts of the batch (wrong order)",
        "check orchestrator.advantage, and your own advantage function",
        evidence=[
            (f"rewards and `advantages` of group {group}", facts.rollouts(step, "--group", group, "--json"))
        ],
        confidence="sure" if facts.run.setting("orchestrator.advantage.type") != "custom" else "likely",
        share=share,
    )


def _misplaced(facts: DiagnosisFacts) -> Finding | None:
    """Find samples whose advantage differs from the advantage of their rollout."""
    wrong = looked = 0
    example = None
    for batch in facts.batches:
        computed = {
            (group, number): advantage
            for group, number, advantage in facts.query(
                f"SELECT grp, number, advantage FROM rollouts WHERE {_TRAINED} AND dropped IS NULL "  # noqa: S608
                "AND turns = 1 AND step = ?",
                batch.batch.step,
            )
        }
        for sample, (group, number, _, _) in zip(batch.batch.samples, batch.origins, strict=False):
            expected = computed.get((group, number))
            if expected is None or not sample.loss_mask.any():
                continue
            looked += 1
            if abs(float(sample.advantages[sample.loss_mask].mean()) - expected) > 1e-4 * (1 + abs(expected)):
                wrong += 1
                example = example or (batch.batch.step, group, number)
    if looked < 20 or share_interval(wrong, looked)[0] < 0.05 or example is None:
        return None
    step, group, number = example
    return facts.finding(
        "advantages_misplaced",
        f"{wrong} of {looked} samples have an advantage that differs from that of their rollout",
        "the samples of the batch are out of order, so advantages belong to other rollouts",
        "check how groups become samples (orchestrator/batch.py)",
        evidence=[
            (
                f"step {step}, group {group}",
                facts.rollouts(step, "--group", group, "--rollout", number, "--json"),
            )
        ],
        confidence="sure",
        share=wrong / looked,
    )


def grader_disagrees(facts: DiagnosisFacts) -> Finding | None:
    """Find equal replies with different rewards. If few replies are equal, only `--try` can detect this."""
    rows = facts.query(
        "SELECT count(*), max(reward) - min(reward), max(step), max(grp) FROM rollouts "  # noqa: S608
        f"WHERE {_TRAINED} AND text IS NOT NULL GROUP BY env, task, text HAVING count(*) > 1"
    )
    other = [row for row in rows if row[1] > _EQUAL]
    low, _ = share_interval(len(other), len(rows), 2.0)
    if len(other) < 3 or low < 0.02:
        return None
    _, apart, step, group = max(other, key=lambda row: row[1])
    return facts.finding(
        "grader_random",
        f"{len(other)} of {len(rows)} repeated answers got different rewards, up to {apart:g} apart",
        "the grade depends on more than the answer: chance, time, or earlier grading",
        "grade deterministically; `buckeye env check` grades twice",
        evidence=[(f"the same text in group {group} of step {step}", facts.rollouts(step, "--group", group))],
        confidence="sure" if low > 0.1 else "likely",
        share=len(other) / len(rows),
    )


def grader_never_pays(facts: DiagnosisFacts) -> Finding | None:
    """Find a grader that gave 0 for many steps while other reward components varied."""
    rows = facts.query(
        "SELECT part.key, count(*), count(DISTINCT step) FROM rollouts, json_each(components) part "  # noqa: S608
        f"WHERE {_TRAINED} AND step > ? AND part.key LIKE 'grade/%' GROUP BY env, part.key "
        "HAVING max(abs(part.value)) = 0 AND max(reward) > min(reward)",
        facts.last - 3 * _RECENT,
    )
    unpaid = [row for row in rows if row[1] >= 100 and row[2] >= 3]
    if not unpaid:
        return None
    name, count, steps = max(unpaid, key=lambda row: row[1])
    return facts.finding(
        "grader_never_pays",
        f"{name} gave 0 to all {count} rollouts of the last {steps} steps",
        "no rollout solves the task, so only other reward components are learned (the format, for example)",
        "fine-tune first on rollouts that solve it (`buckeye env play --save FILE --min-reward X`, `sft`), "
        "use easier tasks, or fix the grader if it is wrong",
        evidence=[(f"the explanations of {name}", facts.rollouts(facts.last))],
    )


def duplicate_tasks(facts: DiagnosisFacts) -> Finding | None:
    """Find tasks with different names, but equal prompts and equal grading."""
    rows = facts.query(
        f"SELECT count(DISTINCT task), prompt, max(step) FROM rollouts WHERE {_TRAINED} "  # noqa: S608
        "AND prompt IS NOT NULL GROUP BY env, prompt"
    )
    tasks, prompts = sum(row[0] for row in rows), len(rows)
    shared = sum(row[0] for row in rows if row[0] > 1)
    if tasks < 10 or share_interval(shared, tasks, 2.0)[0] < 0.3 or _same_prompt_other_task(facts):
        return None
    _, prompt, step = max(rows)
    names = [
        name for (name,) in facts.query("SELECT DISTINCT task FROM rollouts WHERE prompt = ? LIMIT 3", prompt)
    ]
    return facts.finding(
        "duplicate_tasks",
        f"{tasks} tasks have {prompts} different prompts; {shared} tasks share a prompt with another",
        "the dataset has the same task under several ids, so a batch has fewer distinct tasks than it seems",
        "remove the duplicates from the dataset",
        evidence=[(f"the same prompt: {', '.join(names)}", facts.rollouts(step, "--task", names[0]))],
        share=shared / tasks,
    )


def _same_prompt_other_task(facts: DiagnosisFacts) -> bool:
    """Return True if equal replies to equal prompts score differently across tasks.

    Such tasks differ in data that the prompt does not show.
    """
    rows = facts.query(
        "SELECT max(reward) - min(reward) FROM rollouts "  # noqa: S608
        f"WHERE {_TRAINED} AND text IS NOT NULL GROUP BY env, text HAVING count(DISTINCT task) > 1"
    )
    return sum(row[0] > _EQUAL for row in rows) > 0.2 * len(rows) or not rows


def answer_in_prompt(facts: DiagnosisFacts) -> Finding | None:
    """Find higher rewards for replies that repeat text of the prompt."""
    rows = facts.query(
        f"SELECT step, grp, reward, echoes FROM rollouts WHERE {_TRAINED} AND echoes IS NOT NULL"  # noqa: S608
    )
    said, other = ([row[2] for row in rows if row[3] == kind] for kind in (1, 0))
    if len(said) < 20 or (not is_below(other, said) and other):
        return None
    best = max(row[2] for row in rows)
    paid = [row for row in rows if row[2] >= best - _EQUAL]
    copied = [row for row in paid if row[3]]
    if share_interval(len(copied), len(paid), 2.0)[0] < 0.7:
        return None
    held_out = [row[0] for row in facts.query(_EVALUATED)]
    trained = [row[2] for row in rows if row[0] >= facts.last - _RECENT]
    behind = len(held_out) >= 10 and is_below(held_out, trained)
    step, group = copied[-1][:2]
    return facts.finding(
        "answer_in_prompt",
        f"{len(copied)} of the {len(paid)} answers with the highest reward are in their prompts, word "
        "for word" + (", and held-out tasks have lower rewards" if behind else ""),
        "the prompts contain the answer, so the policy learns to copy",
        "remove the answer from the prompts; `buckeye env check` searches all tasks",
        evidence=[(f"group {group} of step {step}", facts.rollouts(step, "--group", group))],
        confidence="likely" if behind else "possible",
        share=len(copied) / len(paid),
    )


_EVALUATED = (
    "SELECT reward FROM rollouts WHERE split = 'eval' AND reward IS NOT NULL AND step = (SELECT max(step) "
    "FROM "
    "rollouts WHERE split = 'eval' AND step <= {until})"
)


def evaluated_on_train(facts: DiagnosisFacts) -> Finding | None:
    """Find evaluation prompts that are also training prompts."""
    known = facts.query(
        "SELECT DISTINCT split, prompt FROM rollouts WHERE retried = 0 AND prompt IS NOT NULL "
        "AND step <= {until}"
    )
    evaluated, trained = ({prompt for of, prompt in known if of == split} for split in ("eval", "train"))
    both = evaluated & trained
    if len(evaluated) < 3 or share_interval(len(both), len(evaluated), 2.0)[0] < 0.2:
        return None
    (step, task), *_ = facts.query(
        "SELECT step, task FROM rollouts WHERE split = 'train' AND prompt = ? AND step <= {until}",
        min(both),
    )
    return facts.finding(
        "evaluated_on_train",
        f"{len(both)} of the {len(evaluated)} evaluation prompts are also trained on",
        "the evaluation uses the train split, so it measures memorization",
        "set split of [[orchestrator.eval.env]] to a held-out split",
        evidence=[(f"the same prompt in training: {task}", facts.rollouts(step, "--task", task))],
        confidence="sure",
        share=len(both) / len(evaluated),
    )


def truncated_replies(facts: DiagnosisFacts) -> Finding | None:
    """Find many truncated replies with lower rewards than complete ones."""
    rows = facts.query(
        f"SELECT reward, truncated, completion_tokens, step FROM rollouts WHERE {_TRAINED} AND step > ?",  # noqa: S608
        facts.last - _RECENT,
    )
    cut, ended = ([row for row in rows if row[1] == kind] for kind in (1, 0))
    if len(rows) < 30 or share_interval(len(cut), len(rows))[0] < 0.1 or len(cut) < 0.2 * len(rows):
        return None
    if not is_below([row[0] for row in cut], [row[0] for row in ended]):
        return None
    before, now = (
        [row[1] for row in rows if (row[3] > facts.last - _RECENT // 2) == late] for late in (0, 1)
    )
    if is_below(now, before, 2.0):
        return None  # truncation decreases with training
    share, length = len(cut) / len(rows), float(np.mean([row[2] for row in cut]))
    return facts.finding(
        "truncated_replies",
        f"{share:.0%} of the replies are cut off after {length:.0f} tokens, and have lower rewards than "
        "complete replies",
        "max_tokens is too small for these tasks, so correct answers are cut off",
        "raise orchestrator.sampling.max_tokens, or shape the reward by length",
        evidence=[(f"mean reward {_range([r[0] for r in cut])}, of complete replies "
        f"{_range([r[0] for r in ended])}",
                   facts.rollouts(facts.last))],
        since=facts.last - _RECENT + 1,
        share=share,
    )  # fmt: skip


def _range(rewards: list[float]) -> str:
    low, high = mean_interval(rewards, 2.0)
    return f"{low:.2f} to {high:.2f}"


def slow_environment(facts: DiagnosisFacts) -> Finding | None:
    """Find an environment so slow that trainer and engines wait for it."""
    recent = facts.batch_steps[-_RECENT:]
    environment = [step.value("orchestrator/time/rollout/environment/mean") or 0.0 for step in recent]
    sampling = [step.value("orchestrator/time/rollout/sampling/mean") or 0.0 for step in recent]
    idle = [
        step.value("sampler/idle_ratio") or step.value("orchestrator/sampler/idle_ratio") or 0.0
        for step in recent
    ]
    if len(recent) < 3 or np.median(environment) < 0.5 or not is_below(sampling, environment):
        return None
    share = sum(environment) / max(1e-9, sum(environment) + sum(sampling))
    if share < 0.6 or np.median(idle) < 0.5:
        return None
    return facts.finding(
        "environment_slow",
        f"A rollout spends {np.median(environment):.1f} s in the environment and "
        f"{np.median(sampling):.1f} s waiting "
        f"for tokens; engines are idle {np.median(idle):.0%} of the time",
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


def failing_rollouts(facts: DiagnosisFacts) -> Finding | None:
    """Find a high share of rollouts without a reward."""
    rows = facts.query(
        "SELECT reward IS NULL, error, step FROM rollouts WHERE split = 'train' AND step <= {until} AND "
        "step > ?",
        facts.last - _RECENT,
    )
    failed = [row for row in rows if row[0]]
    if len(rows) < 30 or share_interval(len(failed), len(rows))[0] < 0.1:
        return None
    errors = [row[1] for row in failed if row[1]]
    common = max(set(errors), key=errors.count) if errors else ""
    return facts.finding(
        "rollouts_fail",
        f"{len(failed)} of the last {len(rows)} rollouts have no reward",
        f"they fail, most often with: {common[:200]}",
        "fix the environment; failures that the policy causes should have a reward",
        evidence=[("the failed rollouts", facts.rollouts(failed[-1][2], "--errored"))],
        confidence="sure",
        share=len(failed) / len(rows),
    )
