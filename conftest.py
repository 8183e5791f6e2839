"""Fixtures of all tests. A session has its own folders, so two sessions can run at once."""

import gc
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from tests.wording import refusal, wording

__all__ = ["refusal", "wording"]

settings.register_profile(
    "any machine",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("quick", settings.get_profile("any machine"), max_examples=15)
settings.load_profile("any machine")

_SESSION_FOLDER = pytest.StashKey[Path]()


_SHARED_CACHES = {
    "UV_CACHE_DIR": ".cache/uv",
    "PIP_CACHE_DIR": ".cache/pip",
    "npm_config_cache": ".npm",
    "PLAYWRIGHT_BROWSERS_PATH": ".cache/ms-playwright",
}
"""Caches of package managers and browsers, which tests may share with each other and with the user."""


def pytest_configure(config: pytest.Config) -> None:
    """Give the session its own home, cache, configuration, state and temporary folders, for workers too."""
    gc.disable()  # while tests are collected: half of that time, and nothing of it is garbage
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # a session starts hundreds of interpreters
    home, root = Path.home(), Path(tempfile.mkdtemp(prefix="buckeye-tests-"))
    config.stash[_SESSION_FOLDER] = root
    for name, usual in _SHARED_CACHES.items():
        os.environ.setdefault(name, str(home / usual))
    folders = {"HOME": "home", "TMPDIR": "tmp", "PYTEST_DEBUG_TEMPROOT": "pytest"}
    folders |= {f"XDG_{kind}_HOME": kind.lower() for kind in ("CACHE", "CONFIG", "DATA", "STATE")}
    for name, folder in folders.items():
        (root / folder).mkdir()
        os.environ[name] = str(root / folder)
    root.chmod(0o755)  # tests that run as another user look into it
    tempfile.tempdir = None


def pytest_collection_finish() -> None:
    """Collect garbage again, but do not look at what was imported."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure(config: pytest.Config) -> None:
    if (root := config.stash.get(_SESSION_FOLDER, None)) is not None:
        shutil.rmtree(root, ignore_errors=True)


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
    """Send log lines to pytest again after a test, or a fixture of a module, ran rollouts in this process."""
    logger = logging.getLogger("buckeye")
    logger.propagate = True
    logger.setLevel(logging.NOTSET)
    logger.handlers.clear()
