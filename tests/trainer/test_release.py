"""An exported model is compared with the checkpoint in the same precision."""

import json
import shutil

import pytest
import torch
from transformers import AutoConfig, LlamaConfig

from buckeye.config.trainer import LoRAConfig
from buckeye.trainer.model import policy as model
from buckeye.trainer.model.adapter_files import save_adapter
from buckeye.trainer.model.lora import add_adapter
from buckeye.trainer.output.checkpoint_export import ComparisonTexts, write_model
from buckeye.trainer.output.hf_directory import read_tokenizer_files


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_bfloat16_model_is_exported(tmp_path, tiny_model, monkeypatch, dtype):
    monkeypatch.setattr(model, "auto_compute_dtype", lambda parameters, device: torch.bfloat16)
    shutil.copytree(tiny_model, tmp_path / "state" / "model")
    verified = write_model(tmp_path / "state", tmp_path / "out", dtype=dtype, passages=ComparisonTexts())
    assert verified.dtype == (dtype or "float32")
    assert verified.divergence < (1e-3 if dtype else 1e-6)


def test_model_is_compared_within_the_length_of_its_angles(tmp_path, build_model):
    """Longer samples of a model with "longrope" cannot be trained."""
    source = build_model(LlamaConfig, max_position_embeddings=40)
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16}
    count = AutoConfig.from_pretrained(source).head_dim // 2
    rope |= {"short_factor": [1.0] * count, "long_factor": [9.0] * count, "factor": 2.5}
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"rope_parameters": rope}))
    shutil.copytree(source, tmp_path / "state" / "model")
    verified = write_model(tmp_path / "state", tmp_path / "out", dtype=None, passages=ComparisonTexts())
    assert verified.tokens == 16


def test_export_copies_every_chat_template(tmp_path, tiny_model):
    """transformers reads the template for tool conversations from a separate folder."""
    model_folder = shutil.copytree(tiny_model, tmp_path / "state" / "model")
    written = model_folder / "additional_chat_templates" / "tool_use.jinja"
    written.parent.mkdir()
    written.write_text("with tools")
    (model_folder / "additional_chat_templates" / "notes.txt").write_text("of no use")
    write_model(tmp_path / "state", tmp_path / "out", dtype=None, passages=ComparisonTexts())
    folder = tmp_path / "out" / "additional_chat_templates"
    assert [(file.name, file.read_text()) for file in folder.iterdir()] == [("tool_use.jinja", "with tools")]
    files = read_tokenizer_files(str(tmp_path / "out"))
    policy = model.load_policy(str(tiny_model), torch.device("cpu"), compute_dtype="float32")
    add_adapter(policy.model, LoRAConfig(rank=2), base=str(tiny_model), frozen_dtype=torch.float32)
    save_adapter(policy.model, files, tmp_path / "adapter", tensors={})
    assert read_tokenizer_files(str(tmp_path / "adapter")) == files
