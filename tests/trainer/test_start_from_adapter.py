"""Training that starts from an adapter directory: continues the adapter, or trains the merged model."""

import json
import shutil

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from buckeye.cli.load import with_run_weights
from buckeye.config.adapter import start_model
from buckeye.config.load import load_config
from buckeye.config.rl import RLConfig
from buckeye.config.sft import SFTConfig
from buckeye.errors import UsageError
from buckeye.inference.engine.adapters import AdaptedCheckpoint
from buckeye.trainer.batch_loss import load_reference
from buckeye.trainer.data.packing import pack_micro_batch
from buckeye.trainer.model.adapter_files import merge_adapter
from buckeye.trainer.parallel.ranks import Ranks
from buckeye.trainer.rl import run_trainer
from buckeye.trainer.setup import build_learner
from buckeye.transport.checkpoint import list_checkpoints
from tests.rounding import logprob_error
from tests.trainer.rl_runs import put, records
from tests.trainer.test_lora import CPU, IDS, adapted, logprobs, plain_logprobs, saved
from tests.trainer.trainer_config import sft_config, trainer_config

LORA = {"experimental": {"lora": {}}}


@pytest.fixture(scope="module")
def adapter(tiny_model, tmp_path_factory):
    """Adapter of rank 4, as fine-tuning saves it."""
    return saved(adapted(tiny_model, alpha=6.0), tmp_path_factory.mktemp("adapter"))


@pytest.fixture(scope="module")
def expected(tiny_model, adapter):
    """Log-probs that peft computes with the adapter."""
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    return plain_logprobs(PeftModel.from_pretrained(base, str(adapter)))


def config_of(folder, tmp_path, **changes):
    """Return the trainer's settings for a directory, resolved as the command does."""
    config = trainer_config(folder, tmp_path, **changes)
    return config.model_copy(update={"model": start_model(config.model)})


@pytest.mark.parametrize("model", [LORA, {}], ids=["further", "merged"])
def test_learner_and_reference_start_from_the_adapter(adapter, tmp_path, tiny_model, expected, model):
    config = config_of(adapter, tmp_path, model=model, loss={"kl_coef": 0.1})
    learner = build_learner(config, Ranks(rank=0, world_size=1, device=CPU), None, max_steps=1)
    close = {"rtol": 0, "atol": 2 * logprob_error(layers=2, width=48)}
    torch.testing.assert_close(logprobs(learner.policy), expected, **close)
    whole = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(tiny_model).parameters())
    trained = sum(p.numel() for p in learner.policy.trainable.values())
    assert trained < whole if model else trained == whole
    compared = load_reference(config, learner)
    with torch.no_grad():  # the reference keeps the weights from the start of the run
        for parameter in learner.policy.trainable.values():
            parameter.add_(0.1)
    row = pack_micro_batch([IDS], [np.arange(len(IDS)) > 0], CPU)
    torch.testing.assert_close(compared(row, torch.ones(len(IDS) - 1)), expected, **close)


@pytest.mark.parametrize("model", [LORA, {}], ids=["further", "merged"])
def test_a_run_from_an_adapter_publishes_and_resumes(adapter, tmp_path, batches, model):
    put(tmp_path, batches[:2])
    changes = {"model": model, "max_steps": 2}
    run_trainer(config_of(adapter, tmp_path, **changes))
    assert [info.step for info in list_checkpoints(tmp_path / "checkpoints")] == [2]
    put(tmp_path, batches[2:3])
    changes |= {"max_steps": 3, "ckpt": {"resume_step": -1}}
    run_trainer(config_of(adapter, tmp_path, **changes))
    assert [r["step"] for r in records(tmp_path)] == [0, 1, 2]
    assert (tmp_path / "weights" / "step_3" / "adapter_config.json").is_file() is bool(model)


def test_all_process_settings_name_the_base_model(adapter, tiny_model, tmp_path):
    words = ["--trainer", "--orchestrator", "--inference", "--model.name", str(adapter)]
    config = load_config(RLConfig, [*words, "--trainer.model.experimental.lora.dropout", "0.1"])
    sections = (config.trainer, config.orchestrator, config.inference)
    assert {section.model.name for section in sections} == {str(tiny_model)}
    assert config.trainer.model.adapter == adapter
    lora = config.trainer.model.experimental.lora
    assert (lora.rank, lora.alpha, lora.dropout) == (4, 6.0, 0.1)
    chats = ["--data.path", str(tmp_path / "chats.jsonl"), "--model.name", str(adapter)]
    fine_tuned = load_config(SFTConfig, chats).model
    assert (fine_tuned.name, fine_tuned.adapter) == (str(tiny_model), adapter)
    assert fine_tuned.experimental.lora is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ["--trainer.model.experimental.lora.rank", "8"]),
        ({"init_lora_weights": "pissa"}, ["--trainer.model.experimental.lora.dropout", "0"]),
        ({"rank_pattern": {"q_proj": 2}}, ["--trainer.model.experimental.lora.dropout", "0"]),
        ({"use_rslora": True}, ["--trainer.model.experimental.lora.use-rslora", "false"]),
        ({"use_dora": True}, ["--trainer.model.experimental.lora.dropout", "0"]),
        ({"target_modules": ".*_proj"}, ["--trainer.model.experimental.lora.dropout", "0"]),
        ({"base_model_name_or_path": None}, []),
        (None, []),
    ],
)
def test_mismatched_adapter_is_refused_before_start(adapter, tmp_path, changes, words, refusal):
    content = json.loads((adapter / "adapter_config.json").read_text())
    text = "[]" if changes is None else json.dumps(content | changes)
    (tmp_path / "adapter_config.json").write_text(text)
    with refusal(UsageError):
        load_config(RLConfig, ["--trainer", "--model.name", str(tmp_path), *words])


