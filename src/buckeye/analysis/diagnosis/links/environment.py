"""Checks of the environment: failures, time, and observations that depend on what the policy does."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from buckeye.analysis.diagnosis.facts import RECENT, DiagnosisFacts, Place, Result
from buckeye.analysis.diagnosis.prompts import continuations, cut_texts, message_text, prompt_tokens
from buckeye.analysis.diagnosis.statistics import SURE, is_below, share_interval
from buckeye.base.columns import counted
from buckeye.monitor.finding import Finding
from buckeye.monitor.rollouts import RecordedRollout

_READ = 24  # rollouts
_MIN_OBSERVATIONS = 12
_MIN_REPEATS = 6
_COMPARED = 200  # rollouts
_EQUAL = 1e-6
_MOST_ENDS = 400  # rollouts
_OFTEN = 3
_LEAST_DIFFERING = 0.2
_HEAD = 40  # characters
_MOST_BRANCHED = 0.9
_MANY_ERRORS = 0.2
_ERROR = re.compile(
    r"\W*(?:\w*error|\w*exception|traceback|timed? ?out|timeout|failed|unavailable|busy)\b",
    re.IGNORECASE,
)
"""Beginning of an observation that reports a failure."""
_INVALID = re.compile(
    r"invalid|unknown|malformed|unexpected|pars|argument|no such|not (?:an? |found|valid)", re.I
)
"""Words of an observation that reports a wrong action."""
_TURN_LIMITS = ("max_turns", "turn_limit", "max_turns_reached")
"""Stop reasons of Buckeye's limit, of the tool loop, and of `verifiers`."""


def failing_rollouts(facts: DiagnosisFacts) -> Result:
    """Find a high share of rollouts without a reward."""
    rows = facts.query(
        "SELECT reward IS NULL, error, step, path, at, bytes, grp, number FROM rollouts "
        "WHERE split = 'train' AND step <= {until} AND step > ? ORDER BY step DESC",
        facts.last - RECENT,
    )
    failed = [row for row in rows if row[0]]
    common = Counter(row[1] for row in failed if row[1]).most_common(1)
    what = "".join(
        ["recent rollouts have no reward", *(f"; most often: {error[:200]}" for error, _ in common)]
    )
    places = [(row[2],) for row in failed]
    found = facts.share_finding(
        "rollouts_fail", places, len(rows), what, most=0.1, least=30, errors=SURE, confidence="sure"
    )
    if isinstance(found, Finding) and (actions := _failing_actions(facts, rows)):
        return replace(found, seen=f"{found.seen}. Replies that always fail: {', '.join(actions)}")
    return found


def _failing_actions(facts: DiagnosisFacts, rows: Sequence[tuple[Any, ...]]) -> list[str]:
    """Return the most common last replies that always fail, with the observations before them.

    Empty if other failures are common, because failures then do not depend on the action.
    """
    ends = defaultdict[tuple[str, ...], list[bool]](list)
    for has_failed, _, _, *place in rows[:_MOST_ENDS]:
        rollout = facts.run.text_at(*place)
        if rollout is not None and rollout.messages and rollout.messages[-1].get("role") == "assistant":
            last = 2 if any(continuations(rollout)) else 1  # the prompt is that of one task
            contents = [message_text(message).strip() for message in rollout.messages[-last:]]
            ends[tuple(contents)].append(bool(has_failed))
    always = {end: len(found) for end, found in ends.items() if all(found) and len(found) >= _OFTEN}
    count = sum(sum(found) for found in ends.values())
    if not always or len(always) == len(ends) or sum(always.values()) < _MOST_BRANCHED * count:
        return []
    most = sorted(always, key=lambda end: -always[end])[:3]
    return [" to ".join(repr(text[:40]) for text in reversed(end)) for end in most]


def slow_environment(facts: DiagnosisFacts) -> Result:
    """Find an environment so slow that trainer and engines wait for it."""
    recent = facts.batch_steps[-RECENT:]
    environment, sampling = (
        [step.value(f"orchestrator/time/rollout/{part}/mean") or 0.0 for step in recent]
        for part in ("environment", "sampling")
    )
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
    seen = f"{measured}; engines are idle {np.median(idle):.0%} of the time"
    return facts.finding("environment_slow", seen)


