"""Missing and invalid models."""

import pytest

from buckeye.errors import UsageError
from buckeye.launch.preflight.model import fetch_model


def test_fetch_model_refuses_adapter_and_other_directories(tmp_path):
    with pytest.raises(UsageError, match=r"no config\.json"):
        fetch_model(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UsageError, match="--merge-lora"):
        fetch_model(str(tmp_path))
