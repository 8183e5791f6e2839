"""Download of hub environments that are not in the public index, with a key.

The key is sent only as a header of requests to the hub.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpx

from buckeye.base.keys import key
from buckeye.errors import BuckeyeError
from buckeye.workers.installed.install_source import InstallSource

KEY_VARIABLE = "PRIME_API_KEY"
_BASE_VARIABLE = "PRIME_API_BASE_URL"
_BASE = "https://api.primeintellect.ai"
_SECONDS = 120.0


def hub_key() -> str | None:
    """Return PRIME_API_KEY from the environment, `.env` or `buckeye auth set`, else the key that
    `prime login` has stored, else None.
    """
    if known := key(KEY_VARIABLE):
        return known
    try:
        stored = json.loads((Path.home() / ".prime" / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    found = stored.get("api_key") if isinstance(stored, dict) else None
    return found if isinstance(found, str) and found else None


def fetch_private(source: InstallSource, key: str, folder: Path) -> Path:
    """Download a wheel or source archive of the environment into `folder`.

    Raises BuckeyeError if the hub refuses, has no such environment, or sends an invalid answer.
    """
    base = os.environ.get(_BASE_VARIABLE, _BASE).rstrip("/").removesuffix("/api/v1")
    version = source.specifier.removeprefix("==") or "latest"
    address = f"{base}/api/v1/environmentshub/{source.owner}/{source.name}/@{version}"
    with httpx.Client(timeout=_SECONDS, follow_redirects=False) as client:
        details = _details(_get(client, address, key, source), source)
        url = next(
            (details[k] for k in ("wheel_url", "package_url", "tracked_package_url") if details.get(k)), None
        )
        if not isinstance(url, str):
            raise BuckeyeError(f"the hub knows {source.env_id} and offers no package of it to download.")
        url = urljoin(address, url)
        own = urlsplit(url)[:2] == urlsplit(address)[:2]  # scheme and host
        answer = _get(client, url, key if own else None, source)
    target = folder / (Path(urlsplit(url).path).name or "package.tar.gz")
    target.write_bytes(answer.content)
    return target


def _get(client: httpx.Client, url: str, key: str | None, source: InstallSource) -> httpx.Response:
    where = urlsplit(url).netloc
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        answer = client.get(url, headers=headers)
        if answer.has_redirect_location:  # signed URLs on other hosts; they need no key
            answer = client.get(urljoin(url, answer.headers["location"]))
    except httpx.HTTPError as error:
        raise BuckeyeError(f"{where} does not answer: {error or type(error).__name__}") from None
    if answer.status_code in (401, 403):
        raise BuckeyeError(
            f"{where} refuses {source.env_id} ({answer.status_code}): the key in {KEY_VARIABLE} (or that of "
            "`prime login`) is wrong, or may not read it."
        )
    if answer.status_code == 404:
        raise BuckeyeError(f"{where} has no environment {source.env_id}{source.specifier}.")
    if answer.is_error:
        raise BuckeyeError(f"{where} answers {answer.status_code} for {source.env_id}; try again later.")
    return answer


def _details(answer: httpx.Response, source: InstallSource) -> Mapping[str, Any]:
    try:
        details = answer.json()["data"]
    except (ValueError, KeyError, TypeError):
        details = None
    if not isinstance(details, dict):
        raise BuckeyeError(f"the hub's answer about {source.env_id} is not understood.")
    return details
