"""Runs of a known recipe are held against its band, and others are not."""

import json
import statistics
from pathlib import Path

import pytest
from tests.command import run_here

from benchmarks import bands, letters
from buckeye import runs
from buckeye.config.load import load_config, to_json
from buckeye.config.rl import RLConfig
from buckeye.monitor.intervals import student_quantile
from buckeye_audit.bands import band
from buckeye_audit.bands.band import band_of
from buckeye_audit.demo.stages import DemoPaths, max_steps, rl_words
from buckeye_audit.diagnosis.diagnose import diagnose

RECIPES = sorted((Path(band.__file__).parent / "recipes").glob("*.json"))
PROMPT = "What to say?"


def played(run, rewards, *, prompt=PROMPT, env="words", batch=64, rate=1e-3, width=64):
    """A run whose steps earned these."""
    (run / "rollouts").mkdir(parents=True)
    (run / "configs").mkdir()
    model = run / "weights" / "step_1"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps({"hidden_size": width, "num_hidden_layers": 1}))
    settings = {
        "max_async_level": 0,
        "orchestrator": {"batch_size": batch, "rollouts_per_example": 8},
        "trainer": {"optim": {"lr": rate}},
    }
    (run / "configs" / "rl.json").write_text(json.dumps(settings))
    rollout = {"group": 0, "env": env, "task_id": "one", "reward": 0.5, "shaped_reward": 0.5, "turns": 1}
    said = [{"role": "user", "content": prompt}, {"role": "assistant", "content": "a"}]
    line = {**rollout, "text": [f"{prompt} a"], "messages": said, "stop_reason": "done", "seconds": 1.0}
    with (run / "metrics.jsonl").open("w") as metrics:
        for step, reward in enumerate(rewards):
            record = {"time": 1.7e9 + step, "process": "orchestrator", "step": step, "reward/mean": reward}
            metrics.write(json.dumps(record) + "\n")
            (run / "rollouts" / f"step_{step}.jsonl").write_text(json.dumps(line) + "\n")
    return run


def curve(offset=0.0, last=0.9):
    return [0.2 + offset + (last - 0.2) * min(1.0, step / 10) for step in range(20)]


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """The recipe `words`, of five runs whose curves are 0.01 apart."""
    seeds = [played(tmp_path / f"seed-{n}", curve(0.01 * n)) for n in range(5)]
    made = band.recipe_from([runs.open(run) for run in seeds], "by hand")
    monkeypatch.setattr(band, "_recipes", lambda: iter([("words", json.loads(json.dumps(made)))]))
    return made


def found(run):
    return {one.name: one for one in diagnose(run).findings}.get("below_band")


def test_a_run_is_judged_by_all_that_was_played(recipe, tmp_path):
    """A filter keeps groups in which half of the rollouts are right, however good the policy is."""
    run = played(tmp_path / "run", curve(0.02))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    for line in lines:
        line |= {"reward/mean": 0.5, "reward/played": line["reward/mean"]}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    it = band_of(runs.open(run))
    assert it.inside
    assert list(it.rewards) == pytest.approx(curve(0.02))
    again = band.recipe_from([runs.open(run)], "by hand")
    assert again["rewards"] == [pytest.approx(curve(0.02), abs=1e-4)]


def test_the_band_is_where_one_more_run_is(recipe, tmp_path):
    it = band_of(runs.open(played(tmp_path / "run", curve(0.02)[:12])))
    assert (it.recipe, it.steps, it.differs) == ("words", tuple(range(20)), ())
    assert it.rewards == (*(pytest.approx(reward) for reward in curve(0.02)[:12]), *[None] * 8)
    half = student_quantile(4) * statistics.stdev([0.0, 0.01, 0.02, 0.03, 0.04]) * (1 + 1 / 5) ** 0.5
    for at in (0, 5, 19):
        assert it.mid[at] == pytest.approx(curve(0.02)[at])
        assert it.high[at] - it.mid[at] == it.mid[at] - it.low[at] == pytest.approx(half, rel=1e-6)
    assert it.inside
    assert band_of(runs.open(tmp_path / "run"), until=3).played == [0, 1, 2, 3]


