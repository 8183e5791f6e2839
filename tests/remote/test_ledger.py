"""Ledger files, which keep pods from being forgotten."""

from __future__ import annotations

import dataclasses
import json

import pytest

from buckeye.errors import RemoteError
from buckeye.remote.ledger import Ledger, PodEntry
from tests.remote.landlord import KEY


@pytest.fixture
def entry() -> PodEntry:
    return PodEntry(
        name="buckeye-a-1",
        run_id="a",
        provider="prime",
        gpus="2xA100_80GB",
        price_per_hour=2.5,
        ordered=0.0,
    )


def test_two_processes_do_not_look_after_one_pod(house, entry):
    with (
        house.ledger.mark_supervised(entry.name),
        pytest.raises(RemoteError, match="another process"),
        Ledger().mark_supervised(entry.name),
    ):
        raise AssertionError


def test_a_damaged_file_is_told_and_passed_over(house, entry, caplog, wording):
    house.ledger.write(entry)
    (house.ledger.folder / "buckeye-b-2.json").write_text('{"name": ')
    assert house.ledger.entries() == [entry]
    assert caplog.messages == wording


def test_hours_and_cost(entry):
    assert (entry.hours(5400), entry.cost(5400)) == (1.5, 3.75)
    ended = dataclasses.replace(entry, pod_id="p", ended=3600.0)
    assert (ended.hours(1e9), ended.cost(1e9)) == (1.0, 2.5)
    assert dataclasses.replace(entry, ended=3600.0).cost(1e9) == 0  # the pod was never created


def test_the_file_has_no_secret_and_can_be_read(house):
    with house.rent_pod() as pod:
        text = (house.ledger.folder / f"{pod.name}.json").read_text()
        assert KEY not in text
        assert json.loads(text)["run_id"] == "ab12cd34"
