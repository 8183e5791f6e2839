import json

import pytest

from buckeye.config.help import help_text
from buckeye.config.inference import InferenceConfig
from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.config.rl import RLConfig
from buckeye.config.schema import json_schema
from buckeye.config.settings import flag_of
from buckeye.config.sft import SFTConfig
from buckeye.config.structure import paths_of
from buckeye.config.trainer import TrainerConfig

ROOTS = (RLConfig, TrainerConfig, OrchestratorConfig, InferenceConfig, SFTConfig)


@pytest.mark.parametrize("model", ROOTS, ids=lambda model: model.__name__)
def test_schemas_are_closed_and_optional(model):
    schema = json.loads(json.dumps(json_schema(model)))
    assert schema["$schema"].startswith("https://json-schema.org/draft/2020-12")
    objects = [schema, *schema.get("$defs", {}).values()]
    for definition in objects:
        assert definition["additionalProperties"] is False
        assert "required" not in definition
    for reference in _references(schema):
        assert reference.removeprefix("#/$defs/") in schema["$defs"]


def _references(node):
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        node = list(node.values())
    if isinstance(node, list):
        for item in node:
            yield from _references(item)


def test_schema_accepts_the_text_none(wording):
    properties = json_schema(TrainerConfig)["properties"]
    assert {"const": "None"}.items() <= properties["max_steps"]["anyOf"][-1].items()
    assert properties["max_steps"]["description"] == wording


@pytest.mark.parametrize("model", ROOTS, ids=lambda model: model.__name__)
def test_help_has_a_line_for_every_setting(model):
    text = help_text(model, "prog")
    flags = {line.split()[0] for line in text.splitlines() if line.startswith("  --")}
    paths = list(paths_of(model))
    leaves = [p for p in paths if not any(q[: len(p)] == p and q != p for q in paths)]
    assert flags == {flag_of(path) for path in leaves}


def test_help_line_has_meaning_type_and_default(wording):
    text = help_text(RLConfig, "rl")
    settings = ("--trainer.optim.lr", "--trainer.loss.kl-estimator")
    sections = ("[trainer.ckpt]", "[trainer.model.ac]", "[trainer.optim]", "[[orchestrator.env]]")
    lines = [line.strip() for line in text.splitlines()]
    assert [line for line in lines if line.startswith(settings + sections)] == wording
    assert "required" in help_text(SFTConfig, "sft")
