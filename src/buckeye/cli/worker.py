"""Run one process of a run: the trainer, the orchestrator, or the inference server (`buckeye serve`)."""

from __future__ import annotations

import os
import re
from pathlib import Path

from buckeye.base.heartbeat import HEARTBEAT_VARIABLE
from buckeye.base.process import EXIT_INTERRUPTED
from buckeye.cli.load import load, with_local_model, with_model_directory, with_run_weights
from buckeye.config.adapter import is_adapter
from buckeye.config.inference import InferenceConfig
from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.config.trainer import TrainerConfig
from buckeye.errors import BuckeyeError
from buckeye.launch.preflight.model import fetch_base_model, has_tokenizer
from buckeye.launch.preflight.model_files import check_adapter_files, check_model_files, check_tokenizer_files


def trainer(argv: list[str]) -> int:
    """Run the trainer of a run."""
    config = with_local_model(load(TrainerConfig, argv, "trainer"))
    from buckeye.trainer.rl import run_trainer  # importing torch takes seconds

    return 0 if run_trainer(config) else EXIT_INTERRUPTED


def orchestrator(argv: list[str]) -> int:
    """Run the orchestrator of a run."""
    config = with_local_model(load(OrchestratorConfig, argv, "orchestrator"))
    from buckeye.orchestrator.loop import run_orchestrator

    return 0 if run_orchestrator(config) else EXIT_INTERRUPTED


def serve(argv: list[str]) -> int:
    """Serve a model to OpenAI clients."""
    in_run = HEARTBEAT_VARIABLE in os.environ
    config = with_run_weights(load(InferenceConfig, argv, "serve"))
    adapter = Path(config.model.name).resolve() if is_adapter(config.model.name) else None
    local = (
        with_local_model(config)
        if adapter is None
        else with_model_directory(config, fetch_base_model(adapter))
    )
    check_model_files(Path(local.model.name), "server")
    if adapter is not None:
        check_adapter_files(adapter, Path(local.model.name))
    if has_tokenizer(Path(local.model.name)):  # without one, the server samples token ids only
        check_tokenizer_files(Path(local.model.name))
    from buckeye.inference.server.server import run_inference  # importing torch takes seconds

    try:
        run_inference(local, adapter=adapter)
    except BuckeyeError as error:
        if not in_run:  # the settings of `serve` have no section `inference`
            section = r"(?<!-)\binference\.(?=[a-z])"
            error.message = re.sub(section, "", error.message)
            error.hint = error.hint and re.sub(section, "", error.hint)
        raise
    return 0
