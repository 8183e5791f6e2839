"""Download of private hub environments with the user's key, which is sent only to the hub."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpx

from buckeye.base.prime_account import PrimeAccount, prime_account
from buckeye.errors import BuckeyeError, UsageError
from buckeye.workers.installed.install_source import InstallSource

KEY_VARIABLE = "PRIME_API_KEY"
_SECONDS = 120.0


def hub_account() -> PrimeAccount | None:
    """Return the account at Prime's hub, or None without a key. Raises UsageError for an invalid setting."""
    try:
        return prime_account()
    except UsageError as error:
        if error.code == "BK-KEY-MISSING":
            return None
        raise


def fetch_private(source: InstallSource, account: PrimeAccount, folder: Path) -> Path:
    """Download a wheel or source archive of the environment into `folder`.

    Raises BuckeyeError if the hub refuses the key, does not have the environment, or sends an invalid
    response.
    """
    version = source.specifier.removeprefix("==") or "latest"
    address = f"{account.url}/api/v1/environmentshub/{source.owner}/{source.name}/@{version}"
    with httpx.Client(timeout=_SECONDS, follow_redirects=False) as client:
        details = _parse_details(_get(client, address, account.api_key, source), source)
        url = next(
            (details[k] for k in ("wheel_url", "package_url", "tracked_package_url") if details.get(k)), None
        )
        if not isinstance(url, str):
            raise BuckeyeError(
                f"the hub has no package of {source.env_id} to download", code="BK-ENV-INSTALL"
            )
        url = urljoin(address, url)
        is_same_host = urlsplit(url)[:2] == urlsplit(address)[:2]  # scheme and host
        response = _get(client, url, account.api_key if is_same_host else None, source)
    target = folder / (Path(urlsplit(url).path).name or "package.tar.gz")
    target.write_bytes(response.content)
    return target


def _get(client: httpx.Client, url: str, key: str | None, source: InstallSource) -> httpx.Response:
    host = urlsplit(url).netloc
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        response = client.get(url, headers=headers)
        if response.has_redirect_location:  # a signed URL on another host, which needs no key
            response = client.get(urljoin(url, response.headers["location"]))
    except httpx.HTTPError as error:
        raise BuckeyeError(
            f"cannot reach {host}: {error or type(error).__name__}", code="BK-NETWORK"
        ) from None
    if response.status_code in (401, 403):
        raise BuckeyeError(
            f"{host} refused to send {source.env_id}: HTTP {response.status_code}",
            code="BK-KEY-INVALID",
            hint=f"check the key in {KEY_VARIABLE} (or the key of `prime login`) and its permissions",
        )
    if response.status_code == 404:
        raise BuckeyeError(
            f"{host} has no environment {source.env_id}{source.specifier}", code="BK-ENV-UNKNOWN"
        )
    if response.is_error:
        raise BuckeyeError(
            f"{host} failed to send {source.env_id}: HTTP {response.status_code}",
            code="BK-NETWORK",
            hint="retry later",
        )
    return response


def _parse_details(response: httpx.Response, source: InstallSource) -> Mapping[str, Any]:
    try:
        details = response.json()["data"]
    except (ValueError, KeyError, TypeError):
        details = None
    if not isinstance(details, dict):
        raise BuckeyeError(f"the hub replied with invalid data about {source.env_id}", code="BK-ENV-INSTALL")
    return details
