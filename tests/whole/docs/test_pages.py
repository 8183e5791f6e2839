"""Pages of docs/ are linked, and the files, tests, settings, flags and commands in texts exist."""

import re
from datetime import date
from functools import cache
from typing import get_args

import pytest
from tests.cli import printed_commands
from tests.cli.printed_commands import commands_in, flag_names, texts_of
from tests.places import ROOT
from tests.whole.docs.blocks import blocks

from buckeye.cli.schema import configurations
from buckeye.cli.tree import COMMANDS
from buckeye.cli.typer_commands import typer_command
from buckeye.config.judge import JudgeConfig
from buckeye.config.load import load_config
from buckeye.envs.settings import Isolation
from buckeye.envs.stdlib_only.outcomes import Boundary
from buckeye.errors import UsageError
from buckeye.mcp.actions.expressions import FUNCTIONS, METHODS
from buckeye.mcp.client.errors import McpEnvironmentError
from buckeye.mcp.config import DefaultsConfig, GymConfig
from buckeye.mcp.environment import load_environment
from buckeye.mcp.rollout import StopReason
from buckeye.mcp.tasks.lock_file import EnvironmentLock
from buckeye.setup.recipe.flags import TrainFlags, flag_name
from buckeye.workers.worker_side.adapters import (
    agent,
    gymnasium,
    inspect_ai,
    openenv,
    reasoning_gym,
    skyrl_gym,
    textarena,
    verifiers_v1,
)

problem = cache(printed_commands.problem)
INDEX = ROOT / "docs" / "README.md"
PAGES = [
    *(
        ROOT / name
        for name in ("README.md", "AGENTS.md", "SECURITY.md", "benchmarks/README.md", "recipes/README.md")
    ),
    *sorted((ROOT / "skills").rglob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
TEXTS = {page: page.read_text(encoding="utf-8") for page in PAGES}
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))

FLAGS_OF_OTHERS = {"--gpu-bind", "--rm", "--memory-path", "--compute-dtype", "--check", "--engines"}
"""Flags of srun, docker, a published MCP server, and benchmarks."""

ENDPOINT = {"base_url": "http://h/v1", "root_url": "http://h", "api_key": "k", "model": "m"}
NAMES = {
    "how-to/agents": [*agent.ARGUMENTS, *agent.endpoint_variables(ENDPOINT)],
    "how-to/third-party": [
        *verifiers_v1.OWN_ARGUMENTS,
        *reasoning_gym.OWN_ARGUMENTS,
        *textarena.OWN_ARGUMENTS,
        *gymnasium.OWN_ARGUMENTS,
        *skyrl_gym.OWN_ARGUMENTS,
        *inspect_ai.OWN_ARGUMENTS,
        *openenv.OWN_ARGUMENTS,
    ],
    "how-to/publish-environments": EnvironmentLock.model_fields,
    "reference/mcp-files": [*FUNCTIONS, *(name for methods in METHODS.values() for name in methods)],
    "explanation/mcp-rollouts": [
        *get_args(StopReason),
        *(fault.stop_reason for fault in McpEnvironmentError.__subclasses__()),
        *(load_environment.__annotations__.keys() - {"return"}),
    ],
    "explanation/workers": [*get_args(Boundary), *get_args(Isolation)],
}
"""Names that each page must explain."""


@pytest.mark.parametrize("name", NAMES)
def test_a_page_explains_all_there_is(name):
    page = TEXTS[ROOT / "docs" / f"{name}.md"]
    quoted = "\n".join([*re.findall(r"`([^`\n]+)`", page), *(block.text for block in blocks(page))])
    assert [one for one in NAMES[name] if not re.search(rf"(?<![\w-]){one}(?![\w-])", quoted)] == []


def test_the_keys_of_a_gym_file_are_on_its_page():
    page = TEXTS[ROOT / "docs" / "reference" / "mcp-files.md"]
    assert [
        name for name in (*GymConfig.model_fields, *DefaultsConfig.model_fields) if name not in page
    ] == []


@every_page
def test_every_table_of_settings_is_a_configuration(page, tmp_path):
    for block in blocks(TEXTS[page]):
        if block.language != "toml" or page.name == "first-run.md" or "placement = [0, 1]" in block.text:
            continue  # fragments that need other settings or flags
        (tmp_path / "c.toml").write_text(block.text)
        kinds = (*configurations().values(), JudgeConfig)
        assert any(_loads(kind, tmp_path / "c.toml") for kind in kinds), block.text


def _loads(kind, path):
    try:
        load_config(kind, ["@", str(path)])
    except UsageError:
        return False
    return True


