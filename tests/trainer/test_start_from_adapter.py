"""Training that starts from an adapter directory: continues the adapter, or trains the merged model."""

import json

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from buckeye.config.adapter import start_model
from buckeye.config.load import load_config
from buckeye.config.rl import RLConfig
from buckeye.config.sft import SFTConfig
from buckeye.errors import UsageError
from buckeye.trainer.batch_loss import load_reference
from buckeye.trainer.data.packing import pack_micro_batch
from buckeye.trainer.parallel.ranks import Ranks
from buckeye.trainer.rl import run_trainer
from buckeye.trainer.setup import build_learner
from buckeye.transport.checkpoint import list_checkpoints
from tests.rounding import logprob_error
from tests.trainer.rl_runs import put, records
from tests.trainer.test_lora import CPU, IDS, adapted, logprobs, plain_logprobs, saved
from tests.trainer.trainer_config import trainer_config

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
