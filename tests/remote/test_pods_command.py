"""`buckeye rl pods` against a fake provider on the loopback."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import time

import pytest

from buckeye.base.prime_account import prime_account
from buckeye.launch.preflight.devices import GpuSpec
from buckeye.remote.base import RemoteRequest
from buckeye.remote.ledger import Ledger, PodEntry
from buckeye.remote.providers.prime import PrimeProvider
from buckeye.remote.rental import rent_pod
from tests.remote.landlord import KEY, Landlord, serve


@pytest.fixture
def landlord(tmp_path, monkeypatch):
    """Fake provider whose pods are ready immediately, and a user with the key."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("BUCKEYE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PRIME_API_KEY", KEY)
    for name in ("PRIME_TEAM_ID", "PRIME_SSH_KEY_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    key = tmp_path / ".ssh" / "prime_key.pem"
    key.parent.mkdir()
    key.write_text("not read")
    key.chmod(0o600)
    key.with_name("prime_key.pem.pub").write_text("ssh-ed25519 AAAA me\n")
    found = Landlord(active_after=0, ready_after=0)
    with serve(found) as url:
        monkeypatch.setenv("PRIME_API_BASE_URL", url)
        yield found


@pytest.fixture
def run(run_rl):
    """Return a function that runs `rl pods WORDS`; it returns exit code, stdout and stderr."""
    return functools.partial(run_rl, "pods")


def rent(**changes):
    """Rent a pod, as a run does."""
    request = RemoteRequest(gpus=GpuSpec(count=2, type="A100_80GB"), yes=True, **changes)
    with (
        PrimeProvider(prime_account()) as provider,
        rent_pod(
            provider,
            request,
            run_id="ab12cd34",
            disk_gb=50,
            tell=lambda text: None,
        ) as pod,
    ):
        return pod


def change(name, **changes) -> PodEntry:
    """Change an entry of the ledger."""
    return Ledger().write(dataclasses.replace(Ledger().read(name), **changes))


def leave_behind(landlord) -> PodEntry:
    """Rent a pod and leave it in the ledger as if its process had been killed."""
    pod = rent(keep=True)
    return change(pod.name, keep=False, outcome=None)


def test_a_pod_that_was_left_behind_is_shown_and_ended(landlord, run, wording):
    entry = leave_behind(landlord)
    code, out, err = run("list")
    assert code == 0
    assert re.search(
        rf"{entry.name} +{entry.pod_id} +2xA100_80GB +ready +nobody +2\.58 +\d+ min +\$\d\.\d\d", out
    )
    assert "pods gc" in err
    assert run("gc")[0] == 2  # not a terminal: no one can confirm
    assert len(landlord.alive) == 1
    code, out, _ = run("gc", "--yes")
    assert (code, landlord.alive) == (0, [])
    assert re.search(r"gc; \d+ min, \$\d\.\d\d", out)
    assert "1 pod ended." in out
    assert run("list")[1] == wording
    ((shown),) = json.loads(run("list", "--all", "--json")[1])
    assert (shown["name"], shown["state"], shown["outcome"]) == (entry.name, "over", "gc")
    assert run("gc", "--yes", "--json")[1] == "[]\n"


def test_pods_of_a_run_and_kept_ones_stay(landlord, run, wording):
    kept = rent(keep=True)
    other = leave_behind(landlord)
    with Ledger().mark_supervised(other.name):
        assert run("gc", "--yes")[1] == wording
        shown = {pod["name"]: pod["care"] for pod in json.loads(run("list", "--json")[1])}
    assert shown == {kept.name: "kept", other.name: "run"}
    assert len(landlord.alive) == 2


def test_pods_that_only_the_provider_knows_are_told_and_ended_on_demand(landlord, run):
    pod = rent(keep=True)
    for path in Ledger().folder.glob(f"{pod.name}*"):
        path.unlink()
    code, out, err = run("gc", "--yes")
    assert (code, len(landlord.alive)) == (0, 1)
    assert pod.name in err
    assert "not rented by this machine" in err
    assert run("list")[1].count("unknown") == 1
    code, out, _ = run("gc", "--yes", "--all", "--json")
    assert (code, landlord.alive) == (0, [])
    assert json.loads(out)[0]["pod_id"] == pod.id


def test_a_pod_that_is_gone_and_an_order_that_came_to_nothing_are_written_off(landlord, run, wording):
    entry = leave_behind(landlord)
    landlord.vanish(entry.pod_id)
    name = "buckeye-00000000-0000"
    Ledger().write(
        PodEntry(
            name=name, run_id="0" * 8, provider="prime", gpus="1xH100", price_per_hour=9, ordered=time.time()
        )
    )
    ended = {entry["name"]: entry for entry in json.loads(run("gc", "--json")[1])}
    assert {name: found["outcome"] for name, found in ended.items()} == {
        entry.name: "gone",
        name: "never made",
    }
    assert ended[name]["cost"] == 0
    assert run("list")[1] == wording


def test_an_order_whose_process_was_killed_before_the_answer_is_found_by_name(landlord, run):
    entry = leave_behind(landlord)
    change(entry.name, pod_id=None)
    assert run("gc", "--yes")[0] == 0
    assert landlord.alive == []


def test_one_pod_is_ended_by_any_of_its_names(landlord, run):
    entry = leave_behind(landlord)
    for word in (entry.name, entry.pod_id, entry.pod_id[:8], entry.run_id):
        assert f"{entry.name}.known_hosts" in run("attach", word)[1]
    assert run("terminate", entry.pod_id)[0] == 2  # not a terminal: no one can confirm
    code, out, _ = run("terminate", entry.pod_id, "--yes", "--json")
    assert (code, landlord.alive) == (0, [])
    assert json.loads(out)[0]["outcome"] == "terminated"


def test_a_word_that_means_no_pod_or_several(landlord, run, wording):
    assert run("terminate", "x", "--yes")[2] == wording
    names = {leave_behind(landlord).name, leave_behind(landlord).name}
    code, _, err = run("terminate", "ab12cd34", "--yes")
    assert code == 2
    assert all(name in err for name in names)
    assert len(landlord.alive) == 2


def test_what_could_be_rented(landlord, run, wording):
    code, out, err = run("offers", "2xA100", "--max-price", "3")
    assert code == 0
    assert [line.split()[2] for line in out.splitlines()[1:]] == ["2.58", "2.90"]
    assert err == wording
    found = json.loads(run("offers", "4xH100", "--json")[1])
    assert [(offer["cloud"], offer["price_per_hour"]) for offer in found] == [("datacrunch", 7.96)]
    code, _, err = run("offers", "2xA100", "--region", "africa")
    assert code == 1
    assert err == wording