def test_a_run_of_an_adapter_as_model_is_its_newest_adapter(adapter, tmp_path, tiny_model):
    shutil.copytree(adapter, tmp_path / "chats" / "weights" / "step_3")
    config = sft_config(tmp_path / "chats", tmp_path, model=LORA, data={"path": tmp_path / "chats.jsonl"})
    model = with_run_weights(config).model
    assert (model.name, model.adapter) == (str(tiny_model), tmp_path / "chats" / "weights" / "step_3")
    assert model.experimental.lora.rank == 4


OF_PEFT = {
    "plain": {"target_modules": ["q_proj", "v_proj"], "lora_alpha": 3},
    "rslora": {"use_rslora": True, "target_modules": ["o_proj", "up_proj"]},
    "one layer": {"layers_to_transform": [1], "target_modules": ["k_proj", "down_proj"]},
    "whole head": {"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]},
}


@pytest.mark.parametrize("settings_of", [trainer_config, sft_config], ids=["rl", "sft"])
@pytest.mark.parametrize("case", OF_PEFT)
def test_adapters_of_peft_are_trained_further_and_exported(
    case, settings_of, tiny_model, tiny_llama, tmp_path
):
    base = tiny_llama if case == "whole head" else tiny_model  # the embedding of tiny_model is tied
    torch.manual_seed(0)
    config = LoraConfig(r=4, task_type="CAUSAL_LM", init_lora_weights=False, **OF_PEFT[case])
    peft_model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    if case == "whole head":
        peft_model.base_model.model.lm_head.modules_to_save.default.weight.data.mul_(1.1)
    peft_model.save_pretrained(tmp_path / "adapter")
    close = {"rtol": 0, "atol": 2 * logprob_error(layers=2, width=48)}
    data = {"data": {"path": tmp_path / "chats.jsonl"}} if settings_of is sft_config else {}
    settings = settings_of(tmp_path / "adapter", tmp_path, model=LORA, **data)
    settings = settings.model_copy(update={"model": start_model(settings.model)})
    assert settings.model.name == str(base)
    learner = build_learner(settings, Ranks(rank=0, world_size=1, device=CPU), None, max_steps=1)
    torch.testing.assert_close(logprobs(learner.policy), plain_logprobs(peft_model), **close)
    with torch.no_grad():
        for parameter in learner.policy.trainable.values():
            parameter.add_(0.02 * torch.randn_like(parameter))
    trained, export = logprobs(learner.policy), saved(learner.policy, tmp_path / "export")
    assert (trained - plain_logprobs(peft_model)).abs().max() > 1e-3
    fresh = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(fresh, str(export))
    torch.testing.assert_close(plain_logprobs(loaded), trained, **close)
    torch.testing.assert_close(plain_logprobs(loaded.merge_and_unload()), trained, **close)
    merge_adapter(str(base), export, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(plain_logprobs(merged), trained, **close)
    assert merged.config.tie_word_embeddings is (base == tiny_model)
    served = AdaptedCheckpoint(base, export)  # by the embedded engine
    for name, tensor in merged.state_dict().items():
        if name in served.shapes:
            torch.testing.assert_close(served.merged(name).float(), tensor, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("module", ["lm_head", "embed_tokens"])
def test_adapter_of_an_embedding_is_merged_unless_it_is_tied(module, tiny_model, tiny_llama, tmp_path):
    """The embedding of `tiny_model` is also its output layer, which the adapter would change too."""
    for base in (tiny_llama, tiny_model):
        config = LoraConfig(
            r=4, task_type="CAUSAL_LM", init_lora_weights=False, target_modules=["q_proj", module]
        )
        adapter = tmp_path / base.name / "adapter"
        plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        get_peft_model(plain, config).save_pretrained(adapter)
        if base == tiny_model:
            with pytest.raises(UsageError) as refused:
                merge_adapter(str(base), adapter, tmp_path / "merged")
            assert refused.value.code == "BK-ADAPTER"
            return
        fresh = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        expected = plain_logprobs(PeftModel.from_pretrained(fresh, str(adapter)))
        merge_adapter(str(base), adapter, tmp_path / base.name / "merged")
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / base.name / "merged", dtype=torch.float32)
        close = {"rtol": 0, "atol": 2 * logprob_error(layers=2, width=48)}
        torch.testing.assert_close(plain_logprobs(merged), expected, **close)


@pytest.mark.parametrize("changes", [{"peft_type": "OTHER"}, {"r": "4"}, None])
def test_adapter_that_peft_does_not_know_is_not_merged(tiny_llama, adapter, tmp_path, changes):
    shutil.copytree(adapter, tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(changes and json.loads(path.read_text()) | changes))
    with pytest.raises(UsageError) as refused:
        merge_adapter(str(tiny_llama), tmp_path / "adapter", tmp_path / "merged")
    assert refused.value.code == "BK-ADAPTER"


def test_adapter_with_a_bias_that_the_base_lacks_is_not_merged(tiny_llama, tmp_path):
    config = LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["q_proj"], lora_bias=True)
    plain = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    get_peft_model(plain, config).save_pretrained(tmp_path / "adapter")
    with pytest.raises(UsageError) as refused:
        merge_adapter(str(tiny_llama), tmp_path / "adapter", tmp_path / "merged")
    assert refused.value.code == "BK-ADAPTER"
