"""Forks of `rl tune` in the test process, without starting a process for each.

Engine, orchestrator and trainer are real.
"""

from pathlib import Path
from unittest import mock

from tests.analysis.diagnosis.small_runs import KEY, _carry_out

from buckeye.base.storage import write_file
from buckeye.config.load import load_config, to_json
from buckeye.config.rl import RLConfig
from buckeye.run_files.directory import begin_attempt

RUN = """
max_steps = {steps}
max_async_level = 0
output_dir = "{folder}/out"
[model]
name = "{model}"
[inference.model]
device = "cpu"
[trainer.model]
device = "cpu"
[trainer.optim]
lr = {lr}
[orchestrator]
batch_size = {batch}
rollouts_per_example = 8
seq_len = 64
seed = {seed}
[orchestrator.sampling]
max_tokens = 6
[[orchestrator.env]]
id = "{env}"
"""


def play(argv, log, seconds):
    """Replace `forks._run_command`."""
    carry_out(load_config(RLConfig, argv[4:]))
    return ""


def carry_out(config):
    """Carry out a run, as `buckeye rl` does with these settings."""
    run = config.output_dir
    write_file(run / "configs" / "rl.json", to_json(config))
    write_file(run / "configs" / "trainer.json", to_json(config.trainer))
    identity = begin_attempt(run, resumed_step=config.ckpt.resume_step if config.ckpt else None)
    known = {"BUCKEYE_RUN_ID": identity.run_id, "BUCKEYE_ATTEMPT": str(identity.attempt)}
    with mock.patch.dict("os.environ", {**known, "BUCKEYE_INFERENCE_KEY": KEY}):
        _carry_out(config, Path(config.trainer.model.name), 1, identity)


def config_of(folder, model, env, *, lr, steps=40, batch=64, seed=0):
    """Create `folder` and return the configuration of a run in it."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "run.toml"
    file.write_text(
        RUN.format(folder=folder, model=model, env=env, lr=lr, steps=steps, batch=batch, seed=seed)
    )
    return load_config(RLConfig, ["@", str(file)])
