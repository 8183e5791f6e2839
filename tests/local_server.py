"""An HTTP server on the loopback, for as long as a block lasts."""

import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class QuietHandler(BaseHTTPRequestHandler):
    """Answers requests and prints nothing."""

    def log_message(self, *_):
        pass

    def body(self):
        """What was sent, as bytes."""
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self, status, content, **headers):
        """Send bytes; an underscore in the name of a header is a hyphen. A HEAD gets the headers alone."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


class _Server(ThreadingHTTPServer):
    def handle_error(self, request, client_address):
        """Say nothing of a client that has gone: its test may look at what is printed."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class LocalServer:
    """`handler` is the class of its answers, `url` its address without a slash at the end."""

    def __init__(self, handler):
        self._server = _Server(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
