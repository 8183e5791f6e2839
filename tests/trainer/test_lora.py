"""Adapters: only they are trained, published and saved; the base stays bitwise unchanged."""

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from buckeye.config.trainer import ExperimentalConfig, LoRAConfig
from buckeye.errors import CheckpointError, UsageError
from buckeye.monitor.metrics import read_run_metrics
from buckeye.trainer.data.packing import pack_micro_batch
from buckeye.trainer.model.adapter_files import merge_adapter, read_adapter, save_adapter
from buckeye.trainer.model.lora import add_adapter, without_adapter
from buckeye.trainer.model.policy import load_policy
from buckeye.trainer.output.weight_rounding import make_canary
from buckeye.trainer.parallel.shards import fill_policy
from buckeye.trainer.rl import run_trainer
from buckeye.transport.checkpoint import resolve_checkpoint
from buckeye.transport.weights import verify_weights
from tests.rounding import logprob_error
from tests.trainer.counting import count_passes
from tests.trainer.rl_runs import ME, put
from tests.trainer.trainer_config import trainer_config

CPU = torch.device("cpu")
IDS = np.random.default_rng(3).integers(0, 256, 24).astype(np.int32)


def adapted(model: Path, *, frozen_dtype=torch.float32, **settings):
    """Return a policy with an adapter whose B is not zero."""
    torch.manual_seed(0)
    policy = load_policy(str(model), CPU)
    add_adapter(policy.model, LoRAConfig(rank=4, **settings), base=str(model), frozen_dtype=frozen_dtype)
    with torch.no_grad():
        for parameter in policy.trainable.values():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return policy


def logprobs(policy):
    """Return the log-probs of all tokens of `IDS` except the first."""
    row = pack_micro_batch([IDS], [np.arange(len(IDS)) > 0], CPU)
    with torch.no_grad():
        return policy(row, torch.ones(len(IDS) - 1))[0]


def saved(policy, directory: Path) -> Path:
    save_adapter(policy.model, {}, directory, tensors=policy.trainable)
    return directory


def plain_logprobs(model):
    ids = torch.from_numpy(IDS).long()
    with torch.no_grad():
        return model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]


def test_a_new_adapter_changes_nothing(tiny_model):
    policy = load_policy(str(tiny_model), CPU)
    before = logprobs(policy)
    add_adapter(policy.model, LoRAConfig(), base=str(tiny_model), frozen_dtype=torch.float32)
    assert torch.equal(logprobs(policy), before)
    adapter_elements = 2 * 16 * ((32 + 32) + 2 * (32 + 16) + (32 + 32) + 2 * (32 + 48) + (48 + 32))
    assert sum(p.numel() for p in policy.trainable.values()) == adapter_elements  # two layers of rank 16


@pytest.mark.parametrize("modules_to_save", [[], ["lm_head", "norm"]])
def test_merged_model_equals_adapted_model_and_peft(tmp_path, tiny_llama, modules_to_save):
    policy = adapted(tiny_llama, modules_to_save=modules_to_save, alpha=6.0)
    expected = logprobs(policy)
    adapter = saved(policy, tmp_path / "adapter")
    merge_adapter(str(tiny_llama), adapter, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    foreign = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_llama), str(adapter))
    assert (logprobs(load_policy(str(tiny_llama), CPU)) - expected).abs().max() > 1e-2
    for model in (merged, foreign):
        torch.testing.assert_close(
            plain_logprobs(model), expected, rtol=0, atol=logprob_error(layers=2, width=48)
        )


def test_adapter_of_another_model_is_not_merged(tmp_path, tiny_model, refusal):
    adapter = saved(adapted(tiny_model, target_modules=["q_proj"]), tmp_path / "adapter")
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file(
        {name.replace("q_proj", "query"): t for name, t in tensors.items()},
        adapter / "adapter_model.safetensors",
    )
    with refusal(UsageError):
        merge_adapter(str(tiny_model), adapter, tmp_path / "merged")


