"""An agent without code for training: it requests a sum from a model, checks the form of the reply, and
retries once if the form is wrong.

Any client works, such as the `openai` package. URL, key and task are environment variables. The last line of
the output is the reward.
"""

import json
import os
import urllib.request
from pathlib import Path

PREFIX = "Sum: "


def request_reply(messages: list[dict[str, str]]) -> str:
    """Return the reply of the model."""
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        data=json.dumps({"model": os.environ["BUCKEYE_MODEL"], "messages": messages}).encode(),
        headers={
            "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
            "Content-Type": "application/json",
        },
    )
    with urllib.request.urlopen(request) as response:
        return str(json.load(response)["choices"][0]["message"]["content"] or "")


def main() -> None:
    """Run one task."""
    task = json.loads(Path(os.environ["BUCKEYE_TASK"]).read_text("utf-8"))
    messages = list(task["messages"])
    reply = request_reply(messages)
    if not reply.startswith(PREFIX):
        messages += [
            {"role": "assistant", "content": reply},
            {"role": "user", "content": f"Begin with {PREFIX!r}, then the number."},
        ]
        reply = request_reply(messages)
    has_form = reply.startswith(PREFIX)
    is_right = reply.removeprefix(PREFIX).strip() == str(task["data"]["answer"])
    reward = 1.0 if has_form and is_right else 0.2 if has_form else 0.0
    components = {"in_form": float(has_form), "right": float(is_right)}
    print(json.dumps({"reward": reward, "components": components}))


main()
