"""A disk that is small enough to fill."""

import pytest

from tests.small_disk import small_disk


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk", size=1_000_000) as path:
        yield path
