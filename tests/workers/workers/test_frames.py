"""Messages arrive unchanged, and nothing else is taken for a message."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buckeye.workers.worker_side import frames
from buckeye.workers.worker_side.frames import HEADER, FrameError, body_length, decode, encode

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(TEXT, JSON), TEXT)
def test_a_message_comes_back_as_it_was(values, kind):
    frame = {**values, "type": kind}
    data = encode(frame)
    body = data[HEADER.size :]
    assert body_length(data[: HEADER.size]) == len(body)
    assert decode(body) == frame


@given(st.binary())
def test_other_bytes_are_no_message(body):
    try:
        frame = decode(body)
    except FrameError:
        return
    assert isinstance(frame["type"], str)


def test_half_a_surrogate_pair_is_replaced():
    """A text that an environment cut within an emoji does not end the rollout."""
    data = encode({"type": "result", "value": ["\ud83d", "\ud83d\ude00", {"\ude00": 1}]})
    assert decode(data[HEADER.size :])["value"] == ["\ufffd", "\U0001f600", {"\ufffd": 1}]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), b"bytes"])
def test_what_json_does_not_know_is_refused(value):
    with pytest.raises(FrameError):
        encode({"type": "result", "value": value})


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"{}", b'{"type": 1}', b'{"type": "x", "y": NaN}', b"[" * 9999]
)
def test_a_body_that_is_no_message_is_refused(body):
    with pytest.raises(FrameError):
        decode(body)


def test_a_message_of_the_longest_length_passes_and_one_byte_more_does_not(refusal):
    frame = {"type": "x", "y": "123"}  # 22 characters
    assert len(encode(frame, max_bytes=22)) == 26
    with refusal(FrameError):
        encode(frame, max_bytes=21)
    assert body_length(HEADER.pack(frames.MAX_FRAME)) == frames.MAX_FRAME
    with pytest.raises(FrameError, match="is announced"):
        body_length(HEADER.pack(frames.MAX_FRAME + 1))
