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
def test_encoded_message_decodes_unchanged(values, kind):
    frame = {**values, "type": kind}
    data = encode(frame)
    body = data[HEADER.size :]
    assert body_length(data[: HEADER.size]) == len(body)
    assert decode(body) == frame


@given(st.binary())
def test_random_bytes_are_refused(body):
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
def test_values_without_json_form_are_refused(value):
    with pytest.raises(FrameError):
        encode({"type": "result", "value": value})


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"{}", b'{"type": 1}', b'{"type": "x", "y": NaN}', b"[" * 9999]
)
def test_invalid_body_is_refused(body):
    with pytest.raises(FrameError):
        decode(body)


def test_message_one_byte_over_the_limit_is_refused(refusal, monkeypatch):
    frame = {"type": "x", "y": "123"}  # 22 characters
    monkeypatch.setattr(frames, "MAX_FRAME", 22)
    assert len(encode(frame)) == 26
    monkeypatch.setattr(frames, "MAX_FRAME", 21)
    with refusal(FrameError):
        encode(frame)
    monkeypatch.undo()
    assert body_length(HEADER.pack(frames.MAX_FRAME)) == frames.MAX_FRAME
    with pytest.raises(FrameError, match="the limit is"):
        body_length(HEADER.pack(frames.MAX_FRAME + 1))
