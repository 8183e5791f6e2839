"""Every setting of both generations, by name and default; and what holds for all classes."""

import subprocess
import sys
from collections import Counter

import pytest
from pydantic import ValidationError
from tests.config.classes import all_classes

from buckeye.config.inference import InferenceConfig
from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.config.rl import RLConfig
from buckeye.config.sft import SFTConfig
from buckeye.config.shared import BaseConfig
from buckeye.config.trainer import TrainerConfig

ROOTS = (RLConfig, TrainerConfig, OrchestratorConfig, InferenceConfig, SFTConfig)
CLASSES = list(dict.fromkeys(cls for root in ROOTS for cls in all_classes(root)))
QWEN = "Qwen/Qwen3-0.6B"

TRAINER = {
    "model.name": QWEN,
    "model.attn": "flash_attention_2",
    "model.compile": None,
    "model.ac": None,
    "model.ac_offloading": None,
    "model.fsdp_cpu_offload": False,
    "model.reshard_after_forward": True,
    "model.dp_replicate": 1,
    "model.tp": 1,
    "model.load_using_meta": False,
    "model.reduce_dtype": "float32",
    "model.experimental.lora": None,
    "optim.type": "adamw",
    "optim.lr": 1e-6,
    "optim.weight_decay": 0.01,
    "optim.max_norm": 1.0,
    "optim.betas1": 0.9,
    "optim.betas2": 0.999,
    "scheduler.type": "constant",
    "ckpt.interval": 10,
    "ckpt.keep": 3,
    "ckpt.resume_step": None,
    "loss.ratio_type": "token",
    "loss.ratio_length_norm": False,
    "loss.mask_ratio_high": 8.0,
    "loss.mask_ratio_low": 0.125,
    "loss.sequence_mask_ratio_low": 0.0,
    "loss.kl_tau": 0.0,
    "loss.kl_mask_type": "all",
    "log.level": "info",
    "wandb": None,
    "output_dir": "outputs",
    "max_steps": None,
    "max_async_level": 1,
    "dist_timeout_seconds": 600,
    "seq_len": 2048,
    "seed": 0,
    "batch_timeout": 3600.0,
    "model.device": "auto",
}
ORCHESTRATOR = {
    "batch_size": 128,
    "rollouts_per_example": 1,
    "seq_len": 2048,
    "max_steps": None,
    "max_async_level": 1,
    "max_off_policy_steps": 8,
    "oversampling_factor": 1.0,
    "max_concurrent": None,
    "mask_truncated_completions": False,
    "zero_truncated_completions": False,
    "advantage.std_norm": None,
    "advantage.length_weighted_mean": False,
    "advantage.leave_one_out": False,
    "advantage.neg_clipped": False,
    "seed": 42,
    "client.base_url": ["http://localhost:8000/v1"],
    "client.timeout": 1200,
    "client.api_key_var": "OPENAI_API_KEY",
    "model.name": QWEN,
    "sampling.temperature": 1.0,
    "sampling.max_tokens": None,
    "sampling.seed": None,
    "eval": None,
    "ckpt.interval": 10,
    "ckpt.keep": 3,
    "ckpt.resume_step": None,
    "buffer.type": "simple",
    "buffer.online_difficulty_filtering": False,
    "wandb": None,
    "zero_spread": "keep",
    "rollout_timeout": 600.0,
    "max_rollout_retries": 1,
    "max_empty_batches": 10,
}
INFERENCE = {
    "server.host": None,
    "server.port": 8000,
    "server.api_key_var": "BUCKEYE_INFERENCE_KEY",
    "model.name": QWEN,
    "model.dtype": "auto",
    "model.device": "auto",
    "model.max_model_len": None,
    "model.enforce_eager": False,
    "model.trust_remote_code": False,
    "model.enable_auto_tool_choice": False,
    "model.tool_call_parser": "hermes",
    "parallel.tp": 1,
    "parallel.dp": 1,
    "gpu_memory_utilization": 0.9,
    "seed": None,
    "backend": "auto",
    "max_num_seqs": 128,
    "kv_cache_gb": None,
    "vllm": {},
}
RUN = {
    "inference": None,
    "inference_gpu_ids": [0],
    "trainer_gpu_ids": [1],
    "output_dir": "outputs",
    "clean": False,
    "resume": False,
    "dry_run": False,
    "log.level": "info",
    "ckpt": None,
    "wandb": None,
    "model": None,
    "max_steps": None,
    "max_model_len": None,
    "max_async_level": None,
    "seq_len": None,
    "cluster.nodes": 1,
    "cluster.trainer_nodes": None,
    "cluster.inference_nodes": None,
    "cluster.address": None,
    "cluster.engine": "auto",
    "cluster.ray_address": "auto",
    "cluster.join_timeout": 600.0,
}
SECTIONS = [
    (TrainerConfig, "--ckpt", {"interval": 10, "resume_step": None, "keep": 3}),
    (TrainerConfig, "--ckpt", {"skip_dataloader": False}),
    (TrainerConfig, "--model.ac", {"freq": 1}),
    (TrainerConfig, "--model.compile", {"fullgraph": False}),
    (TrainerConfig, "--model.ac-offloading", {}),
    (TrainerConfig, "--wandb", {"project": "buckeye", "name": None, "offline": False, "id": None}),
    (TrainerConfig, "--wandb", {"log_extras.samples": True, "log_extras.interval": 10}),
    (TrainerConfig, "--scheduler.type linear", {"warmup": 10, "decay": 10, "min_lr": 0.0}),
    (TrainerConfig, "--scheduler.type cosine", {"warmup": 10, "min_lr": 0.0}),
    (TrainerConfig, "--optim.type muon", {"lr": 1e-6, "betas1": 0.9, "betas2": 0.999}),
    (TrainerConfig, "--optim.type adamw8bit", {"lr": 1e-6, "betas1": 0.9}),
    (TrainerConfig, "--optim.type sgd", {"nesterov": True, "momentum": 0.9}),
    (OrchestratorConfig, "--eval", {"num_examples": -1, "rollouts_per_example": 1, "interval": 100}),
    (OrchestratorConfig, "--eval", {"eval_base_model": True, "sampling.top_p": None}),
    (OrchestratorConfig, "--buffer.type online-difficulty", {"min_reward": 0.01, "max_reward": 0.99}),
]