def test_frozen_matrices_are_counted_separately(tiny_model, tiny_llama):
    """Two layers of hidden size 32: base and head are frozen, the rank-4 adapter of q_proj is trained."""
    layer = 32 * (32 + 16 + 16 + 32) + 3 * 32 * 48
    adapter = 2 * 4 * (32 + 32)
    for model, trained_head in ((tiny_model, []), (tiny_llama, []), (tiny_llama, ["lm_head"])):
        policy = adapted(model, target_modules=["q_proj"], modules_to_save=trained_head)
        head = 264 * 32
        assert policy.matrix_elements == 2 * layer + head + adapter
        assert policy.frozen_matrix_elements == 2 * layer + (0 if trained_head else head)


def test_without_adapter_equals_the_base_model(tiny_llama):
    policy = adapted(tiny_llama, modules_to_save=["lm_head"])
    trainable, before = set(policy.trainable), logprobs(policy)
    with without_adapter(policy.model):
        assert torch.equal(logprobs(policy), logprobs(load_policy(str(tiny_llama), CPU)))
    assert torch.equal(logprobs(policy), before)
    assert set(policy.trainable) == trainable


def test_gradients_are_those_of_the_formula(tiny_model):
    """With W' = W + s B A: dL/dB = s dL/dW' A^T and dL/dA = s B^T dL/dW'."""
    policy = adapted(tiny_model, target_modules=["o_proj"], alpha=6.0)
    full = load_policy(str(tiny_model), CPU)
    name = "model.layers.1.self_attn.o_proj"
    a, b = (policy.trainable[f"{name}.lora_{side}.default.weight"] for side in "AB")
    for layer in range(2):
        other = name.replace("1", str(layer))
        pair = [policy.trainable[f"{other}.lora_{side}.default.weight"] for side in "AB"]
        with torch.no_grad():
            full.trainable[f"{other}.weight"] += 1.5 * pair[1] @ pair[0]
    row = pack_micro_batch([IDS], [np.arange(len(IDS)) > 0], CPU)
    for model in (policy, full):
        model(row, torch.ones(len(IDS) - 1))[0].sum().backward()
    gradient = full.trainable[f"{name}.weight"].grad
    torch.testing.assert_close(b.grad, 1.5 * gradient @ a.detach().T, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(a.grad, 1.5 * b.detach().T @ gradient, rtol=1e-4, atol=1e-4)


def test_recomputed_activations_give_the_same_gradients(tiny_model):
    gradients, passes = [], []
    for every in (None, 1):
        policy = adapted(tiny_model)
        passes.append(count_passes(policy))
        if every is not None:
            policy.checkpoint_activations(every=every)
        row = pack_micro_batch([IDS], [np.arange(len(IDS)) > 0], CPU)
        policy(row, torch.ones(len(IDS) - 1))[0].sum().backward()
        gradients.append({name: p.grad for name, p in policy.trainable.items()})
    assert passes == [[1] * len(passes[0]), [2] * len(passes[0])]
    for name, gradient in gradients[0].items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)


def test_canary_has_no_dropout(tiny_model):
    policy = adapted(tiny_model, dropout=0.5)
    assert not torch.equal(logprobs(policy), logprobs(policy))
    assert make_canary(policy) == make_canary(policy)
    assert not torch.equal(logprobs(policy), logprobs(policy))


def test_in_bfloat16_the_adapter_stays_precise(tiny_llama):
    """If layers compute in bfloat16, frozen weights are stored in bfloat16; trained weights are not."""
    exact = adapted(tiny_llama, modules_to_save=["norm"])
    policy = adapted(tiny_llama, modules_to_save=["norm"], frozen_dtype=torch.bfloat16)
    policy.compute_dtype = torch.bfloat16
    frozen = [p for p in policy.model.parameters() if not p.requires_grad]
    assert {p.dtype for p in frozen} == {torch.bfloat16}
    assert {p.dtype for p in policy.trainable.values()} == {torch.float32}
    row = pack_micro_batch([IDS], [np.arange(len(IDS)) > 0], CPU)
    for model in (exact, policy):
        model(row, torch.ones(len(IDS) - 1))[0].sum().backward()
    for name, parameter in exact.trainable.items():
        found = policy.trainable[name].grad
        assert found.dtype == torch.float32
        cosine = torch.nn.functional.cosine_similarity(found.flatten(), parameter.grad.flatten(), dim=0)
        assert cosine > 0.95, name


