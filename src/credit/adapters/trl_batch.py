"""What a TRL batch says about its rollouts: which tokens are the model's, who called, who had to."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxtyping import Bool, Int
from torch import Tensor

OPENING_TAG = "<tool_call>"


def learnable_mask(batch: Mapping[str, Any]) -> Bool[Tensor, "batch tokens"]:
    """Model tokens of a TRL batch: ``completion_mask * tool_mask`` (TRL pads the latter with 1)."""
    mask: Tensor = batch["completion_mask"].bool()
    return mask & batch["tool_mask"].bool() if "tool_mask" in batch else mask


def rows_with_call(
    ids: Int[Tensor, "batch tokens"],
    mask: Bool[Tensor, "batch tokens"],
    completions: Sequence[Any],
    tokenizer: Any,
) -> list[bool]:
    """Rows whose model tokens hold an opening tag, or whose messages hold a parsed call.

    Args:
        ids: completion tokens.
        mask: true on the model's own tokens.
        completions: what TRL hands to reward functions, messages or texts.
        tokenizer: decodes ``ids``; the tag is found whether or not it is a special token.
    """
    # Environment text may quote the tag; padding in its place also keeps two runs from joining into one.
    texts = tokenizer.batch_decode(ids.masked_fill(~mask, tokenizer.pad_token_id), skip_special_tokens=False)
    return [
        OPENING_TAG in text or (isinstance(turns, list) and any(turn.get("tool_calls") for turn in turns))
        for text, turns in zip(texts, completions, strict=True)
    ]


def rows_that_must_call(
    rows: Sequence[Mapping[str, Any]], asked: str | Callable[[Mapping[str, Any]], Any] | None
) -> list[bool]:
    """Rows whose task needs a tool, by a column or by a function of the row; none when not ``asked``.

    Raises:
        ValueError: a row lacks the column; the message names it.

    Example:
        >>> rows_that_must_call([{"needs_tool": True}, {"needs_tool": None}], "needs_tool")
        [True, False]
    """
    if asked is None:
        return [False for _ in rows]
    if isinstance(asked, str):
        for row in rows:
            if asked not in row:
                raise ValueError(f"tool_required: no column {asked!r} in the row; it has {sorted(row)}")
        return [bool(row[asked]) for row in rows]
    return [bool(asked(row)) for row in rows]
