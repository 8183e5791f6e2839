"""A small client of the registry API: manifests and blobs, every byte checked against its digest.

Facts: the OCI distribution specification 1.1, and Docker's token authentication. Plain HTTP only on this
machine; everywhere else HTTPS. Logins go to the registry they belong to and the token server it names, never
to where a blob is redirected. What is uploaded is in `push`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpx

from buckeye.base.request_gate import is_loopback
from buckeye.base.storage import read_json
from buckeye.mcp.images.manifest import DOCKER_HUB, MANIFESTS, Blob, ImageReference, Manifest, parse_manifest
from buckeye.mcp.sandbox.base import PrepareError

# Logins to registries, from where docker and podman keep them.

_HUB_KEYS = ("https://index.docker.io/v1/", "index.docker.io", "docker.io")
_HELPER_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Login:
    """A user and a password (or token), or an identity token alone."""

    user: str
    password: str = field(repr=False)
    is_token: bool = False


def find_login(registry: str) -> Login | None:
    """The login for a registry host; None if nobody has logged in there."""
    keys = (*_HUB_KEYS, DOCKER_HUB) if registry == DOCKER_HUB else (registry, f"https://{registry}")
    for file in _files():
        try:
            config = read_json(file)
        except (OSError, ValueError):
            continue
        for key in keys:
            login = _helped(config, key) or _stored(_table(config, "auths").get(key))
            if login is not None:
                return login
    return None


def _files() -> list[Path]:
    """In the order in which they are asked."""
    docker = os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker"
    files = [Path(docker) / "config.json"]
    if named := os.environ.get("REGISTRY_AUTH_FILE"):
        files.insert(0, Path(named))
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        files.append(Path(runtime) / "containers" / "auth.json")
    return files


def _stored(entry: Any) -> Login | None:
    if not isinstance(entry, dict):
        return None
    if token := entry.get("identitytoken"):
        return Login("<token>", str(token), is_token=True)
    try:
        user, _, password = base64.b64decode(str(entry.get("auth", ""))).decode().partition(":")
    except ValueError:
        return None
    return Login(user, password.rstrip("\0")) if user else None


def _table(config: Any, name: str) -> dict[str, Any]:
    """A table of a file; empty where there is none."""
    found = config.get(name) if isinstance(config, dict) else None
    return found if isinstance(found, dict) else {}


def _helped(config: Any, key: str) -> Login | None:
    store = config.get("credsStore") if key in _table(config, "auths") else None
    name = _table(config, "credHelpers").get(key) or store
    program = shutil.which(f"docker-credential-{name}") if name else None
    if program is None:
        return None
    try:
        ran = subprocess.run(  # noqa: S603  a list of words, without a shell
            [program, "get"], input=key, capture_output=True, text=True, timeout=_HELPER_SECONDS, check=False
        )
        answer = json.loads(ran.stdout)
        user, secret = str(answer["Username"]), str(answer["Secret"])
    except (OSError, ValueError, KeyError, TypeError, subprocess.TimeoutExpired):
        return None
    return Login(user, secret, is_token=user == "<token>")


# A small client of the registry API: manifests and blobs, every byte checked against its digest.

MIRROR_VARIABLE = "BUCKEYE_REGISTRY_MIRROR"
"""Names a registry that images of Docker Hub are fetched from."""
_INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_MAX_MANIFEST = 4 * 2**20
_PLAIN = {"accept-encoding": "identity"}  # what is packed may be any number of bytes
_CHUNK = 2**20
_TIMEOUT = httpx.Timeout(60.0, connect=20.0)
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm"}
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')


class Registry(AbstractContextManager["Registry"]):
    """One registry, for one repository; use it as a context manager. Its methods raise PrepareError.

    To fetch from Docker Hub, the mirror is asked where one is named; to `push`, never.
    """

    def __init__(self, reference: ImageReference, *, push: bool = False) -> None:
        self._reference, self._actions = reference, "pull,push" if push else "pull"
        self._host = reference.registry
        if self._host == DOCKER_HUB and not push:
            self._host = os.environ.get(MIRROR_VARIABLE) or DOCKER_HUB
        local = _is_local(self._host)
        self._base = f"{'http' if local else 'https'}://{self._host}/v2/{reference.repository}"
        self._login: Login | None = find_login(self._host)
        self._authorization: str | None = None
        self._client = httpx.Client(timeout=_TIMEOUT, follow_redirects=True, max_redirects=5)

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def manifest(self) -> Manifest:
        """The manifest for this machine's platform; of an index, the entry for it."""
        digest, content, kind = self._manifest(self._reference.version)
        if kind in _INDEXES:
            digest, content, kind = self._manifest(_of_this_platform(content, self._reference))
        return parse_manifest(content, digest=digest, kind=kind, shown=str(self._reference))

    def fetch(self, blob: Blob, target: Path) -> None:
        """Download a blob, unless `target` has it already; it is there only if its digest is right."""
        if target.exists():
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.tmp-{os.getpid()}")
        digest, size = hashlib.sha256(), 0
        try:
            with self.ask("GET", f"/blobs/{blob.digest}") as response, part.open("wb") as file:
                for chunk in response.iter_raw():
                    size += len(chunk)
                    if size > blob.size:
                        break
                    digest.update(chunk)
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            if size != blob.size or f"sha256:{digest.hexdigest()}" != blob.digest:
                raise PrepareError(
                    f"image {self._reference}: {blob.digest[:19]} arrived damaged (size or digest differ)."
                )
            part.replace(target)
        except httpx.HTTPError as error:
            raise self.unreachable(error) from None
        finally:
            part.unlink(missing_ok=True)

    def _manifest(self, version: str) -> tuple[str, dict[str, Any], str]:
        try:
            wanted = {"accept": ", ".join(MANIFESTS + _INDEXES), **_PLAIN}
            with self.ask("GET", f"/manifests/{version}", headers=wanted) as response:
                raw = self._read(response, "its manifest")
                kind = response.headers.get("content-type", "").partition(";")[0].strip()
        except httpx.HTTPError as error:
            raise self.unreachable(error) from None
        digest = f"sha256:{hashlib.sha256(raw).hexdigest()}"
        if version.startswith("sha256:") and version != digest:
            raise PrepareError(f"image {self._reference}: the manifest arrived damaged (its digest differs).")
        try:
            content = json.loads(raw)
            return digest, content, content.get("mediaType", kind)
        except (ValueError, AttributeError):
            raise PrepareError(f"image {self._reference}: its manifest is no JSON.") from None

    def ask(
        self,
        method: str,
        where: str,
        *,
        headers: Mapping[str, str] | None = None,
        content: bytes | Path | None = None,
        expected: tuple[int, ...] = (200,),
    ) -> closing[httpx.Response]:
        """Ask, log in if that is wanted, ask again. `where` follows the repository's address, or is one that
        the registry gave; a login is sent to the registry only. `content` is sent, or what is in that file.
        Raises httpx.HTTPError if it cannot be
        reached."""
        url = urljoin(f"{self._base}/", where) if "://" in where else self._base + where
        ours = urlsplit(url)[:2] == urlsplit(self._base)[:2]
        for attempt in range(2):
            given = {"accept": "*/*", **(headers or {})}
            if ours and self._authorization is not None:
                given["authorization"] = self._authorization
            body = _chunks(content) if isinstance(content, Path) else content
            request = self._client.build_request(method, url, headers=given, content=body)
            response = self._client.send(request, stream=True)
            if response.status_code == 401 and ours and attempt == 0:
                challenge = response.headers.get("www-authenticate", "")
                response.close()
                self._authorization = self._authorize(challenge)
                continue
            if response.status_code in expected:
                return closing(response)
            response.close()
            raise PrepareError(self._refusal(response.status_code))
        raise AssertionError("unreachable")

    def absolute(self, location: str) -> str:
        """An address that the registry gave, in full. Raises PrepareError if it is plain HTTP elsewhere."""
        url = urljoin(f"{self._base}/", location)
        if urlsplit(url).scheme != "https" and not _is_local(urlsplit(url).netloc):
            raise PrepareError(f"{self._host} wants an upload over plain HTTP to {url[:80]}: refused.")
        return url

    def _authorize(self, challenge: str) -> str:
        scheme, _, rest = challenge.partition(" ")
        fields = dict(_CHALLENGE.findall(rest))
        if scheme.lower() == "basic" and self._login is not None:
            return _basic(self._login)
        realm = fields.get("realm", "")
        if scheme.lower() != "bearer" or urlsplit(realm).scheme not in ("https", "http"):
            raise PrepareError(self._refusal(401))
        if urlsplit(realm).scheme == "http" and not _is_local(urlsplit(realm).netloc):
            raise PrepareError(f"{self._host} wants a login over plain HTTP at {realm}: refused.")
        query = {"service": fields["service"]} if "service" in fields else {}
        query["scope"] = f"repository:{self._reference.repository}:{self._actions}"
        if self._login is not None and self._login.is_token:
            form = {"grant_type": "refresh_token", "refresh_token": self._login.password, **query}
            asked = self._client.stream("POST", realm, data={**form, "client_id": "buckeye"}, headers=_PLAIN)
        else:
            headers = {} if self._login is None else {"authorization": _basic(self._login)}
            asked = self._client.stream("GET", realm, params=query, headers={**headers, **_PLAIN})
        with asked as answer:
            content = self._read(answer, "the answer about its login")
        try:
            given = json.loads(content)
            return f"Bearer {given.get('token') or given['access_token']}"
        except (ValueError, KeyError, AttributeError):
            raise PrepareError(self._refusal(answer.status_code)) from None

    def _read(self, response: httpx.Response, what: str) -> bytes:
        raw = bytearray()
        for chunk in response.iter_raw():
            raw += chunk
            if len(raw) > _MAX_MANIFEST:
                raise PrepareError(f"image {self._reference}: {what} is larger than {_MAX_MANIFEST} bytes.")
        return bytes(raw)

    def _refusal(self, status: int) -> str:
        host = self._host
        if status in (401, 403):
            known = "the login that is stored is not accepted" if self._login else "nobody is logged in there"
            what = f"{'take' if 'push' in self._actions else 'give out'} {self._reference}"
            return f"{host} does not {what}: {known} (`docker login {host}` stores a login)."
        if status == 404:
            return f"There is no image {self._reference}."
        return f"{host} answered {status} for {self._reference}."

    def unreachable(self, error: httpx.HTTPError) -> PrepareError:
        """What to raise if the registry cannot be reached."""
        return PrepareError(f"{self._host} cannot be reached for {self._reference}: {error}")


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk


def _basic(login: Login) -> str:
    header: str = httpx.BasicAuth(login.user, login.password)._auth_header
    return header


def _of_this_platform(index: dict[str, Any], reference: ImageReference) -> str:
    wanted = _ARCHITECTURES.get(platform.machine(), platform.machine())
    offered = []
    for entry in index.get("manifests", []):
        given = entry.get("platform") or {}
        if given.get("os") == "linux" and given.get("architecture") == wanted:
            return str(entry["digest"])
        offered.append(f"{given.get('os')}/{given.get('architecture')}")
    others = ", ".join(offered) or "nothing"
    raise PrepareError(f"image {reference} is not for linux/{wanted}, only for {others}.")


def _is_local(host: str) -> bool:
    return is_loopback(urlsplit(f"//{host}").hostname or "")
