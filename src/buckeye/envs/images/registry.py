"""A small client of the registry API: manifests and blobs, every byte checked against its digest.

Facts: the OCI distribution specification 1.1, and Docker's token authentication. Plain HTTP only on this
machine; everywhere else HTTPS. Logins go to the registry and the token server it names over HTTPS, never to
where a blob is redirected.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import httpx

from buckeye.envs.gateway.address import is_loopback
from buckeye.envs.images.credentials import Login, find_login
from buckeye.envs.images.reference import ImageReference
from buckeye.envs.runtimes.base import PrepareError

_MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_MAX_MANIFEST = 4 * 2**20
_TIMEOUT = httpx.Timeout(60.0, connect=20.0)
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm"}
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Blob:
    """A piece of an image, by its digest."""

    digest: str
    size: int
    media_type: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What one image for one platform is made of."""

    digest: str
    config: Blob
    layers: tuple[Blob, ...]


class Registry:
    """One registry, for one repository; use it as a context manager. Its methods raise PrepareError."""

    def __init__(self, reference: ImageReference, *, client: httpx.Client | None = None) -> None:
        self._reference = reference
        local = _is_local(reference.registry)
        self._base = f"{'http' if local else 'https'}://{reference.registry}/v2/{reference.repository}"
        self._login: Login | None = None if local else find_login(reference.registry)
        self._authorization: str | None = None
        self._client = client or httpx.Client(timeout=_TIMEOUT, follow_redirects=True, max_redirects=5)

    def __enter__(self) -> Registry:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def manifest(self) -> Manifest:
        """The manifest for this machine's platform; of an index, the entry for it."""
        digest, content, kind = self._manifest(self._reference.version)
        if kind in _INDEXES:
            digest, content, kind = self._manifest(_of_this_platform(content, self._reference))
        if kind not in _MANIFESTS or not isinstance(content.get("layers"), list):
            raise PrepareError(f"image {self._reference}: a manifest of type {kind!r} is not understood.")
        try:
            layers = tuple(_blob(entry) for entry in content["layers"])
            return Manifest(digest, _blob(content["config"]), layers)
        except (KeyError, TypeError, ValueError):
            raise PrepareError(f"image {self._reference}: its manifest is damaged.") from None

    def fetch(self, blob: Blob, target: Path) -> None:
        """Download a blob, unless `target` has it already; it is there only if its digest is right."""
        if target.exists():
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.tmp-{os.getpid()}")
        digest, size = hashlib.sha256(), 0
        try:
            with self._stream(f"/blobs/{blob.digest}") as response, part.open("wb") as file:
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
            raise self._unreachable(error) from None
        finally:
            part.unlink(missing_ok=True)

    def _manifest(self, version: str) -> tuple[str, dict[str, Any], str]:
        try:
            with self._stream(f"/manifests/{version}", accept=", ".join(_MANIFESTS + _INDEXES)) as response:
                raw = b""
                for chunk in response.iter_bytes():
                    raw += chunk
                    if len(raw) > _MAX_MANIFEST:
                        raise PrepareError(f"image {self._reference}: its manifest is too large.")
                kind = response.headers.get("content-type", "").partition(";")[0].strip()
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        digest = f"sha256:{hashlib.sha256(raw).hexdigest()}"
        if version.startswith("sha256:") and version != digest:
            raise PrepareError(f"image {self._reference}: the manifest arrived damaged (its digest differs).")
        try:
            content = json.loads(raw)
            return digest, content, content.get("mediaType", kind)
        except (ValueError, AttributeError):
            raise PrepareError(f"image {self._reference}: its manifest is no JSON.") from None

    def _stream(self, path: str, *, accept: str = "*/*") -> _Answer:
        """Ask, log in if that is wanted, ask again."""
        for attempt in range(2):
            headers = {"accept": accept}
            if self._authorization is not None:
                headers["authorization"] = self._authorization
            request = self._client.build_request("GET", self._base + path, headers=headers)
            response = self._client.send(request, stream=True)
            if response.status_code == 401 and attempt == 0:
                challenge = response.headers.get("www-authenticate", "")
                response.close()
                self._authorization = self._authorize(challenge)
                continue
            if response.status_code == 200:
                return _Answer(response)
            response.close()
            raise PrepareError(self._refusal(response.status_code))
        raise AssertionError("unreachable")

    def _authorize(self, challenge: str) -> str:
        scheme, _, rest = challenge.partition(" ")
        fields = dict(_CHALLENGE.findall(rest))
        if scheme.lower() == "basic" and self._login is not None:
            return _basic(self._login)
        realm = fields.get("realm", "")
        if scheme.lower() != "bearer" or urlsplit(realm).scheme not in ("https", "http"):
            raise PrepareError(self._refusal(401))
        if urlsplit(realm).scheme == "http" and not _is_local(urlsplit(realm).netloc):
            raise PrepareError(
                f"{self._reference.registry} wants a login over plain HTTP at {realm}: refused."
            )
        scope = f"repository:{self._reference.repository}:pull"
        query = {"service": fields["service"]} if "service" in fields else {}
        if self._login is not None and self._login.is_token:
            form = {
                "grant_type": "refresh_token",
                "refresh_token": self._login.password,
                "scope": scope,
                **query,
            }
            answer = self._client.post(realm, data={**form, "client_id": "buckeye"})
        else:
            headers = {} if self._login is None else {"authorization": _basic(self._login)}
            answer = self._client.get(realm, params={**query, "scope": scope}, headers=headers)
        try:
            given = answer.json()
            return f"Bearer {given.get('token') or given['access_token']}"
        except (ValueError, KeyError, AttributeError):
            raise PrepareError(self._refusal(answer.status_code)) from None

    def _refusal(self, status: int) -> str:
        host = self._reference.registry
        if status in (401, 403):
            known = "the login that is stored is not accepted" if self._login else "nobody is logged in there"
            return (
                f"{host} does not give out {self._reference}: {known} (`docker login {host}` stores a login)."
            )
        if status == 404:
            return f"There is no image {self._reference}."
        return f"{host} answered {status} for {self._reference}."

    def _unreachable(self, error: httpx.HTTPError) -> PrepareError:
        return PrepareError(f"{self._reference.registry} cannot be reached for {self._reference}: {error}")


class _Answer:
    """A streamed response that is closed at the end of its `with`."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response

    def __enter__(self) -> httpx.Response:
        return self._response

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._response.close()


def _basic(login: Login) -> str:
    header: str = httpx.BasicAuth(login.user, login.password)._auth_header
    return header


def _blob(entry: dict[str, Any]) -> Blob:
    digest, size = str(entry["digest"]), int(entry["size"])
    if not _DIGEST.fullmatch(digest) or size < 0:
        raise ValueError(digest)
    return Blob(digest, size, str(entry.get("mediaType", "")))


def _of_this_platform(index: dict[str, Any], reference: ImageReference) -> str:
    wanted = _ARCHITECTURES.get(platform.machine(), platform.machine())
    offered = []
    for entry in index.get("manifests", []):
        given = entry.get("platform") or {}
        if given.get("os") == "linux" and given.get("architecture") == wanted:
            return str(entry["digest"])
        offered.append(f"{given.get('os')}/{given.get('architecture')}")
    raise PrepareError(
        f"image {reference} is not for linux/{wanted}, only for {', '.join(offered) or 'nothing'}."
    )


def _is_local(host: str) -> bool:
    return is_loopback(urlsplit(f"//{host}").hostname or "")
