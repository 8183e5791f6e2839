"""Client for the HTTP API of Prime Intellect, with deadlines, retries, paged lists, and error messages."""

from __future__ import annotations

import itertools
import json
import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import httpx

from buckeye.base.prime_account import PrimeAccount
from buckeye.base.storage import parse_json
from buckeye.errors import AccountError, RemoteError
from buckeye.version import __version__

log = logging.getLogger(__name__)

_TIMEOUT = httpx.Timeout(30.0, connect=10.0)
_DEADLINE_SECONDS = 120.0
_UNREACHED_SECONDS = 15.0  # deadline before the first response, because the network or the URL may be wrong
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 30.0
_PAGE_SIZE = 100
_MOST_PAGES = 50
_SHOWN = 300
_ACCOUNT = {
    401: "the key is invalid or has expired: set a valid PRIME_API_KEY",
    402: "the balance is empty: add money at https://app.primeintellect.ai/dashboard/billing",
    403: "give the key the rights to read availability, and to read and write instances",
}

Params = Mapping[str, str | int | list[str]]


class UnansweredError(RemoteError):
    """No valid response arrived. The server may or may not have carried out the request."""

    code = "BK-NETWORK"


class UnreachedError(UnansweredError):
    """The connection failed, so the request was not sent."""


class RejectedError(RemoteError):
    """The server rejected the request and did not carry it out."""

    code = "BK-PROVIDER"


class NotFoundError(RejectedError):
    """The requested object does not exist."""


