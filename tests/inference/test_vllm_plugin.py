"""The vLLM plugin, which no type checker sees with its base classes: its classes have what they use."""

import ast
import contextlib
import importlib
import sys
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import buckeye.inference.vllm
from buckeye.base.process import RunIdentity
from buckeye.transport.weights import publish_weights
from tests.waiting import wait_for

PLUGIN = Path(buckeye.inference.vllm.__file__).parent / "plugin"


@pytest.mark.parametrize("path", sorted(PLUGIN.glob("*.py")), ids=lambda path: path.stem)
def test_private_names_of_a_class_are_defined_in_it(path):
    for owner in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)):
        defined = {
            node.name for node in owner.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        attributes = [node for node in ast.walk(owner) if isinstance(node, ast.Attribute)]
        defined |= {node.attr for node in attributes if isinstance(node.ctx, ast.Store)}
        used = {
            node.attr
            for node in attributes
            if isinstance(node.value, ast.Name) and node.value.id == "self" and node.attr.startswith("_")
        }
        assert used - defined == set()


class _Engine:
    """Stand-in for vLLM's generic base class."""

    def __class_getitem__(cls, _):
        return cls


@pytest.fixture
def worker(monkeypatch, tmp_path):
    """The plugin's module of workers, without vLLM."""
    base, factory, request = (types.ModuleType(name) for name in ("base", "factory", "request"))
    base.WeightTransferEngine = base.WeightTransferInitInfo = base.WeightTransferUpdateInfo = _Engine
    registry = types.SimpleNamespace(_registry={}, register_engine=lambda *_: None)
    factory.WeightTransferEngineFactory, request.LoRARequest = registry, object
    transfer = "vllm.distributed.weight_transfer"
    for name in ("vllm", "vllm.distributed", transfer, "vllm.lora"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    modules = {f"{transfer}.base": base, f"{transfer}.factory": factory, "vllm.lora.request": request}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.syspath_prepend(str(PLUGIN))
    monkeypatch.setenv("BUCKEYE_VLLM_WEIGHTS_DIR", str(tmp_path))
    monkeypatch.delitem(sys.modules, "buckeye_vllm_worker", raising=False)
    return importlib.import_module("buckeye_vllm_worker")


def _model(folder, *names):
    folder.mkdir()
    save_file({name: torch.zeros(2) for name in names}, folder / "model.safetensors")
    return folder


LAYERS = ("model.embed_tokens.weight", "model.layers.0.mlp.up.weight", "model.layers.1.mlp.up.weight")
OTHER_PARTS = ("model.layers.2.mlp.up.weight", "mtp.layers.0.up.weight", "model.visual.blocks.0.up.weight")


@pytest.mark.parametrize(
    ("sent", "is_accepted"),
    [
        (LAYERS, True),
        ((*LAYERS, OTHER_PARTS[0]), True),
        (LAYERS[:2], False),
        (LAYERS[1:], False),
        ((*LAYERS, "model.layers.0.mlp.new"), False),
    ],
)
def test_only_trained_tensors_must_be_sent(worker, tmp_path, sent, is_accepted):
    engine = worker.DirectoryTransfer()
    served = _model(tmp_path / "served", *LAYERS, *OTHER_PARTS)
    engine.model_config = types.SimpleNamespace(
        model=str(served),
        hf_config=types.SimpleNamespace(tie_word_embeddings=False),
        hf_text_config=types.SimpleNamespace(num_hidden_layers=2),
    )
    with contextlib.nullcontext() if is_accepted else pytest.raises(ValueError, match=r"\(missing\)"):
        engine._check_tensors("step_1", {name: [2] for name in sent})


def test_workers_of_a_server_verify_each_file_once(worker, tmp_path, monkeypatch):
    hashed, digest_files = [], worker._weights_digest.digest_files

    def record(paths):
        hashed.extend(path.name for path in paths)
        return digest_files(paths)

    monkeypatch.setattr(worker._weights_digest, "digest_files", record)
    files = [f"model-{number}.safetensors" for number in range(5)]

    def fill(directory):
        for name in files:
            save_file({name: torch.zeros(2)}, directory / name)

    path = publish_weights(tmp_path, 1, fill, identity=RunIdentity(run_id="t", attempt=1), dtype="float32")
    for rank in range(2):
        monkeypatch.setattr(worker, "_VERIFICATION", worker.Verification())  # each worker is a process
        extension = worker.WorkerExtension()
        extension.rank, extension.parallel_config = rank, types.SimpleNamespace(world_size=2)
        wait_for(lambda verify=extension.buckeye_verify: verify(str(path)) is not None)
        assert extension.buckeye_verify(str(path)) == ""
    assert sorted(hashed) == files
