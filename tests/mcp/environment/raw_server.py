"""MCP server in raw JSON-RPC on standard input and output that misbehaves as requested.

    python raw_server.py [WAY]

Without WAY it behaves well and supports the older handshake only. With `modern-only` and `modern-strict` it
supports the newer one only; `modern-strict` refuses the older one because `_meta` is missing.
"""

import json
import os
import signal
import subprocess
import sys
import time

WAY = sys.argv[1] if len(sys.argv) > 1 else ""
MODERN = ("modern-only", "modern-strict")
state = {"calls": 0, "secret": ""}


def tool(name, **properties):
    return {
        "name": name,
        "description": f"The tool {name}.",
        "inputSchema": {"type": "object", "properties": properties, "required": sorted(properties)},
    }


TOOLS = [
    tool("setup"),
    tool("act", text={"type": "string"}),
    tool("recall"),
    tool("environment"),
    tool("evaluate"),
]


def send(message):
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def answer(request, result):
    send({"jsonrpc": "2.0", "id": request["id"], "result": result})


def refuse(request, code, message):
    send({"jsonrpc": "2.0", "id": request["id"], "error": {"code": code, "message": message}})


def text(value, **more):
    newer = {"resultType": "complete"} if WAY in MODERN else {}
    return {"content": [{"type": "text", "text": value}], **newer, **more}


IMAGE = {"type": "image", "data": "AAAA", "mimeType": "image/png"}
RESULTS = {
    "huge-result": text("x" * 20_000_000),
    "wrong-shape": {"content": "not a list"},
    "long-result": text("ab" * 50_000),
    "half-character": text("seen \ud83d"),
    "image": {"content": [IMAGE, {"type": "text", "text": "seen"}]},
    "announces-other": text("You said it.", structuredContent={"line": 1}),
    "ends": text("You win.", structuredContent={"done": True}),
}
REFUSALS = {
    "internal-error": (-32603, "the database is down"),
    "refuses-arguments": (-32602, "Invalid arguments: text must be short"),
}
VERDICTS = {
    "nan": {"reward": float("nan")},
    "no-reward": {"points": 3},
    "grade": {"grade": 0.25, "moves": 4},
    "bool": {"reward": True},
    "score-and-reward": {"score": 9, "reward": 0.5},
    "failed-inside": {"reward": 0.0, "isError": True},
}
VERDICTS_AS_TEXT = {"json-text": '{"score": 0.75}', "bare-number": "0.125"}


def hang():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(60)


def called(request):
    name, arguments = request["params"]["name"], request["params"].get("arguments") or {}
    state["calls"] += 1
    if name == "setup":
        if WAY == "setup-fails":
            return answer(request, text("no board", isError=True))
        if WAY == "hang-in-setup":
            hang()
        return answer(request, text("The board is empty."))
    if WAY == "breaks-evaluation" and name == "act":  # accepts a call without the required argument
        broken = text("no board", isError=True)
        graded = text("graded", structuredContent={"reward": 1.0})
        return answer(request, broken if state["calls"] > 2 else graded)
    if name == "act" and WAY != "tells":
        return acted(request, arguments)
    if WAY == "tells" and name == "recall":
        return answer(request, text(f"not accepted: {os.environ['MARKER']}", isError=True))
    if WAY == "tells":
        return refuse(request, -32602, f"not accepted: {os.environ['MARKER']}")
    if name == "recall":
        return answer(request, text(state["secret"]))
    if name == "environment":
        return answer(request, text(json.dumps(dict(os.environ))))
    if name == "evaluate":
        return evaluated(request)
    return refuse(request, -32602, f"Unknown tool: {name}")


