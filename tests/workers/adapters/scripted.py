"""Policies whose replies a function of the conversation computes, and that record it."""

import asyncio
import json

from buckeye.envs.base import Reply
from buckeye.envs.settings import WorkerSettings
from buckeye.workers.environment import open_worker_environment


class Speaker:
    """Policy whose function `say(messages, tools, turn)` returns a text or an assistant message."""

    def __init__(self, say):
        self._say = say
        self.said = []
        self.heard = []

    async def chat(self, messages, *, tools=()):
        said = self._say(messages, tools, len(self.said))
        message = said if isinstance(said, dict) else {"role": "assistant", "content": said}
        self.said.append(message)
        self.heard.append(list(messages))
        return Reply(
            text=message.get("content") or "", finish_reason="stop", message=message, completion_tokens=1
        )


def call(tool, arguments, number=1):
    """Return an assistant message that calls a tool."""
    function = {"name": tool, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": f"call-{number}", "type": "function", "function": function}],
    }


def multiplier(messages, tools, turn):
    """Ask the tool for the product in the first message, then reply with it, or with "no" if it is odd."""
    if messages[-1]["role"] == "tool":
        content = messages[-1]["content"]
        text = content if isinstance(content, str) else "".join(part["text"] for part in content)
        return text if int(text) % 2 == 0 else "no"
    number = int(next(m for m in messages if m["role"] == "user")["content"].split()[0])
    return call(tools[0]["function"]["name"], {"a": number, "b": 7})


def opened(env_id, python, args=None, **settings):
    """Open the environment in a worker of another interpreter."""
    return open_worker_environment(str(env_id), args or {}, python, WorkerSettings(**settings))


def play(environment, say, *, split="train", tasks=3):
    """Run the first tasks concurrently; return (task, speaker, outcome) of each."""

    async def play_all():
        try:
            chosen = environment.tasks(split)[:tasks]
            speakers = [Speaker(say) for _ in chosen]
            outcomes = await asyncio.gather(
                *(environment.rollout(task, speaker) for task, speaker in zip(chosen, speakers, strict=True))
            )
            return list(zip(chosen, speakers, outcomes, strict=True))
        finally:
            await environment.close()

    return asyncio.run(play_all())
