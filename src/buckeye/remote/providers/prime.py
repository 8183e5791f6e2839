"""Pods of Prime Intellect, through its HTTP API."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from typing import Any

import httpx
import msgspec

from buckeye.base.prime_account import PrimeAccount
from buckeye.errors import OfferRefusedError, RemoteError
from buckeye.launch.preflight.devices import GpuSpec
from buckeye.remote.base import Offer, Pod, PodStatus
from buckeye.remote.providers.prime_api import NotFoundError, PrimeApi, RejectedError, UnansweredError
from buckeye.remote.providers.prime_rows import is_ours, make_order, parse_offer, parse_pod, parse_status

log = logging.getLogger(__name__)

_ATTEMPTS, _RETRY_SECONDS = 3, 5.0


class PrimeProvider:
    """The provider `prime`. Use it as a context manager, which closes the HTTP connections at its end."""

    name = "prime"

    def __init__(self, account: PrimeAccount, *, transport: httpx.BaseTransport | None = None) -> None:
        self.ssh_key_path = account.ssh_key_path
        self._account = account
        self._api = PrimeApi(account, transport=transport)

    def __enter__(self) -> PrimeProvider:
        return self

    def __exit__(self, *_: object) -> None:
        self._api.close()

    def offers(self, gpus: GpuSpec, *, disk_gb: int) -> list[Offer]:
        """Return all offers with GPUs of the requested type, and any number of GPUs.

        An empty list is requested again, because some servers of the provider briefly list no offers.
        """
        rows: list[Any] = []
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(_RETRY_SECONDS)
            rows = list(self._api.numbered_pages("/availability/gpus", {"gpu_type": gpus.type}))
            if rows:
                break
        found, unreadable = [], []
        for row in rows:
            try:
                found.append(parse_offer(row, disk_gb=disk_gb))
            except msgspec.ValidationError as error:
                unreadable.append(str(error))
        if unreadable:
            log.warning(
                "%d of %d offers of Prime Intellect cannot be read and are left out: %s",
                len(unreadable),
                len(rows),
                unreadable[0],
            )
        return [offer for offer in found if offer.gpus.type == gpus.type]

    def create(
        self, offer: Offer, name: str, *, public_key: str | None = None, max_price: float | None = None
    ) -> Pod:
        """Order the machine of an offer, and return its pod.

        The order is sent once. Without a valid response, the pod is searched by its name. `public_key` is the
        line of `authorized_keys` for the login (None: the keys of the account). Raises OfferRefusedError if
        the order created no pod, and another offer might be accepted.
        """
        order = self._order(offer, name, public_key, max_price)
        try:
            return parse_pod(self._api.post("/pods/", order))
        except RejectedError as error:
            raise OfferRefusedError(str(error)) from None
        except (UnansweredError, msgspec.ValidationError) as error:
            found = self._by_name(name)
            if found is not None:
                return found
            raise OfferRefusedError(f"{error}; no pod was created") from None

    def status(self, pod_id: str) -> PodStatus:
        """Return the state of a pod. If `/pods/status` does not list the pod, request `/pods/ID`."""
        answer = self._api.get("/pods/status", {"pod_ids": [pod_id]})
        entries = answer.get("data")
        if not isinstance(entries, list):
            raise RemoteError(
                f"Prime Intellect: the status of pod {pod_id} has no list: {_shown(answer)}",
                code="BK-PROVIDER",
            )
        for entry in entries:
            if isinstance(entry, dict) and entry.get("podId") == pod_id:
                return _status(entry, pod_id)
        try:
            return _status(self._api.get(f"/pods/{pod_id}"), pod_id)
        except NotFoundError:
            return PodStatus(state="gone", detail="unknown to the provider")

    def terminate(self, pod_id: str) -> None:
        """Request the end of a pod. A pod that the provider does not know counts as ended."""
        try:
            self._api.delete(f"/pods/{pod_id}")
        except NotFoundError:
            return

    def pod_url(self, pod_id: str) -> str:
        """Return the URL of a pod. A DELETE request to this URL ends the pod."""
        return f"{self._account.url}/api/v1/pods/{pod_id}"

    def pods(self) -> list[Pod]:
        """Return the active pods of this account or team that Buckeye has created."""
        return [parse_pod(row) for row in self._api.offset_pages("/pods/") if is_ours(row)]

    def _order(
        self, offer: Offer, name: str, public_key: str | None, max_price: float | None
    ) -> dict[str, Any]:
        pod = {**make_order(offer), "name": name}
        if max_price is not None:
            pod["maxPrice"] = max_price
        if public_key is not None:
            pod["sshKeyId"] = self._key_id(public_key, name)
        order: dict[str, Any] = {"pod": pod, "provider": {"type": offer.cloud}}
        if self._account.team_id is not None:
            order["team"] = {"teamId": self._account.team_id}
        return order

    def _key_id(self, public_key: str, name: str) -> str:
        """Return the id of an ssh key; register the key if the account does not have it."""
        words = public_key.split()[:2]
        for key in self._api.offset_pages("/ssh_keys/"):
            if isinstance(key, dict) and str(key.get("publicKey") or "").split()[:2] == words:
                return str(key.get("id"))
        made = self._api.post("/ssh_keys/", {"name": name, "publicKey": " ".join(words)})
        if not made.get("id"):
            raise RemoteError(
                f"Prime Intellect did not register the SSH key: {_shown(made)}", code="BK-PROVIDER"
            )
        return str(made["id"])

    def _by_name(self, name: str) -> Pod | None:
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(_RETRY_SECONDS)
            for pod in self.pods():
                if pod.name == name:
                    return pod
        return None


def _status(found: Mapping[str, Any], pod_id: str) -> PodStatus:
    try:
        return parse_status(found)
    except msgspec.ValidationError as error:
        raise RemoteError(
            f"Prime Intellect: the status of pod {pod_id} is not valid: {error}", code="BK-PROVIDER"
        ) from None


def _shown(answer: Mapping[str, Any]) -> str:
    return json.dumps(answer)[:300]
