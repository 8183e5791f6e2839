"""A hub of models and datasets on the loopback, as far as creating, listing, up- and downloading go."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0" * 40


class FakeHub:
    """`files[repository][path]` is what was uploaded; `tokens` are those that clients sent;
    `private[repository]` is what was asked for. A `broken` hub makes no repository."""

    def __init__(self):
        self.files = {}
        self.tokens = set()
        self.private = {}
        self.broken = False
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                path = self.path.partition("?")[0]
                if "/resolve/" in path:
                    hub._send(self, path, body=True)
                else:
                    hub._answer(self, hub._get(path))

            def do_HEAD(self):
                hub._send(self, self.path.partition("?")[0], body=False)

            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                hub.tokens.add(self.headers["Authorization"])
                hub._answer(self, hub._post(self.path.partition("?")[0], body))

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()

    def _get(self, path):
        _, _, _, owner, name, *rest = [*path.split("/"), "", ""]
        repository = f"{owner}/{name}"
        files = self.files.get(repository)
        if files is None:
            return None
        if rest[:1] != ["tree"]:
            siblings = [{"rfilename": path} for path in files]
            private = self.private.get(repository, False)
            return {"id": repository, "sha": COMMIT, "private": private, "siblings": siblings}
        return [{"type": "file", "path": p, "size": len(c), "oid": "0"} for p, c in files.items()]

    def _post(self, path, body):
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            if self.broken:
                return None
            self.private[name] = asked.get("visibility") == "private"
            self.files.setdefault(name, {".gitattributes": b""})
            return {"url": f"{self.url}/{name}", "name": name}
        if path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}
        _, _, _, owner, name, action, _ = path.split("/")
        if action == "preupload":
            asked = json.loads(body)["files"]
            return {
                "files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in asked]
            }
        for line in body.splitlines():
            entry = json.loads(line)
            if entry["key"] == "deletedFile":
                del self.files[f"{owner}/{name}"][entry["value"]["path"]]
            if entry["key"] == "file":
                content = base64.b64decode(entry["value"]["content"])
                self.files[f"{owner}/{name}"][entry["value"]["path"]] = content
        return {"commitUrl": f"{self.url}/{owner}/{name}/commit/0", "commitOid": "0", "success": True}

    def _send(self, handler, path, *, body):
        """A file of a repository, at /datasets/OWNER/NAME/resolve/COMMIT/PATH."""
        self.tokens.add(handler.headers["Authorization"])
        place, _, rest = path.removeprefix("/datasets").partition("/resolve/")
        content = self.files.get(place.strip("/"), {}).get(rest.partition("/")[2])
        handler.send_response(404 if content is None else 200)
        if content is None:
            handler.send_header("X-Error-Code", "EntryNotFound")
        handler.send_header("X-Repo-Commit", COMMIT)
        handler.send_header("ETag", f'"{hashlib.sha256(content or b"").hexdigest()}"')
        handler.send_header("Content-Length", str(len(content or b"")))
        handler.end_headers()
        if body:
            handler.wfile.write(content or b"")

    @staticmethod
    def _answer(handler, content):
        handler.send_response(404 if content is None else 200)
        if content is None:
            handler.send_header("X-Error-Code", "RepoNotFound")
        handler.send_header("Content-Type", "application/json")
        handler.end_headers()
        handler.wfile.write(json.dumps(content or {}).encode())