def test_a_run_that_falls_behind_is_accused_and_one_inside_is_not(recipe, tmp_path):
    assert found(played(tmp_path / "good", curve(0.0))) is None
    behind = found(played(tmp_path / "bad", curve(0.02, last=0.5)))
    assert (behind.confidence, behind.since, behind.until) == ("likely", 15, 19)
    assert behind.figures["earned"] == pytest.approx(0.52)
    assert behind.figures["mid"] == pytest.approx(0.92)
    assert behind.cause.startswith("settings, tasks and the start are the recipe's")
    assert found(played(tmp_path / "short", curve(0.02, last=0.5)[:9])) is None
    done = run_here("rl", "diagnose", "bad", cwd=tmp_path)
    assert "below_band (likely, steps 15 to 19): In steps 15 to 19 it earns 0.52; runs of the" in done.stdout


def test_what_explains_it_is_named_and_then_nobody_is_accused(recipe, tmp_path):
    slow = found(played(tmp_path / "slow", curve(0.02, last=0.5), rate=1e-4))
    assert slow.confidence == "possible"
    assert slow.cause == "settings that decide the curve are not the recipe's: trainer.optim.lr"
    low = found(played(tmp_path / "low", curve(-0.15, last=0.5)))
    assert low.confidence == "possible"
    assert low.cause.startswith("it began lower")


@pytest.mark.parametrize("other", [{"prompt": "Why?"}, {"env": "others"}, {"batch": 32}, {"width": 128}])
def test_a_run_of_no_known_recipe_is_not_judged(recipe, tmp_path, other):
    run = played(tmp_path / "run", curve(0.02, last=0.3), **other)
    assert band_of(runs.open(run)) is None
    assert found(run) is None


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_recipes_hold_five_runs_that_learn(file):
    made = json.loads(file.read_text())
    rewards = made["rewards"]
    assert len(rewards) == 5
    assert {len(run) for run in rewards} == {len(rewards[0])}
    assert all(statistics.fmean(run[-3:]) > run[0] + 0.1 for run in rewards)
    assert file.stat().st_size < 20_000
    assert made["prompts"]


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_each_run_of_a_recipe_is_inside_the_band_of_the_others(file):
    rewards = json.loads(file.read_text())["rewards"]
    for left_out in rewards:
        ends = band._ends([one for one in rewards if one is not left_out])
        lows = [low for low, _, _ in ends][-band.SMOOTHED :]
        assert statistics.fmean(left_out[-band.SMOOTHED :]) >= statistics.fmean(lows)


def as_planned(name, folder):
    """The settings with which a recipe is played, its prompts, width and layers of the model, the steps."""
    if name == bands.DEMO:
        words = rl_words(DemoPaths(root=folder), seed=7)
        return load_config(RLConfig, words, environ={}), None, (192, 3), max_steps("train.toml")
    recipe = bands.RECIPES[name]
    file = bands.write_settings(recipe, folder, folder, seed=7)
    asked = [task.messages for task in letters.load_environment(**recipe.args).tasks("train")]
    size = recipe.size.hidden, recipe.size.layers
    return load_config(RLConfig, ["@", str(file)], environ={}), asked, size, recipe.steps


@pytest.mark.parametrize("name", bands.NAMES)
def test_a_recipes_file_has_the_settings_with_which_it_is_played(tmp_path, name):
    run = tmp_path / "run"
    made = json.loads((Path(band.__file__).parent / "recipes" / f"{name}.json").read_text())
    config, asked, (width, layers), steps = as_planned(name, tmp_path)
    (run / "configs").mkdir(parents=True)
    (run / "configs" / "rl.json").write_text(to_json(config))
    (run / "metrics.jsonl").write_text("")
    opened = runs.open(run)
    assert band._chosen(opened, band._SIZES) == made["sizes"]
    assert band._deciding(opened) == made["settings"]
    assert made["shape"] == {"hidden_size": width, "num_hidden_layers": layers}
    assert {len(rewards) for rewards in made["rewards"]} == {steps}
    if asked is None:
        return
    lines = [{"task_id": str(at), "env": made["env"], "messages": list(one)} for at, one in enumerate(asked)]
    (run / "rollouts").mkdir()
    (run / "rollouts" / "step_0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    known = {prompt for (prompt,) in runs.open(run).query(band._PLAYED, made["env"])}
    assert set(made["prompts"]) <= known
    assert len(made["prompts"]) == min(len(known), band._PROMPTS)


def test_every_file_is_of_a_recipe_that_can_be_played():
    assert {file.stem for file in RECIPES} == set(bands.NAMES)
