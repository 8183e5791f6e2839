"""The batch of a step made again from what was played: its tokens, rewards and advantages.

What was sampled is taken as recorded. All around it is the orchestrator's own code: prompts are rendered,
samples joined, rewards shaped, advantages computed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.config.rewards import CustomAdvantageConfig
from buckeye.envs.base import Outcome, Task
from buckeye.errors import UsageError
from buckeye.inference.client import Generation
from buckeye.inference.render import ChatRenderer
from buckeye.monitor.rollouts import PlayedRollout, read_rollouts
from buckeye.orchestrator.advantages import reward_shaping
from buckeye.orchestrator.batch import advantages_of, make_batch
from buckeye.orchestrator.rollout import Group, Rollout
from buckeye.orchestrator.training_samples import Samples, Segment
from buckeye.runs.reader import Run
from buckeye.transport.batches import Sample
from buckeye_audit.replay.step import Comparison

_ARRAYS = ("token_ids", "loss_mask", "logprobs", "versions")


@dataclass(frozen=True)
class _Played:
    """A rollout of a batch: as recorded, with its samples, and made again."""

    recorded: PlayedRollout
    then: Sequence[Sample]
    places: Sequence[int]
    now: Rollout
    made_again: bool

    @property
    def has_turns(self) -> bool:
        """Whether it is known which turn has which tokens: not of one that is masked."""
        return {turn for s in self.now.segments for turn in s.turns} - {-1} == {*range(self.now.turns)}


@dataclass(frozen=True)
class BatchAgain:
    """Makes batches of a run again, with these settings. Without a `renderer` tokens stay as recorded."""

    run: Run
    config: OrchestratorConfig
    renderer: ChatRenderer | None

    def compared(self, step: int) -> list[Comparison]:
        """The stages before training; none where the rollouts of the step were not kept. Functions of one's
        own are not called: they want more of a rollout than is recorded."""
        groups = self._played(step)
        if not groups:
            return []
        played = [one for group in groups for one in group]
        config, found = self.config, list[Comparison]()
        made = [
            Group(index=group[0].recorded.group, rollouts=tuple(one.now for one in group)) for group in groups
        ]
        own = isinstance(config.advantage, CustomAdvantageConfig)
        given = [[one.recorded.advantages or [] for one in group] for group in groups]
        advantages = given if own else advantages_of(made, config)
        samples = iter(make_batch(step, made, advantages, config, state={}).samples)
        now = [[next(samples) for _ in one.now.segments] for one in played]
        found.append(_of_tokens(step, played, now))
        if config.reward_shaping is None or config.reward_shaping.function is None:
            found.append(self._of_rewards(step, played))
        if not own:
            known = {id(one) for group in groups if all(one.has_turns for one in group) for one in group}
            pairs = [(one, new) for one, new in zip(played, now, strict=True) if id(one) in known]
            found.append(_of_advantages(step, pairs))
        return found

    def _played(self, step: int) -> list[list[_Played]]:
        """By group, in the order of the batch, which is that of the file."""
        trained = self.run.trained(step)
        if trained is None or not trained.origins:
            return []
        places, turns = defaultdict[tuple[int, int], list[int]](list), trained.turns()
        for place, (group, number, _, _) in enumerate(trained.origins):
            places[group, number].append(place)
        groups = dict[int, list[_Played]]()
        for one in read_rollouts(self.run.path, step)[0]:
            if one.dropped is not None or one.retried or one.reward is None:
                continue
            own = places.pop((one.group, one.number), [])
            then = [trained.batch.samples[place] for place in own]
            parts = [turns[trained.starts[place] : trained.starts[place + 1]] for place in own]
            as_recorded = [_segment(sample, part.tolist()) for sample, part in zip(then, parts, strict=True)]
            segments = self._segments(one, then)
            now = _rollout(one, then, as_recorded if segments is None else segments)
            groups.setdefault(one.group, []).append(_Played(one, then, own, now, segments is not None))
        return [] if places else list(groups.values())

    def _segments(self, one: PlayedRollout, then: Sequence[Sample]) -> Sequence[Segment] | None:
        """The samples of a conversation, asked for again turn by turn. None where it does not tell all."""
        spans = [_spans(sample) for sample in then]
        asked = Counter(segment for _, segment in one.asked.turns) if one.asked is not None else Counter()
        if (
            self.renderer is None
            or one.asked is None
            or asked != Counter({n: len(s) for n, s in enumerate(spans)})
        ):
            return None
        samples = Samples(self.renderer)
        for turn, (messages, segment) in enumerate(one.asked.turns):
            sample, span = then[segment], spans[segment].pop(0)
            sampled = Generation(
                token_ids=sample.token_ids[span].tolist(),
                logprobs=sample.logprobs[span].tolist(),
                versions=sample.versions[span].tolist(),
                finish_reason="stop",
            )
            try:
                prompt = samples.chat_prompt(one.messages[:messages], one.asked.tools)
            except UsageError:  # the chat template refuses what it took then
                break
            samples.record(prompt, sampled, turn)
        return samples.segments

    def _of_rewards(self, step: int, played: Sequence[_Played]) -> Comparison:
        shaping, then, now, names = reward_shaping(self.config), list[float](), list[float](), list[str]()
        for one in played:
            if one.recorded.shaped_reward is None or one.recorded.reward is None or not one.has_turns:
                continue
            plain = replace(one.now, shaping={}).as_scored()
            amounts = shaping.amounts(plain) if shaping is not None else {}
            then.append(one.recorded.shaped_reward)
            now.append(one.recorded.reward + sum(amounts.values()))
            names.append(_name(one))
        return _of_numbers(step, "rewards", then, now, names)


def _rollout(one: PlayedRollout, then: Sequence[Sample], segments: Sequence[Segment]) -> Rollout:
    return Rollout(
        env_name=one.env,
        task=Task(id=one.task_id, messages=()),
        outcome=Outcome(
            reward=one.reward,
            components=one.components,
            stop_reason=one.stop_reason or "",
            turn_rewards=one.turn_rewards or None,
        ),
        segments=tuple(segments),
        truncated=one.truncated,
        turns=one.turns,
        seconds=one.seconds,
        shaping=one.shaping,
        temperature=then[0].temperature if then else 1.0,
    )


def _segment(sample: Sample, turns: list[int]) -> Segment:
    return Segment(
        token_ids=sample.token_ids.tolist(),
        loss_mask=sample.loss_mask.tolist(),
        logprobs=sample.logprobs.tolist(),
        versions=sample.versions.tolist(),
        turns=turns,
    )


def _spans(sample: Sample) -> list[slice]:
    """Where the sampled stretches of a sample are."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], sample.loss_mask, [False]]).astype(np.int8)))
    return [slice(start, end) for start, end in edges.reshape(-1, 2).tolist()]


