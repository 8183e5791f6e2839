"""Help pages of commands: the important facts first, completely, and within the terminal's width."""

import re

import pytest
from tests.cli.printed_commands import flag_names

from buckeye.cli.help import show_page
from buckeye.cli.rl_page import FLAGS, SETTINGS
from buckeye.cli.settings_help import show_help
from buckeye.cli.tree import COMMANDS
from buckeye.cli.typer_commands import typer_command
from buckeye.config.rl import RLConfig
from buckeye.config.sft import SFTConfig
from buckeye.errors import UsageError
from buckeye.setup.recipe.flags import TrainFlags, flag_name


@pytest.fixture
def shown(monkeypatch, capsys):
    """Return a function that returns the lines that a function prints on a terminal of `columns` columns."""

    def lines(columns, function, *words):
        monkeypatch.setenv("COLUMNS", str(columns))
        function(*words)
        return capsys.readouterr().out.splitlines()

    return lines


EVERY = [command.name for command in COMMANDS if not command.takes_settings]


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize("name", EVERY)
def test_a_page_names_every_option_and_fits(shown, name, columns):
    command = typer_command(name)
    ctx = command.make_context(name, [], resilient_parsing=True)
    lines = shown(columns, command.format_help, ctx, None)
    assert lines[0].startswith(f"usage: {name}")
    assert max(map(len, lines)) <= columns
    for param in command.params:
        if not param.hidden and param.param_type_name == "option":
            long = next(name for name in param.opts if name.startswith("--"))
            assert any(re.match(rf"  (-\w, )?{long}\b", line) for line in lines), param.opts


def test_the_page_of_rl_fits_and_has_every_flag_once(shown):
    lines = shown(80, show_help, RLConfig, "rl", ["--help"])
    assert max(map(len, lines)) <= 80
    first = [line.split()[0] for line in lines if line.startswith("  --")]
    assert {f"--{flag_name(field)}" for field in TrainFlags.model_fields} <= set(first)
    assert len(first) == len(set(first)) <= 60


def test_the_page_of_rl_names_flags_and_settings_that_exist():
    flags = {f"--{flag_name(field)}" for field in TrainFlags.model_fields}
    assert {name.split()[0] for rows in FLAGS.values() for name, _ in rows} == flags
    assert {name.split()[0] for name, _ in SETTINGS} <= set(flag_names(RLConfig))


def test_a_section_has_its_settings_and_no_others(shown):
    lines = shown(80, show_help, RLConfig, "rl", ["--help", "trainer.scheduler"])
    flags = [line.split()[0] for line in lines if line.startswith("  --")]
    assert set(flags) == {f"--trainer.scheduler.{name}" for name in ("type", "warmup", "decay", "min-lr")}
    inner = shown(80, show_help, RLConfig, "rl", ["-h", "orchestrator.eval"])
    assert any(line.startswith("  --orchestrator.eval.env.0.id ") for line in inner)
    assert all("--orchestrator.eval." in line for line in inner if line.startswith("  --"))


def test_a_section_that_is_not_there(refusal):
    with refusal(UsageError):
        show_help(RLConfig, "rl", ["--help", "trainr"])


def test_all_settings_are_lines_that_can_be_searched(shown):
    lines = shown(80, show_help, SFTConfig, "sft", ["--help-all"])
    flags = {line.split()[0] for line in lines if line.startswith("  --")}
    assert flags == set(flag_names(SFTConfig))
    assert any(re.match(r"  --optim\.lr .*default", line) for line in lines)


def test_the_page_of_another_command_has_its_sections(shown):
    lines = shown(80, show_help, SFTConfig, "sft", ["--help"])
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("  --batch-size  ") for line in lines)
    assert any(re.match(r"  optim  +Optimizer", line) for line in lines)
    assert len([line for line in lines if line.startswith("  optim ")]) == 1  # one line for all its kinds


def test_a_name_that_is_too_long_has_its_meaning_below(shown, wording):
    rows = [("--a", "One."), ("--a-name-of-its-own-line", "two three four five")]
    lines = shown(40, show_page, "usage: x", "", {"Part": rows, "Empty": []})
    assert "\n".join(lines) == wording
