"""Reward `judge:FILE`: a model grades each reply."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from buckeye.base.json_lines import LineFile, read_json_lines
from buckeye.base.keys import key_for
from buckeye.base.storage import write_file
from buckeye.config.judge import JudgeConfig
from buckeye.config.load import load_config
from buckeye.dataset.functions import Completion
from buckeye.dataset.prompt_tasks import Columns
from buckeye.dataset.prompts import read_prompts
from buckeye.envs.base import CallOptions, OptionsPolicy, Probe, Task
from buckeye.envs.stdlib_only.outcomes import OutcomeError
from buckeye.errors import UsageError
from buckeye.mcp.grading.judge import GraderVerdict, format_short
from buckeye.mcp.grading.schema import last_number

if TYPE_CHECKING:
    from buckeye.envs.chat_server import ChatServer

log = logging.getLogger(__name__)

_MAX_CACHED = 100_000
_MAX_EXPLANATION = 500
_MILLION = 1e6
_LABEL_TOLERANCE = 0.25
"""Largest difference of a grade and a label that agree, as a share of the scale."""


class JudgeVerdict(GraderVerdict):
    """Grade of a judge, and its tokens and cost, which are 0 for a known grade."""

    counts: Mapping[str, float]


class JudgeReward:
    """Reward that a model gives, from 0 to 1. Known grades are used again. `cost` is the cost until now."""

    name = "judge"
    needs_group = False

    def __init__(self, file: str, columns: Columns) -> None:
        """Raises UsageError for a file that is not valid."""
        if not file:
            raise UsageError("`judge` has no file", code="BK-REWARD", hint="write judge:FILE.toml")
        self.config = load_config(JudgeConfig, ["@", file])
        self.cost = 0.0
        self._answer_column = columns.answer
        self._cache = None if self.config.cache is None else Path(os.path.expanduser(self.config.cache))
        self._cached = _read_cache(self._cache)
        self._next_start = 0.0
        self._servers: WeakKeyDictionary[asyncio.AbstractEventLoop, ChatServer] = WeakKeyDictionary()
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    def answers_in(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the answer of a row, which a judge may accept in other words as well."""
        answer = row.get(self._answer_column) if self._answer_column is not None else None
        return {} if answer is None else {"answer": answer}

    async def score(self, task: Task, completions: Sequence[Completion]) -> list[GraderVerdict]:
        """Return the grade of each reply. Raises OutcomeError for a text without one, and at `max_cost`."""
        return list(await asyncio.gather(*(self._grade(task, completion) for completion in completions)))

    def labelled(self, component: str) -> list[Probe]:
        """Return the labels as probes of a component. Raises UsageError for a row without reply or label."""
        if self.config.labels is None:
            return []
        return [
            self._label(task, number, component)
            for number, task in enumerate(read_prompts(self.config.labels).tasks(), start=1)
        ]

    def _label(self, task: Task, number: int, component: str) -> Probe:
        row = task.data["row"]
        try:
            label = self._share_of_scale(float(row["label"]))
            low, high = max(0.0, label - _LABEL_TOLERANCE), min(1.0, label + _LABEL_TOLERANCE)
            name = f"label {number}"
            return Probe(
                name=name, task=task, reply=str(row["reply"]), low=low, high=high, component=component
            )
        except (KeyError, TypeError, ValueError, OutcomeError) as error:
            message = f"the row needs a `reply` and a `label` on the scale of the judge: {error!r}"
            raise UsageError(message, code="BK-REWARD", at=task.data["at"]) from None

    async def _grade(self, task: Task, completion: Completion) -> GraderVerdict:
        body = {
            "messages": [{"role": "user", "content": self._request(task, completion.text)}],
            "temperature": self.config.temperature,
            "max_tokens": self.config.max_tokens,
        }
        identity = json.dumps([self.config.base_url, self.config.model, body])
        request = hashlib.sha256(identity.encode()).hexdigest()
        counts = {"tokens": 0.0, "cost": 0.0}
        if (text := self._cached.get(request)) is None:
            slots = asyncio.Semaphore(self.config.max_concurrent)
            async with self._slots.setdefault(asyncio.get_running_loop(), slots):
                text, counts = await self._ask(body, completion)
        number = last_number(text)
        if number is None:
            raise OutcomeError(f"the judge gave no number: {format_short(text)}")
        grade = self._share_of_scale(number)
        self._keep(request, text)
        verdict = JudgeVerdict(grade, text[:_MAX_EXPLANATION])
        verdict.counts = counts
        return verdict

    def _request(self, task: Task, reply: str) -> str:
        """Return the prompt with all names replaced at once, so that a reply cannot add a name."""
        row = dict(task.data["row"])
        row["answer"] = row.get(self._answer_column or "answer", "")
        known = {**row, "prompt": task.messages[-1].get("content"), "reply": reply}
        names = "|".join(map(re.escape, known))
        return re.sub(rf"{{({names})}}", lambda match: str(known[match[1]]), self.config.prompt)

    def _share_of_scale(self, number: float) -> float:
        worst, best = self.config.scale
        if not worst <= number <= best:
            raise OutcomeError(f"the grade {number:g} is not from {worst:g} to {best:g}")
        return (number - worst) / (best - worst)

    async def _ask(self, body: Mapping[str, Any], completion: Completion) -> tuple[str, dict[str, float]]:
        """Return the text of the judge, and its tokens and cost. Raises OutcomeError and InferenceError."""
        limit = self.config.max_cost
        if limit is not None and self.cost >= limit:
            raise OutcomeError(f"the judge has cost {self.cost:g}; `max_cost` is {limit:g}")
        await self._wait_for_start()
        if self.config.base_url is None:
            if not isinstance(completion.policy, OptionsPolicy):
                raise OutcomeError("the judge has no `base_url`, and no policy is here to grade the reply")
            options = CallOptions(trained=False, max_tokens=self.config.max_tokens)
            reply = await completion.policy.ask(body["messages"], options=options)
            return reply.text, self._count(reply.prompt_tokens, reply.completion_tokens)
        answer = await self._server(self.config.base_url).complete(body)
        if answer is None:
            raise OutcomeError("the request is too long for the judge")
        tokens = [answer["usage"].get(name) for name in ("prompt_tokens", "completion_tokens")]
        if limit is not None and None in tokens:
            raise OutcomeError("the judge's server does not report all tokens, which `max_cost` needs")
        text = answer["choices"][0]["message"].get("content") or ""
        return text, self._count(*(count or 0 for count in tokens))

    async def _wait_for_start(self) -> None:
        if self.config.rate_limit is not None:
            now = time.monotonic()
            start = max(now, self._next_start)
            self._next_start = start + 1.0 / self.config.rate_limit
            await asyncio.sleep(start - now)

    def _count(self, prompt_tokens: int, completion_tokens: int) -> dict[str, float]:
        of_prompts, of_texts = self.config.prices
        cost = (prompt_tokens * of_prompts + completion_tokens * of_texts) / _MILLION
        self.cost += cost
        return {"tokens": float(prompt_tokens + completion_tokens), "cost": cost}

    def _server(self, base_url: str) -> ChatServer:
        """Return the client of the judge in this event loop. It retries for about a minute."""
        import httpx  # not with this module, which `--help` imports

        from buckeye.envs.chat_server import ChatServer

        loop = asyncio.get_running_loop()
        if loop not in self._servers:
            key = key_for(self.config.api_key_var, base_url)
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            client = httpx.AsyncClient(timeout=self.config.timeout, headers=headers)
            address = base_url.rstrip("/")
            self._servers[loop] = ChatServer(base_url=address, model=self.config.model, client=client)
        return self._servers[loop]

    def _keep(self, request: str, text: str) -> None:
        if request in self._cached or self.config.base_url is None:  # the policy changes
            return
        if len(self._cached) >= _MAX_CACHED:
            del self._cached[next(iter(self._cached))]
        self._cached[request] = text
        if self._cache is None:
            return
        try:
            with contextlib.closing(LineFile(self._cache)) as file:
                file.append(_cache_line(request, text))
        except OSError as error:
            log.warning("The judge keeps no more grades: %s", error)
            self._cache = None


def _read_cache(file: Path | None) -> dict[str, str]:
    """Return the newest texts of a cache by request, and remove older ones from the file.

    Raises UsageError for another file, which stays unchanged.
    """
    if file is None:
        return {}
    try:
        texts = {row["request"]: row["text"] for row in read_json_lines(file)}
    except KeyError:
        message, hint = f"{file} is not a cache of grades", "name a new file as `cache`"
        raise UsageError(message, code="BK-FILE-FORMAT", hint=hint) from None
    newest = dict(list(texts.items())[-_MAX_CACHED:])
    if len(newest) < len(texts):
        with contextlib.suppress(OSError):  # a file that cannot be written does not grow
            write_file(file, [_cache_line(request, text) for request, text in newest.items()])
    return newest


def _cache_line(request: str, text: str) -> bytes:
    return json.dumps({"request": request, "text": text}).encode() + b"\n"
