"""Datasets and reward files of the tests of this folder."""

import asyncio
import json

import pytest

from buckeye.dataset.environment import load_environment
from buckeye.envs.base import Reply, ReplyTokens

ROWS = [{"prompt": f"What is {n} plus {n}?", "answer": str(2 * n)} for n in range(20)]


class Says:
    """Policy that gives one reply; with `ids`, also its tokens."""

    def __init__(self, text, ids=None):
        self.text, self.ids = text, ids

    async def chat(self, messages, *, tools=()):
        tokens = None if self.ids is None else ReplyTokens(prompt_ids=[1], token_ids=self.ids, logprobs=[])
        message = {"role": "assistant", "content": self.text}
        return Reply(text=self.text, finish_reason="stop", message=message, tokens=tokens)


def grade(environment, *texts, task=0, ids=None):
    """Return the outcomes of these replies to one task."""
    asked = environment.tasks("train")[task]

    async def run():
        policies = [Says(text, ids) for text in texts]
        if not hasattr(environment, "finish_group"):
            return [await environment.rollout(asked, policy) for policy in policies]
        pending = [await environment.rollout_in_group(asked, policy) for policy in policies]
        return list(await environment.finish_group(asked, pending))

    return asyncio.run(run())


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Return `write(name, content)`: it writes text, bytes, or rows as JSON Lines."""
    monkeypatch.chdir(tmp_path)

    def write_file(name, content):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, list):
            content = "".join(json.dumps(row) + "\n" for row in content)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return name

    return write_file


@pytest.fixture
def opened(write):
    """Return `opened(reward, rows, **args)`: the environment of rows and a reward, which may be a source."""

    def open_it(reward, rows=ROWS, **args):
        if isinstance(reward, str) and "\n" in reward:
            reward = write("reward.py", reward)
        return load_environment(write("prompts.jsonl", rows), reward, **args)

    return open_it
