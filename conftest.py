"""For all tests: nothing of the person who runs them is touched, and neither a slow machine nor the way in
which they were started decides."""

import logging
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "any machine",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("any machine")


LONGEST = (
    "test_supervision.py",
    "test_guide.py",
    "test_rl.py",
    "test_extras.py",
    "test_adapters.py",
)
"""Files of a minute, which begin first: one process plays a file, and none is to play alone at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)


@pytest.fixture(autouse=True, scope="session")
def _own_state_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def _interrupts_are_heard(request: pytest.FixtureRequest) -> Iterator[None]:
    """A script starts what ends in `&` with SIGINT ignored; processes hand that down, also to those that a
    test means to stop so. A test that leaves another handler to the next ones fails itself."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    left = signal.signal(signal.SIGINT, before)
    assert left is signal.default_int_handler, f"{request.node.nodeid} leaves SIGINT to {left}"


@pytest.fixture(autouse=True)
def _no_stop_is_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that asks its own process to stop asks that of no other test."""
    monkeypatch.setattr("buckeye.base.process._stop_requests", 0)


@pytest.fixture(autouse=True)
def _logs_are_as_before_a_run() -> None:
    """What a test, or a fixture of a module, has played in this process has sent log lines elsewhere."""
    logger = logging.getLogger("buckeye")
    logger.propagate = True
    logger.setLevel(logging.NOTSET)
    logger.handlers.clear()
