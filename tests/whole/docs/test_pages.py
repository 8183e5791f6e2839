"""Every page of docs/ can be found, and what a page points to is there."""

import re
from datetime import date

import pytest
from tests.cli.printed_commands import problem
from tests.places import ROOT

INDEX = ROOT / "docs" / "README.md"
PAGES = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_every_page_has_a_line_in_the_index():
    lines = re.findall(r"^- \[(.+?)\]\((.+?)\): \S.*", INDEX.read_text(encoding="utf-8"), re.M)
    listed = [target for _, target in lines if "/" not in target]
    assert sorted(listed) == sorted(
        page.name for page in PAGES if page.parent == INDEX.parent and page != INDEX
    )
    assert [title for title, target in lines if target == title] == listed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_points_to_is_there(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    for target, _, heading in (link.partition("#") for link in re.findall(r"\]\(([^)\s]+)\)", text)):
        if "://" in target:
            continue
        there = page.parent / target if target else page
        assert there.exists(), target
        if heading:
            assert heading in _headings(there), f"{target}#{heading}"


def test_measured_figures_say_when_on_what_and_by_which_command():
    """On the pages that have any; `python` commands are programs that are there, others are Buckeye's."""
    found = {page: _measured(page) for page in PAGES if "Measured" in page.read_text(encoding="utf-8")}
    names = {page.name for page in found if page.parent == INDEX.parent}
    assert names >= {"algorithms.md", "dakota1890.md", "gateway.md", "workers.md", "tutorial.md"}
    for page, lines in found.items():
        for line in lines:
            when, what, command = re.match(r"(\d{4}-\d\d-\d\d), (.+), by `(.+?)`", line).groups()
            assert date.fromisoformat(when)
            assert re.search(r"\bcores\b", what), (page.name, line)
            _check(command)


def test_every_benchmark_on_its_page_says_it():
    _, *sections = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8").split("\n## ")
    assert [section.splitlines()[0] for section in sections if "\nMeasured: " not in section] == []


def test_the_tests_that_pages_name_are_there():
    """Of a formula, a page says which test computes it."""
    named = [
        (page.name, path, test)
        for page in PAGES
        for path, test in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text(encoding="utf-8"))
    ]
    assert len(named) >= 10
    for page, path, test in named:
        assert f"def {test}(" in (ROOT / path).read_text(encoding="utf-8"), (page, path, test)


def _measured(page):
    text = page.read_text(encoding="utf-8")
    return [" ".join(found.split()) for found in re.findall(r"Measured: (.+?)(?:\n\n|$)", text, re.S)]


def _check(command):
    program, *words = command.split()
    if program != "python":
        assert problem(command) is None, command
        return
    script = words[1].replace(".", "/") + ".py" if words[0] == "-m" else words[0]
    source = (ROOT / script).read_text(encoding="utf-8")
    assert all(word in source for word in words if word.startswith("--")), command


def _headings(page):
    """As GitHub calls the headings of a page in addresses."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}
