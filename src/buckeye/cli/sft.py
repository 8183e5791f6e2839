"""`buckeye sft`: supervised fine-tuning on chats."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from pathlib import Path

from buckeye.base.process import EXIT_INTERRUPTED, run_identity
from buckeye.base.storage import write_file
from buckeye.base.terminal import status_line
from buckeye.cli.load import load, with_local_model, with_run_weights
from buckeye.config.load import to_json
from buckeye.config.sft import SFTConfig
from buckeye.errors import UsageError
from buckeye.launch.progress import describe_weights
from buckeye.launch.resume import without_flags
from buckeye.launch.resume_checks import check_resumable
from buckeye.launch.uploads import open_uploads
from buckeye.monitor.tracker_threads import check_trackers, log_to_trackers
from buckeye.run_files.directory import claim_directory
from buckeye.transport.checkpoint import resolve_checkpoint
from buckeye.transport.object_store import CheckpointStore
from buckeye.transport.resume_from_store import restore_from_store

log = logging.getLogger(__name__)


def sft(argv: list[str]) -> int:
    """Fine-tune a model on chat data."""
    loaded = with_run_weights(load(SFTConfig, argv, "sft"))
    config = with_local_model(loaded)
    resumed = config.ckpt is not None and config.ckpt.resume_step is not None
    is_first_rank = os.environ.get("RANK", "0") == "0"
    ckpt = config.ckpt if config.ckpt is not None and config.ckpt.store is not None else None
    if is_first_rank and ckpt is not None and ckpt.store is not None:
        CheckpointStore(ckpt.store).probe()
        restore_from_store(config.output_dir, ckpt.store, ckpt.resume_step)
    if is_first_rank or ckpt is None:
        _check_inputs(config)
    with status_line("importing torch"):
        from buckeye.trainer.sft import run_sft

    trackers = config.trackers(config.wandb) if is_first_rank else []
    check_trackers(trackers)
    flags = without_flags(argv, ("--ckpt.resume-step",))
    command = shlex.join(["buckeye", "sft", *flags, "--ckpt.resume-step", "-1"])
    output_dir = config.output_dir
    with claim_directory(output_dir, resumed=resumed, resume_command=command):
        if is_first_rank:
            is_local = Path(loaded.model.name).exists()  # a hub name is valid on other hosts too
            written = config if is_local else loaded
            write_file(output_dir / "configs" / "sft.json", to_json(written), mode=0o600)
        with log_to_trackers(trackers, output_dir=output_dir, run_id=run_identity().run_id, config=config):
            with open_uploads(output_dir, config.ckpt if is_first_rank else None) as uploads:
                completed = run_sft(config)
            if not completed and is_first_rank:
                print(f"Stopped. To resume:\n  {command}", file=sys.stderr)
            elif is_first_rank:
                is_adapter = config.model.experimental.lora is not None
                log.info("%s", describe_weights(output_dir, is_adapter=is_adapter))
            return (
                EXIT_INTERRUPTED
                if not completed
                else int(uploads is not None and bool(uploads.pending_steps))
            )


def _check_inputs(config: SFTConfig) -> None:
    """Raise UsageError for a model, a file of chats or a checkpoint that cannot be trained.

    Runs before torch is imported and before files are written.
    """
    from buckeye.inference.engine.architecture import read_model_config
    from buckeye.launch.preflight.model_checks import check_model_and_tokenizer
    from buckeye.launch.preflight.model_files import check_adapter_files
    from buckeye.trainer.data.chat_data import check_first_chat
    from buckeye.trainer.model.trainable import check_trainable, length_problem

    check_model_and_tokenizer(Path(config.model.name))
    if config.model.adapter is not None:
        check_adapter_files(config.model.adapter, Path(config.model.name))
    check_trainable(config.model.name)
    model_config = read_model_config(Path(config.model.name) / "config.json")
    problem = length_problem(model_config, config.seq_len, "seq_len")
    if problem is not None:
        raise UsageError(problem, code="BK-MODEL-UNSUPPORTED", at="seq_len")
    check_first_chat(config.data.path, "data.path")
    if config.data.val_path is not None:
        check_first_chat(config.data.val_path, "data.val_path")
    step = config.ckpt.resume_step if config.ckpt is not None else None
    if step is not None:
        check_resumable(config, resolve_checkpoint(config.output_dir / "checkpoints", step), section="")
