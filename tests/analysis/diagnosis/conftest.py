"""Start model of the complete runs."""

import pytest
import torch
from tests.analysis.diagnosis.small_runs import warm_model


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """Model that answers with random words of three out of four letters."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield warm_model(tmp_path_factory.mktemp("warm"))
    torch.set_num_threads(threads)
