"""Hub of models and datasets on the loopback, with routes to create, list, upload and download."""

from __future__ import annotations

import base64
import hashlib
import json
import threading

from tests.local_server import LocalServer, QuietHandler
from tests.waiting import HANG

COMMIT = "0" * 40


class FakeHub(LocalServer):
    """Fake Hugging Face hub.

    `files[repository][path]` holds uploads, `tokens` the tokens that clients sent.

    `private[repository]` holds the requested visibility. A `broken` hub creates no repository. After
    `cut` bytes of a file, the hub waits for the event `stalled`, once for each path in `cuts`. `ranges`
    holds requested ranges. `sizes[path]` replaces the size of a file in lists.
    """

    def __init__(self):
        self.files = {}
        self.tokens = set()
        self.private = {}
        self.broken = False
        self.cut, self.cuts, self.ranges = 0, set(), []
        self.sizes, self.stalled = {}, threading.Event()
        hub = self

        class Handler(QuietHandler):
            def do_GET(self):
                path = self.path.partition("?")[0]
                if "/resolve/" in path:
                    hub._send(self, path)
                else:
                    hub._answer(self, hub._get(path))

            def do_HEAD(self):
                hub._send(self, self.path.partition("?")[0])

            def do_POST(self):
                hub.tokens.add(self.headers["Authorization"])
                hub._answer(self, hub._post(self.path.partition("?")[0], self.body()))

        super().__init__(Handler)

    def _get(self, path):
        _, _, _, owner, name, *rest = [*path.split("/"), "", ""]
        repository = f"{owner}/{name}"
        files = self.files.get(repository)
        if files is None:
            return None
        if rest[:1] != ["tree"]:
            siblings = [{"rfilename": path, "size": len(content)} for path, content in files.items()]
            private = self.private.get(repository, False)
            return {"id": repository, "sha": COMMIT, "private": private, "siblings": siblings}
        sizes = {path: self.sizes.get(path, len(content)) for path, content in files.items()}
        return [{"type": "file", "path": path, "size": size, "oid": "0"} for path, size in sizes.items()]

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

    def _send(self, handler, path):
        """Send a file of a repository, from /datasets/OWNER/NAME/resolve/COMMIT/PATH."""
        self.tokens.add(handler.headers["Authorization"])
        place, _, rest = path.removeprefix("/datasets").partition("/resolve/")
        content = self.files.get(place.strip("/"), {}).get(rest.partition("/")[2])
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(content or b"").hexdigest()}"'}
        if (size := self.sizes.get(rest.partition("/")[2])) is not None:
            headers["X-Linked-Size"] = str(size)
        if content is None:
            handler.answer(404, b"", X_Error_Code="EntryNotFound", **headers)
        elif handler.command == "GET" and rest.partition("/")[2] in self.cuts:
            self.cuts.remove(rest.partition("/")[2])
            handler.send_response(200)
            for name, value in {**headers, "Content-Length": len(content)}.items():
                handler.send_header(name.replace("_", "-"), str(value))
            handler.end_headers()
            handler.wfile.write(content[: self.cut])
            self.stalled.wait(HANG)
            handler.close_connection = True
        elif (wanted := handler.headers["Range"]) and handler.command == "GET":
            self.ranges.append(wanted)
            start = int(wanted.removeprefix("bytes=").partition("-")[0])
            span = f"bytes {start}-{len(content) - 1}/{len(content)}"
            handler.answer(206, content[start:], Content_Range=span, **headers)
        else:
            handler.answer(200, content, **headers)

    @staticmethod
    def _answer(handler, content):
        headers = {"Content-Type": "application/json"}
        if content is None:
            handler.answer(404, b"{}", X_Error_Code="RepoNotFound", **headers)
        else:
            handler.answer(200, json.dumps(content).encode(), **headers)
