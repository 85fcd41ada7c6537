"""Character spans carried to tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from credit.alignment import char_spans_to_mask, char_spans_to_tokens


@st.composite
def tokenised(draw):
    """Offsets as fast tokenizers give them: gaps (skipped space), shared characters (bytes), special tokens (0, 0)."""
    offsets, at = [], 0
    for kind, gap, width in draw(
        st.lists(st.tuples(st.sampled_from("tbs"), st.integers(0, 1), st.integers(1, 4)), max_size=12)
    ):
        if kind == "s":
            offsets.append((0, 0))
            continue
        at += gap
        offsets += [(at, at + width)] if kind == "t" else [(at, at + 1)] * width
        at += width if kind == "t" else 1
    edge = st.integers(0, at + 2)
    spans = draw(st.lists(st.tuples(edge, edge).map(lambda pair: tuple(sorted(pair))), max_size=5))
    return offsets, spans


def touched(offsets, span):
    characters = set(range(*span))
    return [t for t, (start, stop) in enumerate(offsets) if characters & set(range(start, stop))]


@given(tokenised())
@settings(max_examples=50, deadline=None)
def test_a_span_takes_every_token_it_touches_whole(case):
    offsets, spans = case
    found = char_spans_to_tokens(offsets, spans).tolist()
    mask = char_spans_to_mask(offsets, spans)
    wanted = torch.zeros(len(offsets), dtype=torch.bool)
    for span, (start, stop) in zip(spans, found, strict=True):
        tokens = touched(offsets, span)
        assert (start, stop) == ((tokens[0], tokens[-1] + 1) if tokens else (start, start))
        wanted[start:stop] = True
    assert torch.equal(mask, wanted)


def test_a_span_that_begins_and_ends_inside_tokens():
    assert char_spans_to_tokens([(0, 3), (3, 6), (6, 9)], [(2, 7)]).tolist() == [[0, 3]]
    assert char_spans_to_tokens([(0, 3), (3, 6), (6, 9)], [(3, 6)]).tolist() == [[1, 2]]


def test_nothing_in_nothing_out():
    assert char_spans_to_tokens([], [(0, 4)]).tolist() == [[0, 0]]
    assert char_spans_to_tokens([(0, 1)], []).shape == (0, 2)
    assert char_spans_to_mask([], []).tolist() == []
    assert char_spans_to_mask([(0, 0), (0, 0)], [(0, 9)]).tolist() == [False, False]


@pytest.mark.parametrize("span", [(3, 2), (-1, 2)])
def test_reversed_and_negative_spans_are_errors(span):
    with pytest.raises(ValueError, match=rf"spans: \({span[0]}, {span[1]}\)"):
        char_spans_to_tokens([(0, 9)], [(0, 1), span])


def test_offsets_that_go_backwards_are_an_error():
    with pytest.raises(ValueError, match=r"offsets: token 2 at \(1, 3\)"):
        char_spans_to_tokens([(2, 3), (0, 0), (1, 3)], [(0, 1)])
