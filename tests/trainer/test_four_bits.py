"""Weights in 4 bits (QLoRA): trainer and engine compute with the same rounded weights."""

import hashlib
import shutil

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from buckeye.config.trainer import LoRAConfig
from buckeye.errors import UsageError
from buckeye.inference.engine.adapters import AdaptedCheckpoint
from buckeye.inference.engine.architecture import read_spec
from buckeye.inference.engine.weights import Checkpoint, DecoderWeights
from buckeye.launch.preflight.model_files import check_model_files
from buckeye.trainer.data.packing import pack_micro_batch
from buckeye.trainer.model.adapter_files import merge_adapter
from buckeye.trainer.model.lora import add_adapter
from buckeye.trainer.model.policy import load_policy
from tests.rounding import logprob_error
from tests.trainer.test_lora import CPU, IDS, logprobs, plain_logprobs, saved

CLOSE = {"rtol": 0, "atol": 4 * logprob_error(layers=2, width=48)}


def quantize(base, folder, **settings):
    """Write a model with weights in 4 bits, as transformers does."""
    kind = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", **settings)
    model = AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float32, quantization_config=kind, device_map={"": "cpu"}
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=[False, True], ids=["single", "double"])
def quantized(request, tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantized")
    return quantize(tiny_model, folder, bnb_4bit_use_double_quant=request.param)


@pytest.fixture
def policy(quantized):
    """Policy with an adapter whose B is not zero."""
    torch.manual_seed(0)
    loaded = load_policy(str(quantized), CPU, frozen=True)
    add_adapter(loaded.model, LoRAConfig(rank=4), base=str(quantized), frozen_dtype=torch.float32)
    with torch.no_grad():
        for parameter in loaded.trainable.values():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return loaded


def digest(folder):
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def test_engine_and_checks_read_it(quantized):
    spec = check_model_files(quantized, "engine")
    assert spec == read_spec(quantized)
    reference = AutoModelForCausalLM.from_pretrained(quantized, dtype=torch.float32).dequantize()
    weights, checkpoint = DecoderWeights(spec, dtype=torch.float32, device=CPU), Checkpoint(quantized)
    weights.check(checkpoint)
    weights.load(checkpoint)
    for name, tensor in reference.state_dict().items():
        if name in checkpoint.shapes:
            assert torch.equal(checkpoint.tensor(name).float(), tensor.float()), name


def test_only_the_adapter_is_trained_and_the_base_is_unchanged(quantized, policy):
    before, base = digest(quantized), {n: p.clone() for n, p in policy.model.named_parameters()}
    assert all(".lora_" in name and p.dtype == torch.float32 for name, p in policy.trainable.items())
    optimizer = torch.optim.SGD(policy.trainable.values(), lr=0.1)
    row = pack_micro_batch([IDS], [np.arange(len(IDS)) > 0], CPU)
    start = policy(row, torch.ones(len(IDS) - 1))[0].mean()
    (-start).backward()
    optimizer.step()
    assert logprobs(policy).mean() > start
    for name, parameter in policy.model.named_parameters():
        assert torch.equal(parameter, base[name]) is (name not in policy.trainable), name
    assert digest(quantized) == before


def test_export_is_loaded_by_peft_and_by_the_engine_and_merged(quantized, policy, tmp_path, caplog):
    expected, adapter = logprobs(policy), saved(policy, tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(quantized, dtype=torch.float32)
    # in its evaluation mode, bitsandbytes cannot compute with matrices this small on a CPU
    loaded = PeftModel.from_pretrained(base, str(adapter)).train()
    torch.testing.assert_close(plain_logprobs(loaded), expected, **CLOSE)
    merge_adapter(str(quantized), adapter, tmp_path / "merged")
    assert "4 bits" in caplog.text
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert not getattr(merged.config, "quantization_config", None)
    torch.testing.assert_close(plain_logprobs(merged), expected, **CLOSE)
    served = AdaptedCheckpoint(quantized, adapter)
    for name, tensor in merged.state_dict().items():
        if name in served.shapes:
            torch.testing.assert_close(served.merged(name).float(), tensor.float(), rtol=1e-4, atol=1e-4)


def test_all_weights_cannot_be_trained(quantized, refusal):
    with refusal(UsageError):
        load_policy(str(quantized), CPU)


@pytest.fixture(params=["4bit", "8bit"])
def rounding(request):
    return request.param


@pytest.fixture(params=["float32", "bfloat16"])
def stored_model(request, tiny_model, tmp_path):
    """Return the model with its weights in a dtype."""
    folder = shutil.copytree(tiny_model, tmp_path / "stored")
    AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, request.param)).save_pretrained(folder)
    return folder


