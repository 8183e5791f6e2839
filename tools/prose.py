"""Check the language of docstrings, comments, messages, pages and commit subjects against the style guide.

    prose.py [--base REV] [FILE ...]

Prints `FILE:LINE: FOUND -> WRITE` for each banned construction, and ends with 1 if there is any. Without
files, it checks all tracked Python and Markdown files, and the subjects of the commits since REV (default:
origin/main, if it exists). `tools/prose_allowed.txt` lists exceptions, one `FILE: TEXT` per line.
docs/contributing/style.md explains the rules.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
ALLOWED = Path(__file__).with_name("prose_allowed.txt")
SUBJECT_LENGTH = 65
_SUBJECT = re.compile(r"(?:[\w./-]+(?:, [\w./-]+)*: \S|Merge )")


class Rule(NamedTuple):
    """Banned construction, and what to write instead."""

    pattern: re.Pattern[str]
    instead: str


def _rule(pattern: str, instead: str) -> Rule:
    return Rule(re.compile(pattern, re.I | re.M), instead)


RULES = (
    _rule(
        r"\b(?:is|are|was|were) (?-i:no|none)\b(?! (?:longer|more|less|fewer|later|earlier)\b)",
        "`has no X`, `is not an X`, `no X found`",
    ),
    _rule(r"\b(?:nobody|somebody|whoever|whom|whatever|wherever)\b", "name the person, process or thing"),
    _rule(r"\b(?:go|goes|going|gone|went) on\b", "`continue`, `resume`"),
    _rule(r"\b(?:again and again|another time)\b", "`repeatedly`, `retry`"),
    _rule(r"\bbeside\b", "`next to`, `alongside`, `in addition to`"),
    _rule(r"\bof (?:its|their|one's|his|our) own\b", "`its own X`, `a separate X`"),
    _rule(r"\b(?:in words|(?:is|are|was|were|be|been) (?:told|said))\b", "`as text`, `is reported`"),
    _rule(r"\bcannot be told\b", "`is unknown`"),
    _rule(r"\bso (?:many|long|much|few)\b(?! as)", "the number: `n tokens`, `60 s`"),
    _rule(r"\bas (?:it|they) (?:is|are|comes?|stands?)\b", "`unchanged`, `as it arrives`"),
    _rule(r"\b(?:a look at|looks? at (?:once|it)|two looks)\b", "`check`, `poll`, `inspect`"),
    _rule(r"\bmend(?:s|ed|ing)?\b", "`fix`"),
    _rule(
        r"\bplay(?:s|ed|ing)? (?:an? |one |the )?rollouts?\b|\brollouts? (?:is|are|was|were) played\b",
        "`run a rollout`",
    ),
    _rule(
        r"(?:^|[.:;] )What (?:is|was|are|has|have|can|cannot|must|may|an?|the|it|they|each)\b(?![^.\n]*\?)",
        "`the X`",
    ),
    _rule(r"\b(?:by|of|with|for|from|to) which\b", "two sentences, or `that`, `where`"),
    _rule(r"\b(?:learnt|spelt|burnt)\b", "American spelling: `learned`, `spelled`"),
    _rule(r"\bstands? (?:in|at|on|for|beside|there|over)\b", "`is`, `means`"),
    _rule(r"\b(?:is|are) (?:paid|worth)\b|\b(?:earns?|earned)\b", "`is rewarded`, `scores`"),
    _rule(r"\b(?:homeless|the ill)\b", "`orphaned`, `unhealthy`"),
    _rule(r"\b(?:hears?|heard) (?:of|from|nothing|that)\b", "`receives`"),
)
HEADLESS = Rule(
    re.compile(r"(?:What|Whether|How|Why|By|Of|That|Where|When|Who|Which|For|As|The same)\b"),
    "begin the docstring with a verb in the imperative, or with the name of the thing",
)

_HEADLESS_DOCSTRING = _rule(rf'"""\s*{HEADLESS.pattern.pattern}', HEADLESS.instead)


class Text(NamedTuple):
    """Text of a file, with the line where it begins."""

    line: int
    content: str
    is_docstring: bool = False


def texts_of(path: Path) -> Iterator[Text]:
    """Yield the texts of a file: docstrings, comments and sentences, or a page without its code."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield from _markdown(source)
    elif any(rule.pattern.search(source) for rule in (*RULES, _HEADLESS_DOCSTRING)):  # parsing is slow
        yield from _python(source)


def _markdown(source: str) -> Iterator[Text]:
    in_code = False
    for number, line in enumerate(source.splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code:
            yield Text(number, _without_code(line))


def _python(source: str) -> Iterator[Text]:
    docstrings = set()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            value = first.value if isinstance(first, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                docstrings.add(value)
                yield Text(value.lineno, _without_code(value.value), is_docstring=True)
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings
        if is_text and len(re.findall(r"[a-z]{2,} ", node.value)) >= 2:  # a sentence
            yield Text(node.lineno, node.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Text(token.start[0], _without_code(token.string.lstrip("# ")))


def _without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "`code`", text)


def problems_in(text: Text) -> Iterator[tuple[int, str, str]]:
    """Yield line, words found and replacement of each banned construction in a text."""
    if text.is_docstring and (found := HEADLESS.pattern.match(text.content.strip())):
        yield text.line, found[0], HEADLESS.instead
    for rule in RULES:
        for found in rule.pattern.finditer(text.content):
            yield (
                text.line + text.content.count("\n", 0, found.start()),
                found[0].strip(" .:;\n"),
                rule.instead,
            )


def subject_problems(subject: str) -> Iterator[str]:
    """Yield the problems of the subject of a commit."""
    if len(subject) > SUBJECT_LENGTH and not subject.startswith("Merge "):
        yield f"{len(subject)} characters -> at most {SUBJECT_LENGTH}"
    if not _SUBJECT.match(subject):
        yield "no area -> `area: imperative summary`"
    for _, found, instead in problems_in(Text(1, subject)):
        yield f"{found} -> {instead}"


def _git(*args: str) -> list[str]:
    done = subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, text=True, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else []


def _allowed() -> list[tuple[str, str]]:
    lines = ALLOWED.read_text(encoding="utf-8").splitlines() if ALLOWED.exists() else []
    pairs = (line.partition(": ") for line in lines if line and not line.startswith("#"))
    return [(file, text) for file, _, text in pairs]


def check_files(paths: list[Path]) -> list[str]:
    """Return a line for each banned construction in the files that is not allowed."""
    allowed, lines = _allowed(), []
    for path in paths:
        name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
        for text in texts_of(path):
            for line, found, instead in problems_in(text):
                if not any(name == file and exception in text.content for file, exception in allowed):
                    lines.append(f"{name}:{line}: {found} -> {instead}")
    return lines


def main() -> int:
    """Check the files of the command line, or the repository; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument(
        "--base", default="origin/main", help="check subjects of the commits since this revision"
    )
    options = parser.parse_args()
    tracked = (ROOT / name for name in _git("ls-files", "*.py", "*.md") if "prose" not in name)
    paths = [p.resolve() for p in options.files] or [
        p for p in tracked if p.exists() and "data" not in p.parts
    ]
    lines = check_files(paths)
    if not options.files:
        for commit in _git("log", "--format=%h %s", f"{options.base}..HEAD"):
            name, _, subject = commit.partition(" ")
            lines += [f"commit {name}: {problem}" for problem in subject_problems(subject)]
    print("\n".join(lines) if lines else f"{len(paths)} files: no banned constructions")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
