"""An OpenAI-compatible server whose answers are a function of the request."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def chat_server(answer):
    """Serves `answer(body, number) -> text | message | (status, text)`; yields the address and the requests
    so far, as (headers, body)."""
    requests = []
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
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
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
