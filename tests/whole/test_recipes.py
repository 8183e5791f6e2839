"""Recipes of recipes/: valid settings, data of their curves, and runs that reach the expected reward."""

import json
import runpy
import shutil
import statistics

import pytest
from tests.command import run_here
from tests.setup.tuning.here import carry_out

from benchmarks import recipes
from buckeye.config.load import load_config
from buckeye.config.rl import RLConfig
from buckeye.trainer.model.tiny import TinySize, make_tiny_model

NAMES = recipes.names()
MEASURED = [name for name in NAMES if recipes.expected(name)]
INSTALLED = "verifiers"  # its environment is a package of PyPI


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    size = TinySize(vocab_size=320, layers=1, hidden=64, max_length=512)
    make_tiny_model(folder, texts=["Write the letter e many times."] * 9, size=size, seed=0)
    return folder


def copy_of(name, folder):
    """Copy a recipe and write its data, as its first command does."""
    shutil.copytree(recipes.RECIPES / name, folder, ignore=shutil.ignore_patterns("outputs"))
    return folder


@pytest.mark.parametrize("file", ["run.toml", "gpu.toml"])
@pytest.mark.parametrize("name", [name for name in NAMES if name != INSTALLED])
def test_dry_run_accepts_every_recipe(name, file, model, tmp_path, monkeypatch):
    folder = copy_of(name, tmp_path / name)
    monkeypatch.chdir(folder)
    if (folder / "task.py").exists():
        runpy.run_path("task.py", run_name="__main__")
    files = ["@", "run.toml", *(["@", file] if file == "gpu.toml" else [])]
    config = load_config(RLConfig, files)
    words = ["--model.name", str(model)] if file == "run.toml" else []
    done = run_here(*files, *words, "--dry-run", cwd=folder, program="rl")
    assert done.returncode == 0, done.stdout + done.stderr
    assert config.trainer.max_steps
    assert not (folder / "outputs" / "rl").exists()


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_has_its_commands_and_settings(name):
    before, training = recipes.commands(recipes.RECIPES / name)
    config = load_config(RLConfig, ["@", str(recipes.RECIPES / name / "run.toml")])
    assert f"--output-dir {config.model.name.partition('/weights')[0]}" in before[-1]
    assert before[-1].count(f"--max-steps {config.model.name.rpartition('_')[2]}") == 1
    assert training[-1] == "rl @ run.toml"


@pytest.mark.parametrize("name", MEASURED)
def test_expected_rewards_rise(name):
    found = recipes.expected(name)
    assert len(found["curves"]) == 5
    assert found["start"]["high"] < found["end"]["low"]
    start, end = recipes.ends(found["curves"])
    assert (recipes.interval(start)._asdict(), recipes.interval(end)._asdict()) == (
        found["start"],
        found["end"],
    )


def test_the_page_shows_the_expected_curves():
    assert recipes.table() in (recipes.RECIPES / "README.md").read_text()
    assert recipes.picture() == (recipes.RECIPES / "curves.svg").read_text()


def test_the_sanity_recipe_ends_above_95_percent():
    assert recipes.expected("reverse-text")["end"]["low"] > 0.95


def test_interval_of_known_values():
    """Student's t with two degrees is 4.3027; the deviation of 1, 2, 3 is 1."""
    mean, low, high = recipes.interval([1.0, 2.0, 3.0])
    assert (mean, low, high) == (
        2.0,
        pytest.approx(2 - 4.3027 / 3**0.5, abs=1e-4),
        pytest.approx(4.4842, abs=1e-4),
    )
    assert recipes.interval([1.0, 2.0, 3.0], for_next=True).high == pytest.approx(
        2 + 4.3027 * (4 / 3) ** 0.5, abs=1e-4
    )


def test_a_changed_recipe_is_prepared_again(tmp_path):
    recipe, folder = tmp_path / "recipe", tmp_path / "copy"
    recipe.mkdir()
    for text in ("first", "first", "second"):
        (recipe / "run.toml").write_text(f"#   echo {text} >> made.txt\n#   rl @ run.toml\n")
        recipes.prepare(recipe, folder)
        assert (folder / "made.txt").read_text() == f"{text}\n"


def test_the_fastest_recipe_trains_for_some_steps(tmp_path, monkeypatch):
    folder = copy_of("letters", tmp_path / "letters")
    monkeypatch.chdir(folder)
    for line in recipes.commands(folder)[0]:
        program, *words = line.split()
        if program == "python":
            runpy.run_path(words[0], run_name="__main__")
        else:
            done = run_here(*words, cwd=folder, program=program)
            assert done.returncode == 0, done.stdout + done.stderr
    carry_out(load_config(RLConfig, ["@", "run.toml", "--max-steps", "6", "--log.level", "error"]))
    earned = recipes.rewards(folder / "outputs" / "rl")
    assert earned[-1] > 2 * earned[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", MEASURED)
def test_a_run_reaches_the_expected_reward(name, tmp_path):
    folder = tmp_path / name
    recipes.prepare(recipes.RECIPES / name, folder)
    curve = recipes.rewards(recipes.train(folder, 0))
    found = recipes.expected(name)
    _, ends = recipes.ends(found["curves"])
    assert statistics.fmean(curve[-recipes.LAST :]) > min(
        recipes.interval(ends, for_next=True).low, found["end"]["mean"] - 0.02
    )
    assert json.loads((folder / "prepared.json").read_text())["processor"] > 0
