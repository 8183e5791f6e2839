"""Text that grows token by token."""

from hypothesis import example, given
from hypothesis import strategies as st

from buckeye.inference.engine.detokenizer import IncrementalDetokenizer


def decode_bytes(ids):
    return bytes(ids).decode("utf-8", errors="replace")


def feed_all(growing, data):
    shown = []
    for byte in data:
        growing.feed([byte])
        shown.append(growing.take())
    growing.finish()
    shown.append(growing.take(final=True))
    return shown


@given(st.text(max_size=30), st.lists(st.text("abé ", min_size=1, max_size=4), max_size=3))
def test_parts_join_to_the_text_before_the_first_stop(text, stops):
    growing = IncrementalDetokenizer(decode_bytes, stops)
    shown = "".join(feed_all(growing, text.encode()))
    places = [text.find(stop) for stop in stops if stop in text]
    # of several stops, the one that is complete first ends the text
    complete = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    assert growing.stopped == bool(places)
    if not places:
        assert shown == growing.text == text
    else:
        end = min(complete)[0]
        assert shown == growing.text == text[: min(place for done, place in complete if done == end)]


@given(st.binary(max_size=40))
@example(b"\x80" * 7 + "\x80".encode())  # the eighth byte, the last that it waits for, begins a character
def test_any_bytes_end_as_their_decoding(data):
    growing = IncrementalDetokenizer(decode_bytes)
    feed_all(growing, data)
    growing_at_once = IncrementalDetokenizer(decode_bytes)
    growing_at_once.feed(list(data))
    growing_at_once.finish()
    assert growing_at_once.text == decode_bytes(data)
    assert growing.text.replace("\ufffd", "") == decode_bytes(data).replace("\ufffd", "")


def test_a_character_is_shown_when_its_last_byte_is_there():
    growing = IncrementalDetokenizer(decode_bytes)
    assert feed_all(growing, "aŋb".encode()) == ["a", "", "ŋ", "b", ""]


def test_possible_stop_string_is_held_back():
    growing = IncrementalDetokenizer(decode_bytes, ["END"])
    assert feed_all(growing, b"xEyEN") == ["x", "", "Ey", "", "", "EN"]
    growing = IncrementalDetokenizer(decode_bytes, ["END"])
    assert "".join(feed_all(growing, b"xENDz")) == "x"
    assert growing.num_tokens == 4
