"""Offers as users see them."""

from __future__ import annotations

import sys

import pytest

from buckeye.errors import UsageError
from buckeye.launch.preflight.devices import GpuSpec
from buckeye.remote.base import Offer
from buckeye.remote.connection import parse_target
from buckeye.remote.offers import confirm_price


def offer(price: float, **given) -> Offer:
    return Offer(
        gpus=GpuSpec(count=2, type="A100_80GB"),
        price_per_hour=price,
        disk_gb=200,
        cloud="datacrunch",
        region="eu_north",
        location="FIN-01, FI",
        socket="SXM5",
        security="secure_cloud",
        **given,
    )


def test_where_nobody_can_be_asked_the_flag_is_named(monkeypatch):
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    with pytest.raises(UsageError, match="--yes"):
        confirm_price(offer(2.5))


@pytest.mark.parametrize(("answer", "rented"), [("y", True), (" Yes ", True), ("", False), ("no", False)])
def test_only_a_yes_rents(monkeypatch, answer, rented, wording):
    asked = []
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or answer)
    assert confirm_price(offer(2.5)) is rented
    assert asked == wording


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("host", "root@host:22"),
        ("me@host:2200", "me@host:2200"),
        ("me@[2001:db8::1]:2200", "me@2001:db8::1:2200"),
        ("ssh me@host:1 -p 2", "me@host:2"),
    ],
)
def test_addresses(text, target):
    assert str(parse_target(text)) == target


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a b",
        "me@",
        "@host",
        "-oX@h",
        "me@-h",
        "h:0",
        "h:65536",
        "h:x",
        "h -p",
        "h -p 1 -v",
        "me@h;ls",
        "[::1",
        "'",
    ],
)
def test_what_is_no_address(text):
    with pytest.raises(ValueError, match=r".+"):
        parse_target(text)
