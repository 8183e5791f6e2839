"""Warnings of a dry run about settings that only a trainer with its model would refuse."""

import pytest

from buckeye.config.load import load_config
from buckeye.config.rl import RLConfig
from buckeye.errors import ConfigError
from buckeye.launch.preflight.trainer_checks import trainer_warnings

LORA = "--trainer.model.experimental.lora.target-modules"


def warned(words, model=None, *, on_gpu=False):
    argv = ["--trainer", "--orchestrator", *words.split()]
    config = load_config(RLConfig, argv)
    return trainer_warnings(config, model, on_gpu=on_gpu)


CUSTOM = "--trainer.loss.type custom --trainer.loss.import-path"


@pytest.mark.parametrize(
    "words",
    [
        f"{CUSTOM} no/loss.py:f",
        f"{CUSTOM} no.such.module:f",
        f"{CUSTOM} json.decoder:f",
        "--orchestrator.advantage.type custom --orchestrator.advantage.import-path no/own.py:f",
        f"{LORA} q_proj,query",
        f"{LORA} embed_tokens",
    ],
    ids=["no file", "no module", "no function", "advantage", "unknown layer", "embeddings"],
)
def test_trainer_warnings_report_invalid_settings(tiny_model, words, wording):
    assert warned(words, tiny_model) == wording


def test_trainer_warnings_are_empty_for_valid_settings(tiny_model, tmp_path):
    (tmp_path / "loss.py").write_text("from math import sqrt as f\n")
    assert warned(f"{CUSTOM} {tmp_path}/loss.py:f") == []
    assert warned(f"{CUSTOM} json.decoder:scanstring") == []
    assert warned(f"{LORA} q_proj,layers.0.mlp.up_proj", tiny_model) == []
    assert warned(f"{LORA} whatever", None) == []  # the model is not available locally


def test_adamw8bit_with_sharded_model_is_refused(refusal, wording):
    kind = "--trainer.optim.type adamw8bit"
    several = f"{kind} --trainer-gpu-ids 1,2"
    assert warned(several, on_gpu=True)[0] == wording
    assert warned(several, on_gpu=False) == warned(kind, on_gpu=True) == []
    assert warned(f"{several} --trainer.model.sharding none", on_gpu=True) == []
    for words in ("--trainer.model.sharding full", "--trainer.model.dp-replicate 2 --trainer-gpu-ids 1,2"):
        with refusal(ConfigError):
            warned(f"{kind} {words}")
