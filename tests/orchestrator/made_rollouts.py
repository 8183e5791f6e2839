"""Hand-made rollouts and groups."""

from buckeye.envs.base import Outcome, Task
from buckeye.inference.client import Generation
from buckeye.orchestrator.rollout import Group, Rollout
from buckeye.orchestrator.training_samples import Segment


def rollout(reward, *, turns=(3,), env_name="letters", task_id="t", shaping=None, boundary=None, **more):
    """Return a rollout of one segment.

    Each turn has one prompt token, followed by the number of sampled tokens given in `turns`.
    """
    of_outcome = {k: more.pop(k) for k in ("stop_reason", "turn_rewards", "components") if k in more}
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
        env_name=env_name,
        task=Task(id=task_id, messages=()),
        outcome=Outcome(
            reward=reward,
            error="it broke" if reward is None else None,
            boundary=boundary if reward is None else None,
            **({"stop_reason": "answered"} | of_outcome),
        ),
        segments=(segment,),
        turns=len(turns),
        shaping=shaping or {},
        **({"truncated": False, "seconds": 0.0} | more),
    )


def group(*rollouts, index=0):
    return Group(index=index, rollouts=rollouts)