@every_page
def test_every_flag_that_a_page_names_exists(page):
    text = re.sub(r"^ *```.*?^ *```", "", TEXTS[page], flags=re.S | re.M)
    known = "\n".join([*_flags(), *FLAGS_OF_OTHERS])
    for flag in set(re.findall(r"`(--[a-z][\w.-]*)", text)) - {"--"}:
        names = {flag.rstrip("."), flag.rstrip(".").replace("--no-", "--", 1)}  # sections can be turned off
        assert any(re.search(rf"(?m)^{re.escape(name)}(\.|$)", known) for name in names), flag


@cache
def _flags():
    typed = [typer_command(command.name) for command in COMMANDS if not command.takes_settings]
    options = {name for one in typed for param in one.params for name in (*param.opts, *param.secondary_opts)}
    settings = {name for kind in configurations().values() for name in flag_names(kind)}
    ours = {f"--{flag_name(field)}" for field in TrainFlags.model_fields}
    return options | settings | ours | {"--help", "--help-all", "--version", "--debug"}


@every_page
def test_every_command_that_a_page_shows_is_one(page):
    for block in blocks(TEXTS[page]):
        for line in block.text.replace("\\\n", " ").splitlines() if block.language == "bash" else ():
            if re.match(r"(buckeye|rl) ", line) and "--dry-run --json" not in line:
                command = re.split(r" +(?:#|[|>]|&&)", line)[0]
                command = re.sub(r"--(?:trainer|orchestrator|inference)(?= @)", "", command)
                assert problem(re.sub(r"(?<= )[\d.]+(?= |$)", "N", command)) is None, command


@pytest.mark.e2e
def test_every_command_that_a_text_of_the_program_names_is_one():
    found = [
        (f"{path.relative_to(ROOT)}:{line}", command)
        for path in sorted((ROOT / "src").rglob("*.py"))
        if path != ROOT / "src/buckeye/remote/scripts.py"  # shell scripts, which other tests run
        for line, text in texts_of(path)
        for command in commands_in(text)
    ]
    assert len(found) > 130
    assert {(place, command): said for place, command in found if (said := problem(command))} == {}


def test_every_page_has_a_line_in_the_index():
    listed = re.findall(r"^- \[.+?\]\((.+?)\): \S.*", TEXTS[INDEX], re.M)
    pages = [str(page.relative_to(INDEX.parent)) for page in PAGES if INDEX.parent in page.parents]
    others = ["../benchmarks/README.md", "../recipes/README.md"]
    assert sorted([*listed, INDEX.name]) == sorted([*pages, *others])


@every_page
def test_what_a_page_points_to_is_there(page):
    text = re.sub(r"^```.*?^```", "", TEXTS[page], flags=re.S | re.M)
    for target, _, heading in (link.partition("#") for link in re.findall(r"\]\(([^)\s]+)\)", text)):
        if "://" in target:
            continue
        there = page.parent / target if target else page
        assert there.exists(), target
        if heading:
            assert heading in _headings(there), f"{target}#{heading}"


def _headings(page):
    """Return the anchors of a page's headings, as GitHub forms them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_measured_figures_say_when_on_what_and_by_which_command():
    measured = [
        " ".join(found.split())
        for text in TEXTS.values()
        for found in re.findall(r"Measured: (.+?)(?:\n\n|$)", text, re.S)
    ]
    assert len(measured) > 20
    for line in measured:
        when, what, command = re.match(r"(\d{4}-\d\d-\d\d), (.+), by `(.+?)`", line).groups()
        assert date.fromisoformat(when)
        assert re.search(r"\bcores\b", what), line
        _check(command)
    _, *sections = TEXTS[ROOT / "benchmarks" / "README.md"].split("\n## ")
    assert [section.splitlines()[0] for section in sections if "\nMeasured: " not in section] == []


def _check(command):
    """Assert that a command is valid: `python` commands name existing programs, others are Buckeye's."""
    program, *words = command.split()
    if program != "python":
        assert problem(command) is None, command
        return
    script = words[1].replace(".", "/") + ".py" if words[0] == "-m" else words[0]
    source = (ROOT / script).read_text(encoding="utf-8")
    assert all(word in source for word in words if word.startswith("--")), command


def test_the_tests_that_pages_name_are_there():
    """A page names the test of the recipes, and the test file of each security promise."""
    named = [found for text in TEXTS.values() for found in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)]
    assert named
    for path, test in named:
        assert f"def {test}(" in (ROOT / path).read_text(encoding="utf-8"), (path, test)
    rows = re.findall(
        r"(?m)^\| \*\*.*\|([^|]+)\|$",
        TEXTS[ROOT / "docs" / "explanation" / "security.md"].partition("## Keys")[0],
    )
    assert len(rows) >= 11
    for row in rows:
        files = re.findall(r"`([\w/.]+)`", row)
        assert files
        for name in files:
            assert (ROOT / (name if name.endswith(".py") else f"tests/whole/security/{name}.py")).is_file(), (
                name
            )
