"""Claims of README and the hand-written pages, each checked by machine.

`python -m tests.whole.docs.claims -n 40 --seed 1` draws some at random, and prints which are true. Commands,
flags, settings, defaults, codes, findings, variables, files and links are found in the texts. Limits that are
constants of the code, measured figures, and settings that are refused, are listed in `constants.py`.
Other tests of this folder execute the commands of the tutorial and the shown programs.
"""

import argparse
import importlib
import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from tests.cli.printed_commands import problem
from tests.places import ROOT
from tests.whole.docs.blocks import blocks
from tests.whole.docs.constants import CONSTANTS, FIGURES, REFUSALS

from buckeye.base.explanations import explanations
from buckeye.cli.schema import configurations
from buckeye.cli.tree import COMMANDS
from buckeye.cli.typer_commands import typer_command
from buckeye.config.help import sections_of
from buckeye.config.load import load_config
from buckeye.config.settings import dotted, flag_of
from buckeye.errors import UsageError
from buckeye.setup.recipe.flags import TrainFlags, flag_name

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_CODE = re.compile(r"`([^`\n]+)`")
_DEFAULT = re.compile(r"(`(--[\w-]+|[a-z_][\w.]*)`(?: seconds| tokens)? \((\d[\d.]*)\))")
_FINDINGS = re.compile(r"\| ((?:`(?!sure|likely|possible)[a-z]\w+`(?:, )?)+) (?=\|)")


@dataclass(frozen=True)
class Claim:
    """Claim of a page. `holds` returns True if it is true."""

    kind: str
    page: str
    line: int
    text: str
    holds: Callable[[], bool]

    def __str__(self):
        return f"{self.page}:{self.line} [{self.kind}] {self.text}"


def claims() -> Iterator[Claim]:
    """Yield all claims of all hand-written pages."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if not text.startswith("<!-- Generated"):
            yield from claims_of_page(page, text)
    for page, quoted, place, value in CONSTANTS:
        yield _listed("limit", page, quoted, lambda p=place, v=value: _value(p) == v)
    for page, quoted, kind, flags in REFUSALS:
        yield _listed("refusal", page, quoted, lambda k=kind, f=flags: _loads(k, ()) and not _loads(k, f))
    for page, results, case, text in FIGURES:
        cases = {row["name"]: row["rows"] for row in json.loads((ROOT / results).read_text(encoding="utf-8"))}
        yield _listed("figure", page, text.format(**cases[case]["run"]), lambda: True)


def _listed(kind, page, quoted, holds):
    """Return a claim of `constants.py`. It holds only while its text is on the page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    line = 1 + text[: max(0, text.find(quoted))].count("\n")
    return Claim(kind, page, line, quoted.replace("\n", " "), lambda: quoted in text and holds())


_NEEDED = {
    "rl": ("--model.name", "m", "--orchestrator.env.0.id", "e"),
    "orchestrator": ("--model.name", "m", "--env.0.id", "e"),
    "trainer": (),
}
"""Flags without which no configuration of a kind loads."""


def _loads(kind, flags):
    try:
        load_config(configurations()[kind], [*_NEEDED[kind], *flags])
    except UsageError:
        return False
    return True


def claims_of_page(page, text):
    name = str(page.relative_to(ROOT))
    for block in blocks(text):
        if block.language == "bash":
            for line in block.text.replace("\\\n", " ").splitlines():
                if re.match(r"(buckeye|rl) ", line) and "--dry-run --json" not in line:
                    number = 1 + text[: text.find(line.split("  ")[0])].count("\n")
                    yield Claim("command", name, number, line, lambda c=line: problem(_command(c)) is None)
    for number, line in enumerate(_without_blocks(text).splitlines(), 1):
        for link in re.findall(r"\]\(([^)\s]+)\)", line):
            if "://" not in link:
                yield Claim("link", name, number, link, lambda p=page, k=link: _has_target(p, k))
        own = line.rpartition(" | ")[2] if page.name == "other-trainers.md" else line
        for code in _CODE.findall(own):
            yield from _claims_of_code(name, number, code)
        for cell in _FINDINGS.findall(line) if page.name == "diagnose.md" else ():
            for finding in _CODE.findall(cell):
                yield Claim("finding", name, number, finding, lambda f=finding: f in explanations())
        for quoted, setting, value in _DEFAULT.findall(line) if page.name != "third-party.md" else ():
            yield Claim("default", name, number, quoted, lambda s=setting, v=value: float(v) in _defaults(s))