def _of_tokens(step: int, played: Sequence[_Played], now: Sequence[Sequence[Sample]]) -> Comparison:
    where = next((place for one, new in zip(played, now, strict=True) if (place := _apart(one, new))), "")
    taken = sum(not one.made_again for one in played)
    note = f", {taken} of {len(played)} rollouts as recorded" if taken else ""
    return Comparison(
        step=step,
        stage="tokens",
        recorded=f"{sum(len(sample.token_ids) for one in played for sample in one.then)} tokens",
        replayed=f"{sum(len(sample.token_ids) for samples in now for sample in samples)} tokens{note}",
        difference=None if where else 0.0,
        where=where,
    )


def _apart(one: _Played, now: Sequence[Sample]) -> str:
    """The first token of a rollout that is another one, or recorded otherwise; "" if there is none."""
    for place, then, new in zip(one.places, one.then, now, strict=False):
        if all(np.array_equal(getattr(then, name), getattr(new, name)) for name in _ARRAYS):
            continue
        shared = min(len(then.token_ids), len(new.token_ids))
        differ = [getattr(then, name)[:shared] != getattr(new, name)[:shared] for name in _ARRAYS]
        token = next(iter(np.flatnonzero(np.any(differ, axis=0)).tolist()), shared)
        return f"{_name(one)}, sample {place}, token {token}"
    same = len(one.then) == len(now)
    return "" if same else f"{_name(one)}, {len(one.then)} samples then, {len(now)} now"


def _of_advantages(step: int, pairs: Sequence[tuple[_Played, Sequence[Sample]]]) -> Comparison:
    then, now, names = list[float](), list[float](), list[str]()
    for one, new in pairs:
        for old, again in zip(one.then, new, strict=False):
            if np.array_equal(old.loss_mask, again.loss_mask):
                then += old.advantages.tolist()
                now += again.advantages.tolist()
                names += [_name(one)] * len(old.advantages)
    return _of_numbers(step, "advantages", then, now, names)


def _of_numbers(
    step: int, stage: Literal["rewards", "advantages"], then: list[float], now: list[float], names: list[str]
) -> Comparison:
    apart = np.abs(np.array(then) - np.array(now))
    difference, of = float(apart.max(initial=0.0)), "rollouts" if stage == "rewards" else "tokens"
    worst = int(apart.argmax()) if difference else None
    return Comparison(
        step=step,
        stage=stage,
        recorded=f"{len(then)} {of}" if worst is None else f"{then[worst]:.6g}",
        replayed=f"{len(now)} {of}" if worst is None else f"{now[worst]:.6g}",
        difference=difference,
        where="" if worst is None else names[worst],
    )


def _name(one: _Played) -> str:
    return f"group {one.recorded.group}, rollout {one.recorded.number}"
