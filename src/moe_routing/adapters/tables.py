"""From recorded usage to the tables that steer a step: the part of the adapter that knows no model."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from credit._safe import require_shape, select
from moe_routing.fields import FieldKind, check_ids, count_pairs
from moe_routing.information import TurnStatistics, finite_turns
from moe_routing.sums import all_reduce_sums
from moe_routing.turns import MIN_TURNS, Reduction, turn_control

KINDS = (FieldKind.THINK, FieldKind.TOOL)
Normalizer = Literal["pairs", "turns"]


@dataclass(frozen=True)
class RoutingTables:
    """What every router needs to steer one step; row ``f`` of ``control`` belongs to field id ``f``.

    Attributes:
        num_pairs: within-field pairs of the whole batch on all ranks.
        divisor: what the sum of the token losses is divided by: ``num_pairs``, or the number of fields.
        gate: 1.0 when the control acts, else 0.0.
        information: ``I(E; Y_o)`` per layer and operation, by kind of field.
        num_turns: turns of each kind.
    """

    control: Float[Tensor, "layers fields experts"]
    num_pairs: Int[Tensor, ""]
    divisor: Int[Tensor, ""]
    gate: float
    information: dict[str, Float[Tensor, "layers operations"]]
    num_turns: dict[str, int]


@dataclass(frozen=True)
class RoutingRecord:
    """Sums over the recorded forwards; records of micro-batches add up.

    Attributes:
        statistics: of each kind of field.
        tokens: of each field that the statistics count.
        num_pairs: within-field pairs.
        num_fields: fields that own a token.
    """

    statistics: tuple[TurnStatistics, ...]
    tokens: Int[Tensor, " fields"]
    num_pairs: Int[Tensor, ""]
    num_fields: Int[Tensor, ""]
    labels: Bool[Tensor, "fields operations"]
    kind: Int[Tensor, " fields"]

    @classmethod
    def of(
        cls,
        usage: Float[Tensor, "layers fields experts"],
        field: Int[Tensor, " tokens"],
        labels: Bool[Tensor, "fields operations"],
        kind: Int[Tensor, " fields"],
    ) -> "RoutingRecord":
        """The record of one forward.

        Raises:
            ValueError: if ``kind`` or ``labels`` has another number of fields than ``usage``, or a kind is unknown.
        """
        fields = usage.shape[-2]
        require_shape("kind", kind, (fields,), f"labels of shape {tuple(labels.shape)}")
        check_ids("kind", kind, len(KINDS), "FieldKind")
        field, labels, kind = (x.to(usage.device) for x in (field, labels, kind))
        tokens = torch.bincount(field[field >= 0].long(), minlength=fields)
        statistics = tuple(TurnStatistics.from_usage(usage, labels, (tokens > 0) & (kind == k)) for k in KINDS)
        # A turn that the statistics leave out is no part of the objective, and so gets no control row.
        counted = select(finite_turns(usage), tokens)
        return cls(statistics, counted, count_pairs(field), (tokens > 0).sum(), labels, kind)

    def __add__(self, other: "RoutingRecord") -> "RoutingRecord":
        if not (torch.equal(self.labels, other.labels) and torch.equal(self.kind, other.kind)):
            raise ValueError(
                "labels and kind number the fields of the whole batch: they must not change between calls; discard() "
                "drops a batch that was given up"
            )
        twice = ((self.tokens > 0) & (other.tokens > 0)).nonzero()[:, 0].tolist()
        if twice:
            raise ValueError(
                f"field {twice[0]} (and {len(twice) - 1} more) has tokens in two recorded forwards, and its turn would "
                "count twice: a field lies in one micro-batch, and each is recorded once; discard() drops a batch that "
                "was given up"
            )
        return replace(
            self,
            statistics=tuple(a + b for a, b in zip(self.statistics, other.statistics)),
            tokens=self.tokens + other.tokens,
            num_pairs=self.num_pairs + other.num_pairs,
            num_fields=self.num_fields + other.num_fields,
        )

    def reduce(self, process_group: Any = None) -> "RoutingRecord":
        """Add the sums up over ranks; labels, kinds and tokens stay those of this rank's fields."""
        num_pairs, num_fields = all_reduce_sums([self.num_pairs, self.num_fields], process_group)
        statistics = tuple(part.reduce(process_group) for part in self.statistics)
        return replace(self, statistics=statistics, num_pairs=num_pairs, num_fields=num_fields)

    def tables(
        self,
        gate: float = 1.0,
        *,
        normalizer: Normalizer = "pairs",
        min_turns: int = MIN_TURNS,
        reduction: Reduction = "sum",
    ) -> RoutingTables:
        """The control rows of this rank's fields, each from the statistics of its kind."""
        rows = [
            turn_control(
                part.pmi(),
                self.labels,
                select(self.kind == k, self.tokens),
                part.num_turns,
                min_turns=min_turns,
                reduction=reduction,
            )
            for k, part in zip(KINDS, self.statistics)
        ]
        return RoutingTables(
            control=sum(rows[1:], rows[0]).float(),
            num_pairs=self.num_pairs,
            divisor=self.num_pairs if normalizer == "pairs" else self.num_fields,
            gate=gate,
            information={k.name.lower(): part.information() for k, part in zip(KINDS, self.statistics)},
            num_turns={k.name.lower(): int(part.num_turns) for k, part in zip(KINDS, self.statistics)},
        )