@pytest.mark.parametrize(
    ("stored", "computed", "loaded"),
    [
        (torch.bfloat16, "auto", torch.bfloat16),
        (torch.bfloat16, "float32", torch.float32),
        (torch.float32, "bfloat16", torch.bfloat16),
        (torch.float32, "auto", torch.float32),
    ],
)
def test_frozen_base_has_the_narrowest_dtype(tmp_path, tiny_model, stored, computed, loaded):
    """The adapter and the modules trained in full are float32."""
    AutoModelForCausalLM.from_pretrained(tiny_model, dtype=stored).save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path), CPU, compute_dtype=computed, frozen=True)
    assert {parameter.dtype for parameter in policy.model.parameters()} == {loaded}
    lora = LoRAConfig(rank=4, modules_to_save=["model.norm"])
    add_adapter(policy.model, lora, base=str(tmp_path), frozen_dtype=torch.bfloat16)
    assert {(p.requires_grad, p.dtype) for p in policy.model.parameters()} == {
        (True, torch.float32),
        (False, torch.bfloat16),
    }


@pytest.mark.parametrize(
    "settings",
    [
        *({"target_modules": names} for names in (["query"], ["q_proj", "lm_head"], [])),
        *({"modules_to_save": names} for names in (["head"], ["embed_tokens"])),
    ],
)
def test_modules_that_cannot_be_adapted(tiny_model, settings, refusal):
    with refusal(UsageError):
        adapted(tiny_model, **settings)


@pytest.mark.parametrize("settings", [{"alpha": 8.0}, {"target_modules": ["q_proj"]}])
def test_adapter_with_other_settings_is_not_loaded(tmp_path, tiny_model, settings, refusal):
    adapter = saved(adapted(tiny_model), tmp_path)
    with refusal(CheckpointError):
        read_adapter(adapted(tiny_model, **settings).model, adapter)


def test_adapter_with_other_shapes_is_not_loaded(tmp_path, tiny_model, tiny_llama, refusal):
    adapter = saved(adapted(tiny_model, target_modules=["q_proj"]), tmp_path)
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file(
        {name: t[:, :2].contiguous() for name, t in tensors.items()}, adapter / "adapter_model.safetensors"
    )
    with refusal(CheckpointError):
        read_adapter(adapted(tiny_model, target_modules=["q_proj"]).model, adapter)


