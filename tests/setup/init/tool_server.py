"""MCP server on standard input and output whose tools are read from a JSON file.

    python tool_server.py TOOLS.json

Every call returns its arguments; if they contain "refuse", as an error.

- `fail...` returns its own description.
- `crash` ends the server.
- `finish` reports that the environment is done.
- `write` writes to the files that its description names.

Calls are logged to TOOLS.log if that is writable.
"""

import contextlib
import json
import os
import sys
from pathlib import Path

FILE = Path(sys.argv[1])
TOOLS = json.loads(FILE.read_text())


def answer(request, result):
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}) + "\n")
    sys.stdout.flush()


def written(path):
    """Write to a path; return "written" or the name of the error."""
    try:
        with Path(path).expanduser().open("a") as file:
            file.write("planted")
    except OSError as error:
        return type(error).__name__
    return "written"


def called(request):
    name, arguments = request["params"]["name"], request["params"].get("arguments") or {}
    with contextlib.suppress(OSError), FILE.with_suffix(".log").open("a") as log:
        log.write(json.dumps([name, arguments]) + "\n")
    if name == "crash":
        os._exit(3)
    if name == "evaluate":
        return answer(request, {"content": [], "structuredContent": {"reward": 0.5}})
    text = json.dumps(arguments)
    if name.startswith("fail"):
        text = next(tool["description"] for tool in TOOLS if tool["name"] == name)
    if name == "write":
        paths = next(tool["description"] for tool in TOOLS if tool["name"] == name).split()
        text = " ".join(written(path) for path in paths)
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
