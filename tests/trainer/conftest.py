"""Tiny models with a tokenizer, built once per session, and batches for them."""

import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen3Config

from buckeye.base.process import RunIdentity
from buckeye.trainer.data.packing import pack_micro_batch
from buckeye.trainer.model.policy import load_policy
from buckeye.trainer.rl import run_trainer
from buckeye.transport.batches import Batch, Sample
from tests.trainer.rl_runs import put
from tests.trainer.trainer_config import trainer_config

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


def _save_tokenizer(directory: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.chat_template = TEMPLATE
    fast.save_pretrained(directory)


SHAPE = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 264,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
}


@pytest.fixture(scope="session")
def build_model(tmp_path_factory):
    """Return `build_model(ConfigClass, **changes)`, which saves a two-layer model with a byte tokenizer.

    It returns the model's directory.
    """

    def build(config_class, **changes) -> Path:
        directory = tmp_path_factory.mktemp("model")
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config_class(**{**SHAPE, **changes}))
        with torch.no_grad():  # larger than the usual 0.02, so that tokens differ and errors show
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    parameter.mul_(6.0)
        model.save_pretrained(directory)
        _save_tokenizer(directory)
        return directory

    return build


@pytest.fixture(scope="session")
def tiny_model(build_model) -> Path:
    """Qwen3 with grouped key-value heads and tied embeddings."""
    return build_model(Qwen3Config)


@pytest.fixture(scope="session")
def tiny_llama(build_model) -> Path:
    """Llama with an untied output layer."""
    return build_model(LlamaConfig, tie_word_embeddings=False)


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.setenv("BUCKEYE_THREADS", "1")
    handlers = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def batches(tiny_model):
    """Four batches sampled one version earlier, with the model's log-probs plus noise."""
    policy = load_policy(str(tiny_model), torch.device("cpu"))
    rng = np.random.default_rng(0)

    def sample(step: int, length: int) -> Sample:
        ids = rng.integers(0, 256, length).astype(np.int32)
        row = pack_micro_batch([ids], [np.arange(length) > 0], policy.device)
        with torch.no_grad():
            exact, _ = policy(row, torch.ones(length - 1))
        mask = np.arange(length) >= length // 3
        noisy = np.concatenate([[0.0], exact.numpy() + rng.normal(0, 0.1, length - 1)])
        return Sample(
            token_ids=ids,
            loss_mask=mask,
            logprobs=np.where(mask, noisy, 0).astype(np.float32),
            versions=np.where(mask, max(0, step - 1), -1).astype(np.int32),
            advantages=np.full(length, rng.normal(), np.float32),
            temperature=1.0,
        )

    return [
        Batch(
            step=step,
            samples=tuple(sample(step, int(n)) for n in rng.integers(3, 40, 9)),
            orchestrator_state={"emitted": step},
        )
        for step in range(4)
    ]


@pytest.fixture
def train(tiny_model, monkeypatch):
    """Return `train(run, batches, ...)`, which trains the tiny model on these batches."""

    def run_one(run: Path, batches, *, attempt: int = 1, **changes) -> None:
        monkeypatch.setenv("BUCKEYE_ATTEMPT", str(attempt))
        put(run, batches, identity=RunIdentity(run_id="local", attempt=attempt))
        run_trainer(trainer_config(tiny_model, run, **{"max_steps": len(batches), **changes}))

    return run_one