@pytest.mark.parametrize(
    ("model", "words", "expected"),
    [
        (TrainerConfig, "", TRAINER),
        (OrchestratorConfig, "", ORCHESTRATOR),
        (InferenceConfig, "", INFERENCE),
        (RLConfig, "--trainer --orchestrator", RUN),
    ],
)
def test_names_and_defaults(load, model, words, expected):
    plain = load(model, words).model_dump(mode="json")
    assert {path: _at(plain, path) for path in expected} == expected


@pytest.mark.parametrize(("model", "words", "expected"), SECTIONS)
def test_sections_that_are_off_by_default(load, model, words, expected):
    plain = load(model, words).model_dump(mode="json")
    section = plain[words.split(".")[0].strip("-").split()[0].replace("-", "_")]
    if words.startswith("--model."):
        section = section[words.removeprefix("--model.").replace("-", "_")]
    assert {path: _at(section, path) for path in expected} == expected


def _at(plain, path):
    for key in path.split("."):
        plain = plain[key]
    return plain


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_no_class_accepts_unknown_keys(cls):
    assert issubclass(cls, BaseConfig)
    with pytest.raises(ValidationError) as caught:
        cls.model_validate({"no_such_setting": 1})
    assert "extra_forbidden" in [error["type"] for error in caught.value.errors()]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_setting_has_a_help_text(cls):
    assert cls.__doc__
    assert [name for name, info in cls.model_fields.items() if not info.description] == []


def test_class_names_are_unique():
    assert [name for name, count in Counter(cls.__name__ for cls in CLASSES).items() if count > 1] == []


def test_configurations_cannot_be_changed(load):
    with pytest.raises(ValidationError, match="frozen"):
        load(TrainerConfig, "").optim.lr = 1.0


def test_values_that_python_would_take_for_numbers(refused, folder):
    folder.write("t.toml", "max_steps = true\nseed = 1.5\n[optim]\nlr = nan\nmax_norm = inf\n")
    message = refused(TrainerConfig, "@ t.toml")
    for line in ("1: max_steps: is true;", "2: seed: is 1.5;", "4: optim.lr: is NaN;", "5: optim.max_norm:"):
        assert f"t.toml:{line}" in message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--batch-size 10 --rollouts-per-example 4",
            "batch_size = 10 is not a multiple of rollouts_per_example = 4: a batch holds whole groups; use"
            " e.g. batch_size = 8 or 12.\n"
            "  batch_size: --batch-size, rollouts_per_example: --rollouts-per-example",
        ),
        ("--sampling.temperature 0", "--sampling.temperature: is 0.0; expected a number > 0."),
    ],
)
def test_settings_that_do_not_go_together(refused, words, message):
    assert refused(OrchestratorConfig, words) == message


def test_reading_configurations_is_light():
    code = "import sys, buckeye.config.load; print([m for m in sys.modules if m in sys.argv[1:]])"
    heavy = ("torch", "transformers", "numpy", "rich", "typer", "httpx")
    output = subprocess.run([sys.executable, "-c", code, *heavy], capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "[]"


def test_sampling_runs_no_further_ahead_than_tokens_may_be_old():
    levels = {(0, 8): (0, 0), (1, 8): (1, 8), (4, 2): (2, 2), (1, 0): (0, 0)}
    for (level, age), expected in levels.items():
        config = OrchestratorConfig(max_async_level=level, max_off_policy_steps=age)
        assert (config.run_ahead, config.most_token_age) == expected
