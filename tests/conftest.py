"""For all tests: what they start is not remembered as a run of the person who runs them."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def _own_state_directory(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def _no_stop_is_requested(monkeypatch):
    """A test that asks its own process to stop asks that of no other test."""
    monkeypatch.setattr("buckeye.process._stop_requested", False)
