"""From the page alone the cause of a planted fault is read with one click, and what shows it with two.

    python -m tests.ui.test_faults

makes the pictures of it, docs/screens/fault-NAME.png."""

import tempfile
from pathlib import Path

import pytest

from tests.places import ROOT
from tests.ui.browsing import CHROMIUM, browsing, serving
from tests.waiting import HANG

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no browser: apt-get install chromium"),
]
CAUSES = {
    "sign of the advantage": "the sign of the advantages is turned",
    "stale weights": "new weights do not reach the engines",
    "truncation at half": "nearly every reply was cut off before its end",
    "grader random": "the grader does not judge by the answer alone",
    "lr x 30": "the updates are too large (trainer.optim.lr = 0.15)",
    "environment that answers late": "the environment answers late, and everything waits for it",
}
"""A planted fault of `tests.analysis.diagnosis.catalogue`, and the cause as the page has to tell it."""


def play_all(place):
    """A run with each fault in it, by its name."""
    import torch

    from tests.analysis.diagnosis.catalogue import FAULTS
    from tests.analysis.diagnosis.small_runs import play, warm_model

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        warm = warm_model(Path(folder))
        for name in CAUSES:
            fault = FAULTS[name]
            play(place / name.replace(" ", "-"), fault.model(warm, Path(folder)), fault.small, fault.plant())
    torch.set_num_threads(threads)


def read_cause(page, name):
    """Click on a run in the list; the cause that stands first."""
    page.click(f"tbody a:text-is('{name.replace(' ', '-')}')")
    page.wait_for_selector(".finding")
    return page.locator(".finding dd").first.inner_text()


def see_evidence(page):
    """Click on what shows it; the kind of page that opens."""
    page.click(".finding a")
    page.wait_for_selector(".answer, table.groups, .log, section .bar + .charts .chart")
    return page.evaluate("location.hash").rpartition("/")[2].partition("?")[0]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    place = tmp_path_factory.mktemp("faults")
    play_all(place)
    with serving(place) as base:
        yield base


@pytest.mark.parametrize("name", CAUSES)
def test_the_cause_is_read_with_one_click_and_seen_with_two(served, opened, name):
    page = opened(served)
    assert CAUSES[name] in read_cause(page, name)
    assert see_evidence(page) in ("rollouts", "overview", "logs")


def take_pictures(base):
    """Of each fault, as it is after the first click."""
    with browsing() as browser:
        for name in CAUSES:
            page = browser.new_page(viewport={"width": 1200, "height": 620})
            page.set_default_timeout(HANG * 1000)
            page.goto(base)
            read_cause(page, name)
            page.wait_for_timeout(1500)  # charts are drawn
            page.screenshot(path=ROOT / "docs" / "screens" / f"fault-{name.replace(' ', '-')}.png")
            page.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as runs:
        play_all(Path(runs))
        with serving(runs) as address:
            take_pictures(address)
