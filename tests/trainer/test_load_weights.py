"""The trainer's own loading gives the parameters, buffers and logits of transformers' `from_pretrained`."""

import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from buckeye.errors import UsageError
from buckeye.trainer.model.attention import PACKED_ATTENTION
from buckeye.trainer.model.policy import PolicyNetwork
from buckeye.trainer.model.trainable import FAMILIES
from buckeye.trainer.parallel.fsdp import shard_policy
from buckeye.trainer.parallel.shards import can_load_tensors, fill_policy, prepare_policy
from buckeye.trainer.setup import _load_policy
from tests.rounding import logprob_error

from .test_trainable import LAYERS, SMALL, small_config
from .trainer_config import trainer_config

CPU = torch.device("cpu")
QUICK = ("qwen3", "phi3", "gemma3_text", "apertus", "gpt2", "gpt_neox", "opt", "biogpt")
MIXTURES = ("qwen3_moe", "olmoe", "mixtral")
WHOLE = ("gemma", "gemma3_text", "apertus", "gpt_bigcode", "gpt_neox", *MIXTURES)
"""Families with buffers that are not in files, or with other names in files."""


def save(directory, family="llama", *, seed=0, shard="1GB", dtype=torch.float32, **changes):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(small_config(family, **changes), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.to(dtype).save_pretrained(directory, max_shard_size=shard)
    return directory


def load(directory, by_tensors: bool | None = None) -> PolicyNetwork:
    settings = {"flash": False, "compute_dtype": "float32", "sharded": False}
    policy = prepare_policy(str(directory), CPU, by_tensors=by_tensors, **settings)
    fill_policy(policy, str(directory), offloaded=False)
    return policy


def assert_loads_as_transformers(directory) -> None:
    plain, packed = (
        AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation=kind).eval()
        for kind in ("eager", PACKED_ATTENTION)
    )
    policy = load(directory).eval()
    for kind in ("named_parameters", "named_buffers"):
        expected, found = dict(getattr(packed, kind)()), dict(getattr(policy.model, kind)())
        assert expected.keys() == found.keys()
        assert [n for n in found if not torch.equal(found[n], expected[n])] == []
        assert [n for n in found if found[n].dtype != expected[n].dtype] == []
    assert policy.model.generation_config.to_dict() == packed.generation_config.to_dict()
    ids = torch.arange(SMALL["vocab_size"])[:24]
    with torch.no_grad():
        found, expected = policy.logits(ids, slice(None)), plain(input_ids=ids[None]).logits[0]
    limit = 2 * logprob_error(layers=LAYERS, width=128)
    torch.testing.assert_close(found.log_softmax(-1), expected.log_softmax(-1), rtol=0, atol=limit)


@pytest.mark.parametrize(
    "family", [f if f in QUICK else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES]
)
def test_family_is_loaded_as_by_transformers(tmp_path, family):
    save(tmp_path, family)
    assert can_load_tensors(str(tmp_path)) == (family not in WHOLE)
    assert_loads_as_transformers(tmp_path)


@pytest.mark.parametrize("rope", ["linear", "dynamic", "yarn", "llama3", "longrope"])
def test_frequencies_of_positions_are_those_of_transformers(tmp_path, rope):
    scaling = {
        "rope_type": rope,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "short_factor": [1.5, 1.0, 2.0, 1.0],
        "long_factor": [9.0] * 4,
        "original_max_position_embeddings": 64,
    }
    save(tmp_path, rope_scaling=scaling, shard="20KB", dtype=torch.bfloat16, tie_word_embeddings=True)
    assert can_load_tensors(str(tmp_path))
    assert_loads_as_transformers(tmp_path)


@pytest.mark.parametrize("shard", ["1GB", "20KB"])
def test_other_files_of_the_folder_are_not_loaded(tmp_path, shard):
    model, other = save(tmp_path / "model", shard=shard), save(tmp_path / "other", seed=1)
    shutil.copy(other / "model.safetensors", model / "zzz.safetensors")
    assert can_load_tensors(str(model))
    assert_loads_as_transformers(model)


def test_separate_output_layer_of_a_tied_model_is_refused(tmp_path):
    file = save(tmp_path, tie_word_embeddings=True) / "model.safetensors"
    tensors = load_file(file)
    assert "lm_head.weight" not in tensors
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, file)
    for by_tensors in (None, True):
        with pytest.raises(UsageError) as refused:
            load(tmp_path, by_tensors)
        assert refused.value.code == "BK-MODEL-UNSUPPORTED"


def test_tensor_of_another_shape_is_refused(tmp_path):
    file, name = save(tmp_path) / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(file)
    save_file(tensors | {name: tensors[name].T.contiguous()}, file)
    for by_tensors in (None, True):
        with pytest.raises(UsageError, match=rf"{name}.*\[32, 48\]|\[32, 48\].*{name}") as refused:
            load(tmp_path, by_tensors)
        assert refused.value.code == "BK-MODEL-DAMAGED"


def test_additional_tensor_of_a_rare_type_is_ignored(tmp_path):
    file = save(tmp_path) / "model.safetensors"
    save_file(load_file(file) | {"scales": torch.zeros(4, dtype=torch.float8_e8m0fnu)}, file)
    assert not can_load_tensors(str(tmp_path))
    assert_loads_as_transformers(tmp_path)


def test_damaged_index_is_refused(tmp_path):
    (save(tmp_path, shard="20KB") / "model.safetensors.index.json").write_text("{")
    for by_tensors in (None, True):
        with pytest.raises(UsageError) as refused:
            load(tmp_path, by_tensors)
        assert refused.value.code == "BK-MODEL-DAMAGED"


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_neox"])
def test_checkpoint_without_every_value_is_loaded_whole_on_each_rank(tmp_path, family):
    """Buffers are not in the files, or names differ. A sharded run has started from such a model."""
    checkpoint = str(save(tmp_path, family))
    ranks = SimpleNamespace(mesh=object(), device=CPU)
    policy = _load_policy(checkpoint, trainer_config("another", tmp_path), ranks)
    assert policy.model.device == CPU


def test_buffers_that_are_not_in_files_are_not_left_empty(tmp_path):
    save(tmp_path, "gemma3_text")
    with pytest.raises(UsageError, match="embed_scale") as refused:
        load(tmp_path, by_tensors=True)
    assert refused.value.code == "BK-MODEL-UNSUPPORTED"


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_family_whose_layers_have_another_name_is_not_sharded(tmp_path, family):
    policy = load(save(tmp_path / "model", family))
    ranks = SimpleNamespace(mesh=object(), device=CPU)
    with pytest.raises(UsageError) as refused:
        shard_policy(policy, trainer_config("another", tmp_path).model, ranks)
    assert (refused.value.code, refused.value.at) == ("BK-MODEL-UNSUPPORTED", "trainer.model.sharding")


def test_quantization_of_a_sharded_model_is_refused(tmp_path):
    lora, directory = {"lora": {"rank": 4}}, save(tmp_path)
    settings = {"load_using_meta": True, "quantization": "4bit", "experimental": lora}
    config = trainer_config(directory, tmp_path, model=settings)
    with pytest.raises(UsageError) as refused:
        _load_policy(str(directory), config, SimpleNamespace(mesh=object(), device=CPU))
    assert refused.value.code in ("BK-MODEL-UNSUPPORTED", "BK-PACKAGE-MISSING")
