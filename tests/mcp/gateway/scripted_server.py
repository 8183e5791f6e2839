"""MCP server on stdio without any library, so that it can also misbehave; run as a script."""

import json
import os
import subprocess
import sys
import time


def send(message):
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def text(value):
    return {"content": [{"type": "text", "text": value if isinstance(value, str) else json.dumps(value)}]}


def call(request, memory):
    name, arguments = request["params"]["name"], request["params"].get("arguments", {})
    token = request["params"].get("_meta", {}).get("progressToken")
    if name == "remember":
        memory.append(arguments["value"])
        return text("done")
    if name == "recall":
        return text(memory)
    if name == "environment":
        return text(dict(os.environ))
    if name == "who":
        return text(
            {"pid": os.getpid(), "uid": os.getuid(), "cwd": os.getcwd(), "tmp": os.environ.get("TMPDIR")}
        )
    if name == "read":
        try:
            with open(arguments["path"]) as file:
                return text(file.read())
        except OSError as error:
            return text(f"{type(error).__name__}")
    if name == "write":
        with open(arguments["path"], "w") as file:
            file.write(arguments["text"])
        return text("done")
    if name == "sleep":
        time.sleep(arguments["seconds"])
        return text("awake")
    if name == "progress":
        for done in range(3):
            send({"method": "notifications/progress", "params": {"progressToken": token, "progress": done}})
        return text("finished")
    if name == "announce":
        send({"method": "notifications/message", "params": {"level": "info", "data": arguments["data"]}})
        return text("announced")
    if name == "ask":  # the server sends a request to the client, in the middle of a call
        send({"id": "q1", "method": "sampling/createMessage", "params": {"messages": [], "maxTokens": 1}})
        answer = json.loads(sys.stdin.readline())
        assert answer["id"] == "q1", answer
        return text(answer["result"]["said"])
    if name == "die":
        print("last words", file=sys.stderr, flush=True)
        os._exit(3)
    if name == "flood":
        while True:
            print("x" * 100_000, flush=True)
    if name == "spawn":  # a child that leaves the process group
        child = subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL)
        return text({"child": child.pid})
    raise ValueError(name)


def main():
    memory, behaviour = [], sys.argv[1] if len(sys.argv) > 1 else ""
    if behaviour == "banner":
        print("Welcome to a server that prints", flush=True)
    if behaviour == "hang":
        time.sleep(600)
    if behaviour == "die":
        sys.exit("no configuration")
    for line in sys.stdin:
        request = json.loads(line)
        method = request.get("method")
        if "id" not in request or method is None:
            continue
        if method == "initialize":
            asked = request["params"]["protocolVersion"]
            result = {
                "protocolVersion": asked,
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "scripted", "version": "1"},
            }
        elif method == "tools/call":
            result = call(request, memory)
        else:
            send({"id": request["id"], "error": {"code": -32601, "message": f"no method {method}"}})
            continue
        send({"id": request["id"], "result": result})
    if behaviour == "stays":  # keeps running when its input ends
        time.sleep(600)


if __name__ == "__main__":
    main()