def observations(facts: DiagnosisFacts) -> Result:
    """Find observations that are empty, cut, equal for all actions, or missing in what the model reads."""
    texts, whole, actions, missing = Counter[str](), list[str](), set[str](), 0
    where = "{trained} AND turns > 1 ORDER BY step DESC, grp, number LIMIT ?"
    for rollout, _ in facts.rollouts(where, _READ):
        told = "".join("".join(rollout.text).split())
        replies = [at for at, one in enumerate(rollout.messages) if one.get("role") == "assistant"]
        for at in range(replies[0] + 1, replies[-1]) if replies else ():
            if at in replies:
                continue
            actions.add(message_text(rollout.messages[at - 1]))
            content = rollout.messages[at].get("content")
            if isinstance(content, str):
                text = "".join(content.split())
                whole.append(content)
                missing += text[:_HEAD] not in told and text[-_HEAD:] not in told
                texts[text] += 1
    count = texts.total()
    if count < _MIN_OBSERVATIONS:
        return None
    alike = max(texts.values())
    for number, what in ((texts[""], "empty"), (missing, "not in the text that the model reads")):
        if share_interval(number, count, 2.0)[0] > 0.8:
            return facts.finding("observations_lost", f"{number} of {count} observations are {what}")
    if len(actions) > 2 and share_interval(alike, count, 2.0)[0] > 0.8:
        seen = f"{alike} of {count} observations are equal, after {len(actions)} different actions"
        return facts.finding("observations_lost", seen, confidence="possible")
    cut = cut_texts(whole)
    if cut is not None and share_interval(cut[0], count, 2.0)[0] > 0.3:
        seen = f"{cut[0]} of {count} observations end with a letter after {cut[1]} characters"
        return facts.finding("observations_lost", f"{seen}, with the parts of words {cut[2][:3]}")
    return f"{texts['']} of {count} observations empty, {missing} missing in the model's text, {alike} equal"


def stale_observations(facts: DiagnosisFacts) -> Result:
    """Find a second observation that repeats what distinguishes the first one, though later ones change.

    Words that distinguish prompts are those that some first prompts have, but not all, and that recur in
    third observations: a number of the task does not.
    """
    observed = list[list[set[str]]]()
    for _, rollout in _first_of_turns(facts, 3):
        texts = [
            str(one.get("content"))
            for one in rollout.messages
            if one.get("role") not in ("assistant", "system")
        ]
        observed.append([set(text.split()) for text in texts])
    observed = [words for words in observed if len(words) > 2]
    if len(observed) < _MIN_OBSERVATIONS:
        return None
    firsts = [words[0] for words in observed]
    varied = set[str]().union(*firsts) - set[str].intersection(*firsts)
    varied &= set[str]().union(*(words[2] for words in observed))
    repeats, changes = (
        sum((words[at] & varied == words[at + 1] & varied) is equal for words in observed)
        for at, equal in ((0, True), (1, False))
    )
    measured = f"{repeats} of {len(observed)} second observations repeat the first"
    if not varied or repeats < 0.98 * len(observed) or changes < 0.2 * len(observed):
        return measured
    return facts.finding("stale_observations", f"{measured}, and {changes} third ones change", facts.early)


def _first_of_turns(facts: DiagnosisFacts, least: int) -> Iterator[tuple[str, RecordedRollout]]:
    """Yield the first rollouts of at least `least` turns, with their tasks."""
    where = "{trained} AND turns >= ? ORDER BY step, grp, number LIMIT ?"
    for rollout, (task,) in facts.rollouts(where, least, _COMPARED, columns="task"):
        yield task, rollout


def equal_observations(facts: DiagnosisFacts) -> Result:
    """Find one observation for all training tasks, in a run that does not learn.

    It should depend on the task if evaluations get others, and equal replies get different rewards.
    """
    if not facts.is_flat():
        return None
    seen, tasks, rewards = set[str](), set[str](), defaultdict[str, dict[str, float]](dict)
    for task, rollout in _first_of_turns(facts, 2):
        seen |= {observation for _, observation in continuations(rollout)}
        tasks.add(task)
        replies = [message_text(one) for one in rollout.messages if one.get("role") == "assistant"]
        rewards["\0".join(replies)].setdefault(task, rollout.reward or 0.0)
    if len(tasks) < _MIN_OBSERVATIONS:
        return None
    measured = f"{counted(len(tasks), 'task')} with {counted(len(seen), 'different observation')}"
    spreads = [max(known.values()) - min(known.values()) for known in rewards.values() if len(known) > 1]
    differing = sum(spread > _EQUAL for spread in spreads)
    if len(seen) != 1 or share_interval(differing, len(spreads), 2.0)[0] < _LEAST_DIFFERING:
        return measured
    others = [
        observation not in seen
        for rollout in facts.first_rollouts("eval", _READ)
        for _, observation in continuations(rollout)
    ]
    if share_interval(sum(others), len(others), 2.0)[0] < 0.5:
        return measured
    return facts.finding(
        "equal_observations",
        f"{measured}, {sum(others)} of {len(others)} observations of evaluations are others, and {differing} "
        f"of {len(spreads)} replies to several tasks got different rewards",
        facts.early,
    )


