"""Damaged input of every kind is accepted or refused with a message.

It never causes an "unexpected" error, a written file, or an endless loop.
"""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from buckeye.errors import BuckeyeError

from .loaders import LOADERS
from .mutations import spoilt

pytestmark = pytest.mark.timeout(300)
FEW = 4
MANY = int(os.environ.get("BUCKEYE_FUZZ_CASES", "20000"))
FOUND = Path(__file__).parent / "found"
"""Files `<loader>/<name>` that once were not refused correctly."""


def attempt(loader, folder, content):
    """Load a damaged file and return the outcome."""
    file = folder / loader.spoilt
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    before = contents(folder)
    try:
        loader.load(folder)
        outcome = "accepted"
    except (BuckeyeError, *loader.refusals) as error:
        outcome = "refused" if str(error).strip() else f"{type(error).__name__} without a word"
    assert outcome in ("accepted", "refused"), outcome
    assert contents(folder) == before, "a loader has written"
    return outcome


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def begin(loader, folder):
    loader.prepare(folder)
    return (folder / loader.spoilt).read_bytes()


def try_many(name, folder, count, *, fixed):
    loader = LOADERS[name]
    seed = begin(loader, folder)

    @settings(
        max_examples=count,
        deadline=120_000,
        derandomize=fixed,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(spoilt(seed, loader.kind))
    def check(content):
        attempt(loader, folder, content)

    check()


@pytest.mark.parametrize("name", LOADERS)
def test_what_is_read_is_accepted_as_it_should_be(name, tmp_path):
    loader = LOADERS[name]
    content = begin(loader, tmp_path)
    loader.load(tmp_path)
    assert attempt(loader, tmp_path, content) == "accepted"


@pytest.mark.parametrize("name", LOADERS)
def test_spoilt_input_is_refused_in_words(name, tmp_path):
    try_many(name, tmp_path, FEW, fixed=True)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", LOADERS)
def test_much_spoilt_input_is_refused_in_words(name, tmp_path):
    try_many(name, tmp_path, -(-MANY // len(LOADERS)), fixed=False)


@pytest.mark.parametrize(
    "file", sorted(FOUND.glob("*/*")), ids=lambda file: f"{file.parent.name}/{file.name}"
)
def test_what_was_once_not_refused_in_words(file, tmp_path):
    loader = LOADERS[file.parent.name]
    begin(loader, tmp_path)
    attempt(loader, tmp_path, file.read_bytes())
