"""Every setting of both generations, by name and default; and properties of all classes."""

import subprocess
import sys
from collections import Counter

import pytest
from pydantic import ValidationError

from buckeye.config.inference import InferenceConfig
from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.config.rl import RLConfig
from buckeye.config.sft import SFTConfig
from buckeye.config.shared import BaseConfig
from buckeye.config.structure import fields_of
from buckeye.config.trainer import TrainerConfig

ROOTS = (RLConfig, TrainerConfig, OrchestratorConfig, InferenceConfig, SFTConfig)


def all_classes(model):
    """Return the class and the classes of all its sections, each once."""
    found, pending = {model: None}, [model]
    while pending:
        for shape in fields_of(pending.pop()).values():
            for table in shape.tables + (shape.element.tables if shape.element is not None else ()):
                if table not in found:
                    found[table] = None
                    pending.append(table)
    return list(found)


CLASSES = list(dict.fromkeys(cls for root in ROOTS for cls in all_classes(root)))

SECTIONS = [
    (TrainerConfig, "--ckpt --wandb"),
    (TrainerConfig, "--model.ac --model.compile --model.ac-offloading"),
    (TrainerConfig, "--scheduler.type linear --optim.type muon"),
    (TrainerConfig, "--scheduler.type cosine --optim.type sgd"),
    (TrainerConfig, "--optim.type adamw8bit"),
    (OrchestratorConfig, "--eval --buffer.type online-difficulty"),
]


@pytest.mark.parametrize("model", [TrainerConfig, OrchestratorConfig, InferenceConfig])
def test_names_and_defaults(load, model, wording):
    assert flat(load(model, "")) == wording


def test_run_names_and_defaults(load, wording):
    run = flat(load(RLConfig, "--trainer --orchestrator --no-inference"))
    parts = ("trainer.", "orchestrator.", "inference.")
    assert {name: value for name, value in run.items() if not name.startswith(parts)} == wording


@pytest.mark.parametrize(("model", "words"), SECTIONS)
def test_optional_sections_have_these_defaults(load, model, words, wording):
    default = flat(load(model, ""))
    on = flat(load(model, words))
    assert {
        name: value for name, value in on.items() if name not in default or default[name] != value
    } == wording


def flat(config):
    """Return the value of each setting, with dots between the names of sections."""

    def leaves(path, value):
        if isinstance(value, dict) and value:
            for name, item in value.items():
                yield from leaves([*path, name], item)
        else:
            yield ".".join(path), value

    return dict(leaves([], config.model_dump(mode="json")))


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_no_class_accepts_unknown_keys(cls):
    assert issubclass(cls, BaseConfig)
    with pytest.raises(ValidationError) as caught:
        cls.model_validate({"no_such_setting": 1})
    assert "extra_forbidden" in [error["type"] for error in caught.value.errors()]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_setting_has_a_help_text(cls):
    assert cls.__doc__
    assert [name for name, info in cls.model_fields.items() if not info.description] == []


def test_class_names_are_unique():
    assert [name for name, count in Counter(cls.__name__ for cls in CLASSES).items() if count > 1] == []


def test_configurations_cannot_be_changed(load):
    with pytest.raises(ValidationError, match="frozen"):
        load(TrainerConfig, "").optim.lr = 1.0


def test_booleans_and_infinities_are_not_numbers(refused, folder, wording):
    folder.write("t.toml", "max_steps = true\nseed = 1.5\n[optim]\nlr = nan\nmax_norm = inf\n")
    assert refused(TrainerConfig, "@ t.toml") == wording


@pytest.mark.parametrize("words", ["--batch-size 10 --rollouts-per-example 4", "--sampling.temperature 0"])
def test_conflicting_orchestrator_settings_are_refused(refused, words, wording):
    assert refused(OrchestratorConfig, words) == wording


def test_loading_configurations_imports_no_heavy_libraries():
    code = "import sys, buckeye.config.load; print([m for m in sys.modules if m in sys.argv[1:]])"
    heavy = ("torch", "transformers", "numpy", "rich", "typer", "httpx")
    output = subprocess.run([sys.executable, "-c", code, *heavy], capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "[]"


def test_run_ahead_is_limited_by_max_off_policy_steps():
    levels = {(0, 8): (0, 0), (1, 8): (1, 8), (4, 2): (2, 2), (1, 0): (0, 0)}
    for (level, age), expected in levels.items():
        config = OrchestratorConfig(max_async_level=level, max_off_policy_steps=age)
        assert (config.run_ahead, config.max_token_age) == expected
