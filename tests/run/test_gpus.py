"""How GPUs are written."""

import pytest

from buckeye.errors import UsageError
from buckeye.launch.preflight.devices import Gpus, parse_gpus


@pytest.mark.parametrize(
    ("text", "count", "kind", "memory"),
    [
        ("4xH100", 4, "H100_80GB", 80),
        ("H100", 1, "H100_80GB", 80),
        ("2xA100", 2, "A100_80GB", 80),
        ("3 x a100_40gb", 3, "A100_40GB", 40),
        ("1xRTX4090", 1, "RTX4090_24GB", 24),
        ("8xH200", 8, "H200_141GB", 141),
        ("2", 2, "", 80),
    ],
)
def test_gpus_are_written_as_a_number_and_a_type(text, count, kind, memory):
    assert parse_gpus(text) == Gpus(count, kind, memory)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("4xH1000", "Did you mean H100_80GB"),
        ("0xH100", "a number from 1 to"),
        ("4x", "a number and a type, as 4xH100"),
        ("4xQQQ", "For example: 4xH100"),
    ],
)
def test_what_is_no_gpu_is_answered_with_what_is(text, said):
    with pytest.raises(UsageError, match=said) as caught:
        parse_gpus(text)
    assert str(caught.value).startswith(f"--gpus {text}: ")
