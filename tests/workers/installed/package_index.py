"""Package index on the loopback with locally written wheels: no dependencies, no build."""

import hashlib
import zipfile
from contextlib import contextmanager

from tests.local_server import LocalServer, QuietHandler


def wheel(folder, name, version="1.0", *, files=None, requires=(), extras=(), entry_points="", python=""):
    """Write NAME-VERSION-py3-none-any.whl with these modules; return its path."""
    module = name.replace("-", "_")
    content = dict(files or {f"{module}.py": ""})
    info = f"{module}-{version}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Python: {python}"] if python else []
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
    """Serve a simple index of the wheels in `folder`; yield its address and a growing list of requests."""
    asked = []

    class Handler(QuietHandler):
        def do_GET(self):
            asked.append((self.path, self.headers.get("Authorization")))
            parts = [part for part in self.path.split("/") if part]
            if parts[0] == "files":
                return self.answer(200, (folder / parts[1]).read_bytes(), Content_Type="application/zip")
            wheels = [
                w for w in folder.glob("*.whl") if w.name.partition("-")[0].replace("_", "-") == parts[-1]
            ]
            if not wheels:
                return self.send_error(404)
            links = "".join(
                f'<a href="/files/{w.name}#sha256={hashlib.sha256(w.read_bytes()).hexdigest()}">{w.name}</a>'
                for w in wheels
            )
            page = f"<!DOCTYPE html><html><body>{links}</body></html>"
            return self.answer(200, page.encode(), Content_Type="text/html")

        do_HEAD = do_GET

    with LocalServer(Handler) as server:
        yield f"{server.url}/simple/", asked
