"""Routing control for TRL's GRPO trainer: turns, fields and operations come from the rollouts' own tokens.

The trainer calls; nothing here imports it.
"""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from credit._safe import require_shape
from moe_routing.adapters.tables import RoutingTables
from moe_routing.adapters.transformers import RoutingControl
from moe_routing.fields import FieldKind, field_ids
from moe_routing.operations import OperationRules
from moe_routing.sums import SumCount

TOOL_CALL_BLOCK = r"<tool_call>.*?(?:</tool_call>|\Z)"
CODE_BLOCK = r"```[^\n`]*\n.*?(?:```|\Z)"
# A chat template may open the reasoning in the prompt, so that the completion only closes it.
_THINK = re.compile(r"\A(?:(?!<think>).)*</think>|<think>.*?(?:</think>|\Z)", re.DOTALL)


class TurnRouting:
    """Steers the experts of a model that TRL trains: ``CreditGRPOTrainer(model, ..., routing=TurnRouting(control))``.

    A turn is one run of the model's own tokens. Tokens of its tool-call blocks, tags included, are its TOOL field,
    the others its THINK field. Its operations are those of the calls in it; a turn without calls, as the summary
    is, has none. A block inside ``<think>`` is reasoning. A token that lies across the edge of a block is TOOL.

    Args:
        control: attached to the very model that the trainer gets.
        rules: operations of a turn; :meth:`OperationRules.tool_calls` by default.
        block: regular expression of a tool-call block in a turn's text; ``CODE_BLOCK`` for agents that write code.
        process_group: ranks to add statistics up over; all by default.

    Reference: paper sections 3.1 and 3.3; the reading of TRL's tokens is ours.
    """

    def __init__(
        self,
        control: RoutingControl,
        rules: OperationRules | None = None,
        *,
        block: str = TOOL_CALL_BLOCK,
        process_group: Any = None,
    ) -> None:
        self.control = control
        self.rules = OperationRules.tool_calls() if rules is None else rules
        self.block = re.compile(block, re.DOTALL)
        self.process_group = process_group
        self.tables: RoutingTables | None = None
        self._labels = torch.zeros(0, len(self.rules.operations), dtype=torch.bool)
        self._kind = torch.zeros(0, dtype=torch.long)

    def label(
        self, completion_ids: Int[Tensor, "batch tokens"], turn: Int[Tensor, "batch tokens"], tokenizer: Any
    ) -> Int[Tensor, "batch tokens"]:
        """Field id of each completion token of a new batch, -1 where ``turn`` is negative.

        Raises:
            ValueError: if the two tensors differ in shape.
        """
        require_shape("turn", turn, tuple(completion_ids.shape), "completion_ids")
        kind, calls = torch.full(turn.shape, int(FieldKind.NONE)), dict[tuple[int, int], str | None]()
        numbers, tokens = turn.cpu(), completion_ids.cpu()

        def decode(ids: list[int]) -> str:
            text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            return text

        for row, number in torch.unique(_owned(numbers), dim=0).tolist():
            at = numbers[row] == number
            tool, calls[row, number] = split_turn(tokens[row, at].tolist(), decode, self.block)
            kind[row, at] = torch.where(tool, int(FieldKind.TOOL), int(FieldKind.THINK))
        row_of = torch.arange(len(turn))[:, None].expand(turn.shape)
        field, triples = field_ids(row_of.flatten(), numbers.flatten(), kind.flatten())
        self._labels = self.rules.labels([calls[row, number] for row, number, _ in triples.tolist()])
        self._kind = triples[:, 2]
        return field.reshape(turn.shape).to(turn.device)

    def record(self, field: Int[Tensor, "batch tokens"]) -> AbstractContextManager[None]:
        """Around one forward under the old policy, whose tokens these are."""
        return self.control.record(field, self._labels, self._kind)

    def close(self, entropies: Float[Tensor, "batch tokens"], field: Int[Tensor, "batch tokens"]) -> None:
        """Add up over ranks: the entropy for the gate, and the tables of the batch."""
        mean = SumCount.of(entropies.flatten(), (field >= 0).flatten()).reduce(self.process_group).compute()
        self.tables = self.control.tables(mean, self.process_group)

    def bind(self, field: Int[Tensor, "batch tokens"], *, scale: float) -> AbstractContextManager[None]:
        """Around forward and backward of one micro-batch.

        Raises:
            RuntimeError: before the first batch was closed.
        """
        if self.tables is None:
            raise RuntimeError("no batch was closed yet: record() and close() come before bind()")
        return self.control.bind(field, self.tables, scale=scale)

    def metrics(self) -> dict[str, float]:
        """Gate, survived share, and of the last batch: turns of each kind, their mean information, pairs."""
        logged = self.control.metrics()
        if self.tables is not None:
            logged["routing/pairs"] = float(self.tables.num_pairs)
            for kind, information in self.tables.information.items():
                logged[f"routing/information_{kind}"] = float(information.mean())
                logged[f"routing/turns_{kind}"] = float(self.tables.num_turns[kind])
        return logged


def split_turn(
    ids: list[int], decode: Callable[[list[int]], str], block: re.Pattern[str]
) -> tuple[Bool[Tensor, " tokens"], str | None]:
    """True on the tokens of a turn's tool-call blocks, and its text without reasoning; None without a block.

    >>> tool, text = split_turn([0, 1, 2], lambda ids: "".join("a<b>c"[:3] if i == 1 else "x" for i in ids),
    ...                         re.compile("<b"))
    >>> tool.tolist(), text
    ([False, True, False], 'xa<bx')
    """
    # Blanks of the same length keep every position.
    text = _THINK.sub(lambda found: " " * len(found.group()), decode(ids))
    spans = [found.span() for found in block.finditer(text)]
    tool = torch.zeros(len(ids), dtype=torch.bool)
    for start, stop in spans:
        tool[_token_of(start, ids, decode) : _token_of(stop - 1, ids, decode) + 1] = True
    return tool, text if spans else None


def _token_of(character: int, ids: list[int], decode: Callable[[list[int]], str]) -> int:
    """The token that completes a character of the text, by bisection over decoded prefixes."""
    low, high = 0, len(ids) - 1
    while low < high:
        middle = (low + high) // 2
        # An unfinished character decodes to replacement characters, whose number does not tell.
        if len(decode(ids[: middle + 1]).rstrip("\ufffd")) > character:
            high = middle
        else:
            low = middle + 1
    return low


def _owned(turn: Int[Tensor, "batch tokens"]) -> Int[Tensor, "owned 2"]:
    """Row and turn of every token that has one."""
    rows, columns = (turn >= 0).nonzero(as_tuple=True)
    return torch.stack([rows, turn[rows, columns]], dim=1)
