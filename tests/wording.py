"""Compare user-visible text with the snapshots in `tests/wording/`; `make wording` rewrites them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion
from syrupy.extensions.amber import AmberSnapshotExtension
from syrupy.location import PyTestLocation

from buckeye.errors import BuckeyeError

REPOSITORY = Path(__file__).resolve().parent.parent

_VARYING = (
    (re.compile(r"[\w./-]*/pytest-of-[^/\s]+/pytest-\d+/(?:popen-gw\d+/)?(?:[\w\[\]-]|\.(?=\w))+"), "<tmp>"),
    (re.compile(re.escape(str(REPOSITORY))), "<repository>"),
    (re.compile(re.escape(sys.prefix)), "<venv>"),
    (re.compile(r"(127\.0\.0\.1|localhost|\[::1\]):\d+"), r"\1:<port>"),
    (re.compile(r"\b\d\d:\d\d:\d\d\b"), "<time>"),
    (re.compile(r"(maximum recursion depth exceeded)[\w ]*"), r"\1"),
    (re.compile(r"\.tmp-\d+"), ".tmp-<process>"),
    (re.compile(r"\b0x[0-9a-f]{6,}\b"), "<address>"),
)
"""Patterns of texts that differ between machines, and their replacements in a snapshot."""


class WordingExtension(AmberSnapshotExtension):
    """Snapshots of all tests in one folder, below the path of their test file."""

    @classmethod
    def dirname(cls, *, test_location: PyTestLocation) -> str:
        folder = Path(test_location.filepath).resolve().parent.relative_to(REPOSITORY)
        return str(REPOSITORY / "tests" / "wording" / str(folder).removeprefix("tests/"))


def _mask(*, data: Any, path: Any) -> Any:
    if not isinstance(data, str):
        return data
    for pattern, shown in _VARYING:
        data = pattern.sub(shown, data)
    return data


@pytest.fixture
def wording(snapshot: SnapshotAssertion) -> SnapshotAssertion:
    """Snapshot of this test: `assert text == wording`."""
    return snapshot.use_extension(WordingExtension).with_defaults(matcher=_mask)


@pytest.fixture
def refusal(wording: SnapshotAssertion) -> Callable[[type[Exception]], AbstractContextManager[Any]]:
    """Return a check like `pytest.raises` that also compares the error's code and message to the snapshot."""

    @contextmanager
    def check(kind: type[Exception]) -> Iterator[pytest.ExceptionInfo[Exception]]:
        with pytest.raises(kind) as caught:
            yield caught
        error = caught.value
        code = f"[{error.code}] " if isinstance(error, BuckeyeError) else ""
        assert f"{code}{error}" == wording

    return check
