"""Codes of checks that prevent a start."""

from __future__ import annotations

import pytest

from buckeye.cli.train import _failed_checks_error
from buckeye.config.rl import RLConfig
from buckeye.errors import UsageError
from buckeye.launch.preflight import device_checks
from buckeye.launch.preflight.check import failed, failed_with
from buckeye.launch.preflight.model import has_tokenizer

MODEL = failed("model", "no such model", "correct `model.name`", code="BK-MODEL-NOT-FOUND")
KEYS = failed_with("keys", UsageError("no key", code="BK-KEY-MISSING", hint="set it"))


def test_one_failed_check_keeps_its_code_and_remedy():
    error = _failed_checks_error([KEYS])
    assert (error.code, error.hint, error.exit_code) == ("BK-KEY-MISSING", "set it", 2)


def test_failed_checks_of_one_code_keep_it():
    assert _failed_checks_error([MODEL, MODEL]).code == "BK-MODEL-NOT-FOUND"
    assert _failed_checks_error([MODEL, KEYS]).code == "BK-PREFLIGHT"


@pytest.mark.parametrize("setting", ["trainer.model.device", "inference.model.device"])
def test_device_cuda_without_a_gpu_fails(monkeypatch, setting):
    config = RLConfig.model_validate(
        {
            "trainer": {"model": {"device": "cuda" if setting.startswith("trainer") else "cpu"}},
            "orchestrator": {"env": [{"id": "a"}]},
            "inference": {"model": {"device": "cuda"}},
        }
    )
    monkeypatch.setattr(device_checks, "_has_gpu_driver", lambda: False)
    check = device_checks.check_gpus(config, [])
    assert (check.state, check.code, setting in check.seen) == ("failed", "BK-DEVICE", True)
    monkeypatch.setattr(device_checks, "_has_gpu_driver", lambda: True)
    assert device_checks.check_gpus(config, []).state != "failed"


def test_has_tokenizer(tmp_path):
    assert not has_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").touch()
    assert has_tokenizer(tmp_path)
