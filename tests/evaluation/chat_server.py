"""OpenAI-compatible server whose answers are a function of the request."""

import json
import threading
from contextlib import contextmanager

from tests.local_server import LocalServer, QuietHandler


@contextmanager
def chat_server(answer):
    """Serve `answer(body, number) -> text | message | (status, text)`.

    Yield the address and the growing list of requests, as (headers, body).
    """
    requests = []
    lock = threading.Lock()

    class Handler(QuietHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = json.loads(self.body())
            with lock:
                requests.append((dict(self.headers), body))
                number = len(requests)
            said = answer(body, number)
            status = 200
            if isinstance(said, tuple):
                status, data = said[0], said[1].encode()
            else:
                message = said if isinstance(said, dict) else {"role": "assistant", "content": said}
                choice = {"index": 0, "message": message, "finish_reason": "stop"}
                usage = {"prompt_tokens": 7, "completion_tokens": 3}
                data = json.dumps({"choices": [choice], "usage": usage}).encode()
            self.answer(status, data)

    with LocalServer(Handler) as server:
        yield f"{server.url}/v1", requests
