"""`buckeye sft`: supervised fine-tuning on chats."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from buckeye.base.process import INTERRUPTED, run_identity
from buckeye.base.storage import write_file
from buckeye.cli.load import load, with_local_model
from buckeye.config.load import to_json
from buckeye.config.sft import SFTConfig
from buckeye.launch.resume import without_flags
from buckeye.launch.resume_checks import refuse_misfit
from buckeye.launch.uploads import uploads_of
from buckeye.monitor.tracking import check_trackers, tracked
from buckeye.run_files.directory import claimed
from buckeye.transport.checkpoint import resolve_checkpoint
from buckeye.transport.checkpoint_resume import bring
from buckeye.transport.object_store import Store


def sft(argv: list[str]) -> int:
    """Fine-tune on chat data."""
    given = load(SFTConfig, argv, "sft")
    config = with_local_model(given)
    resumed = config.ckpt is not None and config.ckpt.resume_step is not None
    first = os.environ.get("RANK", "0") == "0"
    ckpt = config.ckpt if config.ckpt is not None and config.ckpt.store is not None else None
    if first and ckpt is not None and ckpt.store is not None:
        Store(ckpt.store).probe()
        bring(config.output_dir, ckpt.store, ckpt.resume_step)
    if first or ckpt is None:
        _refuse_misfit(config)
    from buckeye.trainer.sft import run_sft  # importing torch takes seconds

    trackers = config.trackers(config.wandb) if first else []
    check_trackers(trackers)
    again = without_flags(argv, ("--ckpt.resume-step",))
    command = shlex.join(["buckeye", "sft", *again, "--ckpt.resume-step", "-1"])
    output_dir = config.output_dir
    with claimed(output_dir, resumed=resumed, resume_command=command):
        if first:
            local = Path(given.model.name).exists()  # otherwise a hub name, which is valid on other hosts too
            write_file(output_dir / "configs" / "sft.json", to_json(config if local else given), mode=0o600)
        with tracked(trackers, output_dir=output_dir, run_id=run_identity().run_id, config=config):
            with uploads_of(output_dir, config.ckpt if first else None) as uploads:
                done = run_sft(config)
            if not done and first:
                print(f"Stopped. Continue with:\n  {command}", file=sys.stderr)
            return INTERRUPTED if not done else int(uploads is not None and bool(uploads.left))


def _refuse_misfit(config: SFTConfig) -> None:
    """Raise UsageError for a model or a checkpoint that cannot be trained.

    This happens before torch is imported and before anything is written.
    """
    from buckeye.trainer.model.trainable import refuse_untrainable

    refuse_untrainable(config.model.name)
    step = config.ckpt.resume_step if config.ckpt is not None else None
    if step is not None:
        refuse_misfit(config, resolve_checkpoint(config.output_dir / "checkpoints", step), section="")


COMMANDS = {"sft": sft}
