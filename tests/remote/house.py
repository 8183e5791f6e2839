"""Fake provider, client, ledger and user in one process, on one clock that waits advance."""

from __future__ import annotations

import dataclasses

from buckeye.base.prime_account import PrimeAccount
from buckeye.launch.preflight.devices import GpuSpec
from buckeye.remote.base import RemoteRequest
from buckeye.remote.ledger import Ledger, PodEntry
from buckeye.remote.providers.prime import PrimeProvider
from buckeye.remote.rental import rent_pod
from tests.remote.landlord import KEY, FakeTime, Landlord, replace_time

REQUEST = RemoteRequest(gpus=GpuSpec(count=2, type="A100_80GB"), yes=True)


class House:
    """Fake provider, client, ledger and the messages to the user, on one clock."""

    def __init__(self, folder, monkeypatch):
        self.time = FakeTime()
        monkeypatch.setattr("buckeye.remote.rental.confirm_price", self.confirm)
        replace_time(monkeypatch, self.time, self.sleep)
        monkeypatch.setenv("BUCKEYE_HOME", str(folder))
        self.landlord = Landlord(now=self.time.now)
        account = PrimeAccount(api_key=KEY, url="http://127.0.0.1:1")
        self.provider = PrimeProvider(account, transport=self.landlord.transport())
        self.ledger = Ledger()
        self.key = folder / "id"
        self.key.write_text("not read")
        self.key.chmod(0o600)
        self.key.with_name("id.pub").write_text("ssh-ed25519 AAAA me\n")
        self.told: list[str] = []
        self.asked: list[float] = []
        self.answer = True
        self.on_sleep = lambda: None

    def sleep(self, seconds):
        self.time.sleep(seconds)
        self.on_sleep()

    def confirm(self, offer):
        self.asked.append(offer.price_per_hour)
        return self.answer

    def rent_pod(self, request=REQUEST, **changes):
        request = dataclasses.replace(request, identity_file=self.key, **changes)
        return rent_pod(
            self.provider,
            request,
            run_id="ab12cd34",
            disk_gb=50,
            tell=self.told.append,
        )

    @property
    def entry(self) -> PodEntry:
        return self.ledger.entries()[-1]

    def text(self) -> str:
        return "\n".join(self.told)
