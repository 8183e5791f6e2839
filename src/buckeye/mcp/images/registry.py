"""Download images from a registry. The client verifies all content against its digest.

Sources: the OCI distribution specification 1.1, and Docker's token authentication. The client uses plain HTTP
for registries on this machine, and HTTPS for all others. It sends a login to the registry of this login and
to the registry's token server, but never to the target of a redirect.
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
from buckeye.base.storage import read_json
from buckeye.mcp.images.manifest import DOCKER_HUB, Blob, ImageManifest, ImageReference, parse_manifest
from buckeye.mcp.sandbox.runtime import PrepareError

MIRROR_VARIABLE = "BUCKEYE_REGISTRY_MIRROR"
"""Environment variable with the host of a registry to use instead of Docker Hub."""
_HUB_KEYS = ("https://index.docker.io/v1/", "index.docker.io", "docker.io", DOCKER_HUB)
_MAX_REPLY = 4 * 2**20
_DOCKER = "docker.distribution.manifest"
_MEDIA_TYPES = ("oci.image.manifest.v1", "oci.image.index.v1", f"{_DOCKER}.v2", f"{_DOCKER}.list.v2")
_ACCEPTED = [f"application/vnd.{media_type}+json" for media_type in _MEDIA_TYPES]
_HEADERS = {"accept": ", ".join((*_ACCEPTED, "*/*")), "accept-encoding": "identity"}
"""Headers of all requests. `identity` forbids compression, because a body could expand to any size."""
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm"}
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')


class Registry(AbstractContextManager["Registry"]):
    """Client for one repository of a registry, as a context manager. Its methods raise PrepareError."""

    def __init__(self, reference: ImageReference) -> None:
        self._reference = reference
        self._host = reference.registry
        if self._host == DOCKER_HUB:
            self._host = os.environ.get(MIRROR_VARIABLE) or DOCKER_HUB
        scheme = "http" if is_local(self._host) else "https"
        self._base = f"{scheme}://{self._host}/v2/{reference.repository}"
        self._login = find_login(self._host)
        self._authorization: dict[str, str] = {}
        self._client = httpx.Client(timeout=60.0, follow_redirects=True, max_redirects=5)

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def manifest(self) -> ImageManifest:
        """Return the manifest for this machine's platform."""
        digest, content = self._manifest(self._reference.version)
        if "manifests" in content:
            digest, content = self._manifest(_select_platform(content, self._reference))
        return parse_manifest(content, digest=digest, name=str(self._reference))

    def fetch(self, blob: Blob, folder: Path) -> Path:
        """Return the file of a blob in `folder`. If it is missing, download it and verify its digest."""
        target = folder / blob.digest.removeprefix("sha256:")
        if target.exists():
            return target
        folder.mkdir(parents=True, exist_ok=True)
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
                raise PrepareError(f"image {self._reference}: the download of {blob.digest[:19]} is damaged")
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
        return target

    def _manifest(self, version: str) -> tuple[str, dict[str, Any]]:
        with self._get(f"/manifests/{version}") as response:
            raw = self._read(response, "the manifest")
        digest = f"sha256:{hashlib.sha256(raw).hexdigest()}"
        if version.startswith("sha256:") and version != digest:
            raise PrepareError(f"image {self._reference}: the manifest does not match its digest")
        try:
            return digest, dict(json.loads(raw))
        except (ValueError, TypeError):
            raise PrepareError(f"image {self._reference}: the manifest is not a JSON object") from None

    @contextmanager
    def _get(self, path: str) -> Iterator[httpx.Response]:
        """Send a GET request. After a 401 response, log in and retry once."""
        try:
            for attempt in range(2):
                headers = {**_HEADERS, **self._authorization}
                with self._client.stream("GET", self._base + path, headers=headers) as response:
                    if response.status_code == 200:
                        yield response
                        return
                if response.status_code != 401 or attempt:
                    break
                self._authorization = self._authorize(response.headers.get("www-authenticate", ""))
        except httpx.HTTPError as error:
            message = f"cannot reach {self._host} for image {self._reference}: {error}"
            raise PrepareError(
                message, code="BK-NETWORK", hint="check the network and the image name"
            ) from None
        raise self._status_error(response.status_code)

    def _authorize(self, challenge: str) -> dict[str, str]:
        scheme, _, rest = challenge.partition(" ")
        fields = dict(_CHALLENGE.findall(rest))
        if scheme.lower() == "basic" and self._login:
            return self._login
        realm = urlsplit(fields.get("realm", ""))
        is_safe = realm.scheme == "https" or (realm.scheme == "http" and is_local(realm.netloc))
        if scheme.lower() != "bearer" or not is_safe:
            raise self._status_error(401)
        scope = f"repository:{self._reference.repository}:pull"
        query = {"service": fields.get("service", ""), "scope": scope}
        headers = {**_HEADERS, **self._login}
        with self._client.stream("GET", realm.geturl(), params=query, headers=headers) as response:
            raw = self._read(response, "the reply to the login")
        try:
            reply = json.loads(raw)
            return {"authorization": f"Bearer {reply.get('token') or reply['access_token']}"}
        except (ValueError, KeyError, AttributeError):
            raise self._status_error(response.status_code) from None

    def _read(self, response: httpx.Response, name: str) -> bytes:
        raw = bytearray()
        for chunk in response.iter_raw():
            raw += chunk
            if len(raw) > _MAX_REPLY:
                raise PrepareError(f"image {self._reference}: {name} is larger than {_MAX_REPLY:,} bytes")
        return bytes(raw)

    def _status_error(self, status: int) -> PrepareError:
        if status in (401, 403):
            reason = "the stored login was rejected" if self._login else "no stored login"
            message = f"{self._host} refuses access to image {self._reference}: {reason}"
            return PrepareError(message, hint=f"log in with `docker login {self._host}`")
        if status == 404:
            return PrepareError(f"image not found: {self._reference}", hint="check its name and tag")
        return PrepareError(f"{self._host} replied with status {status} for image {self._reference}")


def _select_platform(index: dict[str, Any], reference: ImageReference) -> str:
    wanted = f"linux/{_ARCHITECTURES.get(platform.machine(), platform.machine())}"
    digests: dict[str, str] = {}
    for entry in index["manifests"]:
        target = entry.get("platform") or {}
        digests.setdefault(f"{target.get('os')}/{target.get('architecture')}", str(entry["digest"]))
    if wanted not in digests:
        available = ", ".join(digests) or "none"
        raise PrepareError(
            f"image {reference} does not support the platform {wanted}; available: {available}",
            hint="build the image for this platform",
        )
    return digests[wanted]


def find_login(registry: str) -> dict[str, str]:
    """Return the HTTP basic authentication header for a registry host, or {} without a stored login."""
    keys = _HUB_KEYS if registry == DOCKER_HUB else (registry, f"https://{registry}")
    for key in keys:
        try:
            auth = str(read_json(_login_file())["auths"][key]["auth"])
        except (OSError, ValueError, LookupError, TypeError):
            continue
        return {"authorization": f"Basic {auth}"}
    return {}


def _login_file() -> Path:
    docker = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker")
    return Path(os.environ.get("REGISTRY_AUTH_FILE") or docker / "config.json")


def is_local(host: str) -> bool:
    """Return True if `host`, with or without a port, is a loopback address."""
    return is_loopback(urlsplit(f"//{host}").hostname or "")