def failing_observations(facts: DiagnosisFacts) -> Result:
    """Find observations that are errors after actions that often get others, in a run that does not learn.

    Errors that always follow the same actions are the policy's, unless nearly all observations are errors.
    """
    answers = defaultdict[str, list[bool]](list)
    invalid = 0
    for _, rollout in _first_of_turns(facts, 2):
        for before, message in pairwise(rollout.messages):
            if before.get("role") == "assistant" and message.get("role") != "assistant":
                action, text = message_text(before).strip(), str(message.get("content"))
                invalid += _INVALID.search(text) is not None or '"name": ""' in action  # a malformed call
                answers[action].append(_ERROR.match(text) is not None)
    count, errors = sum(map(len, answers.values())), sum(map(sum, answers.values()))
    sometimes = sum(sum(found) for found in answers.values() if not all(found))
    measured = (
        f"{errors} of {count} observations are errors, {sometimes} of them not always after their action"
    )
    is_always = errors > _MOST_BRANCHED * count and not invalid and len(answers) > 2
    many = errors if is_always else sometimes
    if share_interval(many, count, 2.0)[0] < _MANY_ERRORS or facts.has_risen:
        return measured if count >= _MIN_OBSERVATIONS else None
    return facts.finding("failing_observations", measured, facts.early)


def history_lost(facts: DiagnosisFacts) -> Result:
    """Find rollouts whose later prompts never continue the earlier turns.

    The later prompts equal the first one, or the run does not learn.
    """
    branched, extended = (facts.early_mean(f"orchestrator/turns/{name}") for name in ("branched", "extended"))
    if branched is None or extended is None or not branched + extended:
        return None
    share = branched / (branched + extended)
    measured = f"{share:.0%} of the later turns do not continue the conversation before them"
    if share < _MOST_BRANCHED:
        return measured
    prompts = defaultdict[Place, list[bytes]](list)
    for place, sample, _ in facts.samples("task"):
        prompts[place].append(prompt_tokens(sample).tobytes())
    turns = [found for found in prompts.values() if len(found) > 1]
    equal = sum(len(set(found)) == 1 for found in turns)
    is_repeated = share_interval(equal, len(turns), 2.0)[0] > _MOST_BRANCHED
    if facts.has_risen and not is_repeated:
        return measured
    seen = ", and every turn has the prompt of the first one" if is_repeated else ""
    return facts.finding("history_lost", measured + seen, facts.early)


def turn_limit(facts: DiagnosisFacts) -> Result:
    """Find rollouts that all end at their limit of turns, and none with a reward."""
    rows = facts.query("SELECT stop_reason, reward FROM rollouts WHERE {trained}")
    limited = sum(stop in _TURN_LIMITS for stop, _ in rows)
    if len(rows) < 30 or not limited:
        return None
    measured = f"{limited / len(rows):.0%} of the rollouts end at their limit of turns"
    rewards = [reward for _, reward in rows]
    if limited < len(rows) or max(rewards) - min(rewards) > 1e-6:
        return f"{measured} (others end, or rewards differ)"
    return facts.finding("turn_limit", f"{measured}, with a reward of {rewards[0]:g}")


def unrepeatable_observations(facts: DiagnosisFacts) -> Result:
    """Find different observations after equal messages of one task, in a run that does not learn.

    An environment with chance has them too, so this is evidence only if no other link is broken.
    """
    if not facts.is_flat():
        return None
    seen = defaultdict[tuple[str, ...], list[str]](list)
    for task, rollout in _first_of_turns(facts, 2):
        for before, observation in continuations(rollout):
            seen[(task, *before)].append(observation)
    repeated = [texts for texts in seen.values() if len(texts) > 1]
    differing = sum(len(set(texts)) > 1 for texts in repeated)
    measured = f"{differing} of {len(repeated)} times, equal messages of a task led to different observations"
    if len(repeated) < _MIN_REPEATS or share_interval(differing, len(repeated), 2.0)[0] < 0.3:
        return None
    return facts.finding("unrepeatable_observations", measured, facts.early)


CHECKS = (
    failing_rollouts,
    slow_environment,
    failing_observations,
    observations,
    stale_observations,
    equal_observations,
    history_lost,
    turn_limit,
)