def _claims_of_code(page, line, code):
    if re.fullmatch(r"BK(-[A-Z]+)+", code):
        yield Claim("code", page, line, code, lambda: code in explanations())
    elif re.fullmatch(r"BUCKEYE_[A-Z_]+", code):
        yield Claim("variable", page, line, code, lambda: code in _source())
    elif re.fullmatch(r"(src|tests|examples|environments|benchmarks|tools|docs|recipes)/[\w./-]+", code):
        yield Claim("file", page, line, code, lambda: (ROOT / code).exists())
    elif re.fullmatch(rf"({'|'.join(_sections())})\.[a-z][\w.]*(=.*| = .*)?", code) and not code.endswith(
        _SUFFIXES
    ):
        setting = re.split(r" ?=", code)[0]
        yield Claim("setting", page, line, code, lambda: setting in _paths())
    elif re.fullmatch(r"--[a-z][\w.-]*( .*)?", code) and not code.startswith(_OTHER_FLAGS):
        flag = code.split()[0].rstrip(".")
        yield Claim(
            "flag", page, line, code, lambda: flag in _flags() or flag.replace("--no-", "--", 1) in _flags()
        )
    elif re.fullmatch(r"(buckeye|rl) [a-z@-][^`]*", code):
        yield Claim("command", page, line, code, lambda: problem(_command(code)) is None)


_SUFFIXES = (".json", ".jsonl", ".toml", ".yaml", ".py", ".md", ".txt", ".stdout", ".safetensors")
_OTHER_FLAGS = ("--help", "--rm", "--memory-path")
"""Flags of all commands, of docker, and of a published MCP server."""


def _command(line):
    command = re.split(r" +(?:#|[|>]|&&)", line)[0]
    command = re.sub(r"--(?:trainer|orchestrator|inference)(?= @)", "", command)
    command = re.sub(r"^(buckeye (?:sft|serve) .*)--model ", r"\1--model.name ", command)
    command = re.sub(r"^(buckeye sft .*)--data ", r"\1--data.path ", command)
    command = re.sub(r"(--[a-z-]+)$", r"\1 VALUE", command) if problem(command) else command
    return re.sub(r"(?<= )[\d.]+(?= |$)", "N", command)


def _without_blocks(text):
    """Return the text with empty lines instead of code blocks."""
    return re.sub(r"^ *```.*?^ *```", lambda m: "\n" * m[0].count("\n"), text, flags=re.S | re.M)


def _has_target(page, link):
    target, _, heading = link.partition("#")
    found = page.parent / target if target else page
    return found.exists() and (not heading or heading in _anchors(found))


@cache
def _anchors(page):
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@cache
def _rows():
    """Return (path, default) of all settings of all configurations; defaults as numbers where they are."""
    return [
        (row.path, row.default)
        for kind in configurations().values()
        for s in sections_of(kind, "")
        for row in s.rows
    ]


@cache
def _paths():
    """Return the dotted names of all settings and sections, and those without their first parts."""
    names = {dotted(path[: end + 1]) for path, _ in _rows() for end in range(len(path))}
    return names | {name.partition(".")[2] for name in names} | {re.sub(r"\.0\b", "", name) for name in names}


@cache
def _sections():
    return sorted({path[0] for path, _ in _rows() if len(path) > 1})


def _defaults(name):
    """Return the numeric defaults of a flag, or of the settings whose name ends with `name`."""
    if name.startswith("--"):
        return _flags().get(name, set())
    found = {default for path, default in _rows() if f".{dotted(path)}".endswith(f".{name}")}
    return {float(value) for value in found if re.fullmatch(r"-?\d+(\.\d+)?(e-?\d+)?", value or "")}


@cache
def _flags():
    """Return the numeric defaults of every flag of every command."""
    flags = {flag_of(path): set() for path, _ in _rows()}
    flags |= {flag_of(path[:-1]): set() for path, _ in _rows() if len(path) > 1}
    for command in COMMANDS:
        for param in typer_command(command.name).params if not command.takes_settings else ():
            for name in (*param.opts, *param.secondary_opts):
                flags.setdefault(name, set())
                if isinstance(param.default, int | float):
                    flags[name].add(float(param.default))
    return flags | {f"--{flag_name(field)}": set() for field in TrainFlags.model_fields} | {"--debug": set()}


@cache
def _source():
    return "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))


def _value(place):
    """Return the value of `module:NAME`, or the default of `--flag` of `command:--flag`."""
    module, _, name = place.partition(":")
    if name.startswith("--"):
        (param,) = [p for p in typer_command(module).params if name in p.opts]
        return param.default
    value = importlib.import_module(f"buckeye.{module}")
    for part in name.split("."):
        fields = getattr(value, "model_fields", None) or getattr(value, "__dataclass_fields__", {})
        is_default = isinstance(value, type) and part in fields
        value = fields[part].default if is_default else getattr(value, part)
    return value


def draw(every, number, rng):
    """Return `number` different claims, of all kinds alike: most claims are links."""
    rng.shuffle(every)
    by_kind = {claim.kind: [other for other in every if other.kind == claim.kind] for claim in every}
    drawn = []
    while len(drawn) < number and any(by_kind.values()):
        drawn += [left.pop() for left in by_kind.values() if left]
    return drawn[:number]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=40)
    parser.add_argument("--seed", type=int, default=None)
    given = parser.parse_args()
    seed = random.randrange(10**6) if given.seed is None else given.seed
    drawn = draw(list(claims()), given.n, random.Random(seed))
    print(f"seed {seed}")
    false = 0
    for claim in drawn:
        held = claim.holds()
        false += not held
        print("true " if held else "FALSE", claim)
    print(f"{len(drawn) - false} true, {false} false")
    return 1 if false else 0


if __name__ == "__main__":
    sys.exit(main())