@pytest.mark.parametrize("at", [0.0, 0.5, 0.99])
def test_adapter_of_other_weights_is_not_loaded(tmp_path, tiny_llama, at, refusal):
    adapter = saved(adapted(tiny_llama), tmp_path / "adapter")
    moved = shutil.copytree(tiny_llama, tmp_path / "moved")
    read_adapter(adapted(moved).model, adapter)
    other = shutil.copytree(tiny_llama, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    for tensor in tensors.values():
        tensor += 1e-3 * (torch.arange(tensor.numel()).reshape(tensor.shape) >= at * tensor.numel())
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    with refusal(UsageError):
        read_adapter(adapted(other).model, adapter)
    with refusal(UsageError):
        merge_adapter(str(other), adapter, tmp_path / "merged")


def _with_lora(config, *, dropout=0.1, **model):
    lora = ExperimentalConfig(lora=LoRAConfig(rank=4, dropout=dropout))
    return config.model_copy(
        update={"model": config.model.model_copy(update={"experimental": lora, **model})}
    )


def _train(model: Path, run: Path, **changes) -> None:
    run_trainer(_with_lora(trainer_config(model, run, **changes)))


def _digest(model: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in model.glob("*.safetensors")}


def _adapter(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / "weights" / f"step_{step}" / "adapter_model.safetensors")


def test_run_publishes_and_saves_only_the_adapter(tmp_path, tiny_model, batches):
    put(tmp_path, batches[:2])
    base = _digest(tiny_model)
    _train(tiny_model, tmp_path, max_steps=2)
    assert _digest(tiny_model) == base
    manifest = verify_weights(tmp_path / "weights" / "step_2")
    assert manifest.adapter
    assert manifest.dtype == "float32"
    assert list(manifest.files) == ["adapter_model.safetensors"]
    assert manifest.canary is not None
    first, last = _adapter(tmp_path, 0), _adapter(tmp_path, 2)
    assert first.keys() == last.keys()
    assert all("lora_" in name for name in first)
    assert all(not t.any() for name, t in first.items() if "lora_B" in name)
    assert all(not torch.equal(first[name], last[name]) for name in first)
    state = resolve_checkpoint(tmp_path / "checkpoints", 2).path / "trainer"
    assert not list(state.rglob("model*.safetensors"))
    assert all("lora_" in name for name in load_file(state / "optimizer.safetensors"))
    assert "3712 parameters" in (tmp_path / "logs" / "run.log").read_text()


def test_trainer_loads_the_frozen_base_in_the_compute_dtype(tmp_path, tiny_model, batches, monkeypatch):
    allocated = {}

    def fill(policy, *args, **settings):
        for parameter in policy.model.parameters():
            allocated.setdefault(parameter.requires_grad, set()).add((parameter.dtype, parameter.device.type))
        fill_policy(policy, *args, **settings)

    monkeypatch.setattr("buckeye.trainer.setup.fill_policy", fill)
    put(tmp_path, batches[:1])
    run_trainer(_with_lora(trainer_config(tiny_model, tmp_path, max_steps=1), compute_dtype="bfloat16"))
    assert allocated == {True: {(torch.float32, "meta")}, False: {(torch.bfloat16, "meta")}}


def test_the_published_canary_is_that_of_the_merged_model(tmp_path, tiny_model, batches):
    put(tmp_path, batches[:1])
    _train(tiny_model, tmp_path, max_steps=1)
    published = tmp_path / "weights" / "step_1"
    merge_adapter(str(tiny_model), published, tmp_path / "merged")
    canary = verify_weights(published).canary
    found = make_canary(load_policy(str(tmp_path / "merged"), CPU), prompt=canary.prompt_ids)
    assert found.token_ids == canary.token_ids
    assert found.logprobs == pytest.approx(canary.logprobs, abs=logprob_error(layers=2, width=48))


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, tiny_model, batches, monkeypatch):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    put(straight, batches)
    _train(tiny_model, straight, max_steps=4)
    put(broken, batches[:2])
    _train(tiny_model, broken, max_steps=2)
    monkeypatch.setenv("BUCKEYE_ATTEMPT", "2")
    put(broken, batches[2:], identity=replace(ME, attempt=2))
    _train(tiny_model, broken, max_steps=4, ckpt={"resume_step": -1})
    one, two = _adapter(straight, 4), _adapter(broken, 4)
    for name in one:
        assert torch.equal(one[name], two[name]), name
    losses = [read_run_metrics(run / "metrics.jsonl").of("trainer") for run in (straight, broken)]
    assert [r["loss"] for r in losses[0].values()] == [r["loss"] for r in losses[1].values()]


def test_checkpoint_of_an_adapter_is_refused_for_full_training(tmp_path, tiny_model, batches, refusal):
    put(tmp_path, batches[:1])
    _train(tiny_model, tmp_path, max_steps=1)
    with refusal(CheckpointError):
        run_trainer(trainer_config(tiny_model, tmp_path, max_steps=2, ckpt={"resume_step": -1}))
