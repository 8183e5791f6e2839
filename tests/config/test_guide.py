"""The command lines of the training guide, with its own files."""

from pathlib import Path

import pytest

from buckeye.config.rl import RLConfig

GUIDE = Path(__file__).parent / "guide"
FILES = (
    f"--trainer @ {GUIDE}/train.toml --orchestrator @ {GUIDE}/orch.toml --inference @ {GUIDE}/infer.toml"
    " --output-dir outputs/dakota-v12-1000steps"
)
EIGHT = "--inference-gpu-ids 0,1,2,3,4,5 --trainer-gpu-ids 6,7 --inference.parallel.dp 6"


def test_eight_devices(load):
    config = load(RLConfig, f"{FILES} {EIGHT}")
    assert config.inference_gpu_ids == [0, 1, 2, 3, 4, 5]
    assert config.trainer_gpu_ids == [6, 7]
    assert (config.inference.parallel.dp, config.trainer_ranks) == (6, 2)
    assert config.trainer.optim.lr == 3e-6
    assert config.trainer.max_steps == config.orchestrator.max_steps == 1000
    assert (config.orchestrator.batch_size, config.orchestrator.rollouts_per_example) == (128, 16)
    assert config.trainer.seq_len == config.inference.model.max_model_len == 2048
    assert config.orchestrator.sampling.max_tokens == 2048
    assert [env.id for env in config.orchestrator.env] == ["harleycooper/dakota1890"]
    assert {str(c.output_dir) for c in (config, config.trainer, config.orchestrator, config.inference)} == {
        "outputs/dakota-v12-1000steps"
    }
    assert (config.trainer.ckpt.interval, config.trainer.ckpt.keep) == (10, 3)
    assert config.clean is False


def test_two_devices(load):
    config = load(RLConfig, f"{FILES} --inference-gpu-ids 0 --trainer-gpu-ids 1")
    assert (config.inference_gpu_ids, config.trainer_gpu_ids) == ([0], [1])
    assert config.inference.parallel.dp == 1


def test_checkpoints_by_flags(load):
    ckpt = " ".join(f"--{role}.ckpt.interval 20 --{role}.ckpt.keep 4" for role in ("trainer", "orchestrator"))
    config = load(RLConfig, f"{FILES} {ckpt} {EIGHT}")
    assert (config.trainer.ckpt.interval, config.trainer.ckpt.keep) == (20, 4)
    assert (config.orchestrator.ckpt.interval, config.orchestrator.ckpt.keep) == (20, 4)


def test_checkpoints_by_files(load, folder):
    table = "\n[ckpt]\ninterval = 20  # Save checkpoint every 20 steps\nkeep = 4\n"
    for name in ("train.toml", "orch.toml"):
        folder.write(name, (GUIDE / name).read_text() + table)
    config = load(RLConfig, "--trainer @ train.toml --orchestrator @ orch.toml")
    assert (config.trainer.ckpt.interval, config.orchestrator.ckpt.keep) == (20, 4)
    assert config.inference is not None


@pytest.mark.parametrize("step", [-1, 500])
def test_resume(load, step):
    resume = f"--trainer.ckpt.resume-step {step} --orchestrator.ckpt.resume-step {step}"
    config = load(RLConfig, f"{FILES} {resume} {EIGHT}")
    assert config.trainer.ckpt.resume_step == config.orchestrator.ckpt.resume_step == step
    assert config.trainer.ckpt.interval == 10
