"""Settings that contradict each other, and valid settings with unexpected effects."""

import pytest

from buckeye.config.inference import InferenceConfig
from buckeye.config.load import load_with_warnings
from buckeye.config.orchestrator import OrchestratorConfig, SamplingConfig
from buckeye.config.rl import RLConfig
from buckeye.config.sft import SFTConfig
from buckeye.config.trainer import TrainerConfig
from buckeye.inference.client import SamplingParams
from buckeye.orchestrator.evaluation_schedule import sampling_params


def test_defaults_give_no_warnings():
    for model, words in (
        (TrainerConfig, ""),
        (InferenceConfig, ""),
        (SFTConfig, "--data.path x"),
    ):
        assert _warnings(model, words) == []


@pytest.mark.parametrize(
    "words",
    [
        "--model.tp 2 --model.experimental.lora",
        "--optim.type adamw8bit --model.tp 2",
        "--optim.type adamw8bit --model.sharding full",
    ],
)
def test_trainer_conflicts_name_the_flag(refused, words):
    assert refused(TrainerConfig, words).startswith(f"[BK-CONFIG-CONFLICT] {words.split()[0]}")


@pytest.mark.parametrize("words", ["--parallel.tp 2", "--vllm.max-num-seqs 3"])
def test_embedded_engine_refuses_settings_of_vllm(refused, words):
    assert refused(InferenceConfig, words).startswith(f"[BK-CONFIG-CONFLICT] {words.split()[0]}")
    assert not _warnings(InferenceConfig, f"--backend vllm {words}")


@pytest.mark.parametrize("name", ["min_tokens", "top_p", "top_k"])
def test_training_samples_from_the_distribution_that_the_trainer_computes(name):
    """Other settings would bias the ratios of trainer and sampler."""
    assert name not in SamplingConfig.model_fields
    sampled = sampling_params(OrchestratorConfig())
    assert getattr(sampled, name) == getattr(SamplingParams(max_tokens=1), name)


def _warnings(model, words):
    return load_with_warnings(model, words.split())[1]


RUN = "--trainer --orchestrator --inference --orchestrator.rollouts-per-example 8"


def test_vllm_refuses_modules_to_save(refused, wording):
    words = f"{RUN} --trainer.model.experimental.lora.modules-to-save norm"
    assert _warnings(RLConfig, words) == []
    assert refused(RLConfig, f"{words} --inference.backend vllm") == wording


def test_run_without_inference_warns_with_server_addresses():
    (warning,) = _warnings(RLConfig, RUN.replace("--inference", "--no-inference"))
    assert "http://localhost:8000/v1" in warning
    words = "--orchestrator.client.base-url http://h/v1"
    assert _warnings(RLConfig, RUN.replace("--inference", words)) == []


@pytest.mark.parametrize("url", ["localhost:8000/v1", "http://", "http://h:70000/v1", "ftp://h/v1"])
@pytest.mark.parametrize("words", ["--client.base-url", "--teacher.model big --teacher.base-url"])
def test_address_of_a_server_is_a_url(refused, words, url):
    text = refused(OrchestratorConfig, f"{words} {url}")
    assert text.startswith("[BK-CONFIG-VALUE]")
    assert words.rpartition("--")[2].replace("-", "_") in text


def test_implemented_settings_give_no_warnings():
    words = """--trainer.optim.type muon --trainer.scheduler.type cosine --trainer.loss.kl-coef 0.1
        --trainer.model.experimental.lora.rank 8
        --trainer.model.fsdp-cpu-offload --no-trainer.model.reshard-after-forward
        --trainer.model.reduce-dtype bfloat16 --trainer.model.dp-replicate 2
        --trainer.model.ac --trainer.model.compile --trainer-gpu-ids 1,2 --inference.parallel.dp 2
        --inference-gpu-ids 3,4 --orchestrator.eval --orchestrator.zero-spread drop
        --orchestrator.buffer.type online-difficulty --ckpt.keep 2 --ckpt.resume-step 4
        --trainer.ckpt.skip-dataloader
        --orchestrator.advantage.std-norm global --wandb --orchestrator.oversampling-factor 1.5"""
    assert _warnings(RLConfig, f"{RUN} {words}") == []


@pytest.mark.parametrize("loss", ["reinforce", "rloo"])
def test_several_updates_without_a_ratio_give_a_warning(loss, wording):
    (warning,) = _warnings(TrainerConfig, f"--loss.type {loss} --epochs-per-batch 2")
    assert warning == wording
    assert _warnings(TrainerConfig, f"--loss.type {loss}") == []
    assert _warnings(TrainerConfig, "--loss.type ppo --epochs-per-batch 2 --mini-batches 4") == []


def test_groups_of_one_rollout_give_a_warning(wording):
    (warning,) = _warnings(OrchestratorConfig, "--rollouts-per-example 1")
    assert warning == wording
    assert _warnings(OrchestratorConfig, "--rollouts-per-example 4") == []
    assert _warnings(OrchestratorConfig, "--advantage None") == []
    teacher = "--teacher.model big --teacher.base-url http://h/v1"
    assert _warnings(OrchestratorConfig, f"--rollouts-per-example 1 {teacher}") == []


@pytest.mark.parametrize("name", ["DAPO", "gspu"])
def test_unknown_loss_gets_suggestions(refused, name, wording):
    assert refused(RLConfig, f"{RUN} --trainer.loss.type {name}") == wording
