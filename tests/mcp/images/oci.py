"""Hand-made images, and a registry that serves them with the routes that a pull needs."""

import gzip
import hashlib
import io
import json
import platform
import re
import subprocess
import tarfile
from contextlib import contextmanager
from pathlib import Path

from tests.local_server import LocalServer, QuietHandler

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())


def digest(data):
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def entry(name, content=b"", *, kind=tarfile.REGTYPE, mode=0o644, link=""):
    """Return a member of a layer and its content."""
    info = tarfile.TarInfo(name)
    info.type, info.mode, info.linkname = kind, mode, link
    info.size = len(content) if kind == tarfile.REGTYPE else 0
    return info, content


def directory(name, mode=0o755):
    return entry(name, kind=tarfile.DIRTYPE, mode=mode)


def symlink(name, target):
    return entry(name, kind=tarfile.SYMTYPE, link=target)


def hardlink(name, target):
    return entry(name, kind=tarfile.LNKTYPE, link=target)


def sparse(name, size):
    """Return a sparse file of `size` bytes; the tar contains one block of it."""
    info, content = entry("GNUSparseFile.0/x", b"1\n0\n512\n".ljust(512, b"\0") + b"x" * 512)
    version = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}
    info.pax_headers = {**version, "GNU.sparse.name": name, "GNU.sparse.realsize": str(size)}
    return info, content


def dated(name, mtime):
    info, content = entry(name)
    info.pax_headers = {"mtime": mtime}
    return info, content


