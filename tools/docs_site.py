"""Hooks of mkdocs: the navigation from docs/README.md, pages of other folders, and links to them."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = {
    "README.md": "index.md",
    "docs/README.md": "documentation.md",
    "recipes/README.md": "tutorials/recipes.md",
    "benchmarks/README.md": "explanation/benchmarks.md",
    "environments/dakota1890/README.md": "explanation/dakota1890.md",
    "environments/dakota1890/RESULTS.md": "explanation/dakota1890-results.md",
    "environments/text_2048/README.md": "explanation/text_2048.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
"""Pages of the site by their files outside of docs/, or with another name there."""

PYTHON = "reference/python.md"
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_PICTURE = re.compile(r"!\[[^\]]*\]\(([^):]+)\)")
_ITEM = re.compile(r"\[([^\]]+)\]\(([^)#]+\.md)\)")
_FENCE = re.compile(r"(^ *```.*?^ *```)", re.DOTALL | re.MULTILINE)
_LIST_AFTER_TEXT = re.compile(r"^((?! *(?:[-*|#]|\d+\. )).*\S.*)\n(?=(?:- |1\. ))", re.MULTILINE)
"""A line of text directly before a list, which GitHub renders as a list, but Python-Markdown does not."""


def on_config(config: Any) -> Any:
    """Set the navigation: the headings and links of docs/README.md, then the pages of other folders."""
    nav: list[dict[str, Any]] = [{"Home": OUTSIDE["README.md"]}]
    for section in (ROOT / "docs/README.md").read_text().split("\n## ")[1:]:
        title, _, body = section.partition("\n")
        ungrouped, *groups = re.split(r"^\*\*(.+)\*\*$", body, flags=re.MULTILINE)
        pages = _entries(ungrouped)
        for name, items in zip(groups[::2], groups[1::2], strict=True):
            pages.append({name: _entries(items)})
        nav.append({title: pages})
    by_title = {next(iter(entry)): entry for entry in nav}
    by_title["Reference"]["Reference"].append({"Python": PYTHON})
    named = re.findall(r"'([^']+\.md)'", repr(nav))
    others = [{_title(file): page} for file, page in OUTSIDE.items() if page not in named]
    config["nav"] = [*nav, {"Project": others}]
    return config


def _entries(items: str) -> list[dict[str, Any]]:
    """Return the entries of the navigation for the links of a list."""
    links = [(text, _site_path(PurePosixPath("docs"), target)) for text, target in _ITEM.findall(items)]
    return [{text: page} for text, page in links if page is not None]


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of other folders with their pictures, and the page of the Python names."""
    index = files.get_file_from_path("README.md")
    if index is not None:
        files.remove(index)  # the home page is the README of the repository
    for file, page in OUTSIDE.items():
        content = (ROOT / file).read_text()
        files.append(File.generated(config, page, content=content))
        for picture in _PICTURE.findall(content):
            path = str((ROOT / file).parent / picture)
            files.append(File.generated(config, f"{Path(page).parent}/{picture}", abs_src_path=path))
    from buckeye import __all__ as names

    text = "".join(f"::: buckeye.{name}\n\n" for name in names if not name.startswith("_"))
    files.append(File.generated(config, PYTHON, content=f"# Python\n\n{text}"))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links to files outside of docs/ to their page; without one, leave the text of the link.

    Words after the language of a code block, which tests read, are removed. A list after a line of text gets
    an empty line before it.
    """
    parts = _FENCE.split(markdown)  # every second part is a code block
    parts[::2] = [_LIST_AFTER_TEXT.sub(r"\1\n\n", part) for part in parts[::2]]
    markdown = "".join(parts)
    markdown = re.sub(r"^(\s*```\w+) .*$", r"\1", markdown, flags=re.MULTILINE)
    source = {page_: file for file, page_ in OUTSIDE.items()}.get(page.file.src_uri)
    folder = PurePosixPath(source).parent if source else PurePosixPath("docs", page.file.src_uri).parent

    def replace(link: re.Match[str]) -> str:
        text, target = link[1], link[2]
        path, _, anchor = target.partition("#")
        if not path or "://" in target or target.startswith("mailto:"):
            return link[0]
        found = _site_path(folder, path)
        if found is None:
            if not (ROOT / folder / path).exists():
                return link[0]  # mkdocs reports it
            return text
        here = PurePosixPath(page.file.src_uri).parent
        relative = os.path.relpath(found, here)
        return f"[{text}]({relative}{'#' + anchor if anchor else ''})"

    return _LINK.sub(replace, markdown)


def _site_path(folder: PurePosixPath, target: str) -> str | None:
    """Return the page of a file that is linked from a folder of the repository; None if it has none."""
    path = os.path.normpath(folder / target)
    if path in OUTSIDE:
        return OUTSIDE[path]
    inside = PurePosixPath(path)
    if inside.parts[:1] == ("docs",) and (ROOT / path).is_file():
        return str(inside.relative_to("docs"))
    return None


def _title(file: str) -> str:
    return (ROOT / file).read_text().partition("\n")[0].removeprefix("# ")
