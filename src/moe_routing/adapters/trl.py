"""Routing control for TRL's GRPO trainer: turns, fields and operations come from the rollouts' own tokens.

The trainer calls; nothing here imports it.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from credit._safe import require_shape
from moe_routing.adapters.summary import SelectionObserver
from moe_routing.adapters.tables import KINDS, RoutingTables
from moe_routing.adapters.transformers import RoutingControl
from moe_routing.api_names import blank_reasoning
from moe_routing.fields import FieldKind, field_ids
from moe_routing.operations import OperationRules
from moe_routing.selection import FieldSelection
from moe_routing.summary import RoutingSummary
from moe_routing.sums import SumCount

# A closing tag in a string of the call, as in {"command": "echo </tool_call>"}, does not end it.
TOOL_CALL_BLOCK = r'<tool_call>(?:"(?:\\.|[^"\\\n])*"|\\"|.)*?(?:</tool_call>|\Z)'
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
        process_group: ranks to add statistics up over; by default all that hold batches of their own. Groups of fewer
            ranks have an objective each, whose mean is followed.

    Attributes:
        summaries: expert selection in the first and in the last batch, over all ranks. With the trainer's own log they
            make a report: ``routing_report(routing.summaries, routing.rules.operations, trainer.state.log_history)``.

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
        self._groups: list[Any] = control.batch_groups if process_group is None else [process_group]
        self.tables: RoutingTables | None = None
        self.summaries: dict[str, RoutingSummary] = {}
        self._labels = torch.zeros(0, len(self.rules.operations), dtype=torch.bool)
        self._trajectory = self._kind = torch.zeros(0, dtype=torch.long)
        self._selection: FieldSelection | None = None
        self._logged: dict[str, float] = {}

    def label(
        self, completion_ids: Int[Tensor, "batch tokens"], turn: Int[Tensor, "batch tokens"], tokenizer: Any
    ) -> Int[Tensor, "batch tokens"]:
        """Field id of each completion token of a new batch, -1 where ``turn`` is negative.

        Raises:
            ValueError: if the two tensors differ in shape.
        """
        require_shape("turn", turn, tuple(completion_ids.shape), "completion_ids")
        self.control.discard()
        self.tables = None  # those of the last batch number other fields
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
        self._trajectory, self._kind = triples[:, 0], triples[:, 2]
        self._selection = None
        return field.reshape(turn.shape).to(turn.device)

    @contextmanager
    def record(self, field: Int[Tensor, "batch tokens"]) -> Iterator[None]:
        """Around one forward under the old policy, whose tokens these are."""
        observer = SelectionObserver(field.flatten(), len(self._kind))
        with self.control.record(field, self._labels, self._kind) as recording:
            recording.observe = observer
            yield
        part = observer.selection()
        self._selection = part if self._selection is None else self._selection + part

    def close(self, entropies: Float[Tensor, "batch tokens"], field: Int[Tensor, "batch tokens"]) -> None:
        """Add up over ranks: the entropy for the gate, and the tables of the batch.

        A batch without a token of a field has no entropy (NaN), and shuts the gate; 0 would open it.
        """
        entropy = SumCount.of(entropies.flatten(), (field >= 0).flatten())
        for group in self._groups:
            entropy = entropy.reduce(group)
        mean = torch.where(entropy.count > 0, entropy.compute(), torch.nan)
        self.tables = self.control.tables(mean, self.process_group)
        self._logged = self._tables_metrics(self.tables) | self._selection_metrics()

    def bind(self, field: Int[Tensor, "batch tokens"], *, scale: float) -> AbstractContextManager[None]:
        """Around forward and backward of one micro-batch.

        Raises:
            RuntimeError: before the batch was closed.
        """
        if self.tables is None:
            raise RuntimeError("this batch was not closed yet: record() and close() come before bind()")
        return self.control.bind(field, self.tables, scale=scale * self._share())

    def metrics(self) -> dict[str, float]:
        """Gate and survived share now; turns, information, pairs and expert selection of the last batch."""
        return self.control.metrics() | self._logged

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: the gate's state, and the summaries of the first and the last batch.

        The same on every rank that shares a process group. The tables are those of a generation batch, which a resumed
        run generates anew.
        """
        gate = None if self.control.gate is None else self.control.gate.state_dict()
        return {"gate": gate, "summaries": {name: asdict(summary) for name, summary in self.summaries.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`; the state of a gate that this control has not is left out."""
        if self.control.gate is not None and state["gate"] is not None:
            self.control.gate.load_state_dict(state["gate"])
        self.summaries = {
            name: RoutingSummary(**kept | {sums: SumCount(**kept[sums]) for sums in ("load_cv", "router_entropy")})
            for name, kept in state["summaries"].items()
        }

    def _share(self) -> float:
        """Each group of ranks has an objective of its own, and the gradient is to be that of their mean."""
        if self.process_group is None or not torch.distributed.is_initialized():
            return 1.0
        return torch.distributed.get_world_size(self.process_group) / torch.distributed.get_world_size()

    def _tables_metrics(self, tables: RoutingTables) -> dict[str, float]:
        logged = {"routing/pairs": float(tables.num_pairs)}
        for kind, information in tables.information.items():
            logged[f"routing/information_{kind}"] = float(information.mean())
            logged[f"routing/turns_{kind}"] = float(tables.num_turns[kind])
        return logged

    def _selection_metrics(self) -> dict[str, float]:
        assert self._selection is not None  # there are tables, so something was recorded
        selection, self._selection = self._selection, None
        summary = RoutingSummary.from_fields(selection, self._labels, self._trajectory)
        for group in self._groups:
            summary = summary.reduce(group)
        self.summaries = {"first": self.summaries.get("first", summary), "last": summary}
        gaps = {
            f"routing/specialization_gap_{kind.name.lower()}": selection.specialization(
                self._labels, self._kind == kind, self._groups
            )
            for kind in KINDS
        }
        return summary.metrics() | {name: float(gap.mean()) for name, gap in gaps.items()}


def split_turn(
    ids: list[int], decode: Callable[[list[int]], str], block: re.Pattern[str]
) -> tuple[Bool[Tensor, " tokens"], str | None]:
    """True on the tokens of a turn's tool-call blocks, and its text without reasoning; None without a block.

    >>> tool, text = split_turn([0, 1, 2], lambda ids: "".join("a<b>c"[:3] if i == 1 else "x" for i in ids),
    ...                         re.compile("<b"))
    >>> tool.tolist(), text
    ([False, True, False], 'xa<bx')
    """
    text = blank_reasoning(decode(ids), _THINK)
    spans = [found.span() for found in block.finditer(text)]
    tool, places = torch.zeros(len(ids), dtype=torch.bool), _Places(ids, decode, len(text))
    for start, stop in spans:
        tool[places.token_of(start) : places.token_of(stop - 1) + 1] = True
    return tool, text if spans else None


class _Places:
    """Finds the tokens behind characters of a turn's text from decoded prefixes, which are what this costs."""

    def __init__(self, ids: list[int], decode: Callable[[list[int]], str], length: int) -> None:
        self.ids = ids
        self.decode = decode
        self.completed = {0: 0, len(ids): length}  # characters, by the number of tokens decoded

    def token_of(self, character: int) -> int:
        """The token that completes a character."""
        done = self.completed
        high = min(count for count, characters in done.items() if characters > character)
        low = max(count for count, characters in done.items() if characters <= character and count < high)
        probes = 0
        while high - low > 1:
            # Tokens are of similar length, so a guess in proportion is close; the middle bounds the number of guesses.
            share = (character - done[low]) / max(done[high] - done[low], 1) if probes % 3 < 2 else 0.5
            count = min(max(low + round(share * (high - low)), low + 1), high - 1)
            # An unfinished character decodes to replacement characters, whose number does not tell.
            done[count] = len(self.decode(self.ids[:count]).rstrip("\ufffd"))
            low, high = (low, count) if done[count] > character else (count, high)
            probes += 1
        return high - 1


def _owned(turn: Int[Tensor, "batch tokens"]) -> Int[Tensor, "owned 2"]:
    """Row and turn of every token that has one."""
    rows, columns = (turn >= 0).nonzero(as_tuple=True)
    return torch.stack([rows, turn[rows, columns]], dim=1)
