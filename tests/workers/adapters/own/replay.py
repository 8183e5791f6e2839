"""Server that replays recorded messages: one per request, and the last one for all further requests.

A message may contain the `finish_reason` of its end. Requests are recorded.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def streamed(answer):
    """Return an answer as the events of a stream."""
    (choice,) = answer.pop("choices")
    calls = [{"index": at, **call} for at, call in enumerate(choice["message"].get("tool_calls") or ())]
    delta = {**choice["message"], **({"tool_calls": calls} if calls else {})}
    usage = answer.pop("usage")
    parts = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]},
        {"choices": [], "usage": usage},
    ]
    head = {**answer, "object": "chat.completion.chunk"}
    return (
        b"".join(b"data: %s\n\n" % json.dumps(head | part).encode() for part in parts) + b"data: [DONE]\n\n"
    )


class Replay:
    """Server whose `url` answers chat completions."""

    def __init__(self):
        replay = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *words):
                pass

            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                replay.asked.append(request["messages"])
                message = dict(replay.messages[min(len(replay.asked), len(replay.messages)) - 1])
                usual = "tool_calls" if message.get("tool_calls") else "stop"
                finish = message.pop("finish_reason", usual)
                answer = {
                    "id": "replayed",
                    "object": "chat.completion",
                    "created": 0,
                    "model": "replay",
                    "choices": [{"index": 0, "message": message, "finish_reason": finish}],
                    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
                }
                streams = bool(request.get("stream"))
                body = streamed(answer) if streams else json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream" if streams else "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self.play([])
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{server.server_address[1]}/v1"

    def play(self, messages):
        """Start a rollout that is answered with these messages."""
        self.messages, self.asked = messages, []
