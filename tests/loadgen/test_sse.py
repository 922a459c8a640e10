from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen import sse
from loadgen.sse import EventTooLong, SseDecoder


@given(
    payloads=st.lists(st.binary(min_size=1).filter(lambda b: b"\n" not in b and b"\r" not in b)),
    newline=st.sampled_from([b"\n", b"\r\n"]),
    cuts=st.lists(st.integers(0, 400)),
)
def test_any_cut_gives_the_same_events(payloads, newline, cuts):
    wire = b"".join(b"data: " + payload + newline + newline for payload in payloads)
    decoder = SseDecoder()
    edges = [0, *sorted(min(cut, len(wire)) for cut in cuts), len(wire)]
    events = [event for start, end in pairwise(edges) for event in decoder.feed(wire[start:end])]
    assert events == payloads


def test_lines_of_one_event_join_and_other_fields_are_left_out():
    wire = b": comment\nevent: x\ndata: one\ndata:two\nid: 3\n\n\n\ndata: three\n\n"
    assert SseDecoder().feed(wire) == [b"one\ntwo", b"three"]


def test_an_event_without_end_is_refused(monkeypatch):
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 64)
    decoder = SseDecoder()
    decoder.feed(b"data: " + b"x" * 50)
    with pytest.raises(EventTooLong):
        decoder.feed(b"x" * 50)
