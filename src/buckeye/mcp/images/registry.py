"""A small client of the registry API, for pulling: every byte is checked against its digest.

Facts: the OCI distribution specification 1.1, and Docker's token authentication. Plain HTTP only on this
machine; everywhere else HTTPS. Logins go to the registry they belong to and the token server it names, never
to where a blob is redirected.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from buckeye.base.request_gate import is_loopback
from buckeye.mcp.images.logins import find_login
from buckeye.mcp.images.manifest import (
    DOCKER_HUB,
    INDEXES,
    MANIFESTS,
    Blob,
    ImageReference,
    Manifest,
    parse_manifest,
)
from buckeye.mcp.sandbox.base import PrepareError

MIRROR_VARIABLE = "BUCKEYE_REGISTRY_MIRROR"
"""Names a registry that images of Docker Hub are fetched from."""
_MAX_MANIFEST = 4 * 2**20
_HEADERS = {"accept": ", ".join((*MANIFESTS, *INDEXES, "*/*")), "accept-encoding": "identity"}
"""Without an encoding: what is packed may be any number of bytes."""
_TIMEOUT = httpx.Timeout(60.0, connect=20.0)
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm"}
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')


class Registry(AbstractContextManager["Registry"]):
    """One registry, for one repository; use it as a context manager. Its methods raise PrepareError."""

    def __init__(self, reference: ImageReference) -> None:
        self._reference = reference
        self._host = reference.registry
        if self._host == DOCKER_HUB:
            self._host = os.environ.get(MIRROR_VARIABLE) or DOCKER_HUB
        scheme = "http" if is_local(self._host) else "https"
        self._base = f"{scheme}://{self._host}/v2/{reference.repository}"
        self._login = find_login(self._host)
        self._authorization: dict[str, str] = {}
        self._client = httpx.Client(timeout=_TIMEOUT, follow_redirects=True, max_redirects=5)

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def manifest(self) -> Manifest:
        """The manifest for this machine's platform; of an index, the entry for it."""
        digest, content, kind = self._manifest(self._reference.version)
        if kind in INDEXES:
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
            with self._get(f"/blobs/{blob.digest}") as response, part.open("wb") as file:
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
        finally:
            part.unlink(missing_ok=True)

    def _manifest(self, version: str) -> tuple[str, dict[str, Any], str]:
        with self._get(f"/manifests/{version}") as response:
            raw = self._read(response, "its manifest")
            kind = response.headers.get("content-type", "").partition(";")[0].strip()
        digest = f"sha256:{hashlib.sha256(raw).hexdigest()}"
        if version.startswith("sha256:") and version != digest:
            raise PrepareError(f"image {self._reference}: the manifest arrived damaged (its digest differs).")
        try:
            content = json.loads(raw)
            return digest, content, content.get("mediaType", kind)
        except (ValueError, AttributeError):
            raise PrepareError(f"image {self._reference}: its manifest is no JSON.") from None

    @contextmanager
    def _get(self, where: str) -> Iterator[httpx.Response]:
        """Ask, log in if that is wanted, ask again."""
        try:
            for attempt in range(2):
                headers = {**_HEADERS, **self._authorization}
                with self._client.stream("GET", self._base + where, headers=headers) as response:
                    if response.status_code == 200:
                        yield response
                        return
                if response.status_code != 401 or attempt:
                    break
                self._authorization = self._authorize(response.headers.get("www-authenticate", ""))
        except httpx.HTTPError as error:
            raise PrepareError(f"{self._host} cannot be reached for {self._reference}: {error}") from None
        raise self._refusal(response.status_code)

    def _authorize(self, challenge: str) -> dict[str, str]:
        scheme, _, rest = challenge.partition(" ")
        fields = dict(_CHALLENGE.findall(rest))
        basic = {} if self._login is None else self._login.header()
        if scheme.lower() == "basic" and basic:
            return basic
        realm = urlsplit(fields.get("realm", ""))
        if scheme.lower() != "bearer" or realm.scheme not in ("https", "http"):
            raise self._refusal(401)
        if realm.scheme == "http" and not is_local(realm.netloc):
            raise PrepareError(
                f"{self._host} wants a login over plain HTTP at {realm.geturl()[:80]}: refused."
            )
        query = {"service": fields["service"]} if "service" in fields else {}
        query["scope"] = f"repository:{self._reference.repository}:pull"
        if self._login is not None and self._login.is_token:
            form = {"grant_type": "refresh_token", "refresh_token": self._login.password, **query}
            request = self._client.build_request(
                "POST", realm.geturl(), data={**form, "client_id": "buckeye"}, headers=_HEADERS
            )
        else:
            request = self._client.build_request(
                "GET", realm.geturl(), params=query, headers={**_HEADERS, **basic}
            )
        answer = self._client.send(request, stream=True)
        try:
            given = json.loads(self._read(answer, "the answer about its login"))
            return {"authorization": f"Bearer {given.get('token') or given['access_token']}"}
        except (ValueError, KeyError, AttributeError):
            raise self._refusal(answer.status_code) from None
        finally:
            answer.close()

    def _read(self, response: httpx.Response, what: str) -> bytes:
        raw = bytearray()
        for chunk in response.iter_raw():
            raw += chunk
            if len(raw) > _MAX_MANIFEST:
                raise PrepareError(f"image {self._reference}: {what} is larger than {_MAX_MANIFEST} bytes.")
        return bytes(raw)

    def _refusal(self, status: int) -> PrepareError:
        host = self._host
        if status in (401, 403):
            known = "the login that is stored is not accepted" if self._login else "nobody is logged in there"
            return PrepareError(
                f"{host} does not give out {self._reference}: {known} (`docker login {host}` stores a login)."
            )
        if status == 404:
            return PrepareError(f"There is no image {self._reference}.")
        return PrepareError(f"{host} answered {status} for {self._reference}.")


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


def is_local(host: str) -> bool:
    """Whether a host, perhaps with a port, is this machine."""
    return is_loopback(urlsplit(f"//{host}").hostname or "")
