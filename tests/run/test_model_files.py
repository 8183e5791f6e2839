"""Missing and invalid models."""

import psutil
import pytest

from buckeye.errors import UsageError
from buckeye.launch.preflight.model import fetch_model, resolve_run
from tests.run.made_runs import made_run, recorded


def test_fetch_model_refuses_adapter_and_other_directories(tmp_path):
    with pytest.raises(UsageError, match=r"no config\.json"):
        fetch_model(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UsageError, match="--merge-lora"):
        fetch_model(str(tmp_path))


def test_run_directory_names_its_newest_weights_when_the_run_has_ended(tmp_path):
    ended = made_run(tmp_path / "ended")
    active = made_run(tmp_path / "active", state="running", launcher=recorded(psutil.Process()))
    for run in (ended, active):
        for step in (9, 10):
            (run / "weights" / f"step_{step}").mkdir(parents=True)
    assert resolve_run(str(ended)) == str(ended / "weights" / "step_10")
    with pytest.raises(UsageError) as refused:
        resolve_run(str(active))
    assert (refused.value.code, refused.value.at) == ("BK-MODEL-NOT-FOUND", "--model")
    assert resolve_run("org/model") == "org/model"
    assert resolve_run(str(ended / "weights" / "step_9")) == str(ended / "weights" / "step_9")
