"""A report as blocks, which are written as Markdown and as one HTML file.

Every text may come from a model: it is escaped here, and what cannot be seen is made visible. Nothing is
loaded or run by the HTML file: its policy forbids that, and its pictures lie within it.
"""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files

from buckeye.base.json_lines import printable


@dataclass(frozen=True, slots=True)
class Heading:
    """The title of a section."""

    text: str


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True, slots=True)
class Bullets:
    """A list."""

    items: Sequence[str]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows below a header. With `figures` all columns but the first are set to the right."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    figures: bool = True


@dataclass(frozen=True, slots=True)
class Picture:
    """What it shows, the name of its PNG beside the Markdown, and it as SVG."""

    text: str
    file: str
    svg: bytes


@dataclass(frozen=True, slots=True)
class Folded:
    """What is opened by those who want it: a line, and below it labelled texts, which are shown as they
    are."""

    title: str
    parts: Sequence[tuple[str, str]]


Block = Heading | Text | Bullets | Table | Picture | Folded


def to_markdown(title: str, blocks: Sequence[Block]) -> str:
    """The document as GitHub reads it."""
    return "\n\n".join([f"# {_markdown(title)}", *map(_markdown_block, blocks)]) + "\n"


def to_html(title: str, blocks: Sequence[Block]) -> str:
    """The document as one file, which needs nothing else."""
    style = files("buckeye_audit.report").joinpath("report.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_html(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{_html(title)}</h1>\n" + "\n".join(map(_html_block, blocks)) + "\n</main>\n</body>\n</html>\n"
    )


def markdown_table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    escape: Callable[[str], str],
    *,
    figures: bool = True,
) -> str:
    """A table of Markdown; `escape` keeps a cell within its bounds."""
    rule = ["---", *["---:" if figures else "---"] * (len(header) - 1)]
    lines = [header, rule, *rows]
    cells = ([line if line is rule else [escape(cell) for cell in line]][0] for line in lines)
    return "\n".join("| " + " | ".join(line) + " |" for line in cells)


_MARKS = re.compile(r"([\\`*_\[\]|~#$])")


def _markdown(text: str) -> str:
    """One line that means itself."""
    line = " ".join(printable(text).split())
    return _MARKS.sub(r"\\\1", line).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _markdown_block(block: Block) -> str:
    match block:
        case Heading(text):
            return f"## {_markdown(text)}"
        case Text(text):
            return _markdown(text)
        case Bullets(items):
            return "\n".join(f"- {_markdown(item)}" for item in items)
        case Table(header, rows, figures):
            return markdown_table(header, rows, _markdown, figures=figures)
        case Picture(text, file):
            return f"![{_markdown(text)}]({file})"
        case Folded(title, parts):
            inner = "\n\n".join(f"{_markdown(label)}\n\n{_fenced(text)}" for label, text in parts)
            return f"<details><summary>{_html(title)}</summary>\n\n{inner}\n\n</details>"


def _fenced(text: str) -> str:
    """A text as it is, within more backticks than it has itself."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{printable(text)}\n{fence}"


def _html(text: str) -> str:
    return html.escape(printable(text))


def _html_block(block: Block) -> str:
    match block:
        case Heading(text):
            return f"<h2>{_html(text)}</h2>"
        case Text(text):
            return f"<p>{_html(text)}</p>"
        case Bullets(items):
            return "<ul>" + "".join(f"<li>{_html(item)}</li>" for item in items) + "</ul>"
        case Table(header, rows, figures):
            kind = ' class="figures"' if figures else ""
            head = "".join(f"<th>{_html(cell)}</th>" for cell in header)
            body = "".join(
                "<tr>" + "".join(f"<td>{_html(cell)}</td>" for cell in row) + "</tr>\n" for row in rows
            )
            return f"<div><table{kind}><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>"
        case Picture(text, _, svg):
            data = base64.b64encode(svg).decode()
            return f'<img alt="{_html(text)}" src="data:image/svg+xml;base64,{data}">'
        case Folded(title, parts):
            inner = "".join(f"<h3>{_html(label)}</h3>\n<pre>{_html(text)}</pre>\n" for label, text in parts)
            return f"<details><summary>{_html(title)}</summary>\n{inner}</details>"
