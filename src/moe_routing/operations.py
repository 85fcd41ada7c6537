"""Operation labels of a turn: which kinds of thing its code or its tool calls do.

Labels are deterministic: regular expressions over the API names that a turn uses, and nothing else. The label set of
a turn is sorted and belongs to its thinking field and its tool field alike.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from moe_routing.api_names import tool_call_names
from moe_routing.code_names import code_api_names

Turn = str | Mapping[str, Any] | Sequence[Any] | None
NameReader = Callable[[Turn], list[str]]


class OperationRules:
    """Maps the API names of a turn to a set of operations.

    A name belongs to every operation one of whose patterns is found in it (``re.search`` on the name in snake
    case, so ``Gmail.sendEmail`` is matched as ``gmail.send_email``). A name that no pattern fits adds no label;
    :meth:`unmatched` lists such names, so that a rule set can be checked against a new environment.

    Args:
        patterns: for each operation its regular expression, or several.
        names: reads the API names out of a turn: :func:`code_api_names`, :func:`tool_call_names`, or your own.

    Raises:
        ValueError: for a rule set without operations or a pattern that does not compile.

    Reference: paper appendix C.6; the rules themselves are ours.

    >>> rules = OperationRules({"read": r"^docs\\.", "write": [r"\\.save$", r"\\.put$"]}, code_api_names)
    >>> rules("apis.docs.find(x); apis.files.put(y)")
    ('read', 'write')
    """

    def __init__(self, patterns: Mapping[str, str | Sequence[str]], names: NameReader = tool_call_names) -> None:
        if not patterns:
            raise ValueError("patterns names no operation")
        self.operations: tuple[str, ...] = tuple(sorted(patterns))
        self._names = names
        self._patterns = {operation: _compile(operation, patterns[operation]) for operation in self.operations}

    @classmethod
    def appworld(cls) -> "OperationRules":
        """Rules for code that calls ``apis.app.method(...)``: read (search and login included), create, update,
        delete, complete.

        >>> OperationRules.appworld()("me = apis.phone.login(**k)\\napis.phone.send_text_message(to, text)")
        ('create', 'read')
        """
        return cls(APPWORLD_PATTERNS, code_api_names)

    @classmethod
    def tool_calls(cls) -> "OperationRules":
        """Rules for tool calls, by the first verb of the tool's name, wherever the service's name stands.

        >>> OperationRules.tool_calls()('<tool_call>{"name": "gmail_search_deleted", "arguments": {}}</tool_call>')
        ('read',)
        """
        return cls(TOOL_CALL_PATTERNS, tool_call_names)

    def __call__(self, turn: Turn) -> tuple[str, ...]:
        """Operations of a turn, sorted, each once; empty for a turn without calls."""
        names = [snake_case(name) for name in self._names(turn)]
        return tuple(op for op in self.operations if any(self._fits(op, name) for name in names))

    def unmatched(self, turn: Turn) -> tuple[str, ...]:
        """API names of a turn that belong to no operation, sorted, each once."""
        names = {snake_case(name) for name in self._names(turn)}
        return tuple(sorted(n for n in names if not any(self._fits(op, n) for op in self.operations)))

    def labels(self, turns: Sequence[Turn]) -> Bool[Tensor, "turns operations"]:
        """One row per turn, one column per operation in the order of :attr:`operations`.

        Index it with the turn of each field to label the fields.

        >>> OperationRules({"a": "^a", "b": "^b"}).labels([{"name": "b_1"}, None]).tolist()
        [[False, True], [False, False]]
        """
        found = [self(turn) for turn in turns]
        rows = [[operation in ops for operation in self.operations] for ops in found]
        return torch.tensor(rows, dtype=torch.bool).reshape(len(rows), len(self.operations))

    def _fits(self, operation: str, name: str) -> bool:
        return any(pattern.search(name) for pattern in self._patterns[operation])


def snake_case(name: str) -> str:
    """``Gmail.sendEmail`` and ``gmail.send-email`` as ``gmail.send_email``; dots part the app from the method."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    return re.sub(r"_{2,}", "_", re.sub(r"[\s/:\-]+", "_", spaced)).lower()


def first_verb_patterns(verbs: Mapping[str, str], prefix: str) -> dict[str, str]:
    """One pattern per operation: after ``prefix`` and words that are no verb of the set comes one of its verbs.

    Names such as ``delete_search_filter`` hold the verbs of two operations; the first one says what is done.

    >>> patterns = first_verb_patterns({"read": "search find", "delete": "delete"}, prefix="^")
    >>> [bool(re.search(patterns[op], "mail_delete_search_filter")) for op in ("read", "delete")]
    [False, True]
    """
    word_end = r"(?![a-z0-9])"
    every_verb = "|".join("|".join(group.split()) for group in verbs.values())
    other_words = rf"(?:(?!(?:{every_verb}){word_end})[a-z0-9]+[._])*"
    return {op: rf"{prefix}{other_words}(?:{'|'.join(group.split())}){word_end}" for op, group in verbs.items()}


def _compile(operation: str, patterns: str | Sequence[str]) -> list[re.Pattern[str]]:
    try:
        return [re.compile(p) for p in ([patterns] if isinstance(patterns, str) else patterns)]
    except re.error as error:
        raise ValueError(f"operation {operation!r} has an invalid pattern: {error}") from error


_VERBS = {
    "read": "browse check count describe download exists fetch find get inspect list login logout lookup open peek "
    "preview query read retrieve scan search select show view",
    "create": "add append book build compose compress copy create draft duplicate forward generate import initiate "
    "insert invite make new order pay place post publish purchase record register reply request review schedule send "
    "signup submit subscribe transfer upload write",
    "update": "accept apply approve archive assign block cancel change close confirm decline decompress deny disable "
    "edit enable extend follow label like lock loop mark merge modify move mute next patch pause pin play previous "
    "rate reassign refresh reject rename reopen replace reset resize resolve restore resume save seek set shuffle "
    "snooze star stop toggle unarchive unblock unfollow unlabel unlike unmute unpin unstar unsubscribe update upsert "
    "verify",
    "delete": "clear delete destroy discard drop erase purge remove revoke trash withdraw",
    "complete": "complete finalize finish",
}

TOOL_CALL_PATTERNS = first_verb_patterns(_VERBS, prefix=r"^")
"""Patterns of :meth:`OperationRules.tool_calls`."""

APPWORLD_PATTERNS = first_verb_patterns(
    {operation: verbs for operation, verbs in _VERBS.items() if operation != "complete"}, prefix=r"^[a-z0-9_]+\."
) | {"complete": r"^supervisor\.complete_task$"}
"""Patterns of :meth:`OperationRules.appworld`: only the supervisor's ``complete_task`` ends the task."""
