"""Agent that compacts its conversation, starts a sub-agent, and continues twice from one reply.

The first rollout that ends gets a reward of 1, and the other ones get 0.
"""

import json
import os
import urllib.request
from pathlib import Path

MAX_CHARACTERS = 4


def ask(messages):
    """Add the model's reply to the messages, and return its text."""
    headers = {
        "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
        "Content-Type": "application/json",
    }
    body = json.dumps({"model": "any", "messages": messages}).encode()
    address = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(address, body, headers)) as answer:
        messages.append(json.load(answer)["choices"][0]["message"])
    return messages[-1]["content"]


def user(text):
    return {"role": "user", "content": text}


def converse(messages, texts):
    """Say texts in turn. Replace the conversation by its summary when it becomes too long."""
    for text in texts:
        messages.append(user(text))
        ask(messages)
        if sum(len(message["content"]) for message in messages) >= MAX_CHARACTERS:
            messages[:] = [user(ask([*messages, user("sum")]))]
            ask(messages)


task = json.loads(Path(os.environ["BUCKEYE_TASK"]).read_text())
conversation = []
converse(conversation, [task["messages"][0]["content"], "n", "n"])
ask([user("sub")])
ask([user("q"), {"role": "assistant", "content": "x"}, user("m")])
try:
    Path("ended").touch(exist_ok=False)
    reward = 1.0
except FileExistsError:
    reward = 0.0
print(json.dumps({"reward": reward}))
