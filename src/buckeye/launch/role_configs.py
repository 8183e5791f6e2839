"""`configs/`: what each process of a run is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from buckeye.base.storage import write_file
from buckeye.config.load import to_json
from buckeye.config.orchestrator import OrchestratorCheckpointConfig
from buckeye.config.rl import RLConfig
from buckeye.config.trainer import TrainerCheckpointConfig
from buckeye.sizing.plan import Role, RolePlan


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an attempt begins: at the checkpoint of `step`, None for the model. `own` says that this start of
    the run has committed it itself, so that nothing of it is to be skipped."""

    step: int | None
    own: bool = False


def write_role_configs(config: RLConfig, plan: RolePlan, *, model_path: Path, origin: Origin) -> None:
    """Write the resolved configuration of every process to `configs/`."""
    directory = config.output_dir / "configs"
    directory.mkdir(parents=True, exist_ok=True)
    for role in plan.roles:
        if role.config_name is not None:
            config_text = _role_config(config, role, plan, model_path, origin)
            write_file(directory / role.config_name, config_text, mode=0o600)  # settings may hold keys


def _role_config(config: RLConfig, role: Role, plan: RolePlan, model_path: Path, origin: Origin) -> str:
    output_dir = config.output_dir.absolute()
    section = getattr(config, role.kind)
    model = section.model.model_copy(update={"name": str(model_path)})
    changes: dict[str, object] = {"output_dir": output_dir, "model": model}
    if role.kind == "inference":
        host = {"host": role.host} if role.node else {}
        changes["server"] = section.server.model_copy(update={"port": role.port, **host})
    else:  # one resolver: both processes are told the same step
        changes["ckpt"] = _checkpoints(section.ckpt, role, origin)
    if role.kind == "orchestrator" and plan.base_urls:
        changes["client"] = section.client.model_copy(
            update={"base_url": plan.base_urls, "api_key_var": "BUCKEYE_INFERENCE_KEY"}
        )
    return to_json(section.model_copy(update=changes))


def _checkpoints(
    given: TrainerCheckpointConfig | OrchestratorCheckpointConfig | None, role: Role, origin: Origin
) -> TrainerCheckpointConfig | OrchestratorCheckpointConfig | None:
    """The settings of a process's checkpoints. Without any, a run commits when it is asked to end, and can go
    on from that."""
    if given is None:
        if origin.step is None:
            return None
        kind = TrainerCheckpointConfig if role.kind == "trainer" else OrchestratorCheckpointConfig
        return kind(interval=None, resume_step=origin.step)
    skips = [name for name in type(given).model_fields if name.startswith("skip_")] if origin.own else []
    return given.model_copy(update={"resume_step": origin.step, **dict.fromkeys(skips, False)})
