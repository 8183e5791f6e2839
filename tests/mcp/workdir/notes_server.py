"""MCP server in raw JSON-RPC that keeps notes in a file: `python notes_server.py FILE [WAY]`.

With the WAY `clock` it adds the time and a random number to each answer.
"""

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

FILE = Path(sys.argv[1] if len(sys.argv) > 1 else "notes.txt")
WAY = sys.argv[2] if len(sys.argv) > 2 else ""
DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 100)
        time.sleep(600)
"""
HIDDEN = """
import os, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 100)
        os.execve(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)", sys.argv[1]], {})
"""  # its environment does not identify its owner


def tool(name, **properties):
    schema = {"type": "object", "properties": properties, "required": sorted(properties)}
    return {"name": name, "description": f"The tool {name}.", "inputSchema": schema}


TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
TOOLS = [
    tool("add", text=TEXT),
    tool("notes"),
    tool("where"),
    tool("listed"),
    tool("environment"),
    tool("fill", count=NUMBER),
    tool("daemon"),
    tool("hide"),
    tool("run", code=TEXT),
    tool("evaluate"),
]


def notes():
    return FILE.read_text().splitlines() if FILE.exists() else []


def hidden(_):
    """Return "hidden" if a process has the marker on its command line and an empty environment."""
    time.sleep(0.01)
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            marked = os.environ["MARKER"].encode() in (path / "cmdline").read_bytes()
            if marked and not (path / "environ").read_bytes():
                return "hidden"
    return ""


def call(name, arguments):
    if name == "add":
        with FILE.open("a") as file:
            file.write(arguments["text"] + "\n")
        return "added"
    if name == "notes":
        return "\n".join(notes()) or "no notes"
    if name == "where":
        return json.dumps({"cwd": os.getcwd(), "files": sorted(os.listdir())})
    if name == "listed":
        return json.dumps(
            {f"./{path}": None if path.is_dir() else path.read_text() for path in Path().rglob("*")}
        )
    if name == "environment":
        return json.dumps(dict(os.environ))
    if name == "fill":
        Path("large").write_bytes(b"x" * arguments["count"])
        return "filled"
    if name == "run":
        exec(arguments["code"])
        return "ran"
    if name == "daemon":
        subprocess.run([sys.executable, "-c", DAEMON], check=True)
        return "left behind"
    if name == "hide":
        subprocess.run([sys.executable, "-c", HIDDEN, os.environ["MARKER"]], check=True)
        return next((said for said in map(hidden, range(1000)) if said), "it does not run")
    return json.dumps({"reward": float(len(notes()) == 1), "notes": len(notes())})


def main():
    for line in sys.stdin:
        request = json.loads(line)
        method = request.get("method")
        if method == "initialize":
            about = {"capabilities": {"tools": {}}, "serverInfo": {"name": "notes", "version": "1"}}
            result = about | {"protocolVersion": request["params"]["protocolVersion"]}
        elif method == "tools/list":
            result = {"tools": TOOLS}
        elif method == "tools/call":
            text = call(request["params"]["name"], request["params"].get("arguments") or {})
            if WAY == "clock" and request["params"]["name"] != "evaluate":
                text += f" at {time.time_ns()} with {random.random()}"
            result = {"content": [{"type": "text", "text": text}]}
        elif "id" in request:
            error = {"code": -32601, "message": "Method not found"}
            print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "error": error}), flush=True)
            continue
        else:
            continue
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}), flush=True)


main()