def acted(request, arguments):
    state["secret"] = arguments.get("text", "")
    if WAY == "hang-in-call":
        hang()
    if WAY == "hang-with-child":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        hang()
    if WAY == "die-in-call":
        print("out of cheese", file=sys.stderr, flush=True)
        os._exit(3)
    if WAY == "flood":
        while True:
            sys.stdout.write("y" * 65536 + "\n")
    if WAY == "flood-stderr":
        while True:
            sys.stderr.write("z" * 65536 + "\n")
    if WAY == "garbage":
        sys.stdout.write("this is not JSON\n" * 10)
        sys.stdout.flush()
        return None
    if WAY == "noise":
        sys.stdout.write("loading...\n")
    if WAY == "tool-gone":
        TOOLS[:] = [tool for tool in TOOLS if tool["name"] != "act"]
        send({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"})
    if WAY == "tool-gone-silently" and state["calls"] > 2:
        TOOLS[:] = [tool for tool in TOOLS if tool["name"] != "act"]
        return refuse(request, -32602, "Unknown tool: act")
    if WAY == "tool-differs":
        TOOLS[1]["inputSchema"] = {"type": "object", "properties": {"other": {"type": "number"}}}
        send({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"})
    if WAY == "tool-added":
        TOOLS.append(tool("extra"))
        send({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"})
    if WAY == "no-envelope":
        return send({"id": request["id"], "result": text("seen")})
    if WAY in REFUSALS:
        return refuse(request, *REFUSALS[WAY])
    if WAY in RESULTS:
        return answer(request, RESULTS[WAY])
    return answer(request, text(f"You said {arguments.get('text')}."))


def evaluated(request):
    if WAY in VERDICTS:
        return answer(request, text("graded", structuredContent=VERDICTS[WAY]))
    if WAY in VERDICTS_AS_TEXT:
        return answer(request, text(VERDICTS_AS_TEXT[WAY]))
    if WAY == "evaluate-fails":
        return answer(request, text("no grader", isError=True))
    if WAY == "hang-in-evaluate":
        hang()
    said = float(state["secret"] == "win")
    return answer(request, text("graded", structuredContent={"reward": said, "calls": state["calls"]}))


def main():
    if WAY == "hang-in-start":
        hang()
    if WAY == "die-in-start":
        print("no such board", file=sys.stderr)
        sys.exit(7)
    if WAY == "garbage-in-start":
        sys.stdout.write("Usage: server [options]\n")
        sys.stdout.flush()
    while WAY == "flood-in-start":  # like the program `yes`
        sys.stdout.write("y\n" * 1000)
    for line in sys.stdin:
        request = json.loads(line)
        method = request.get("method")
        if method == "initialize" and WAY not in ("garbage-in-start", *MODERN):
            info = {"name": "raw", "version": "1"}
            version = request["params"]["protocolVersion"]
            capabilities = {"tools": {"listChanged": True}}
            answer(request, {"protocolVersion": version, "capabilities": capabilities, "serverInfo": info})
        elif method in ("server/discover", "tools/list") and WAY in MODERN:
            about = {"resultType": "complete", "ttlMs": 0, "cacheScope": "private"}
            versions = {"supportedVersions": ["2026-07-28"], "capabilities": {"tools": {}}}
            answer(request, about | ({"tools": TOOLS} if method == "tools/list" else versions))
        elif method == "tools/list":
            if WAY in ("announces-more", "announces-other"):
                row = {"type": "object", "properties": {"rows": {"type": "array"}}, "required": ["rows"]}
                next(one for one in TOOLS if one["name"] == "act")["outputSchema"] = row
            cursor = request.get("params", {}).get("cursor", "")
            more = {"nextCursor": f"{cursor}+"} if WAY == "endless-tools" else {}
            answer(request, {"tools": TOOLS, **more})
        elif method == "tools/call":
            called(request)
        elif "id" in request and WAY == "modern-strict":
            refuse(request, -32602, "request is missing _meta")
        elif "id" in request and WAY != "garbage-in-start":
            refuse(request, -32601, "Method not found")
    if WAY == "stays":
        hang()


main()
