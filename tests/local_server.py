"""HTTP server on the loopback, for the duration of a block."""

import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class QuietHandler(BaseHTTPRequestHandler):
    """Request handler that prints nothing."""

    def log_message(self, *_):
        pass

    def body(self):
        """Return the request's body as bytes."""
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self, status, content, **headers):
        """Send bytes; an underscore in the name of a header is a hyphen.

        A HEAD request gets only the headers.
        """
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


class _Server(ThreadingHTTPServer):
    def handle_error(self, request, client_address):
        """Print nothing about a client that has disconnected: its test may check the output."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class LocalServer:
    """Server with the request handler class `handler`; `url` is its address without a trailing slash."""

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
