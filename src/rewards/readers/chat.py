"""Rows in the chat format: `messages` or `prompt` and `completion`, with `tools`; SLCA's released rows."""

import re
from collections.abc import Iterator, Mapping

from rewards.readers._fields import Row, as_messages, as_tools, decoded, gold, gold_of, identity, read
from rewards.rows import MalformedRowError, Report, Rows, warn_of_row
from rewards.trajectories import Trajectory

# A plain text may begin with a bracket too.
_MESSAGES = re.compile(r"\s*\[\s*[{\]]")


def read_chat(rows: Rows, on_error: Report = warn_of_row) -> Iterator[Trajectory]:
    """Read TRL's rows: `messages`, or `prompt` and perhaps `completion`; with `tools` and perhaps `gold`.

    Columns hold lists, or JSON texts of them; `prompt` and `completion` may be plain texts. Arguments that are JSON
    strings become objects. Gold is the column `gold` (as `Trajectory.to_row` writes it), or else what the assistant
    messages call, a step a message; it is None where no assistant speaks.

    Args:
        rows: a file of JSON lines or one JSON array, or the rows themselves.
        on_error: told of each malformed row; the default warns.

    Yields:
        One trajectory a row, its source "file:line".

    Raises:
        OSError: the file cannot be read.

    Example:
        >>> (row,) = read_chat([{"prompt": "Hi", "completion": "Hello"}])
        >>> [message["role"] for message in row.messages], row.gold
        (['user', 'assistant'], Gold(steps=()))

    Reference: the data set formats of TRL; ours.
    """
    return read(rows, on_error, _chat)


def _chat(row: Row, source: str) -> Trajectory:
    if "messages" in row:
        messages, field = as_messages(decoded(row, "messages"), "messages"), "messages"
    elif "prompt" in row:
        messages, field = _side(row, "prompt", "user"), "prompt"
        if row.get("completion") is not None:
            messages, field = messages + _side(row, "completion", "assistant"), "completion"
    else:
        raise MalformedRowError("messages", "neither messages nor prompt")
    tools = as_tools(decoded(row, "tools"), "tools")
    known = gold(row["gold"], "gold") if row.get("gold") is not None else gold_of(messages, field)
    return Trajectory(tuple(messages), tools, known, identity(row, "id", "uuid"), source)


def _side(row: Row, field: str, role: str) -> list[dict[str, object]]:
    value = row[field]
    if isinstance(value, str) and not _MESSAGES.match(value):
        return [{"role": role, "content": value}]
    return as_messages(decoded(row, field), field)


def read_slca(rows: Rows, on_error: Report = warn_of_row) -> Iterator[Trajectory]:
    """Read the rows that SLCA released: `prompt`, `tools`, `reward_model.ground_truth.gold_tool_calls`.

    Args:
        rows: a file of JSON lines or one JSON array, or the rows themselves.
        on_error: told of each malformed row; the default warns.

    Yields:
        One task a row, its gold by step.

    Raises:
        OSError: the file cannot be read.

    Example:
        >>> truth = {"gold_tool_calls": '[[{"name": "f", "arguments": {}}]]'}
        >>> prompt = [{"role": "user", "content": "?"}]
        >>> (row,) = read_slca([{"prompt": prompt, "tools": "[]", "reward_model": {"ground_truth": truth}}])
        >>> row.gold.calls()
        [[{'name': 'f', 'arguments': {}}]]

    Reference: the data set toucan-toolcall-slca.
    """
    return read(rows, on_error, _slca)


def _slca(row: Row, source: str) -> Trajectory:
    messages = as_messages(decoded(row, "prompt"), "prompt")
    tools = as_tools(decoded(row, "tools"), "tools")
    model = decoded(row, "reward_model")
    truth = decoded(model, "ground_truth") if isinstance(model, Mapping) else None
    if not isinstance(truth, Mapping) or "gold_tool_calls" not in truth:
        raise MalformedRowError("reward_model.ground_truth.gold_tool_calls", "not there")
    known = gold(decoded(truth, "gold_tool_calls"), "reward_model.ground_truth.gold_tool_calls")
    extra = row.get("extra_info")
    name = identity(row, "id", "uuid") or identity(extra if isinstance(extra, Mapping) else {}, "id", "index")
    return Trajectory(tuple(messages), tools, known, name, source)
