"""A package index on loopback, with wheels made here: no dependencies, no build."""

import hashlib
import http.server
import threading
import zipfile
from contextlib import contextmanager


def wheel(folder, name, version="1.0", *, files=None, requires=(), extras=(), entry_points=""):
    """Write NAME-VERSION-py3-none-any.whl with these modules; returns its path."""
    module = name.replace("-", "_")
    content = dict(files or {f"{module}.py": ""})
    info = f"{module}-{version}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {r}" for r in requires] + [f"Provides-Extra: {e}" for e in extras]
    content[f"{info}/METADATA"] = "\n".join(lines) + "\n"
    content[f"{info}/WHEEL"] = (
        "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    if entry_points:
        content[f"{info}/entry_points.txt"] = entry_points
    record = f"{info}/RECORD"
    content[record] = "".join(f"{path},,\n" for path in [*content, record])
    target = folder / f"{module}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(target, "w") as archive:
        for path, text in content.items():
            archive.writestr(path, text)
    return target


@contextmanager
def serving(folder):
    """The address of a simple index of the wheels in `folder`, and a list that fills with what is asked."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append((self.path, self.headers.get("Authorization")))
            parts = [part for part in self.path.split("/") if part]
            if parts[0] == "files":
                return self.answer((folder / parts[1]).read_bytes(), "application/zip")
            wheels = [
                w for w in folder.glob("*.whl") if w.name.partition("-")[0].replace("_", "-") == parts[-1]
            ]
            if not wheels:
                return self.send_error(404)
            links = "".join(
                f'<a href="/files/{w.name}#sha256={hashlib.sha256(w.read_bytes()).hexdigest()}">{w.name}</a>'
                for w in wheels
            )
            return self.answer(f"<!DOCTYPE html><html><body>{links}</body></html>".encode(), "text/html")

        do_HEAD = do_GET

        def answer(self, body, kind):
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/simple/", asked
    finally:
        server.shutdown()
        server.server_close()
