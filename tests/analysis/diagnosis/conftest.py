"""What whole runs begin with."""

import pytest
import torch
from tests.analysis.diagnosis.small_runs import warm_model


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """A model that answers with any three of four letters."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield warm_model(tmp_path_factory.mktemp("warm"))
    torch.set_num_threads(threads)
