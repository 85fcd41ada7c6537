"""What a TRL batch says about its rollouts: the model's tokens, who called, who had to, the rows' tools."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxtyping import Bool, Int
from torch import Tensor

Schema = Mapping[str, Any]
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


def row_tools(row: Mapping[str, Any], column: str = "tools") -> list[Schema]:
    """The tool schemas of a dataset row.

    Args:
        row: dataset row; its column is a list of schemas, its JSON, or nothing.
        column: name of the column.

    Raises:
        ValueError: the column is missing or does not hold a list of objects; the message names it.

    Example:
        >>> row_tools({"tools": [{"type": "function", "function": {"name": "f", "parameters": None}}]})
        [{'type': 'function', 'function': {'name': 'f'}}]
    """
    if column not in row:
        raise ValueError(f"no column {column!r} in the row; its columns are {sorted(row)}")
    tools = row[column]
    if isinstance(tools, str):
        tools = json.loads(tools) if tools.strip() else []
    else:
        tools = _without_nulls(tools or [])
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError(f"column {column!r} must hold a list of tool schemas or its JSON, got {tools!r:.200}")
    return tools


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, list | tuple):
        return [_without_nulls(entry) for entry in value]
    return value
