"""An MCP server on standard input and output whose tools are those of a JSON file.

    python tool_server.py TOOLS.json

Every call is answered with its arguments; with "refuse" in it, as an error; `crash` ends the server, `finish`
says that the environment is done. What was called is written to TOOLS.log.
"""

import json
import os
import sys
from pathlib import Path

FILE = Path(sys.argv[1])
TOOLS = json.loads(FILE.read_text())


def answer(request, result):
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}) + "\n")
    sys.stdout.flush()


def called(request):
    name, arguments = request["params"]["name"], request["params"].get("arguments") or {}
    with FILE.with_suffix(".log").open("a") as log:
        log.write(json.dumps([name, arguments]) + "\n")
    if name == "crash":
        os._exit(3)
    if name == "evaluate":
        return answer(request, {"content": [], "structuredContent": {"reward": 0.5}})
    text = json.dumps(arguments)
    done = {"structuredContent": {"done": True}} if name == "finish" else {}
    return answer(
        request,
        {
            "content": [{"type": "text", "text": text}],
            "isError": "refuse" in text or "refuse" in name,
            **done,
        },
    )


for line in sys.stdin:
    message = json.loads(line)
    if message.get("method") == "initialize":
        about = {"protocolVersion": message["params"]["protocolVersion"], "capabilities": {"tools": {}}}
        answer(message, about | {"serverInfo": {"name": "tools", "version": "1"}})
    elif message.get("method") == "tools/list":
        answer(message, {"tools": TOOLS})
    elif message.get("method") == "tools/call":
        called(message)
