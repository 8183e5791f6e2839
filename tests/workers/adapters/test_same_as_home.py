"""Recorded replies of models, good and bad, give equal results in Buckeye and in the original runner.

The reward, the turns and all messages to the model are compared. `recorded_replies.jsonl` has 250 replies:
ten of each of five kinds, for five environments. Later replies of a rollout are recorded too; the last one is
repeated.
"""

import asyncio
import json
from pathlib import Path

import openai as openai_sdk
import pytest
from tests.workers.adapters.own.replay import Replay
from tests.workers.adapters.scripted import opened
from tests.workers.adapters.test_played import PACKAGES, own_scores
from tests.workers.adapters.venvs import CACHE, python_of
from tests.workers.proxy.players import openai

from buckeye.envs.base import Reply

pytestmark = pytest.mark.anyio

RECORDED = [
    json.loads(line)
    for line in Path(__file__).with_name("recorded_replies.jsonl").read_text(encoding="utf-8").splitlines()
]
ASK = [{"role": "user", "content": "a"}]
VENVS = {"sums_v0": "verifiers-031", "tool_v0": "verifiers-031", "guess_v0": "verifiers-031"}
VENVS |= {"group_v0": "verifiers-031", "tool_v1": "verifiers-040"}


class Recorded:
    """Policy that replies with recorded messages in order, and records its requests."""

    def __init__(self, said):
        self._said = said
        self.asked = []

    async def chat(self, messages, *, tools=()):
        self.asked.append(list(messages))
        message = dict(self._said[min(len(self.asked), len(self._said)) - 1])
        finish = message.pop("finish_reason", "stop")
        return Reply(text=message["content"], finish_reason=finish, message=message, completion_tokens=1)


def told(conversation):
    """Return the content of a conversation, without differences between client formats."""
    return [
        (
            message["role"],
            content if isinstance(content := message.get("content") or "", str) else content[0]["text"],
            [(call["id"], call["function"]) for call in message.get("tool_calls") or ()],
            message.get("tool_call_id"),
        )
        for message in conversation
    ]


@pytest.mark.parametrize("recorded", [RECORDED[::5], pytest.param(RECORDED, marks=pytest.mark.slow)])
async def test_agent_receives_the_recorded_replies_unchanged(recorded):

    async def choice(client):
        answer = await client.chat.completions.create(model="m", messages=ASK)
        return answer.choices[0].model_dump(
            include={"message": {"role", "content", "tool_calls"}, "finish_reason": True}
        )

    first = [reply["said"][0] for reply in recorded]
    replay = Replay()
    replay.play(first)
    home = openai_sdk.AsyncOpenAI(base_url=replay.url, api_key="none")
    async with home, openai(Recorded(first)) as (here, _):
        for reply in recorded:
            ours, theirs = await choice(here), await choice(home)
            ours["message"]["content"] = ours["message"]["content"] or ""
            assert ours == theirs, reply


@pytest.mark.slow
@pytest.mark.parametrize("module", VENVS)
def test_rewards_and_turns_are_those_of_the_home_runner(module, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("UV_CACHE_DIR", str(CACHE.parent / "uv"))
    python = python_of(VENVS[module])
    recorded = [reply for reply in RECORDED if reply["environment"] == module]
    environment = opened(PACKAGES / f"{module}.py", python, {"limit": 4} if module == "tool_v1" else {})

    async def play():
        try:
            tasks = environment.tasks("train")
            speakers = [Recorded(reply["said"]) for reply in recorded]
            return speakers, await asyncio.gather(
                *(
                    environment.rollout(tasks[reply["row"]], speaker)
                    for reply, speaker in zip(recorded, speakers, strict=True)
                )
            )
        finally:
            await environment.close()

    speakers, outcomes = asyncio.run(play())
    job = [
        {"args": {}, "settings": {}, "split": "train", "row": reply["row"], "said": reply["said"]}
        for reply in recorded
    ]
    words = ("v1.py", PACKAGES, module, "null") if module == "tool_v1" else ("v0.py", PACKAGES, module)
    scores = own_scores(python, *words, job=job)
    for reply, speaker, outcome, home in zip(recorded, speakers, outcomes, scores, strict=True):
        assert (outcome.error, home["error"]) == (None, ""), reply
        assert len(speaker.asked) == len(home["asked"]), reply
        assert [told(turn) for turn in speaker.asked] == [told(turn) for turn in home["asked"]], reply
        assert outcome.reward == pytest.approx(home["reward"], abs=1e-9), reply
        for name, value in home["metrics"].items():
            assert outcome.components[name] == pytest.approx(value), (name, reply)
    assert len({outcome.reward for outcome in outcomes}) > 1
