"""Client of Prime Intellect against a fake provider in the same process, on a fake clock."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buckeye.base.prime_account import PrimeAccount, prime_account
from buckeye.errors import AccountError, OfferRefusedError, RemoteError, UsageError
from buckeye.launch.preflight.devices import GpuSpec
from buckeye.remote.base import Offer, SshTarget
from buckeye.remote.providers.prime import PrimeProvider
from buckeye.remote.providers.prime_rows import parse_status
from tests.remote.landlord import KEY, FakeTime, Landlord, amount, replace_time, row

TWO_A100 = GpuSpec(count=2, type="A100_80GB")


class House:
    """Fake provider and its client, on one clock."""

    time = FakeTime()

    def __init__(self, **settings):
        self.time.seconds = FakeTime.seconds
        self.landlord = Landlord(now=self.time.now, **settings)
        self.provider = self.client(KEY)

    def client(self, key, **account):
        made = PrimeAccount(api_key=key, url="http://127.0.0.1:1", **account)
        return PrimeProvider(made, transport=self.landlord.transport())

    def cheapest(self) -> Offer:
        return next(o for o in self.provider.offers(TWO_A100, disk_gb=50) if o.price_per_hour == 2.58)

    def order(self, name="buckeye-ab12cd34-0001", **spec):
        return self.provider.create(self.cheapest(), name, **spec)


@pytest.fixture(autouse=True)
def fake_time(monkeypatch):
    replace_time(monkeypatch, House.time, House.time.sleep)


@pytest.fixture
def house() -> House:
    return House()


def asked(house: House, method: str, path: str) -> list:
    return [
        body for m, p, body in house.landlord.requests if m == method and p.rstrip("/") == f"/api/v1{path}"
    ]


def test_offers_have_the_price_of_the_whole_machine_with_its_disk():
    disk = amount(
        100, minCount=100, maxCount=2000, pricePerUnit=0.0002, step=50, defaultIncludedInPrice=False
    )
    included = {**disk, "defaultIncludedInPrice": True}
    community = {"onDemand": 9.0, "communityPrice": 2.0, "isVariable": False, "currency": "USD"}
    house = House(
        rows=[
            row("a", "A100_80GB", 2, "datacrunch", 2.5, disk=disk),
            row("b", "A100_80GB", 2, "hyperstack", None, disk=included, prices=community),
            row("c", "A100_80GB", 2, "runpod", 3.0, disk={**disk, "pricePerUnit": None}),
        ]
    )
    offers = {offer.cloud: offer for offer in house.provider.offers(TWO_A100, disk_gb=310)}
    # 310 GB in steps of 50 are 350; 350 x 0.0002 = 0.07. Included are the first 100: 250 x 0.0002 = 0.05.
    assert (offers["datacrunch"].disk_gb, offers["datacrunch"].price_per_hour) == (350, pytest.approx(2.57))
    assert offers["hyperstack"].price_per_hour == pytest.approx(2.05)
    assert offers["runpod"].disk_gb == 350  # the image takes 40 of it
    assert {offer.unfit for offer in offers.values()} == {None}


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"isSpot": True}, "taken away"),
        ({"prices": {"onDemand": None, "communityPrice": None}}, "no price"),
        ({"prices": {"onDemand": 2.0, "isVariable": True}}, "changes its price"),
        ({"prices": None}, "no price"),
        ({"stockStatus": "Out of Stock"}, "not in stock"),
        ({"stockStatus": "Perhaps"}, "not in stock"),
        ({"stockStatus": None}, "not in stock"),
        ({"images": ["bittensor"]}, "no image"),
        ({"images": None}, "no image"),
        ({"socket": None}, "cannot be ordered"),
        ({"disk": amount(100, minCount=10, maxCount=40)}, "no disk of 50 GB"),
    ],
)
def test_what_cannot_be_used_is_offered_with_the_reason(given, reason):
    house = House(rows=[row("a", "A100_80GB", 2, "datacrunch", 2.5, **given)])
    (offer,) = house.provider.offers(TWO_A100, disk_gb=50)
    assert offer.unfit is not None
    assert reason in offer.unfit


def test_rows_with_missing_and_new_keys_are_read_and_broken_ones_are_told(caplog):
    small = {"cloudId": "x", "gpuType": "A100_80GB", "gpuCount": 2, "news": {"of": ["tomorrow"]}}
    broken = {"cloudId": "y", "gpuType": "A100_80GB", "gpuCount": "two"}
    house = House(rows=[small, broken, row("a", "A100_80GB", 2, "datacrunch", 2.5)])
    assert [offer.row["cloudId"] for offer in house.provider.offers(TWO_A100, disk_gb=50)] == ["x", "a"]
    assert "1 of 3 offers" in caplog.text
    assert "gpuCount" in caplog.text


def test_all_pages_of_both_kinds_are_read(house):
    house.landlord.rows = [row(str(i), "A100_80GB", 2, "datacrunch", 2 + i) for i in range(250)]
    assert len(house.provider.offers(TWO_A100, disk_gb=50)) == 250
    assert len(asked(house, "GET", "/availability/gpus")) == 3
    house.landlord.rows = house.landlord.rows[:1]
    house.landlord.page_size = 2
    offer = house.provider.offers(TWO_A100, disk_gb=50)[0]
    for number in range(5):
        house.provider.create(offer, f"buckeye-{number}")
    house.provider.create(offer, "somebody-else")
    assert [pod.name for pod in house.provider.pods()] == [f"buckeye-{number}" for number in range(5)]


def test_an_empty_list_is_asked_for_again(house):
    house.landlord.fault("GET", "/availability", times=2, code=200, body=b'{"items": [], "totalCount": 0}')
    assert len(house.provider.offers(TWO_A100, disk_gb=50)) == 3
    house.landlord.rows = []
    assert house.provider.offers(TWO_A100, disk_gb=50) == []


def test_an_order_repeats_the_row_and_no_other(house):
    house.landlord.rows[1] |= {"prices": {"onDemand": 2.58, "communityPrice": None, "isVariable": False}}
    pod = house.order(public_key="ssh-ed25519 AAAA me@here", max_price=3.0)
    (body,) = asked(house, "POST", "/pods")
    assert body["provider"] == {"type": "datacrunch"}
    assert body["pod"] == {
        "name": "buckeye-ab12cd34-0001",
        "cloudId": "2A100.cheap",
        "gpuType": "A100_80GB",
        "socket": "SXM5",
        "gpuCount": 2,
        "country": "FI",
        "security": "secure_cloud",
        "dataCenterId": "FIN-01",
        "image": "cuda_12_6_pytorch_2_7",
        "diskSize": 100,
        "vcpus": 52,
        "memory": 360,
        "autoRestart": False,
        "maxPrice": 3.0,
        "sshKeyId": house.landlord.keys[0]["id"],
    }
    assert (pod.price_per_hour, pod.gpus, pod.created) == (2.58, "2xA100_80GB", 1_800_000_000.0)
    house.order("buckeye-2", public_key="ssh-ed25519 AAAA another comment")
    assert len(house.landlord.keys) == 1


def test_a_team_is_named_in_the_order(house):
    offer = house.cheapest()
    house.client(KEY, team_id="t1").create(offer, "buckeye-x")
    assert asked(house, "POST", "/pods")[0]["team"] == {"teamId": "t1"}


def test_a_redirect_keeps_the_order_and_the_key(house):
    house.landlord.fault("POST", "/pods", code=307, headers={"location": "/api/v1/pods/"}, body=b"")
    house.order()
    assert len(house.landlord.alive) == 1


@pytest.mark.parametrize(
    ("code", "body", "parts"),
    [
        (401, b'{"detail": "Invalid token"}', ["Invalid token (401)", "PRIME_API_KEY"]),
        (402, b'{"detail": "Insufficient funds"}', ["Insufficient funds (402)", "balance"]),
        (403, b'{"detail": "Missing scope"}', ["Missing scope (403)", "right"]),
    ],
)
@pytest.mark.parametrize("request_of", ["offers", "order"])
def test_what_the_account_cannot_do_stops_at_once(house, code, body, parts, request_of):
    path = "/availability" if request_of == "offers" else "/pods"
    house.landlord.fault("GET" if request_of == "offers" else "POST", path, times=99, code=code, body=body)
    before = house.time.now()
    with pytest.raises(AccountError) as caught:
        house.order()
    assert all(part in str(caught.value) for part in parts)
    assert house.time.now() == before
    assert house.landlord.alive == []


def test_a_wrong_key_is_refused_and_never_shown(house):
    wrong = "pit_wrong0123456789wrong0123456789"
    echo = json.dumps({"detail": f"Invalid token {wrong}"}).encode()
    house.landlord.fault("GET", "/availability", code=401, body=echo)
    provider = house.client(wrong)
    for _ in range(2):
        with pytest.raises(AccountError, match="401") as caught:
            provider.offers(TWO_A100, disk_gb=50)
        assert wrong not in str(caught.value)
    assert wrong not in repr(PrimeAccount(api_key=wrong))


@pytest.mark.parametrize(
    "fault",
    [
        {"code": 500},
        {"code": 502, "body": b"<html><h1>Bad gateway</h1></html>"},
        {"code": 200, "body": b""},
        {"code": 200, "body": b'{"items": ['},
        {"code": 200, "body": b"[]"},
        {"cut": True},
        {"code": 429, "headers": {"Retry-After": "7"}, "body": b'{"detail": "Slow down"}'},
        {"code": 429, "body": b""},
    ],
)
def test_questions_are_repeated_and_then_one_message_says_why(house, fault):
    house.landlord.fault("GET", "/availability", times=3, **fault)
    before = house.time.now()
    assert len(house.provider.offers(TWO_A100, disk_gb=50)) == 3
    waited = house.time.now() - before
    if "headers" in fault:
        assert waited == 21  # three times what the server asked for
    else:
        assert 0.75 * 7 <= waited <= 1.25 * 7  # 1 + 2 + 4 seconds, each up to a quarter more or less
    house.landlord.fault("GET", "/availability", times=10_000, **fault)
    with pytest.raises(RemoteError, match="/availability/gpus") as caught:
        house.provider.offers(TWO_A100, disk_gb=50)
    assert house.time.now() - before - waited <= 120
    assert re.search(r"\(tried for \d+ s\)$", str(caught.value))
    assert "\n" not in str(caught.value)
    assert KEY not in str(caught.value)


def test_a_network_that_is_not_there_is_told_at_once_and_given_up_within_seconds(house, caplog):
    before = house.time.now()
    real = PrimeProvider(PrimeAccount(api_key=KEY, url="http://127.0.0.1:1"))
    with pytest.raises(RemoteError, match=r"127\.0\.0\.1") as caught:
        real.offers(TWO_A100, disk_gb=50)
    assert (caught.value.code, caught.value.hint) == ("BK-NETWORK", "check that this machine is online")
    assert house.time.now() <= before + 15
    assert len(caplog.records) >= 3


@pytest.mark.parametrize("code", [400, 404, 409])
def test_an_offer_that_is_refused_says_so(house, code):
    house.landlord.fault("POST", "/pods", code=code, body=b'{"message": "Requested GPU is not available"}')
    with pytest.raises(OfferRefusedError, match="not available"):
        house.order()
    assert len(asked(house, "POST", "/pods")) == 1


@pytest.mark.parametrize(
    "fault",
    [{"cut": True}, {"code": 504}, {"code": 200, "body": b""}, {"code": 200, "body": b"{}"}],
)
def test_an_order_whose_answer_is_lost_is_found_by_name_and_not_repeated(house, fault, refusal):
    house.landlord.fault("POST", "/pods", done=True, **fault)
    pod = house.order()
    assert [pod.id] == [p["id"] for p in house.landlord.alive]
    house.landlord.fault("POST", "/pods", **fault)
    with refusal(OfferRefusedError):
        house.order("buckeye-other")
    assert len(asked(house, "POST", "/pods")) == 2


def test_the_way_of_a_pod(house):
    pod = house.order()
    seen = []
    for seconds in (0, 60, 240):
        house.time.sleep(seconds)
        status = house.provider.status(pod.id)
        seen.append((status.state, status.detail, status.progress))
    assert seen == [
        ("starting", "PROVISIONING", None),
        ("starting", "INSTALLING", 0.5),
        ("ready", "FINISHED", 1.0),
    ]
    assert status.ssh == (SshTarget(user="root", host="127.0.0.1", port=2222),)
    assert status.price_per_hour == 2.58
    house.provider.terminate(pod.id)
    house.provider.terminate(pod.id)  # does nothing: the pod is gone
    assert house.provider.status(pod.id).state == "gone"
    assert house.provider.pods() == []


def test_a_pod_that_is_missing_in_the_short_answer_is_asked_about(house):
    pod = house.order()
    house.landlord.fault("GET", "/pods/status", code=200, body=b'{"data": []}')
    assert house.provider.status(pod.id).state == "starting"


@pytest.mark.parametrize(
    ("connection", "targets"),
    [
        (None, []),
        ([], []),
        ([None], []),
        (["root@10.0.0.1", None], []),
        ("", []),
        ("N/A", []),
        ("root@135.23.125.123 -p 1234", ["root@135.23.125.123:1234"]),
        ("ubuntu@1.2.3.4", ["ubuntu@1.2.3.4:22"]),
        ("ssh root@1.2.3.4 -p22022", ["root@1.2.3.4:22022"]),
        (["root@10.0.0.1 -p 1", "root@10.0.0.2 -p 2"], ["root@10.0.0.1:1", "root@10.0.0.2:2"]),
        ("root@-oProxyCommand=evil", []),
        ("root@h; rm -rf /", []),
    ],
)
def test_every_form_of_an_address(connection, targets):
    status = parse_status({"status": "ACTIVE", "sshConnection": connection, "installationStatus": "FINISHED"})
    assert list(map(str, status.ssh)) == targets
    assert status.state == ("ready" if targets else "starting")


def test_an_address_from_the_mapping_of_ports():
    mapping = [
        {"internal": "8888", "external": "*", "usedBy": "JUPYTER"},
        {"internal": "22", "external": 30022},
    ]
    status = parse_status({"status": "ACTIVE", "ip": ["1.2.3.4"], "primePortMapping": mapping})
    assert list(map(str, status.ssh)) == ["root@1.2.3.4:30022"]


@pytest.mark.parametrize(
    ("given", "state"),
    [
        ({"status": "ERROR"}, "failed"),
        ({"status": "STOPPED"}, "failed"),
        ({"status": "PENDING", "installationFailure": "no driver"}, "failed"),
        ({"status": "DELETING"}, "ending"),
        ({"status": "TERMINATED"}, "gone"),
        ({"status": "UNKNOWN"}, "starting"),
        ({"status": "ACTIVE", "sshConnection": "a@b", "installationProgress": 99}, "starting"),
        ({"status": "ACTIVE", "sshConnection": "a@b", "installationProgress": 100}, "ready"),
    ],
)
def test_states(given, state):
    assert parse_status(given).state == state


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=3),
    max_leaves=8,
)


@given(connection=json_values, ip=json_values, mapping=json_values)
def test_no_answer_makes_an_address_of_something_else(connection, ip, mapping):
    found = {"status": "ACTIVE", "sshConnection": connection, "ip": ip, "primePortMapping": mapping}
    for target in parse_status(found).ssh:
        assert not target.host.startswith("-")
        assert 1 <= target.port <= 65535


class TestAccount:
    @pytest.fixture(autouse=True)
    def home(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.chdir(tmp_path)
        for name in ("KEY", "BASE_URL"):
            monkeypatch.delenv(f"PRIME_API_{name}", raising=False)
        for name in ("TEAM_ID", "SSH_KEY_PATH"):
            monkeypatch.delenv(f"PRIME_{name}", raising=False)
        self.set = monkeypatch.setenv
        self.folder = tmp_path / ".prime"
        (self.folder / "environments").mkdir(parents=True)

    def write(self, name="config.json", **settings):
        (self.folder / name).write_text(json.dumps(settings))

    def test_the_environment_goes_before_the_file(self):
        self.write(api_key="file", team_id="t1", base_url="https://x.org/api/v1/", ssh_key_path="~/k.pem")
        account = prime_account()
        assert (account.api_key, account.team_id, account.url) == ("file", "t1", "https://x.org")
        assert str(account.ssh_key_path) == str(self.folder.parent / "k.pem")
        self.set("PRIME_API_KEY", "env")
        self.set("PRIME_API_BASE_URL", "http://127.0.0.1:8/api/v1")
        account = prime_account()
        assert (account.api_key, account.url) == ("env", "http://127.0.0.1:8")

    def test_the_ssh_key_that_prime_stores_unasked_counts_only_where_it_is(self):
        path = self.folder.parent / ".ssh" / "id_rsa"
        self.write(api_key="file", ssh_key_path=str(path))
        assert prime_account().ssh_key_path is None
        path.parent.mkdir()
        path.write_text("")
        assert prime_account().ssh_key_path == path
        self.write(api_key="file", ssh_key_path="~/gone.pem")  # explicit, so that a missing file is reported
        assert prime_account().ssh_key_path == self.folder.parent / "gone.pem"
        self.set("PRIME_SSH_KEY_PATH", "~/.ssh/id_rsa")
        path.unlink()
        assert prime_account().ssh_key_path == path

    def test_the_file_env_is_read(self):
        (self.folder.parent / ".env").write_text("PRIME_API_KEY=dotenv\n")
        assert prime_account().api_key == "dotenv"

    @pytest.mark.parametrize("content", ["", "{", "[]", '{"api_key": 3}'])
    def test_a_damaged_file_is_named_or_has_no_key(self, content):
        (self.folder / "config.json").write_text(content)
        with pytest.raises(UsageError, match=r"config\.json|PRIME_API_KEY"):
            prime_account()

    def test_the_key_is_not_sent_in_the_clear(self):
        self.set("PRIME_API_KEY", "secret\nkey")
        with pytest.raises(UsageError) as caught:
            prime_account()
        assert "secret" not in str(caught.value)
        self.set("PRIME_API_KEY", "k")
        self.set("PRIME_API_BASE_URL", "http://api.example.org")
        with pytest.raises(UsageError, match="unencrypted"):
            prime_account()
