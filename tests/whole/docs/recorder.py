"""A server that notes everything that is sent to it, and answers chats."""

import json

from tests.local_server import LocalServer, QuietHandler


class Recorder(LocalServer):
    """`sent` are the requests: their lines, headers and bodies, as text."""

    def __init__(self, reply="<think>I guess.</think><tool>done()</tool>"):
        self.sent = []
        recorder = self

        class Handler(QuietHandler):
            def do_POST(self):
                body = self.body().decode(errors="replace")
                recorder.sent.append(f"{self.requestline}\n{self.headers}\n{body}")
                message = {"role": "assistant", "content": reply}
                choice = {"index": 0, "message": message, "finish_reason": "stop"}
                usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
                answer = {"id": "1", "object": "chat.completion", "created": 0, "model": "m"}
                self._answer(answer | {"choices": [choice], "usage": usage})

            def do_GET(self):
                recorder.sent.append(f"{self.requestline}\n{self.headers}")
                self._answer({"object": "list", "data": [{"id": "m", "object": "model"}]})

            def _answer(self, content):
                self.answer(200, json.dumps(content).encode(), Content_Type="application/json")

        super().__init__(Handler)
