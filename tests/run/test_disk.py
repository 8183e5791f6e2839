"""Estimates of disk, by hand from a model's shapes."""

import json

from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.config.rl import RLConfig
from buckeye.config.trainer import ExperimentalConfig, LoRAConfig, ModelConfig, TrainerConfig
from buckeye.run.disk import count_parameters, estimate_disk


def _estimate(model, lora):
    trainer = TrainerConfig(model=ModelConfig(device="cpu", experimental=ExperimentalConfig(lora=lora)))
    return estimate_disk(RLConfig(trainer=trainer, orchestrator=OrchestratorConfig()), model)


def test_an_adapter_takes_what_its_matrices_take(tiny_model):
    whole, adapter = (
        _estimate(tiny_model, None),
        _estimate(
            tiny_model, LoRAConfig(rank=2, target_modules=["down_proj"], modules_to_save=["model.norm"])
        ),
    )
    parameters = count_parameters(tiny_model)
    assert (whole.weights, whole.checkpoints) == (4 * 4 * parameters, 3 * 4 * parameters)
    hidden, inner, layers = _shape(tiny_model)
    trained = layers * 2 * (hidden + inner) + hidden
    assert (adapter.weights, adapter.checkpoints) == (4 * 4 * trained, 3 * 4 * trained)


def _shape(model):
    config = json.loads((model / "config.json").read_text())
    return config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
