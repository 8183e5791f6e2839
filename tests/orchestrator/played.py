"""Rollouts and groups made by hand."""

from buckeye.envs.base import Outcome, Task
from buckeye.inference.client import Generation
from buckeye.orchestrator.rollout import Group, Rollout
from buckeye.orchestrator.training_samples import Segment


def rollout(reward, *, turns=(3,), truncated=False, stop_reason="answered", turn_rewards=None, shaping=None):
    """One segment: a prompt token before each turn, then as many sampled tokens as `turns` says."""
    segment = Segment()
    for turn, tokens in enumerate(turns):
        segment.add_context([7])
        segment.add_sampled(
            Generation(
                token_ids=[5] * tokens, logprobs=[-0.5] * tokens, versions=[2] * tokens, finish_reason="stop"
            ),
            turn,
        )
    return Rollout(
        env_name="letters",
        task=Task(id="t", messages=()),
        outcome=Outcome(
            reward=reward,
            stop_reason=stop_reason,
            turn_rewards=turn_rewards,
            error="it broke" if reward is None else None,
        ),
        segments=(segment,),
        truncated=truncated,
        turns=len(turns),
        seconds=0.0,
        shaping=shaping or {},
    )


def group(*rollouts, index=0):
    return Group(index=index, rollouts=rollouts)
