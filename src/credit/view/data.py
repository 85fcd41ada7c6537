"""What a token-credit view shows: the tokens of one rollout, the credit of each, and why some have none."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any

import torch

from credit.segments import Segment
from credit.view.text import as_text

PROMPT = "prompt"
PADDING = "padding"
ENVIRONMENT = "environment"
MASKED = "outside the mask"
NO_SEGMENT = "no segment"
ABSENT = "absent from group"
TRUNCATED = "truncated"
ABORTED = "aborted"


@dataclass(frozen=True)
class TokenCredit:
    """One rollout, token by token; build it with `token_credit` or `batch_token_credit`.

    Attributes:
        tokens: text of each token (`surrogateescape` for bytes that are not UTF-8).
        segments: segment of each token, -1 for none.
        advantages: for each rule, the advantage of each token.
        reasons: why a token carries no signal; empty for a token that is trained.
        rewards: this rollout's reward per component; NaN is absent.
        peers: the other rewards of its group per component; NaN is absent.
        component_advantages: the advantage per component, before it was assigned to tokens.
        segment_names: name of each segment value.
        title: a line that names the rollout.
        note: free text under the title.
    """

    tokens: tuple[str, ...]
    segments: tuple[int, ...]
    advantages: Mapping[str, tuple[float, ...]]
    reasons: tuple[str, ...]
    rewards: Mapping[str, float] = field(default_factory=dict)
    peers: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    component_advantages: Mapping[str, float] = field(default_factory=dict)
    segment_names: Mapping[int, str] = field(default_factory=lambda: _names(Segment))
    title: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        wanted = len(self.tokens)
        lengths = {"segments": len(self.segments), "reasons": len(self.reasons)}
        lengths |= {f"advantages[{rule!r}]": len(values) for rule, values in self.advantages.items()}
        for name, length in lengths.items():
            _same_length(name, length, wanted)

    @cached_property
    def trained(self) -> tuple[bool, ...]:
        """True where a token carries a learning signal, if only the signal 0."""
        return tuple(not reason for reason in self.reasons)

    @cached_property
    def scale(self) -> float:
        """Largest finite `|advantage|` of a trained token under any rule: the full shade. 0 without one."""
        shown = (
            abs(a)
            for values in self.advantages.values()
            for a, on in zip(values, self.trained)
            if on and math.isfinite(a)
        )
        return max(shown, default=0.0)


Numbers = Sequence[Any] | torch.Tensor


def token_credit(
    tokens: Sequence[Any] | torch.Tensor,
    *,
    segments: Numbers,
    advantages: Numbers | Mapping[str, Any],
    mask: Numbers | None = None,
    completion_mask: Numbers | None = None,
    reasons: Sequence[str] | None = None,
    row_reason: str = "",
    absent: Collection[int] = (),
    prompt: Sequence[Any] | torch.Tensor = (),
    decode: Callable[[int], str | bytes] | None = None,
    rewards: Mapping[str, Any] | None = None,
    peers: Mapping[str, Numbers] | None = None,
    component_advantages: Mapping[str, Any] | None = None,
    segment_type: type[IntEnum] = Segment,
    title: str = "",
    note: str = "",
) -> TokenCredit:
    """The token-credit view of one rollout.

    A token without signal gets the first reason that holds: its own in `reasons`; `"padding"` outside
    `completion_mask`; `"environment"` outside `mask` (without a `completion_mask` the two cannot be told
    apart: `"outside the mask"`); `row_reason`; `"no segment"` for a policy token that belongs to none;
    `"absent from group"` for the segments in `absent`. Under a `row_reason` an all-false `completion_mask`
    counts as not given.

    Args:
        tokens: `[T]` token text or bytes, or ids together with `decode`.
        segments: `[T]` int, -1 for none.
        advantages: `[T]` float, or one such for each rule, by name; the first is the one that shades.
        mask: `[T]` bool, true on policy tokens. Default: where `segments >= 0`.
        completion_mask: `[T]` bool, false on padding.
        reasons: `[T]` a reason for each token, empty for none.
        row_reason: why the whole row stays out of the loss, e.g. `"truncated"` or `"aborted"`.
        absent: segments whose component reward is absent, so that they stay out of their group.
        prompt: `[P]` prompt tokens, shown first and never trained.
        decode: text or bytes of one id.
        rewards: component to reward; None or NaN is absent.
        peers: component to the other rewards of the group.
        component_advantages: component to advantage.
        segment_type: the enum that names the segments.
        title: a line that names the rollout.
        note: free text.

    Returns:
        The view of `P + T` tokens.

    Raises:
        ValueError: when a length is not `T`.

    Reference: ours.

    Example:
        >>> view = token_credit(["4", "2", "<pad>"], segments=[0, 1, -1], completion_mask=[1, 1, 0],
        ...                     advantages={"SLCA": [0.5, -1.0, 0.0]})
        >>> view.reasons
        ('', '', 'padding')
        >>> view.scale
        1.0
    """
    texts = _texts(tokens, decode)
    shown = tuple(int(s) for s in _numbers(segments))
    by_rule = advantages if isinstance(advantages, Mapping) else {"advantage": advantages}
    credit = {rule: _numbers(values) for rule, values in by_rule.items()}
    policy = tuple(s >= 0 for s in shown) if mask is None else _flags(mask)
    real = None if completion_mask is None else _flags(completion_mask)
    given = ("",) * len(texts) if reasons is None else tuple(reasons)
    lengths = {"segments": len(shown), "mask": len(policy), "reasons": len(given)}
    lengths |= {} if real is None else {"completion_mask": len(real)}
    lengths |= {f"advantages[{rule!r}]": len(values) for rule, values in credit.items()}
    for name, length in lengths.items():
        _same_length(name, length, len(texts))
    if row_reason and real is not None and not any(real):
        real = None  # Trainers drop a row by emptying its completion mask; nothing is padding for that.
    why = tuple(
        given[t] or _reason(shown[t], policy[t], None if real is None else real[t], row_reason, absent)
        for t in range(len(texts))
    )
    before = _texts(prompt, decode)
    return TokenCredit(
        tokens=before + texts,
        segments=(int(Segment.NONE),) * len(before) + shown,
        advantages={rule: (0.0,) * len(before) + values for rule, values in credit.items()},
        reasons=(PROMPT,) * len(before) + why,
        rewards={name: _number(value) for name, value in (rewards or {}).items()},
        peers={name: _numbers(values) for name, values in (peers or {}).items()},
        component_advantages={name: _number(value) for name, value in (component_advantages or {}).items()},
        segment_names=_names(segment_type),
        title=title,
        note=note,
    )


def _reason(segment: int, policy: bool, real: bool | None, row_reason: str, absent: Collection[int]) -> str:
    if real is False:
        return PADDING
    if not policy and real:
        return ENVIRONMENT
    if row_reason or not policy:
        return row_reason or MASKED
    if segment < 0:
        return NO_SEGMENT
    return ABSENT if segment in absent else ""


def _texts(tokens: Sequence[Any] | torch.Tensor, decode: Callable[[int], str | bytes] | None) -> tuple[str, ...]:
    values = tokens.tolist() if isinstance(tokens, torch.Tensor) else tokens
    if decode is not None:
        return tuple(as_text(decode(int(t))) for t in values)
    for at, token in enumerate(values):
        if not isinstance(token, str | bytes):
            raise TypeError(f"tokens[{at}] is {type(token).__name__}; give text or bytes, or decode= for ids")
    return tuple(as_text(t) for t in values)


def _numbers(values: Numbers) -> tuple[float, ...]:
    return tuple(_number(v) for v in (values.tolist() if isinstance(values, torch.Tensor) else values))


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _flags(values: Numbers) -> tuple[bool, ...]:
    return tuple(value != 0 for value in _numbers(values))


def _names(segment_type: type[IntEnum]) -> dict[int, str]:
    return {int(member): member.name.lower() for member in segment_type}


def _same_length(name: str, length: int, wanted: int) -> None:
    if length != wanted:
        raise ValueError(f"{name} has {length} tokens, tokens has {wanted}")
