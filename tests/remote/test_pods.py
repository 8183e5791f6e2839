"""Lifetime of a pod, from the offers to the confirmed end, with every failure on the way."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

from buckeye.errors import AccountError, PodGoneError, RemoteError, UsageError
from buckeye.launch.preflight.devices import GpuSpec
from buckeye.remote.base import RemoteRequest
from buckeye.remote.rental import host_target, own_host
from tests.remote.landlord import row


def ordered(house) -> list[str]:
    """Return the rows (cloudId) of the orders, in order."""
    requests = house.landlord.requests
    return [body["pod"]["cloudId"] for method, path, body in requests if method == "POST" and "pods" in path]


def test_the_cheapest_that_fits_is_rented_and_ended(house):
    with house.rent_pod() as pod:
        assert [p["_cloud"] for p in house.landlord.alive] == ["2A100.cheap"]
        assert str(pod.ssh[0]) == "root@127.0.0.1:2222"
        assert house.ledger.is_supervised(pod.name)
        assert (house.entry.pod_id, house.entry.ssh) == (pod.id, ("root@127.0.0.1:2222",))
        house.time.sleep(7200)
        pod.known_hosts.write_text("key")
        pod.check()
    assert house.landlord.alive == []
    assert not pod.known_hosts.exists()
    assert not house.ledger.is_supervised(pod.name)
    assert house.entry.outcome == "finished"
    # 5 minutes until it is ready, checked every 8 seconds, 2 hours, and a second to see that it is gone.
    assert house.entry.hours(0) == pytest.approx((304 + 7200 + 1) / 3600)
    assert house.told[-1].startswith(f"{pod.name}: finished; 2.08 h, $5.38")
    waiting = [text for text in house.told if text.startswith("Waiting")]
    assert "PROVISIONING, 0 min" in waiting[0]
    assert any("INSTALLING 50%" in text for text in waiting)
    table = house.told[0].splitlines()
    assert [line.split()[2] for line in table[1:]] == ["2.58", "2.90", "3.40"]


def test_what_is_ordered_is_written_down_before(house, monkeypatch):
    seen = []
    create = house.provider.create

    def spy(offer, name, **given):
        seen.append((house.entry.name, house.entry.pod_id, house.entry.price_per_hour, name))
        return create(offer, name, **given)

    monkeypatch.setattr(house.provider, "create", spy)
    with house.rent_pod() as pod:
        pass
    assert seen == [(pod.name, None, 2.58, pod.name)]
    assert pod.name.startswith("buckeye-ab12cd34-")
    assert len(pod.name) <= 30


@pytest.mark.parametrize("error", [ValueError("a defect"), KeyboardInterrupt(), SystemExit(3)])
def test_the_pod_ends_with_an_error(house, error, wording):
    with pytest.raises(type(error)), house.rent_pod():
        raise error
    assert house.landlord.alive == []
    expected = "interrupted" if isinstance(error, KeyboardInterrupt) else f"failed: {error}"
    assert house.entry.outcome == expected
    assert house.told[-1] == wording


@pytest.fixture
def handled():
    """Return `handled(signal, handler)`, which sets a signal handler until the test ends."""
    with contextlib.ExitStack() as before:

        def handle(number, handler):
            before.callback(signal.signal, number, signal.signal(number, handler))

        yield handle


@pytest.mark.parametrize("on_interrupt", [signal.default_int_handler, signal.SIG_IGN])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_pod_ends_with_a_signal(house, handled, number, on_interrupt):
    """Also in a process that a script started with `&`, which ignores SIGINT."""
    handled(signal.SIGINT, on_interrupt)
    handled(number, signal.SIG_DFL)
    with pytest.raises(KeyboardInterrupt), house.rent_pod():
        os.kill(os.getpid(), number)
    assert house.landlord.alive == []
    assert signal.getsignal(number) == signal.SIG_DFL


@pytest.mark.parametrize("moment", range(0, 10, 2))
def test_ctrl_c_at_any_moment_of_the_wait(house, moment):
    looks = iter(range(1000))

    def interrupt():
        if next(looks) == moment * 4:
            raise KeyboardInterrupt

    house.on_sleep = interrupt
    with pytest.raises(KeyboardInterrupt), house.rent_pod():
        raise AssertionError
    assert house.landlord.alive == []
    assert house.entry.outcome == "interrupted"


@pytest.mark.parametrize("arrives", ["before", "after"])
def test_ctrl_c_while_the_order_is_on_its_way(house, monkeypatch, arrives):
    create = house.provider.create

    def interrupted(offer, name, **given):
        if arrives == "after":
            create(offer, name, **given)
        raise KeyboardInterrupt

    monkeypatch.setattr(house.provider, "create", interrupted)
    with pytest.raises(KeyboardInterrupt), house.rent_pod():
        raise AssertionError
    assert house.landlord.alive == []
    assert house.entry.ended is not None


def interrupted(house, on_sleep) -> None:
    """Rent a pod, press Ctrl-C, and call `on_sleep` in every later pause."""

    def press():
        house.on_sleep = on_sleep
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt), house.rent_pod():
        press()


def test_the_second_ctrl_c_says_what_is_left_and_does_not_stop_the_end(house, wording):
    house.landlord.deletes_needed = 3
    presses = iter([signal.SIGINT])
    interrupted(house, lambda: [signal.raise_signal(number) for number in presses])
    assert house.told[-2] == wording
    assert house.landlord.alive == []


def test_the_third_ctrl_c_leaves_the_pod_and_says_how_to_end_it(house, wording):
    house.landlord.deletes_needed = 99
    interrupted(house, lambda: signal.raise_signal(signal.SIGINT))
    assert len(house.landlord.alive) == 1
    assert house.told[-1] == wording
    assert house.entry.ended is None


def test_keep_leaves_the_pod_and_says_so(house, wording):
    with house.rent_pod(keep=True):
        pass
    assert len(house.landlord.alive) == 1
    assert house.entry.keep
    assert house.told[-1] == wording


def test_keep_does_not_keep_a_pod_that_was_never_ready(house, refusal):
    house.landlord.ready_after = 1e9
    with refusal(RemoteError), house.rent_pod(keep=True):
        raise AssertionError
    assert house.landlord.alive == []
    assert "30 min, $1.29" in house.told[-1]


@pytest.mark.parametrize("fault", ["refusing", "lying", "failing", "vanishing"])
def test_an_offer_that_comes_to_nothing_gives_way_to_the_next(house, fault):
    """An offer is refused, costs more than offered, fails, or disappears while the pod starts."""

    def take_away():
        if house.landlord.alive and house.landlord.alive[0]["_cloud"] == "2A100.cheap":
            house.landlord.vanish(house.landlord.alive[0]["id"])

    if fault == "vanishing":
        house.on_sleep = take_away
    else:
        found = {"refusing": True, "lying": 25.80, "failing": "no driver"}[fault]
        setattr(house.landlord, fault, {"2A100.cheap": found})
    with house.rent_pod(max_price=3):
        assert [p["_cloud"] for p in house.landlord.alive] == ["2A100.middle"]
        assert house.entry.price_per_hour == 2.90
    assert house.landlord.alive == []


def test_when_all_refuse_nothing_is_left(house, refusal):
    house.landlord.refusing = {"2A100.cheap", "2A100.middle", "2A100.dear"}
    with refusal(RemoteError), house.rent_pod(max_price=9):
        raise AssertionError
    assert house.entry.ended is not None
    assert house.entry.cost(house.time.now()) == 0


def test_an_empty_wallet_is_not_tried_again_elsewhere(house):
    house.landlord.fault("POST", "/pods", times=9, code=402, body=b'{"detail": "Insufficient funds"}')
    with pytest.raises(AccountError, match="402"), house.rent_pod():
        raise AssertionError
    assert sum(method == "POST" for method, path, _ in house.landlord.requests if "pods" in path) == 1
    assert house.landlord.alive == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"max_price": 2.0}, r"3 costs more than --max-price 2.*cheapest costs \$2\.58 an hour"),
        ({"gpus": GpuSpec(count=3, type="A100_80GB")}, "3 has 2 GPUs"),
        ({"gpus": GpuSpec(count=1, type="B200_180GB")}, "offers no B200_180GB now"),
        ({"region": ("africa",)}, "1 is in canada"),
        ({"disk_gb": 5000}, "has no disk of 5000 GB"),
    ],
)
def test_when_nothing_fits_the_reasons_are_counted(house, changes, reason):
    with pytest.raises(RemoteError, match=reason), house.rent_pod(**changes):
        raise AssertionError
    assert house.ledger.entries() == []
    assert not any(method == "POST" for method, _, _ in house.landlord.requests)


@pytest.mark.parametrize("region", ["canada", "CA", "ca-1"])
def test_a_region_can_be_a_country_or_a_data_centre(house, region):
    with house.rent_pod(region=(region,)):
        assert [p["_cloud"] for p in house.landlord.alive] == ["2A100.dear"]


def test_nothing_is_ordered_before_the_price_is_confirmed(house):
    house.answer = False
    with pytest.raises(RemoteError, match="not confirmed"), house.rent_pod(yes=False):
        raise AssertionError
    assert house.asked == [2.58]
    assert not any(method == "POST" for method, _, _ in house.landlord.requests)
    assert house.ledger.entries() == []


def test_a_higher_price_is_asked_for_again(house):
    house.landlord.refusing = {"2A100.cheap"}
    house.landlord.rows.append(row("2A100.same", "A100_80GB", 2, "nebius", 2.58))
    house.landlord.failing = {"2A100.same": "broken"}
    with house.rent_pod(yes=False):
        assert [p["_cloud"] for p in house.landlord.alive] == ["2A100.middle"]
    assert house.asked == [2.58, 2.90]


def test_yes_alone_confirms_the_price_of_the_first_offer_only(house):
    house.landlord.refusing = {"2A100.cheap", "2A100.same"}
    house.landlord.rows.append(row("2A100.same", "A100_80GB", 2, "nebius", 2.58))
    with (
        pytest.raises(RemoteError, match=r"costs \$2\.90 an hour, .*\$2\.58.*--max-price 2\.90"),
        house.rent_pod(),
    ):
        raise AssertionError
    assert ordered(house) == ["2A100.cheap", "2A100.same"]
    assert (house.asked, house.landlord.alive) == ([], [])
    assert house.entry.ended is not None


def test_a_pod_above_the_limit_is_given_back_though_its_offer_was_below(house, refusal):
    house.landlord.lying = {"2A100.cheap": 2.59}  # accepted as 2.58, but above a limit of 2.58
    with refusal(RemoteError), house.rent_pod(max_price=2.58):
        raise AssertionError
    assert (ordered(house), house.landlord.alive) == (["2A100.cheap"], [])


def test_an_order_without_an_answer_that_arrives_late_is_ended_too(house, wording):
    late = []
    pods = house.provider.pods

    def blind():
        return [pod for pod in pods() if house.landlord.pods[pod.id]["_cloud"] != "2A100.cheap" or late]

    house.provider.pods = blind
    house.landlord.fault("POST", "/pods", code=504, done=True)
    house.on_sleep = lambda: late.append(1) if house.time.now() - 1_800_000_000 > 200 else None
    with house.rent_pod(max_price=3):
        assert [p["_cloud"] for p in house.landlord.alive] == ["2A100.middle"]
    assert [text for text in house.told if "second pod" in text] == wording


@pytest.mark.parametrize("set_forward", [0.0, 86_400.0])
def test_the_end_is_ordered_until_it_is_confirmed(house, set_forward):
    """The clock is set during each wait."""
    house.on_sleep = lambda: setattr(house.time, "set_forward", house.time.set_forward + set_forward)
    house.landlord.deletes_needed = 3
    with house.rent_pod():
        house.landlord.fault("DELETE", "/pods", times=2, cut=True)
        house.landlord.fault("GET", "/pods", times=2, code=503)
    assert house.landlord.alive == []


def test_an_end_that_is_never_confirmed_is_an_error_that_says_what_to_do(house, refusal, wording):
    house.landlord.deletes_needed = 10_000
    with refusal(RemoteError), house.rent_pod():
        pass
    assert house.entry.ended is None
    with pytest.raises(ValueError, match="first"), house.rent_pod():
        raise ValueError("first")
    assert house.told[-1] == wording


def test_a_key_that_is_withdrawn_ends_the_wait_for_the_end(house, refusal):
    with refusal(RemoteError), house.rent_pod():
        house.landlord.fault("GET", "/pods", times=999, code=401)


def test_hours_that_are_over_are_told(house, refusal):
    with house.rent_pod(max_hours=1.5) as pod:
        house.time.sleep(3600)
        pod.check()
        house.time.sleep(1800)
        with refusal(RemoteError):
            pod.check()


def test_a_pod_that_is_gone_is_told(house):
    with house.rent_pod() as pod:
        house.landlord.vanish(pod.id)
        with pytest.raises(PodGoneError, match="gone"):
            pod.check()
    assert house.entry.ended is not None


def test_hosts_are_neither_made_nor_ended(house):
    request = RemoteRequest(provider="ssh", host=("me@10.0.0.1:2200",), max_hours=1)
    host = own_host(request, run_id="ab12cd34")
    assert list(map(str, host.ssh)) == ["me@10.0.0.1:2200"]
    assert host.identity_file is None
    host.check()
    house.time.sleep(3600)
    with pytest.raises(RemoteError, match="max-hours"):
        host.check()
    assert (house.asked, house.told, house.ledger.entries()) == ([], [], [])


@pytest.mark.parametrize("hosts", [(), ("a b",), ("-oProxyCommand=x",), ("h:99999",)])
def test_hosts_that_are_none(hosts):
    with pytest.raises(UsageError, match="--host"):
        host_target(hosts)


def test_ctrl_c_while_an_offer_is_given_up_rents_no_other(house):
    house.landlord.lying = {"2A100.cheap": 25.80}
    presses = iter([signal.SIGINT])
    house.on_sleep = lambda: [signal.raise_signal(number) for number in presses]
    with pytest.raises(KeyboardInterrupt), house.rent_pod():
        raise AssertionError
    assert house.landlord.alive == []
    assert ordered(house) == ["2A100.cheap"]


def test_a_pod_is_ended_though_the_ledger_is_lost(house, caplog, wording):
    with house.rent_pod():
        for path in house.ledger.folder.iterdir():
            path.unlink()
        house.ledger.folder.rmdir()
        house.ledger.folder.write_text("in the way")
    assert house.landlord.alive == []
    assert caplog.messages == wording


def test_max_hours_are_over_before_the_pod_is_ready(house, refusal):
    with refusal(RemoteError), house.rent_pod(max_hours=0.05):
        raise AssertionError
    assert house.landlord.alive == []
