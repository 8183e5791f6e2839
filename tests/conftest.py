"""For all tests: what they start is not remembered as a run of the person who runs them."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def _own_state_directory(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield
