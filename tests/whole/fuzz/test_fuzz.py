"""Spoilt input of every kind is accepted or refused with a message: never an "unexpected" error, a file
written, or no end."""

import json
import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from buckeye.errors import BuckeyeError

from .loaders import LOADERS
from .mutations import spoilt
from .watchdog import ends

FEW = 4
MANY = int(os.environ.get("BUCKEYE_FUZZ_CASES", "20000"))
FOUND = Path(__file__).parent / "found"
"""`<loader>/<name>`: files that were once not refused as they should be."""
COUNTS = "BUCKEYE_FUZZ_COUNTS"
"""Names a file that the counts of a campaign are written to, as JSON."""


@pytest.fixture(scope="module")
def counts():
    found = {}
    yield found
    if COUNTS in os.environ:
        Path(os.environ[COUNTS]).write_text(json.dumps(found, indent=1))


def attempt(loader, folder, content):
    """What comes of a spoilt file."""
    file = folder / loader.spoilt
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    before = contents(folder)
    try:
        with ends():
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
    for name, content in loader.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return (folder / loader.spoilt).read_bytes()


def try_many(name, folder, count, counts, *, fixed):
    loader = LOADERS[name]
    seed = begin(loader, folder)
    known = counts.setdefault(name, Counter())

    @settings(
        max_examples=count,
        deadline=None,
        derandomize=fixed,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(spoilt(seed, loader.kind))
    def check(content):
        known["cases"] += 1
        try:
            known[attempt(loader, folder, content)] += 1
        except BaseException:
            known["unexpected"] += 1
            raise

    check()


@pytest.mark.parametrize("name", LOADERS)
def test_what_is_read_is_accepted_as_it_should_be(name, tmp_path):
    loader = LOADERS[name]
    content = begin(loader, tmp_path)
    loader.load(tmp_path)
    assert attempt(loader, tmp_path, content) == "accepted"


@pytest.mark.parametrize("name", LOADERS)
def test_spoilt_input_is_refused_in_words(name, tmp_path, counts):
    try_many(name, tmp_path, FEW, counts, fixed=True)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", LOADERS)
def test_much_spoilt_input_is_refused_in_words(name, tmp_path, counts):
    try_many(name, tmp_path, -(-MANY // len(LOADERS)), counts, fixed=False)


@pytest.mark.parametrize(
    "file", sorted(FOUND.glob("*/*")), ids=lambda file: f"{file.parent.name}/{file.name}"
)
def test_what_was_once_not_refused_in_words(file, tmp_path):
    loader = LOADERS[file.parent.name]
    begin(loader, tmp_path)
    attempt(loader, tmp_path, file.read_bytes())
