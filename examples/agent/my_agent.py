"""An agent that knows nothing of training: it asks a model for a sum, checks the form of the answer, and asks
once more if it is wrong.

Any client will do, the `openai` package as well as this; the address, the key and the task come from the
environment. The last line says what the rollout was worth.
"""

import json
import os
import urllib.request
from pathlib import Path

PREFIX = "Sum: "


def ask(messages: list[dict[str, str]]) -> str:
    """What the model says next."""
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        data=json.dumps({"model": os.environ["BUCKEYE_MODEL"], "messages": messages}).encode(),
        headers={
            "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
            "Content-Type": "application/json",
        },
    )
    with urllib.request.urlopen(request) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"] or "")


def main() -> None:
    """Play one task."""
    task = json.loads(Path(os.environ["BUCKEYE_TASK"]).read_text("utf-8"))
    messages = list(task["messages"])
    reply = ask(messages)
    if not reply.startswith(PREFIX):
        messages += [
            {"role": "assistant", "content": reply},
            {"role": "user", "content": f"Begin with {PREFIX!r}, then the number."},
        ]
        reply = ask(messages)
    in_form = reply.startswith(PREFIX)
    right = reply.removeprefix(PREFIX).strip() == str(task["data"]["answer"])
    reward = 1.0 if in_form and right else 0.2 if in_form else 0.0
    print(json.dumps({"reward": reward, "components": {"in_form": float(in_form), "right": float(right)}}))


main()
