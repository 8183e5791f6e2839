"""What docs/rl.md shows is so: its flags, its commands, its keys."""

import re
import shlex

import pytest
from tests.places import ROOT

from buckeye.base.keys import KEYS
from buckeye.cli.rl_page import FLAGS
from buckeye.launch.preflight.devices import parse_gpus
from buckeye.setup.recipe.flags import read_words
from buckeye.setup.recipe.model import usual_model

PAGE = (ROOT / "docs" / "rl.md").read_text(encoding="utf-8")
COMMANDS = [
    shlex.split(line, comments=True)
    for block in re.findall(r"^```bash\n(.*?)^```", PAGE, re.S | re.M)
    for line in block.splitlines()
]


@pytest.mark.parametrize("words", [words for words in COMMANDS if words[1] == "rl"], ids=" ".join)
def test_every_command_is_understood(words):
    assert read_words(words[2:]).is_of_parts


def test_every_flag_of_the_command_is_there_and_no_other():
    ours = {name.split()[0] for rows in FLAGS.values() for name, _ in rows}
    assert {flag for flag in ours if flag in PAGE} == ours
    settings = {
        "--no-push",
        "--max-steps",
        "--output-dir",
        "--clean",
        "--resume",
        "--help",
        "--help-all",
        "--seq-len",
    }
    of_init = {"--include"}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", PAGE)) <= ours | settings | of_init


def test_keys_models_and_gpus_are_those_of_the_program():
    assert set(re.findall(r"^\| `([A-Z_]+)` \|", PAGE, re.M)) == set(KEYS)
    for on_gpu in (True, False):
        assert usual_model(on_gpu=on_gpu).partition("/")[2].removesuffix("-Instruct") in PAGE
    for text in ("4xH100", "2xA100_40GB", "RTX4090"):
        assert f"`{text}`" in PAGE
        parse_gpus(text)
