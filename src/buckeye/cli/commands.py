"""The functions of all commands; a command's module is imported when the command runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Functions = Mapping[str, Any]


def command_function(command: str) -> Callable[..., Any]:
    """Return the function of a command, by its name in the tree."""
    return _MODULES[command]()[command]  # type: ignore[no-any-return]


def _init() -> Functions:
    from buckeye.cli import init

    return init.COMMANDS


def _doctor() -> Functions:
    from buckeye.cli import doctor

    return doctor.COMMANDS


def _tune() -> Functions:
    from buckeye.cli import tune

    return tune.COMMANDS


def _schema() -> Functions:
    from buckeye.cli import schema

    return schema.COMMANDS


def _train() -> Functions:
    from buckeye.cli import train

    return train.COMMANDS


def _runs() -> Functions:
    from buckeye.cli import runs

    return runs.COMMANDS


def _rollouts() -> Functions:
    from buckeye.cli import rollouts

    return rollouts.COMMANDS


def _compare() -> Functions:
    from buckeye.cli import compare

    return compare.COMMANDS


def _diagnose() -> Functions:
    from buckeye.cli import diagnose

    return diagnose.COMMANDS


def _replay() -> Functions:
    from buckeye.cli import replay

    return replay.COMMANDS


def _pods() -> Functions:
    from buckeye.cli import pods

    return pods.COMMANDS


def _env() -> Functions:
    from buckeye.cli import env

    return env.COMMANDS


def _env_check() -> Functions:
    from buckeye.cli import env_check

    return env_check.COMMANDS


def _env_image() -> Functions:
    from buckeye.cli import env_image

    return env_image.COMMANDS


def _env_installed() -> Functions:
    from buckeye.cli import env_installed

    return env_installed.COMMANDS


def _play() -> Functions:
    from buckeye.cli import env_play

    return env_play.COMMANDS


def _hf() -> Functions:
    from buckeye.cli import hf

    return hf.COMMANDS


def _evaluate() -> Functions:
    from buckeye.cli import evaluate

    return evaluate.COMMANDS


def _sft() -> Functions:
    from buckeye.cli import sft

    return sft.COMMANDS


def _model() -> Functions:
    from buckeye.cli import model

    return model.COMMANDS


def _worker() -> Functions:
    from buckeye.cli import worker

    return worker.COMMANDS


def _gateway() -> Functions:
    from buckeye.cli import gateway

    return gateway.COMMANDS


def _auth() -> Functions:
    from buckeye.cli import auth

    return auth.COMMANDS


def _vllm() -> Functions:
    from buckeye.cli import vllm

    return vllm.COMMANDS


def _ui() -> Functions:
    from buckeye.cli import ui

    return ui.COMMANDS


def _demo() -> Functions:
    from buckeye.cli import demo

    return demo.COMMANDS


def _explain() -> Functions:
    from buckeye.cli import explain

    return explain.COMMANDS


_MODULES: dict[str, Callable[[], Functions]] = {
    "rl": _train,
    "rl init": _init,
    "rl doctor": _doctor,
    "rl tune": _tune,
    "rl schema": _schema,
    "rl list": _runs,
    "rl status": _runs,
    "rl logs": _runs,
    "rl stop": _runs,
    "rl resume": _runs,
    "rl fork": _runs,
    "rl clean": _runs,
    "rl rollouts": _rollouts,
    "rl compare": _compare,
    "rl diagnose": _diagnose,
    "rl replay": _replay,
    "rl report": _ui,
    "rl pods list": _pods,
    "rl pods offers": _pods,
    "rl pods attach": _pods,
    "rl pods terminate": _pods,
    "rl pods gc": _pods,
    "env new": _env,
    "env check": _env_check,
    "env play": _play,
    "env build": _env_image,
    "env push": _env_image,
    "env install": _env_installed,
    "env list": _env_installed,
    "env remove": _env_installed,
    "env trust": _env,
    "hf": _hf,
    "eval": _evaluate,
    "sft": _sft,
    "chat": _model,
    "serve": _worker,
    "export": _model,
    "gateway": _gateway,
    "auth set": _auth,
    "auth status": _auth,
    "model tiny": _model,
    "model import": _model,
    "vllm install": _vllm,
    "ui": _ui,
    "demo": _demo,
    "explain": _explain,
    "worker trainer": _worker,
    "worker orchestrator": _worker,
}
"""Loaders of the commands' modules, by command name; each returns the functions of the module."""
