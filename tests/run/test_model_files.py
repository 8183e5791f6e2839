"""Missing and invalid models."""

import pytest

from buckeye.errors import UsageError
from buckeye.launch.preflight.model import fetch_model


def test_an_adapter_is_no_model_and_is_told_apart(tmp_path):
    with pytest.raises(UsageError, match=r"no config\.json"):
        fetch_model(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UsageError, match="--merge-lora"):
        fetch_model(str(tmp_path))
