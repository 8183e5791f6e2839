"""docs/architecture.md names files that exist, and every room in the order of its imports."""

from __future__ import annotations

import re
import tomllib

from tests.places import ROOT

PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")


def test_every_link_leads_to_something():
    for target in re.findall(r"\]\((\.\./[^)]+)\)", PAGE):
        assert (ROOT / "docs" / target).exists(), target


def test_every_room_is_named():
    rooms = {path.parent.name for path in (ROOT / "src/buckeye").glob("*/__init__.py")}
    assert {room for room in rooms if not re.search(rf"\b{room}\b", PAGE)} == set()


def test_every_room_says_what_it_is_for():
    for init in (ROOT / "src").rglob("__init__.py"):
        assert init.read_text(encoding="utf-8").lstrip().startswith('"""'), init


def test_the_order_of_the_rooms_is_the_one_that_is_checked():
    drawn = PAGE.partition("## The rooms")[2].partition("```")[2].partition("```")[0]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    downwards = project["tool"]["importlinter"]["contracts"][0]
    layers = [re.findall(r"buckeye\.(\w+)", layer) for layer in downwards["layers"]]
    names = re.findall(r"(?m)^\w+", drawn)
    assert names == _in_order_drawn([room for layer in layers for room in layer], drawn)
    lines = [min(_line_of(room, drawn) for room in layer) for layer in layers]
    assert lines == sorted(set(lines))


def _in_order_drawn(rooms, drawn):
    return sorted(rooms, key=lambda room: _line_of(room, drawn))


def _line_of(room, drawn):
    place = re.search(rf"(?m)^{room}\b", drawn)
    assert place is not None, room
    return drawn.count("\n", 0, place.end())


def test_no_file_is_passed_twice_on_a_way():
    for way in PAGE.split("## The way of ")[1:]:
        files = re.findall(r"\(\.\./(src/[^)]+\.py)\)", way)
        assert len(files) == len(set(files)) > 14
