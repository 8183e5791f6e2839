"""Groups of rollouts of a model, as training would sample them."""

from __future__ import annotations

from collections.abc import Sequence

from buckeye.config.environments import EnvConfig
from buckeye.config.inference import InferenceConfig, ServedModelConfig
from buckeye.envs.base import TRAIN
from buckeye.evaluation.chat_policy import ChatPlayer, ChatSampling
from buckeye.evaluation.play import model_server
from buckeye.orchestrator.environments import load_environments
from buckeye.orchestrator.evaluation import EvalResult, evaluate

DEFAULT_CONCURRENT = 128


async def run_groups(
    environments: Sequence[EnvConfig],
    sizes: Sequence[int],
    *,
    groups: int,
    model: str,
    sampling: ChatSampling,
    seq_len: int | None,
    seed: int,
    max_concurrent: int = DEFAULT_CONCURRENT,
    timeout: float = 600.0,
) -> list[EvalResult]:
    """Run the first `groups` train tasks of every environment, each as often as its entry in `sizes`, on an
    engine for `model` with a context of `seq_len` tokens; None is the model's.

    Raises UsageError if there is no such model, and RunError if its engine does not start.
    """
    engine = InferenceConfig(model=ServedModelConfig(max_model_len=seq_len))
    loaded = load_environments(environments, rollout_timeout=timeout)
    async with model_server(
        model, None, "", timeout=timeout, max_concurrent=max_concurrent, engine=engine
    ) as server:
        player = ChatPlayer(
            server, sampling, seed=seed, timeout=timeout, retries=1, max_concurrent=max_concurrent
        )
        return [
            await evaluate(env, player, split=TRAIN, num_examples=groups, rollouts_per_example=size)
            for env, size in zip(loaded, sizes, strict=True)
        ]
