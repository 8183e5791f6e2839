"""Fake provider of pods: the used part of the HTTP API of Prime Intellect, with faults on request.

In a test it answers a client in the same process (`transport`), on a fake clock. For other programs `serve`
puts it on a port of the loopback. Its pods are dictionaries, or servers that `start_pod` starts.
"""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx

from tests.local_server import LocalServer, QuietHandler

KEY = "pit_0123456789abcdef0123456789abcdef"

Query = dict[str, list[str]]
Answer = tuple[int, Any]


def amount(default: float | None = None, **given: Any) -> dict[str, Any]:
    """Return the disk, processors or memory that a row offers."""
    keys = ("minCount", "maxCount", "pricePerUnit", "step", "defaultIncludedInPrice", "additionalInfo")
    return {**dict.fromkeys(keys), "defaultCount": default, **given}


def row(
    cloud_id: str, gpu: str, count: int, provider: str, price: float | None, **given: Any
) -> dict[str, Any]:
    """Return a row of the list of offers, with all keys of the API."""
    return {
        "cloudId": cloud_id,
        "gpuType": gpu,
        "socket": "SXM5",
        "provider": provider,
        "region": "eu_north",
        "dataCenter": "FIN-01",
        "country": "FI",
        "gpuCount": count,
        "gpuMemory": 80,
        "disk": amount(
            200, minCount=100, maxCount=2000, pricePerUnit=0, step=1, defaultIncludedInPrice=False
        ),
        "vcpu": amount(26 * count),
        "memory": amount(180 * count),
        "stockStatus": "Available",
        "security": "secure_cloud",
        "prices": {"onDemand": price, "communityPrice": None, "isVariable": False, "currency": "USD"},
        "images": ["ubuntu_22_cuda_12", "cuda_12_6_pytorch_2_7", "prime_rl"],
        "isSpot": None,
        **given,
    }


def usual_rows() -> list[dict[str, Any]]:
    """Return three machines with two A100 at different prices, and one with four H100."""
    return [
        row(
            "2A100.dear", "A100_80GB", 2, "hyperstack", 3.40, region="canada", dataCenter="CA-1", country="CA"
        ),
        row("2A100.cheap", "A100_80GB", 2, "datacrunch", 2.58),
        row("2A100.middle", "A100_80GB", 2, "runpod", 2.90, region="united_states", country="US"),
        row("4H100.80S.176V", "H100_80GB", 4, "datacrunch", 7.96),
    ]


@dataclass
class FakeTime:
    """Clocks that only `sleep` advances. The user may set the first one."""

    seconds: float = 1_800_000_000.0
    set_forward: float = 0.0

    def now(self) -> float:
        return self.seconds + self.set_forward

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


def replace_time(monkeypatch: Any, clock: FakeTime, sleep: Callable[[float], None]) -> None:
    """Let the modules that rent pods use another clock."""
    fake = SimpleNamespace(time=clock.now, monotonic=clock.monotonic, sleep=sleep)
    modules = ("ledger", "inventory", "remote_run", "rental", "teardown")
    for name in (*modules, "providers.prime", "providers.prime_api"):
        monkeypatch.setattr(f"buckeye.remote.{name}.time", fake)


@dataclass
class Fault:
    """Failure of the next `times` matching requests; with `done` the request is still carried out."""

    method: str
    path: str
    times: int
    code: int = 500
    body: bytes = b'{"detail": "Internal error"}'
    headers: dict[str, str] = field(default_factory=dict)
    cut: bool = False
    done: bool = False


class CutError(Exception):
    """Connection that closes without an answer."""