@pytest.fixture
def rounded_policy(rounding, stored_model):
    """Policy of a full-precision model that is rounded when it is loaded, with an adapter and a full norm."""
    torch.manual_seed(0)
    loaded = load_policy(str(stored_model), CPU, frozen=True, compute_dtype="float32", quantization=rounding)
    lora = LoRAConfig(rank=4, modules_to_save=["model.norm"])
    add_adapter(loaded.model, lora, base=str(stored_model), frozen_dtype=torch.float32)
    with torch.no_grad():
        for parameter in loaded.trainable.values():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return loaded


def rounded_tensors(folder, rounding, adapter=None):
    """Return the tensors that the engine computes with."""
    checkpoint = Checkpoint(folder) if adapter is None else AdaptedCheckpoint(folder, adapter)
    weights = DecoderWeights(read_spec(folder), dtype=torch.float32, device=CPU, quantization=rounding)
    weights.check(checkpoint)
    weights.load(checkpoint)
    return {name: checkpoint.merged(name).float() for name in checkpoint.shapes}


def test_trainer_and_engine_round_alike(rounding, rounded_policy, stored_model, tmp_path):
    plain, base = rounded_tensors(stored_model, None), rounded_tensors(stored_model, rounding)
    changed = {name for name, tensor in plain.items() if not torch.equal(tensor, base[name])}
    assert changed == {name for name in plain if name.endswith("_proj.weight")}
    tensors = rounded_tensors(stored_model, rounding, saved(rounded_policy, tmp_path))
    model = AutoModelForCausalLM.from_pretrained(stored_model, dtype=torch.float32)
    model.load_state_dict(tensors, strict=False)
    torch.testing.assert_close(plain_logprobs(model), logprobs(rounded_policy), **CLOSE)


def test_gradients_are_those_of_the_rounded_weights(rounding, rounded_policy, stored_model, tmp_path):
    row = pack_micro_batch([IDS], [np.arange(len(IDS)) > 0], CPU)

    def gradients(policy):
        policy(row, torch.ones(len(IDS) - 1))[0].sum().backward()
        return {name: parameter.grad for name, parameter in policy.trainable.items()}

    found = gradients(rounded_policy)
    dense = load_policy(str(stored_model), CPU, frozen=True, compute_dtype="float32")
    dense.model.load_state_dict(rounded_tensors(stored_model, rounding), strict=False)
    lora = LoRAConfig(rank=4, modules_to_save=["model.norm"])
    add_adapter(dense.model, lora, base=str(stored_model), frozen_dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in dense.trainable.items():
            parameter.copy_(rounded_policy.trainable[name])
    for name, gradient in gradients(dense).items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-4)


def test_export_belongs_to_the_unrounded_base(rounded_policy, stored_model, tmp_path):
    adapter = saved(rounded_policy, tmp_path / "adapter")
    merge_adapter(str(stored_model), adapter, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    base = AutoModelForCausalLM.from_pretrained(stored_model, dtype=torch.float32)
    assert merged.config.tie_word_embeddings == base.config.tie_word_embeddings
    trained = rounded_policy.model.get_parameter("model.norm.modules_to_save.default.weight")
    assert torch.equal(merged.model.norm.weight, trained.to(merged.dtype))
    loaded = PeftModel.from_pretrained(base, str(adapter))
    close = CLOSE if merged.dtype == torch.float32 else {"rtol": 0, "atol": 0.1}
    torch.testing.assert_close(plain_logprobs(merged.float()), plain_logprobs(loaded), **close)


def test_config_that_only_claims_four_bits_is_refused(quantized, tiny_model, tmp_path, refusal):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    shutil.copy(quantized / "config.json", folder / "config.json")
    with refusal(UsageError):
        check_model_files(folder, "engine")
