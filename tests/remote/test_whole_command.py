"""`buckeye rl --gpus 2xA100 --provider prime --yes` where there are an environment, tasks and a model."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from buckeye.transport.checkpoint import list_checkpoints, verify_checkpoint
from tests.remote.laptop import Laptop
from tests.remote.machine import needs_machines
from tests.remote.town import assert_nothing_left

pytestmark = [
    needs_machines,
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.usefixtures("nothing_goes_on"),
]

SERVER = """
import json, sys

said = []
for line in sys.stdin:
    message = json.loads(line)
    method, result = message.get("method"), {}
    if method == "initialize":
        result = {"protocolVersion": message["params"]["protocolVersion"], "capabilities": {"tools": {}},
                  "serverInfo": {"name": "letters", "version": "1"}}
    elif method == "tools/list":
        text = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
        result = {"tools": [{"name": "say", "inputSchema": text},
                            {"name": "evaluate", "inputSchema": {"type": "object"}}]}
    elif method == "tools/call" and message["params"]["name"] == "say":
        said.append(message["params"]["arguments"]["text"])
        result = {"content": [{"type": "text", "text": "heard"}]}
    elif method == "tools/call":
        result = {"content": [], "structuredContent": {"reward": min(1.0, len(said) / 2)}}
    if "id" in message:
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
"""
CONFIG = """
job:
  metadata:
    environment: "letters"
system_prompt: |
  Write <tool>say("a")</tool>.
parser:
  use_thinking: false
action_mappings:
  say:
    _tool: "say"
    _parser:
      positional: ["text"]
    text:
      from_arg: "text"
defaults:
  max_turns: 2
"""


def fill(laptop, model):
    """What a person has there: no file of a run, which the command writes."""
    (laptop.project / "run.toml").unlink()
    (laptop.project / "letters.py").unlink()
    (laptop.project / "server.py").write_text(SERVER)
    (laptop.project / "configs").mkdir()
    (laptop.project / "configs/letters.yaml").write_text(CONFIG)
    (laptop.project / "tiny").symlink_to(model)
    tasks = [
        {
            "id": f"t{number}",
            "prompt": f"Say {number}.",
            "mcp_config": {"letters": {"command": "python3", "args": ["server.py"]}},
            "evaluate_tool": {"name": "evaluate"},
        }
        for number in range(8)
    ]
    (laptop.project / "tasks.json").write_text(json.dumps(tasks))


@pytest.fixture
def model(tmp_path):
    """As large as that of the demonstration, with room for two turns."""
    from buckeye.trainer.model.tiny import TinySize, make_tiny_model  # slow, and for the slow tests only

    size = TinySize(vocab_size=512, layers=3, hidden=192, max_length=512)
    texts = ['Write <tool>say("a")</tool>. Say 1. Say 2. heard'] * 20
    make_tiny_model(tmp_path / "tiny", texts=texts, size=size, seed=0)
    return tmp_path / "tiny"


def test_the_command_rents_trains_brings_home_and_gives_back(tmp_path, model, town):
    laptop = Laptop(tmp_path / "laptop", model)
    fill(laptop, model)
    words = [sys.executable, "-m", "buckeye", "rl", *town.words]
    done = subprocess.run(
        words,
        cwd=laptop.project,
        env=laptop.environment(**town.environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=3000,
        check=False,
    )
    said = done.stdout
    assert done.returncode == 0, said
    output = laptop.project / "outputs/letters"
    last = list_checkpoints(output / "checkpoints")[-1]
    verify_checkpoint(last)
    assert last.step == 20
    assert list(output.glob("weights/step_*/model.safetensors"))
    laptop.output = output
    assert_nothing_left(town, laptop)
    (ended,) = town.landlord.history
    assert re.search(rf"{ended['name']}: \w+; [0-9.]+ (min|h), \$\d+\.\d\d\. The pod is gone\.", said)
    (listed,) = json.loads(laptop.command("pods", "list", "--all", "--json", **town.environment))
    assert (listed["state"], listed["price_per_hour"]) == ("over", 2.58)
    assert listed["cost"] >= 0