def layer(*entries):
    """Return an uncompressed tar of these entries."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for info, content in entries:
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


class Image:
    """Image as blobs by digest and a manifest; `layers` are uncompressed tars."""

    def __init__(self, *layers, **config):
        packed = [gzip.compress(data, mtime=0) for data in layers]
        described = {
            "architecture": ARCHITECTURE,
            "os": "linux",
            "config": config,
            "rootfs": {"type": "layers", "diff_ids": [digest(data) for data in layers]},
        }
        raw = json.dumps(described).encode()
        self.blobs = {digest(data): data for data in (raw, *packed)}
        self.manifest = json.dumps(
            {
                "schemaVersion": 2,
                "mediaType": MANIFEST,
                "config": {"mediaType": CONFIG, "digest": digest(raw), "size": len(raw)},
                "layers": [{"mediaType": LAYER, "digest": digest(p), "size": len(p)} for p in packed],
            }
        ).encode()

    def index(self):
        """Return a manifest list: another platform first, then this one."""
        ours = {"mediaType": MANIFEST, "digest": digest(self.manifest), "size": len(self.manifest)}
        other = ours | {"digest": digest(b"other"), "platform": {"os": "linux", "architecture": "mips"}}
        ours["platform"] = {"os": "linux", "architecture": ARCHITECTURE}
        return json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": [other, ours]}).encode()


class FakeRegistry:
    """Registry whose content tests may change, and that records its requests."""

    def __init__(self):
        self.manifests, self.blobs, self.asked = {}, {}, []
        self.token = None  # the token that every request needs, issued by /token
        self.login = None  # the Authorization header that /token requires
        self.port = 0

    def add(self, name, image, *, tag="latest", indexed=False):
        """Serve an image as `name:tag`; return its full name."""
        self.blobs |= image.blobs
        self.manifests[f"{name}:{digest(image.manifest)}"] = (MANIFEST, image.manifest)
        served = (INDEX, image.index()) if indexed else (MANIFEST, image.manifest)
        self.manifests[f"{name}:{tag}"] = served
        return f"127.0.0.1:{self.port}/{name}:{tag}"

    def answer(self, path, headers):
        """Return status, headers and body of a response."""
        if path.startswith("/token"):
            if self.login is not None and headers.get("Authorization") != self.login:
                return 401, {}, b"{}"
            return 200, {"Content-Type": "application/json"}, json.dumps({"token": self.token}).encode()
        if self.token is not None and headers.get("Authorization") != f"Bearer {self.token}":
            realm = f"http://127.0.0.1:{self.port}/token"
            return 401, {"WWW-Authenticate": f'Bearer realm="{realm}",service="fake"'}, b"{}"
        if match := re.fullmatch(r"/v2/(.+)/manifests/(.+)", path):
            found = self.manifests.get(f"{match[1]}:{match[2]}")
            return (404, {}, b"{}") if found is None else (200, {"Content-Type": found[0]}, found[1])
        if match := re.fullmatch(r"/v2/.+/blobs/(.+)", path):
            found = self.blobs.get(match[1])
            return (404, {}, b"{}") if found is None else (200, {}, found)
        return 404, {}, b"{}"


@contextmanager
def fake_registry():
    registry = FakeRegistry()

    class Handler(QuietHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            registry.asked.append(self.path)
            status, headers, body = registry.answer(self.path, self.headers)
            self.answer(status, body, **headers)

    with LocalServer(Handler) as server:
        registry.port = server.port
        yield registry


def shell_layer(*extra):
    """Return a layer with only /bin/sh and its libraries, copied from this machine."""
    shell = Path("/bin/sh").resolve()
    listed = subprocess.run(["ldd", str(shell)], capture_output=True, text=True, check=True).stdout
    libraries = [Path(path) for path in re.findall(r"(/\S+)", listed)]
    folders, files = set(), []
    for path in libraries:
        folders |= set(path.parents)
        files.append(entry(str(path).lstrip("/"), path.read_bytes(), mode=0o755))
    made = [directory(str(folder).lstrip("/")) for folder in sorted(folders) if str(folder) != "/"]
    made += [directory("bin"), directory("tmp", 0o1777), directory("app")]
    return layer(*made, *files, entry("bin/sh", shell.read_bytes(), mode=0o755), *extra)


SHELL_SERVER = rb"""#!/bin/sh
# An MCP server out of nothing but a shell: each tool writes or reads a file, or says who runs it.
while read -r line; do
  case "$line" in *'"id"'*) ;; *) continue ;; esac
  id=${line#*'"id":'}; id=${id#' '}; id=${id%%[,\}]*}
  case "$line" in
    *'"initialize"'*)
      info="\"serverInfo\":{\"name\":\"sh\",\"version\":\"1\"}"
      result="{\"protocolVersion\":\"2025-06-18\",\"capabilities\":{},$info}"
      echo "{\"jsonrpc\":\"2.0\",\"id\":$id,\"result\":$result}"
      continue ;;
    *'"write"'*) said=done; echo "$SECRET" > /app/memory || said=refused ;;
    *'"read"'*) said=nothing; if [ -e /app/memory ]; then read -r said < /app/memory; fi ;;
    *'"who"'*) said="uid=none"
      if [ -e /proc/self/status ]; then
        while read -r key value rest; do
          if [ "$key" = Uid: ]; then said="uid=$value"; fi
        done < /proc/self/status
      fi
      said="$said cwd=$PWD image=$IMAGE_VARIABLE processes=$(echo /proc/[0-9]*)" ;;
    *'"outside"'*) said=hidden; if [ -e "$OUTSIDE" ]; then said=visible; fi ;;
    *'"null"'*) said=broken; if echo x > /dev/null; then said=works; fi ;;
  esac
  echo "{\"jsonrpc\":\"2.0\",\"id\":$id,\"result\":{\"content\":[{\"type\":\"text\",\"text\":\"$said\"}]}}"
done
"""


def shell_image():
    """Return an image whose command is `SHELL_SERVER`."""
    server = entry("app/server", SHELL_SERVER, mode=0o755)
    return Image(
        shell_layer(server),
        Entrypoint=["/bin/sh"],
        Cmd=["/app/server"],
        Env=["IMAGE_VARIABLE=from-the-image"],
        WorkingDir="/app",
    )
