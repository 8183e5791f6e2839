"""On-policy distillation: a larger model scores the tokens that the policy sampled."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from buckeye.base import heartbeat
from buckeye.base.columns import counted
from buckeye.base.keys import key_for
from buckeye.config.teacher import TeacherConfig
from buckeye.errors import InferenceError, UsageError
from buckeye.inference.client.replica import RefusedError, Replica
from buckeye.inference.render import ChatRenderer
from buckeye.orchestrator.rollout import Group

log = logging.getLogger(__name__)

Array = npt.NDArray[np.float32]
T = TypeVar("T")

_MAX_DIFFERENCE = 20.0  # nats
_MAX_REQUESTS = 64  # at a time, per server
_FINAL = ("BK-INFERENCE-REQUEST", "BK-INFERENCE-REPLY", "BK-PORT-TAKEN")
_PAUSES = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_TEXT = "Zażółć gęślą jaźń: 31,415.9 €\n\tdef f(x): return {'ä': [x ** 2]}  # 你好 🙂"


def distillation_advantages(sampler_logprobs: Array, teacher_logprobs: Array) -> Array:
    """Return log teacher_t - log mu_t for each sampled token, limited to 20 nats on both sides.

    mu is the policy that sampled the token. The mean of the negative values is KL(mu || teacher), the reverse
    KL divergence per token. As an advantage, a value does not look at later tokens (a discount of 0).

    Source: "On-policy distillation" (Lu and Thinking Machines Lab 2025), which adds it to the advantages; the
    objective is that of Agarwal et al. 2024, GKD, arXiv 2306.13649, with the reverse KL.
    """
    return np.clip(teacher_logprobs - sampler_logprobs, -_MAX_DIFFERENCE, _MAX_DIFFERENCE)


class Teacher:
    """Client of the teacher's servers. Use it as an async context manager, and call `start` first.

    A request that failed, or got no reply within a quarter of `config.timeout`, is repeated on the next
    server. `InferenceError` is raised after `config.timeout`, or if a repetition cannot help.
    """

    def __init__(self, config: TeacherConfig) -> None:
        if Path(config.model).is_dir():  # a server names a local model by its absolute path
            config = config.model_copy(update={"model": str(Path(config.model).resolve())})
        self._config = config
        self._replicas = [
            Replica(
                index,
                url,
                api_key=key_for(config.api_key_var, url) or None,
                model=config.model,
                timeout=config.timeout / 4,
                heartbeat_timeout=config.timeout / 4,
                max_connections=_MAX_REQUESTS,
            )
            for index, url in enumerate(config.base_url)
        ]
        count = len(self._replicas)
        self._orders = itertools.cycle([self._replicas[i:] + self._replicas[:i] for i in range(count)])
        self._free = asyncio.Semaphore(_MAX_REQUESTS * len(self._replicas))
        self._retries = 0

    async def __aenter__(self) -> Teacher:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for replica in self._replicas:
            replica.close()

    async def start(self, renderer: ChatRenderer) -> None:
        """Wait for the servers. Raise `UsageError` if their tokenizer is not that of the policy."""
        heartbeat.report("its servers", on="teacher")
        expected = renderer.tokenizer.encode(_TEXT, add_special_tokens=False)
        body = {"model": self._config.model, "prompt": _TEXT, "add_special_tokens": False}
        for replica in self._replicas:
            await self._retry(Replica.check_model, [replica])
            try:
                reply = await self._retry(lambda server: server.call("POST", "/tokenize", body), [replica])
            except InferenceError as error:
                if error.code != RefusedError.code:
                    raise
                log.warning("Cannot compare the tokenizers of teacher and policy: %s", error)
                continue
            if reply.get("tokens") != expected:
                raise UsageError(
                    f"the teacher at {replica.url} has another tokenizer than the policy",
                    code="BK-CONFIG-CONFLICT",
                    at="orchestrator.teacher.model",
                    hint="choose a teacher of the policy's family: both must give a text the same token ids",
                )

    async def score(self, step: int, groups: Sequence[Group]) -> tuple[dict[int, Array], dict[str, float]]:
        """Return the distillation advantages of all scored rollouts, and metrics.

        The advantages are by `id` of a segment, f32[T], with 0 for tokens that were not sampled.
        """
        started, self._retries = time.monotonic(), 0
        heartbeat.report(f"the log-probs of batch {step}", on="teacher")
        segments = [segment for group in groups for r in group.scored for segment in r.segments]
        # not `gather_results`: after the first error, other requests need not use up their own time limits
        scored = await asyncio.gather(*(self._logprobs(segment.token_ids.tolist()) for segment in segments))
        advantages, sums, tokens = dict[int, Array](), 0.0, 0
        for segment, logprobs in zip(segments, scored, strict=True):
            mask = segment.loss_mask
            found = distillation_advantages(segment.logprobs, logprobs)
            advantages[id(segment)] = np.where(mask, found, np.float32(0.0))
            sums -= float(found[mask].sum(dtype=np.float64))
            tokens += int(mask.sum())
        return advantages, {
            "teacher/kl": sums / max(1, tokens),
            "teacher/retries": self._retries,
            "teacher/seconds": time.monotonic() - started,
        }

    async def _logprobs(self, token_ids: Sequence[int]) -> Array:
        """Return the teacher's log-probs of a sequence, f32[T]; 0 for the first token."""
        body = {
            "model": self._config.model,
            "prompt": token_ids,
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": 0,
        }
        route = "/v1/completions"

        def parse(reply: Any) -> Array:
            _, *entries = reply["choices"][0]["prompt_logprobs"]
            values = [e[str(token)]["logprob"] for token, e in zip(token_ids[1:], entries, strict=True)]
            return np.array([0.0, *values], np.float32)

        async def request(server: Replica) -> Array:
            reply = await server.call("POST", route, body)
            return server.parse_reply(route, lambda: parse(reply))

        async with self._free:
            return await self._retry(request, next(self._orders))

    async def _retry(self, call: Callable[[Replica], Awaitable[T]], servers: Sequence[Replica]) -> T:
        """Return the result of `call` on the first of the servers that answers.

        Raise `InferenceError` after `timeout` seconds, and at once if the request or the reply is invalid.
        """
        deadline = time.monotonic() + self._config.timeout
        for attempt, server in enumerate(itertools.cycle(servers)):
            try:
                return await call(server)
            except InferenceError as error:
                pause = _PAUSES[min(attempt, len(_PAUSES) - 1)]
                if error.code in _FINAL or time.monotonic() + pause > deadline:
                    raise InferenceError(
                        f"the teacher did not answer ({counted(attempt + 1, 'attempt')}): {error}",
                        code=error.code,
                        at=server.url,
                        hint="check its server and orchestrator.teacher; its context must exceed seq_len",
                    ) from error
                self._retries += 1
                log.warning("Repeating a request to the teacher in %.1f s: %s", pause, error)
                await asyncio.sleep(pause)
        raise AssertionError("there is at least one server")
