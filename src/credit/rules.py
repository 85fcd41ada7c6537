"""Credit rules: the published methods as small objects over :func:`group_advantage` and :func:`assign_credit`.

A rule is called ``rule(rewards, group, segments)``. ``rewards`` maps component names to one reward per rollout, NaN
where the component gave none: that row is absent, its advantage is 0 and its group's statistics leave it out.
``components`` names what a rule reads. Weights act after normalising; before it, the z-score would cancel them.

============== ============================ ================================ =======================
rule           components                   normalised over rows that have   weights (tool; summary)
============== ============================ ================================ =======================
GRPO           alpha * tool + summary, once a learnable token                [1]; [1]
SLCA           tool, summary                a tool run; a summary            [tool, 0]; [0, summary]
ToolPO         global, local                a learnable token; a tool run    [1, local]; [1, 0]
RLTR           tool                         a tool run                       [1]; [0]
SupportControl tool, summary                a tool run; a summary            [1, s->t]; [t->s, 1]
============== ============================ ================================ =======================
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from credit._safe import as_mask, require_finite, require_floating, require_shape, select, statistics_dtype
from credit.advantages import Scale, group_advantage
from credit.assignment import assign_credit
from credit.segments import Segment, has_segment, learns


@runtime_checkable
class CreditRule(Protocol):
    """What a trainer needs of a rule."""

    @property
    def components(self) -> tuple[str, ...]:
        """Names of the reward components the rule reads."""

    def __call__(
        self,
        rewards: Mapping[str, Float[Tensor, " batch"]],
        group: Int[Tensor, " batch"],
        segments: Int[Tensor, "batch tokens"],
        *,
        omitted: Shaped[Tensor, " batch"] | None = None,
    ) -> Float[Tensor, "batch tokens"]:
        """Credit per token; ``omitted`` marks the rows on which the omission guard acted."""


_Rewards = Mapping[str, Float[Tensor, " batch"]]
_Group = Int[Tensor, " batch"]
_Segments = Int[Tensor, "batch tokens"]
_Rows = Shaped[Tensor, " batch"]


@dataclass(frozen=True, kw_only=True)
class _Rule:
    """What the rules share: a matrix on normalised components. The fields are those of :func:`group_advantage`."""

    eps: float = 1e-6
    correction: int = 1
    scale: Scale = "std"
    min_size: int = 2

    components: ClassVar[tuple[str, ...]] = ("tool", "summary")

    def __call__(
        self,
        rewards: Mapping[str, Float[Tensor, " batch"]],
        group: Int[Tensor, " batch"],
        segments: Int[Tensor, "batch tokens"],
        *,
        omitted: Shaped[Tensor, " batch"] | None = None,
    ) -> Float[Tensor, "batch tokens"]:
        """Credit per token; see :class:`CreditRule`."""
        advantages = self._advantages(rewards, group, segments, omitted)
        weights = torch.tensor(self._weights(), dtype=advantages.dtype, device=advantages.device)
        return assign_credit(advantages, segments, weights)

    def _normalise(
        self, name: str, rewards: Float[Tensor, " batch"], group: Int[Tensor, " batch"], present: Bool[Tensor, " batch"]
    ) -> Float[Tensor, " batch"]:
        given = present & ~rewards.isnan()
        require_finite(f"rewards[{name!r}]", rewards, given)
        return group_advantage(
            rewards,
            group,
            given,
            eps=self.eps,
            correction=self.correction,
            scale=self.scale,
            min_size=self.min_size,
        )

    def _read(self, rewards: _Rewards, segments: _Segments, needed: Sequence[str]) -> list[Float[Tensor, " batch"]]:
        unknown = [name for name in rewards if name not in self.components]
        missing = [name for name in needed if name not in rewards]
        if unknown or missing:
            raise ValueError(
                f"rewards: {type(self).__name__} reads the components {list(self.components)}; "
                f"unknown: {unknown}, missing: {missing}"
            )
        for name, values in rewards.items():
            require_shape(f"rewards[{name!r}]", values, (segments.shape[0],), "segments")
            require_floating(f"rewards[{name!r}]", values)
        return [rewards[name] for name in needed]

    def _advantages(
        self, rewards: _Rewards, group: _Group, segments: _Segments, omitted: _Rows | None
    ) -> Float[Tensor, "batch components"]:
        """Tool and summary advantages, each normalised over the rows that have its segment (SLCA eq. 18)."""
        tool, summary = self._read(rewards, segments, ("tool", "summary"))
        return torch.stack(
            [
                self._normalise("tool", tool, group, has_segment(segments, Segment.TOOL)),
                self._normalise("summary", summary, group, has_segment(segments, Segment.SUMMARY)),
            ],
            dim=-1,
        )

    def _weights(self) -> list[list[float]]:
        """Row ``s``: how much of each component segment ``s`` receives."""
        raise NotImplementedError


@dataclass(frozen=True)
class GRPO(_Rule):
    """One advantage for the whole trajectory, from the unified reward ``alpha * tool + summary``.

    Either component may be left out of ``rewards``; the other is then the whole reward. A row with a missing value in a
    component that is there has no total and is absent (counting it as 0 would punish it for a judge that was down).

    Example:
        >>> rewards = {"tool": torch.tensor([0.0, 1.0]), "summary": torch.tensor([3.0, 0.0])}
        >>> GRPO()(rewards, torch.tensor([0, 0]), torch.tensor([[0, -1, 1], [0, -1, 1]]))
        tensor([[ 0.7071,  0.0000,  0.7071],
                [-0.7071,  0.0000, -0.7071]])

    Reference:
        The unified baseline of SLCA; ``alpha`` is its unified reward ratio (appendix D.8).
    """

    alpha: float = 1.0

    def _advantages(
        self, rewards: _Rewards, group: _Group, segments: _Segments, omitted: _Rows | None
    ) -> Float[Tensor, "batch components"]:
        names = [name for name in self.components if name in rewards] or self.components
        parts = torch.stack(self._read(rewards, segments, names))
        learnable = learns(segments)
        for name, part in zip(names, parts):  # before the sum, in which inf - inf would pass for a missing value
            require_finite(f"rewards[{name!r}]", part, learnable & ~part.isnan())
        # Summed wide: half precision would lose the small component beside the large one.
        ratio = [[self.alpha if name == "tool" else 1.0] for name in names]
        wide = parts.to(statistics_dtype(parts))
        total = (wide.new_tensor(ratio) * wide).sum(0)
        return self._normalise("total", total, group, learnable).to(parts.dtype)[:, None]

    def _weights(self) -> list[list[float]]:
        return [[1.0], [1.0]]


@dataclass(frozen=True)
class SLCA(_Rule):
    """Segment-locked credit: tool tokens learn from the tool reward only, summary tokens from the summary reward only.

    ``summary_branch=False`` sets the summary advantage to 0 except on the rows the omission guard marked (SLCA appendix
    D.2); ``summary=0.0`` is its full-zero variant.

    Example:
        >>> rewards = {"tool": torch.tensor([0.0, 1.0]), "summary": torch.tensor([3.0, 0.0])}
        >>> SLCA()(rewards, torch.tensor([0, 0]), torch.tensor([[0, -1, 1], [0, -1, 1]]))
        tensor([[-0.7071,  0.0000,  0.7071],
                [ 0.7071,  0.0000, -0.7071]])

    Reference:
        SLCA eqs. 2, 3 and 18.
    """

    tool: float = 1.0
    summary: float = 1.0
    summary_branch: bool = True

    def _advantages(
        self, rewards: _Rewards, group: _Group, segments: _Segments, omitted: _Rows | None
    ) -> Float[Tensor, "batch components"]:
        advantages = super()._advantages(rewards, group, segments, omitted)
        if not self.summary_branch:
            marked = torch.zeros_like(group, dtype=torch.bool) if omitted is None else as_mask(omitted)
            require_shape("omitted", marked, tuple(group.shape), "group")
            advantages = torch.stack([advantages[:, 0], select(marked, advantages[:, 1])], dim=-1)
        return advantages

    def _weights(self) -> list[list[float]]:
        return [[self.tool, 0.0], [0.0, self.summary]]


@dataclass(frozen=True)
class ToolPO(_Rule):
    """Global outcome advantage everywhere, plus ``local`` times the action advantage on tool tokens.

    Example:
        >>> rewards = {"global": torch.tensor([0.0, 1.0]), "local": torch.tensor([1.0, 0.0])}
        >>> ToolPO(local=0.5)(rewards, torch.tensor([0, 0]), torch.tensor([[0, -1, 1], [0, -1, 1]]))
        tensor([[-0.3536,  0.0000, -0.7071],
                [ 0.3536,  0.0000,  0.7071]])

    Reference:
        The additive baseline of SLCA, section 4.1 and appendix C.4.
    """

    local: float = 1.0

    components: ClassVar[tuple[str, ...]] = ("global", "local")

    def _advantages(
        self, rewards: _Rewards, group: _Group, segments: _Segments, omitted: _Rows | None
    ) -> Float[Tensor, "batch components"]:
        outcome, action = self._read(rewards, segments, ("global", "local"))
        return torch.stack(
            [
                self._normalise("global", outcome, group, learns(segments)),
                self._normalise("local", action, group, has_segment(segments, Segment.TOOL)),
            ],
            dim=-1,
        )

    def _weights(self) -> list[list[float]]:
        return [[1.0, self.local], [1.0, 0.0]]


@dataclass(frozen=True)
class RLTR(_Rule):
    """Only the planner learns: the tool reward on tool tokens, nothing on the summary.

    A summary reward may stand in ``rewards``, so that the rule can take SLCA's place; it is not read.

    Example:
        >>> rewards = {"tool": torch.tensor([0.0, 1.0])}
        >>> RLTR()(rewards, torch.tensor([0, 0]), torch.tensor([[0, -1, 1], [0, -1, 1]]))
        tensor([[-0.7071,  0.0000,  0.0000],
                [ 0.7071,  0.0000,  0.0000]])

    Reference:
        The planner-summarizer baseline of SLCA, appendix C.4.
    """

    components: ClassVar[tuple[str, ...]] = ("tool",)

    def _advantages(
        self, rewards: _Rewards, group: _Group, segments: _Segments, omitted: _Rows | None
    ) -> Float[Tensor, "batch components"]:
        planner = {name: reward for name, reward in rewards.items() if name != "summary"}
        (tool,) = self._read(planner, segments, ("tool",))
        return self._normalise("tool", tool, group, has_segment(segments, Segment.TOOL))[:, None]

    def _weights(self) -> list[list[float]]:
        return [[1.0], [0.0]]


@dataclass(frozen=True)
class SupportControl(_Rule):
    """The 2x2 control: separately normalised components, with either cross path opened or closed.

    Both closed is SLCA with unit weights; sums are left unrescaled, as in the paper.

    Example:
        >>> rewards = {"tool": torch.tensor([0.0, 1.0]), "summary": torch.tensor([1.0, 3.0])}
        >>> rule = SupportControl(summary_to_tool=True)
        >>> rule(rewards, torch.tensor([0, 0]), torch.tensor([[0, -1, 1], [0, -1, 1]]))
        tensor([[-1.4142,  0.0000, -0.7071],
                [ 1.4142,  0.0000,  0.7071]])

    Reference:
        SLCA appendix D.9.
    """

    summary_to_tool: bool = False
    tool_to_summary: bool = False

    def _weights(self) -> list[list[float]]:
        return [[1.0, float(self.summary_to_tool)], [float(self.tool_to_summary), 1.0]]
