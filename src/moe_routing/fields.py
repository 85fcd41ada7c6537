"""Fields: the generated spans inside which routing is measured and steered.

A field is one (trajectory, turn, THINK or TOOL) triple. Every token carries the id of its field, and -1 outside
generated fields; ids need not be contiguous. Two tokens are neighbours when they are consecutive rows of the
flattened forward and carry the same field id, so no pair crosses a field, a turn or a row of the batch.
"""

from enum import IntEnum

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from credit._safe import require_shape


class FieldKind(IntEnum):
    """What a generated token belongs to; anything else (prompt, tool result, padding) is ``NONE``."""

    NONE = -1
    THINK = 0
    TOOL = 1


def field_ids(
    trajectory: Int[Tensor, " tokens"], turn: Int[Tensor, " tokens"], kind: Int[Tensor, " tokens"]
) -> tuple[Int[Tensor, " tokens"], Int[Tensor, "fields 3"]]:
    """Number the (trajectory, turn, kind) triples that occur, in ascending order.

    Args:
        trajectory: trajectory of each token, negative for padding.
        turn: turn of each token inside its trajectory, negative outside turns.
        kind: :class:`FieldKind` of each token.

    Returns:
        The field id of each token (-1 where any of the three is negative), contiguous from 0, and the triple of
        each field. Row ``f`` of every per-field tensor (labels, control table, usage) belongs to id ``f``.

    Raises:
        ValueError: if the three tensors differ in shape.

    Reference: paper section 3.1 (fields of a turn); the numbering is ours.

    >>> ids, triples = field_ids(torch.tensor([0, 0, 0, 7]), torch.tensor([0, 0, 1, 0]), torch.tensor([0, 1, 0, -1]))
    >>> ids.tolist(), triples.tolist()
    ([0, 1, 2, -1], [[0, 0, 0], [0, 0, 1], [0, 1, 0]])
    """
    require_shape("turn", turn, tuple(trajectory.shape), "trajectory")
    require_shape("kind", kind, tuple(trajectory.shape), "trajectory")
    columns = [trajectory.long(), turn.long(), kind.long()]
    inside = (columns[0] >= 0) & (columns[1] >= 0) & (columns[2] >= 0)
    triples = torch.stack([column[inside] for column in columns])
    # The tokens of a field mostly follow each other, and runs of them are faster to sort than tokens.
    starts = torch.ones_like(triples[0], dtype=torch.bool)
    starts[1:] = (triples[:, 1:] != triples[:, :-1]).any(0)
    table, run_ids = _distinct(triples[:, starts])
    ids = torch.full_like(columns[0], -1)
    ids[inside] = run_ids[starts.cumsum(0) - 1]
    return ids, table


def _distinct(triples: Int[Tensor, "3 runs"]) -> tuple[Int[Tensor, "fields 3"], Int[Tensor, " runs"]]:
    """The distinct columns in ascending order, as rows, and the number of each."""
    extents = [int(highest) + 1 for highest in triples.amax(1)] if triples.shape[1] else [1, 1, 1]
    if extents[0] * extents[1] * extents[2] > torch.iinfo(torch.long).max:
        table, inverse = torch.unique(triples.T, dim=0, return_inverse=True)
        return table, inverse
    # One number for each triple, in the same order, is faster to sort than rows are.
    trajectory, turn, kind = triples
    key, inverse = torch.unique((trajectory * extents[1] + turn) * extents[2] + kind, return_inverse=True)
    owner = key // extents[2]
    return torch.stack([owner // extents[1], owner % extents[1], key % extents[2]], dim=-1), inverse


def neighbours(field: Int[Tensor, " tokens"]) -> Bool[Tensor, " tokens"]:
    """True at ``t`` when tokens ``t-1`` and ``t`` lie in one field.

    >>> neighbours(torch.tensor([3, 3, -1, -1, 3, 0, 0])).tolist()
    [False, True, False, False, False, False, True]
    """
    same = torch.zeros_like(field, dtype=torch.bool)
    same[1:] = (field[1:] == field[:-1]) & (field[1:] >= 0)
    return same


def count_pairs(field: Int[Tensor, " tokens"]) -> Int[Tensor, ""]:
    """Number of within-field pairs, the paper's normaliser of the token term (``normalizer="pairs"``).

    A count: add it over micro-batches and ranks, then hand the sum to ``router_gradient(num_pairs=...)``.

    Reference: paper section 3.2.

    >>> int(count_pairs(torch.tensor([0, 0, 0, 1, -1])))
    2
    """
    # A count of what is not zero is several times faster on a CPU than a sum of booleans.
    return torch.count_nonzero((field[1:] == field[:-1]) & (field[1:] >= 0))


def count_fields(field: Int[Tensor, " tokens"]) -> Int[Tensor, ""]:
    """Number of distinct fields that own a token: the other normaliser on offer (``normalizer="turns"``).

    A field must not be split between the shards whose counts are added.

    Reference: ours.

    >>> int(count_fields(torch.tensor([4, 4, -1, 9])))
    2
    """
    ids: Tensor = torch.unique(field)
    return (ids >= 0).sum()


def shift_rows(x: Shaped[Tensor, "tokens *rest"]) -> Shaped[Tensor, "tokens *rest"]:
    """Row ``t-1`` at position ``t``; row 0 holds the last row, which no pair ever reads."""
    return x.roll(1, 0)


def recorded_rows(selected: Int[Tensor, "*layers tokens k"]) -> Bool[Tensor, "*layers tokens"]:
    """True where the selection is known: engines mark padding rows of a recorded route with -1."""
    return (selected >= 0).all(-1)


def check_tokens(name: str, tensor: Shaped[Tensor, "tokens *rest"], tokens: int, like: str) -> None:
    """Raise ``ValueError`` naming both shapes unless ``tensor`` has one row per token."""
    require_shape(name, tensor, (tokens, *tensor.shape[1:]), like)


def check_labels(labels: Bool[Tensor, "fields operations"], fields: int, like: str) -> None:
    """Raise ``ValueError`` unless ``labels`` has one row per field and is boolean: a count would weigh its turn."""
    check_tokens("labels", labels, fields, like)
    if labels.dim() != 2 or labels.dtype is not torch.bool:
        raise ValueError(
            f"labels has shape {tuple(labels.shape)} and dtype {labels.dtype}, but a boolean [fields, operations] is "
            "wanted"
        )


def check_ids(name: str, ids: Int[Tensor, "..."], bound: int, like: str) -> None:
    """Raise ``ValueError`` if an id reaches ``bound``, the number of rows or experts that ``like`` offers.

    Reads the data, hence one synchronisation on an accelerator; skipped under ``torch.compile``.
    """
    if torch.compiler.is_compiling() or ids.numel() == 0:
        return
    highest = int(ids.amax())
    if highest >= bound:
        raise ValueError(f"{name} of shape {tuple(ids.shape)} holds id {highest}, but {like} has room for {bound}")


def check_width(selected: Int[Tensor, "... k"], num_experts: int, like: str) -> None:
    """Raise ``ValueError`` when more experts are selected than exist."""
    if selected.shape[-1] > num_experts:
        raise ValueError(
            f"selected of shape {tuple(selected.shape)} picks k={selected.shape[-1]} experts, "
            f"but {like} has only {num_experts}"
        )


def check_selection(selected: Int[Tensor, "... k"], num_experts: int, like: str) -> None:
    """:func:`check_width`, and the same error for an expert that does not exist."""
    check_width(selected, num_experts, like)
    check_ids("selected", selected, num_experts, like)
