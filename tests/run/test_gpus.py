"""Syntax of lists of GPUs."""

import pytest

from buckeye.errors import UsageError
from buckeye.launch.preflight.devices import GpuSpec, parse_gpu_spec


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
def test_parse_gpu_spec_reads_count_and_type(text, count, kind, memory):
    assert parse_gpu_spec(text) == GpuSpec(count, kind, memory)


@pytest.mark.parametrize("text", ["4xH1000", "0xH100", "4x", "4xQQQ"])
def test_parse_gpu_spec_refuses_invalid_text(text, refusal):
    with refusal(UsageError):
        parse_gpu_spec(text)
