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
    (contract,) = [one for one in project["tool"]["importlinter"]["contracts"] if one["type"] == "layers"]
    layers = [re.findall(r"buckeye\.(\w+)", layer) for layer in contract["layers"]]
    rooms = re.findall(r"(?m)^(\w+)", drawn)
    height = {room: number for number, layer in enumerate(layers) for room in layer}
    assert len(rooms) == len(set(rooms))
    assert set(rooms) == height.keys()
    assert rooms == sorted(rooms, key=height.get)


def test_no_file_is_passed_twice_on_a_way():
    for way in PAGE.split("## The way of ")[1:]:
        files = re.findall(r"\(\.\./(src/[^)]+\.py)\)", way)
        assert len(files) == len(set(files)) > 14
