"""Characters to tokens: spans found in a text, carried to its tokens by the tokenizer's offsets.

Ids are never decoded and encoded again to find a span: re-tokenising changes ids.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor

Offsets = Sequence[tuple[int, int]] | Sequence[Sequence[int]]
CharSpans = Sequence[tuple[int, int]]


def char_spans_to_tokens(offsets: Offsets, spans: CharSpans) -> Int[Tensor, "spans 2"]:
    """Token span of each character span: every token that holds one of its characters, taken whole.

    Args:
        offsets: ``(start, stop)`` characters of each of ``T`` tokens, as a fast tokenizer's
            ``return_offsets_mapping=True`` gives them. A token of no characters (``(0, 0)``, a special token) belongs
            to no span of its own but may lie inside one. Tokens that are parts of one character share its offsets.
        spans: ``(start, stop)`` characters, half open, in any order; they may overlap.

    Returns:
        int64 ``(start, stop)`` tokens, half open. A span without a character, or whose characters no token holds, has
        ``start == stop``.

    Raises:
        ValueError: a span is reversed or negative, or offsets go backwards; each is named.

    Example:
        >>> char_spans_to_tokens([(0, 2), (2, 5), (5, 6)], [(1, 3), (5, 6), (2, 2)])
        tensor([[0, 2],
                [2, 3],
                [0, 0]])

    Reference:
        ours.
    """
    table = torch.tensor([tuple(offset) for offset in offsets], dtype=torch.int64).reshape(-1, 2)
    wanted = torch.tensor(list(spans), dtype=torch.int64).reshape(-1, 2)
    bad = (wanted[:, 0] < 0) | (wanted[:, 1] < wanted[:, 0])
    if bool(bad.any()):
        raise ValueError(f"spans: {tuple(wanted[bad][0].tolist())} is not start <= stop with start >= 0")
    tokens = (table[:, 1] > table[:, 0]).nonzero()[:, 0]
    start, stop = (edge.contiguous() for edge in table[tokens].unbind(dim=1))
    back = ((start.diff() < 0) | (stop.diff() < 0)).nonzero()[:, 0]
    if len(back):
        at = int(tokens[back[0] + 1])
        raise ValueError(f"offsets: token {at} at {tuple(table[at].tolist())} lies before the token before it")
    # The first token that stops after the span starts, and the first that starts at or after its stop.
    first = torch.searchsorted(stop, wanted[:, 0].contiguous(), right=True)
    last = torch.searchsorted(start, wanted[:, 1].contiguous())
    held = (first < last) & (wanted[:, 0] < wanted[:, 1])
    if not bool(held.any()):
        return torch.zeros_like(wanted)
    begin = tokens[torch.where(held, first, 0)]
    end = tokens[torch.where(held, last - 1, 0)] + 1
    return torch.where(held[:, None], torch.stack([begin, end], dim=1), 0)


def char_spans_to_mask(offsets: Offsets, spans: CharSpans) -> Bool[Tensor, " tokens"]:
    """True on the tokens of :func:`char_spans_to_tokens`, whichever span they belong to.

    Args:
        offsets: ``(start, stop)`` characters of each of ``T`` tokens.
        spans: ``(start, stop)`` characters, half open; they may overlap.

    Returns:
        A mask over the tokens.

    Raises:
        ValueError: as :func:`char_spans_to_tokens`.

    Example:
        >>> char_spans_to_mask([(0, 2), (2, 5), (5, 6)], [(1, 3)])
        tensor([ True,  True, False])

    Reference:
        ours.
    """
    found = char_spans_to_tokens(offsets, spans)
    edges = torch.zeros(len(offsets) + 1, dtype=torch.int64)
    ones = torch.ones(len(found), dtype=torch.int64)
    edges.index_add_(0, found[:, 0], ones).index_add_(0, found[:, 1], -ones)
    return edges.cumsum(dim=0)[:-1] > 0