class _LaterError(RemoteError):
    """The server received too many requests. `seconds` is the time to wait, if the server reports it."""

    code = "BK-PROVIDER"

    def __init__(self, message: str, seconds: float | None = None, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.seconds = seconds


class PrimeApi:
    """Client for the JSON API.

    GET and DELETE requests are retried with growing pauses, for two minutes. If the server has not responded
    to any request yet, they are retried for 15 seconds. POST requests are not retried without a response,
    because they may order a machine. Each retry is logged as a warning.
    """

    def __init__(self, account: PrimeAccount, *, transport: httpx.BaseTransport | None = None) -> None:
        self._key = account.api_key
        self._reached = False
        self._http = httpx.Client(
            base_url=f"{account.url}/api/v1",
            headers={"Authorization": f"Bearer {account.api_key}", "User-Agent": f"buckeye/{__version__}"},
            timeout=_TIMEOUT,
            follow_redirects=True,
            transport=transport,
        )

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def get(self, path: str, params: Params | None = None) -> dict[str, Any]:
        """Return the JSON object at `path`. Raises RemoteError."""
        return self._request("GET", path, params=params)

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a POST request, and return the JSON object of the response.

        Raises UnansweredError if it is unknown whether the server carried out the request, RejectedError if
        the server rejected it, and AccountError if the account does not permit it.
        """
        return self._request("POST", path, body=body, repeat=False)

    def delete(self, path: str) -> None:
        """Send a DELETE request. An empty response is valid. Raises RemoteError."""
        self._request("DELETE", path, empty=True)

    def numbered_pages(self, path: str, params: Params) -> Iterator[Any]:
        """Yield every item of a list whose pages are numbered from 1."""
        numbered = ({**params, "page": page, "page_size": _PAGE_SIZE} for page in itertools.count(1))
        return self._pages(path, lambda _: next(numbered), "items", "totalCount")

    def offset_pages(self, path: str) -> Iterator[Any]:
        """Yield every item of a list that is paged by offset and limit."""
        return self._pages(path, lambda found: {"offset": found, "limit": _PAGE_SIZE}, "data", "total_count")

    def _pages(self, path: str, params: Callable[[int], Params], key: str, total_key: str) -> Iterator[Any]:
        """Yield every item of a list. `params(n)` returns the query of the page after the first n items."""
        found = 0
        for _ in range(_MOST_PAGES):
            answer = self.get(path, params(found))
            items = answer.get(key)
            if not isinstance(items, list):
                shown = self._shown(json.dumps(answer))
                raise RemoteError(
                    f"Prime Intellect: the response to GET {path} has no list {key!r}: {shown}",
                    code="BK-PROVIDER",
                )
            yield from items
            found += len(items)
            total = answer.get(total_key)
            is_last = found >= total if isinstance(total, int) else len(items) < _PAGE_SIZE
            if is_last or not items:
                return
        raise RemoteError(f"Prime Intellect: {path} has more than {_MOST_PAGES} pages", code="BK-PROVIDER")

    def _request(
        self,
        method: str,
        path: str,
        *,
        params: Params | None = None,
        body: Mapping[str, Any] | None = None,
        repeat: bool = True,
        empty: bool = False,
    ) -> dict[str, Any]:
        began = time.monotonic()
        wait = _FIRST_WAIT
        while True:
            pause = wait * random.uniform(0.75, 1.25)  # spreads the retries of many clients  # noqa: S311
            try:
                return self._ask_once(method, path, params, body, empty=empty)
            except _LaterError as error:
                pause = pause if error.seconds is None else error.seconds
                failure: RemoteError = error
            except UnansweredError as error:
                if not repeat:
                    raise
                failure = error
            unreached = isinstance(failure, UnreachedError) and not self._reached
            seconds = _UNREACHED_SECONDS if unreached else _DEADLINE_SECONDS
            waited = time.monotonic() - began
            if waited + pause > seconds:
                hint = "check that this machine is online" if unreached else None
                raise type(failure)(f"{failure.message} (tried for {waited:.0f} s)", hint=hint) from None
            log.warning("%s; retrying for %.0f s more", failure.message, seconds - waited)
            time.sleep(pause)
            wait = min(2 * wait, _LONGEST_WAIT)

    def _ask_once(
        self, method: str, path: str, params: Params | None, body: Mapping[str, Any] | None, *, empty: bool
    ) -> dict[str, Any]:
        what = f"Prime Intellect: {method} {path}"
        try:
            response = self._http.request(method, path, params=params, json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = self._hidden(str(error) or type(error).__name__)
            if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
                raise UnreachedError(
                    f"{what}: no connection to {self._http.base_url.host} ({reason})"
                ) from None
            raise UnansweredError(f"{what}: no response ({reason})") from None
        self._reached = True
        if response.is_success:
            return {} if empty else self._object(response, what)
        raise self._failure(response, what)

    def _object(self, response: httpx.Response, what: str) -> dict[str, Any]:
        if not response.content.strip():
            raise UnansweredError(f"{what}: the response is empty ({response.status_code})")
        try:
            found = parse_json(response.content.decode())
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise UnansweredError(f"{what}: the response is not a JSON object: {self._shown(response.text)}")
        return found

    def _failure(self, response: httpx.Response, what: str) -> RemoteError:
        code = response.status_code
        said = self._shown(error_text(response.text))
        if code == 429:
            seconds = None
            with suppress(ValueError):
                seconds = max(0.0, float(response.headers.get("Retry-After", "")))
            return _LaterError(f"{what}: too many requests (429): {said}", seconds)
        if code >= 500:
            return UnansweredError(f"{what}: the service failed ({code}): {said}")
        message = f"{what}: {said} ({code})"
        if code in _ACCOUNT:
            return AccountError(message, hint=_ACCOUNT[code])
        return NotFoundError(message) if code in (404, 405) else RejectedError(message)

    def _shown(self, text: str) -> str:
        line = self._hidden(" ".join(text.split()))
        return (line if len(line) <= _SHOWN else f"{line[:_SHOWN]} ...") or "without a reason"

    def _hidden(self, text: str) -> str:
        return text.replace(self._key, "(redacted)")


def error_text(body: str) -> str:
    """Return the message in the body of an error response.

    The service sends either a text, or a list of fields with their errors in one of two formats.
    """
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return body
    if not isinstance(found, dict):
        return body
    fields = found.get("errors") or found.get("detail")
    if isinstance(fields, list):
        return "; ".join(map(_field_text, fields))
    for key in ("detail", "message", "error"):
        if isinstance(found.get(key), str):
            return str(found[key])
    return body


def _field_text(field: Any) -> str:
    if not isinstance(field, dict):
        return str(field)
    place = field.get("param") or ".".join(map(str, field.get("loc") or ()))
    reason = field.get("details") or field.get("msg") or "is wrong"
    return f"{place}: {reason}" if place else str(reason)
