"""Adapters of models without a built-in decoder."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from buckeye.config.load import load_config
from buckeye.config.rl import RLConfig
from buckeye.config.trainer import LoRAConfig
from buckeye.errors import BuckeyeError, UsageError
from buckeye.inference.engine.adapters import AdaptedCheckpoint
from buckeye.inference.engine.general_spec import read_served_spec
from buckeye.inference.engine.weights import Checkpoint
from buckeye.launch.preflight.trainer_checks import trainer_warnings
from buckeye.trainer.model.adapter_files import merge_adapter
from buckeye.trainer.model.lora import add_adapter
from buckeye.trainer.model.policy import load_policy
from buckeye.trainer.output.hf_directory import save_model
from tests.general_models import tiny_model

from .conftest import make_engine


def save(family, directory) -> None:
    tiny_model(family).save_pretrained(directory)


@pytest.mark.parametrize("family", ["phi", "mixtral", "fuyu"])
def test_a_config_of_an_older_transformers_is_that_of_the_weights_of_its_trainer(family, tmp_path):
    save(family, tmp_path / "old")
    path = tmp_path / "old" / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters", {"rope_theta": 1e4})
    older = {
        "torch_dtype": config.pop("dtype"),
        "rope_theta": rope["rope_theta"],
        "transformers_version": "4.40.0",
    }
    path.write_text(json.dumps(config | older))
    policy = load_policy(str(tmp_path / "old"), torch.device("cpu"))
    save_model(policy.model, {}, tmp_path / "new", dtype=torch.bfloat16)
    assert read_served_spec(tmp_path / "new") == read_served_spec(tmp_path / "old")
    path.write_text(
        json.dumps(config | older | {"rms_norm_eps": 0.5, "layer_norm_eps": 0.5, "hidden_act": "relu"})
    )
    assert read_served_spec(tmp_path / "new") != read_served_spec(tmp_path / "old")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapter_is_applied_replaced_and_removed(dtype, tmp_path):
    save("phi", tmp_path / "base")
    ids, texts = torch.arange(9), []
    engine = make_engine(tmp_path / "base", dtype=dtype)
    weights, plain = engine.decoder.weights, engine.decoder.prompt_logprobs(ids.tolist())
    for number in range(2):
        adapted = get_peft_model(tiny_model("phi"), LoraConfig(r=2, target_modules=["q_proj", "dense"]))
        torch.manual_seed(number)
        for name, parameter in adapted.named_parameters():
            if "lora" in name:
                torch.nn.init.normal_(parameter, 0, 0.3)
        adapted.save_pretrained(tmp_path / f"adapter-{number}")
        checkpoint = AdaptedCheckpoint(tmp_path / "base", tmp_path / f"adapter-{number}")
        weights.check(checkpoint)
        weights.load(weights.prepare(checkpoint))
        with torch.no_grad():
            logits = adapted.eval()(ids[None]).logits[0]
        expected = logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        found = engine.decoder.prompt_logprobs(ids.tolist())
        assert found == pytest.approx(expected.tolist(), abs=1e-4 if dtype == torch.float32 else 0.3)
        texts.append(found)
    assert texts[0] != texts[1]
    weights.load(weights.prepare(Checkpoint(tmp_path / "base")))
    assert engine.decoder.prompt_logprobs(ids.tolist()) == plain


def test_weights_that_were_written_again_to_a_directory_are_read_again(tmp_path):
    save("phi", tmp_path / "step_5")
    engine, ids = make_engine(tmp_path / "step_5"), list(range(9))
    before, weights = engine.decoder.prompt_logprobs(ids), engine.decoder.weights
    tiny_model("phi", seed=1).save_pretrained(tmp_path / "step_5")
    weights.load(weights.prepare(Checkpoint(tmp_path / "step_5")))
    assert engine.decoder.prompt_logprobs(ids) != before
    assert engine.decoder.prompt_logprobs(ids) == make_engine(tmp_path / "step_5").decoder.prompt_logprobs(
        ids
    )


def test_adapter_of_another_model_is_refused(tmp_path):
    save("phi", tmp_path / "base")
    engine = make_engine(tmp_path / "base")
    other = get_peft_model(tiny_model("gpt_neox"), LoraConfig(r=2, target_modules=["query_key_value"]))
    other.save_pretrained(tmp_path / "adapter")
    checkpoint = AdaptedCheckpoint(tmp_path / "base", tmp_path / "adapter")
    with pytest.raises(BuckeyeError, match="query_key_value") as raised:
        engine.decoder.weights.check(checkpoint)
    assert raised.value.code == "BK-ADAPTER"


@pytest.mark.parametrize("targets", [["gate_proj", "up_proj", "down_proj"], ["gate_proj"]])
def test_names_that_mean_routed_experts_are_refused(targets, tmp_path):
    """peft adapts the experts, which the engine cannot serve, in place of the named linear layers."""
    save("glm4_moe", tmp_path)
    policy = load_policy(str(tmp_path), torch.device("cpu"), frozen=True)
    lora = LoRAConfig(target_modules=targets)
    with pytest.raises(UsageError) as refused:
        add_adapter(policy.model, lora, base=str(tmp_path), frozen_dtype=torch.float32)
    assert refused.value.code == "BK-CONFIG-VALUE"
    words = [f"--trainer.model.experimental.lora.target-modules={json.dumps(targets)}"]
    config = load_config(RLConfig, ["--trainer", "--orchestrator", "--inference", *words])
    assert len(trainer_warnings(config, tmp_path, on_gpu=False)) == 1


def test_merge_has_the_tensors_that_peft_does_not_load(tmp_path):
    """peft renames the shared experts of Laguna in its own files."""
    save("laguna", tmp_path / "base")
    adapted = get_peft_model(tiny_model("laguna"), LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name:
                parameter.normal_(0, 0.3)
    adapted.save_pretrained(tmp_path / "adapter")
    merge_adapter(str(tmp_path / "base"), tmp_path / "adapter", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    ids = torch.arange(9)[None]
    torch.testing.assert_close(merged(ids).logits, adapted.eval()(ids).logits, rtol=0, atol=1e-4)
