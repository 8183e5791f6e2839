"""A service that fails at any question: no pod stays, and what it was and what it cost is told."""

from __future__ import annotations

import pytest

from buckeye.errors import RemoteError


@pytest.mark.parametrize("question", ["/availability", "/ssh_keys", "/pods/status"])
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"code": 401, "body": b'{"detail": "Invalid token"}'}, "Invalid token \\(401\\)"),
        ({"code": 402, "body": b'{"detail": "No funds"}'}, "No funds \\(402\\)"),
        ({"code": 429, "body": b'{"detail": "slow down"}'}, "too many requests \\(429\\)"),
        ({"code": 500}, "the service fails \\(500\\)"),
        ({"code": 200, "body": b'{"items": ['}, "no JSON object"),
        ({"code": 200, "body": b""}, "the answer is empty"),
        ({"code": 200, "body": b'{"strange": 1}'}, "strange"),
        ({"cut": True}, "no answer"),
    ],
)
def test_a_service_that_fails_leaves_nothing_and_is_told(house, question, fault, reason):
    """For longer than is waited, at every question on the way; the end of the pod is answered again."""
    house.landlord.fault("GET", question, times=400, **fault)

    def heal():
        if any(method == "DELETE" for method, _, _ in house.landlord.requests):
            house.landlord.faults.clear()

    house.on_sleep = heal
    with pytest.raises(RemoteError, match=reason), house.rented():
        raise AssertionError
    assert house.landlord.alive == []
    for entry in house.ledger.entries():
        if entry.ended is None:  # it was ordered, and nobody would confirm it
            assert f"terminate {entry.name}" in house.told[-1]
        else:
            assert entry.outcome.startswith("failed")
            assert house.told[-1].startswith(entry.name)
        assert "$" in house.told[-1]