class Landlord:
    """State and behavior of the fake provider, with durations in seconds of `now`."""

    def __init__(
        self,
        *,
        now: Callable[[], float] = time.time,
        rows: list[dict[str, Any]] | None = None,
        active_after: float = 60.0,
        ready_after: float = 300.0,
        start_pod: Callable[[dict[str, Any]], Any] | None = None,
        end_pod: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.now = now
        self._numbers = itertools.count(1)
        self.rows = usual_rows() if rows is None else rows
        self.active_after, self.ready_after = active_after, ready_after
        self.start_pod = start_pod or (lambda pod: "root@127.0.0.1 -p 2222")
        self.end_pod = end_pod or (lambda pod: None)
        self.pods: dict[str, dict[str, Any]] = {}
        self.keys: list[dict[str, Any]] = []
        self.requests: list[tuple[str, str, Any]] = []
        self.faults: list[Fault] = []
        self.refusing: set[str] = set()
        """Rows (cloudId) whose orders are refused."""
        self.lying: dict[str, float] = {}
        """Real price of the pods of a row."""
        self.failing: dict[str, str] = {}
        """Error of the installation of a row's pods."""
        self.deletes_needed = 1
        self.page_size = 100
        self._lock = threading.Lock()

    def fault(self, method: str, path: str, *, times: int = 1, **what: Any) -> None:
        """Let requests fail as `Fault` describes; `path` is a regular expression for the path's start."""
        self.faults.append(Fault(method=method, path=path, times=times, **what))

    @property
    def alive(self) -> list[dict[str, Any]]:
        """Pods that are being charged."""
        return list(self.pods.values())

    def vanish(self, pod_id: str) -> None:
        """End a pod as if the wallet were empty."""
        self._remove(pod_id)

    def transport(self) -> httpx.MockTransport:
        """Return a transport for a client in the same process."""

        def handle(request: httpx.Request) -> httpx.Response:
            try:
                code, headers, body = self.answer(
                    request.method, str(request.url), request.headers.get("authorization"), request.content
                )
            except CutError:
                raise httpx.ReadError("connection reset", request=request) from None
            return httpx.Response(code, headers=headers, content=body)

        return httpx.MockTransport(handle)

    def answer(
        self, method: str, url: str, authorization: str | None, content: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        """Return status code, headers and body of an answer; raise CutError if the connection is cut."""
        parts = urlsplit(url)
        body = json.loads(content) if content else None
        with self._lock:
            self.requests.append((method, parts.path, body))
            path = parts.path.removeprefix("/api/v1").rstrip("/")
            fault = next((f for f in self.faults if f.method == method and re.match(f.path, path)), None)
            if fault is None or fault.done:
                code, found = self._respond(method, path, parse_qs(parts.query), authorization, body)
            if fault is not None:
                fault.times -= 1
                if not fault.times:
                    self.faults.remove(fault)
                if fault.cut:
                    raise CutError
                return fault.code, fault.headers, fault.body
        return code, {"content-type": "application/json"}, json.dumps(found).encode()

    def _respond(self, method: str, path: str, query: Query, authorization: str | None, body: Any) -> Answer:
        if authorization is None:
            return 403, {"detail": "Not authenticated"}
        if authorization != f"Bearer {KEY}":
            return 401, {"detail": "Invalid token"}
        for pod in list(self.pods.values()):
            self._age(pod)
        if path == "/availability/gpus" and method == "GET":
            return self._offers(query)
        if path == "/ssh_keys":
            return self._ssh_keys(method, query, body)
        return self._pods(method, path, query, body)

    def _pods(self, method: str, path: str, query: Query, body: Any) -> Answer:
        if path == "/pods":
            return self._create(body) if method == "POST" else self._page([*map(public, self.alive)], query)
        if path == "/pods/status":
            asked = [self.pods[i] for i in query.get("pod_ids", []) if i in self.pods]
            return 200, {"data": [status(pod) for pod in asked]}
        match = re.fullmatch(r"/pods/([0-9a-f]+)", path)
        if match is None or match[1] not in self.pods:
            return 404, {"detail": "Not found"}
        pod = self.pods[match[1]]
        if method == "DELETE":
            pod["_deletes"] += 1
            if pod["_deletes"] >= self.deletes_needed:
                self._remove(pod["id"])
            return 200, {"status": "success"}
        return 200, public(pod)

    def _offers(self, query: Query) -> Answer:
        page, size = int(query.get("page", ["1"])[0]), int(query.get("page_size", ["100"])[0])
        if size > 100:
            wrong = {"param": "query.page_size", "details": "Input should be less than or equal to 100"}
            return 422, {"errors": [wrong]}
        size = min(size, self.page_size)
        gpu, count, regions = query.get("gpu_type"), query.get("gpu_count"), query.get("regions")
        rows = [
            r
            for r in self.rows
            if (not gpu or r["gpuType"] == gpu[0])
            and (not count or r["gpuCount"] == int(count[0]))
            and (not regions or r["region"] in regions)
        ]
        return 200, {"items": rows[(page - 1) * size : page * size], "totalCount": len(rows)}

    def _ssh_keys(self, method: str, query: Query, body: Any) -> Answer:
        if method == "GET":
            return self._page(self.keys, query)
        key = {
            "id": f"key-{next(self._numbers)}",
            "name": body["name"],
            "publicKey": body["publicKey"],
            "isPrimary": False,
        }
        self.keys.append(key)
        return 200, key

    def _page(self, rows: list[dict[str, Any]], query: Query) -> Answer:
        offset, limit = int(query.get("offset", ["0"])[0]), int(query.get("limit", ["100"])[0])
        limit = min(limit, self.page_size)
        return 200, {
            "data": rows[offset : offset + limit],
            "total_count": len(rows),
            "offset": offset,
            "limit": limit,
        }

    def _create(self, body: Any) -> Answer:
        order, provider = body["pod"], body["provider"]["type"]
        missing = [key for key in ("cloudId", "gpuType", "socket", "gpuCount") if order.get(key) is None]
        if missing:
            errors = [{"param": f"body.pod.{key}", "details": "Field required"} for key in missing]
            return 422, {"errors": errors}
        same = ("cloudId", "gpuType", "socket", "gpuCount", "country", "security")
        found = [
            r
            for r in self.rows
            if all(order.get(key) in (None, r[key]) for key in same)
            and r["provider"] == provider
            and order.get("dataCenterId") in (None, r["dataCenter"])
        ]
        cloud_id = order["cloudId"]
        if not found or cloud_id in self.refusing:
            return 400, {"detail": "Requested GPU is not available"}
        pod = new_pod(order, found[0], at=self.now(), number=next(self._numbers))
        pod["priceHr"] = self.lying.get(cloud_id, pod["priceHr"])
        self.pods[pod["id"]] = pod
        return 200, public(pod)

    def _age(self, pod: dict[str, Any]) -> None:
        age = self.now() - pod["_born"]
        if age >= self.active_after:
            pod.update(status="ACTIVE", installationStatus="INSTALLING", installationProgress=50)
        if pod["_cloud"] in self.failing and age >= self.active_after:
            pod.update(status="ERROR", installationFailure=self.failing[pod["_cloud"]])
        elif age >= self.ready_after:
            if pod["_ssh"] is None:
                pod["_ssh"] = self.start_pod(pod)
            pod.update(installationStatus="FINISHED", installationProgress=100, sshConnection=pod["_ssh"])

    def _remove(self, pod_id: str) -> None:
        self.end_pod(self.pods.pop(pod_id))


def new_pod(order: dict[str, Any], offered: dict[str, Any], *, at: float, number: int) -> dict[str, Any]:
    """Return a pod as the API shows it; keys that begin with `_` are internal."""
    return {
        "_born": at,
        "_cloud": offered["cloudId"],
        "_deletes": 0,
        "_ssh": None,
        "_order": order,
        "id": f"{number:08x}" + "0" * 24,
        "name": order.get("name"),
        "providerType": offered["provider"],
        "status": "PROVISIONING",
        "installationStatus": "PENDING",
        "installationFailure": None,
        "installationProgress": None,
        "createdAt": stamp(at),
        "gpuName": order["gpuType"],
        "gpuCount": order["gpuCount"],
        "socket": order["socket"],
        "priceHr": offered["prices"]["onDemand"],
        "primePortMapping": None,
        "sshConnection": None,
        "ip": None,
    }


def public(pod: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a pod that a user sees."""
    return {key: value for key, value in pod.items() if not key.startswith("_")}


def status(pod: dict[str, Any]) -> dict[str, Any]:
    """Return a pod as the route for several statuses shows it."""
    installation = ("installationStatus", "installationFailure", "installationProgress")
    keys = ("providerType", "status", "sshConnection", "ip", "primePortMapping", *installation)
    return {"podId": pod["id"], "costPerHr": pod["priceHr"], **{key: pod[key] for key in keys}}


def stamp(seconds: float) -> str:
    """Return a time in the API's format."""
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(seconds))


@contextmanager
def serve(landlord: Landlord) -> Iterator[str]:
    """Serve on a port of the loopback; yield the address for PRIME_API_BASE_URL."""

    class Handler(QuietHandler):
        def do_request(self) -> None:
            try:
                code, headers, body = landlord.answer(
                    self.command, self.path, self.headers.get("authorization"), self.body()
                )
            except CutError:
                self.close_connection = True
                return
            self.answer(code, body, **headers)

        do_GET = do_POST = do_DELETE = do_PATCH = do_request

    with LocalServer(Handler) as server:
        yield server.url
