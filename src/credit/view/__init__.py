"""The token-credit view: which token of a rollout got which credit, and why some got none.

The first thing to open when training goes wrong. `token_credit` (one rollout) or `batch_token_credit` (a
batch) collects what is known, `print_credit` shows it in a terminal, `write_html` in a browser.
"""

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from credit._safe import require_shape
from credit.view.data import TokenCredit, token_credit
from credit.view.html import render_html
from credit.view.terminal import print_credit
from credit.view.text import byte_level_bytes

__all__ = [
    "TokenCredit",
    "batch_token_credit",
    "byte_level_bytes",
    "print_credit",
    "render_html",
    "token_credit",
    "write_html",
]


def batch_token_credit(
    tokens: Sequence[Any] | torch.Tensor,
    *,
    segments: torch.Tensor,
    advantages: torch.Tensor | Mapping[str, torch.Tensor],
    rewards: Mapping[str, torch.Tensor] | None = None,
    group: torch.Tensor | None = None,
    component_advantages: Mapping[str, torch.Tensor] | None = None,
    per_row: Mapping[str, Sequence[Any] | torch.Tensor] | None = None,
    rows: Sequence[int] | None = None,
    **common: Any,
) -> list[TokenCredit]:
    """Views of the rows of a batch, each beside the rewards of its group.

    Args:
        tokens: `[B][T]` text, bytes or ids.
        segments: `[B, T]` int.
        advantages: `[B, T]` float, or one such for each rule.
        rewards: component to `[B]` rewards, NaN for absent.
        group: `[B]` int; with it, `peers` are the rewards of the other rows of the group.
        component_advantages: component to `[B]`.
        per_row: any other argument of `token_credit` with one value for each row, e.g.
            `{"mask": mask, "prompt": prompts, "title": titles}`.
        rows: which rows; default all.
        **common: arguments of `token_credit` that are the same for every row, e.g. `decode`.

    Returns:
        One view for each row asked for.

    Raises:
        ValueError: when `tokens`, `rewards` or `group` have another number of rows than `segments`, or advantages
            another shape.

    Reference: ours.

    Example:
        >>> views = batch_token_credit([["a"], ["b"]], segments=torch.tensor([[1], [1]]),
        ...     advantages=torch.tensor([[0.7], [-0.7]]), rewards={"summary": torch.tensor([1.0, 0.0])},
        ...     group=torch.tensor([5, 5]), per_row={"title": ["good", "bad"]})
        >>> views[0].rewards, views[0].peers, views[1].title
        ({'summary': 1.0}, {'summary': (0.0,)}, 'bad')
    """
    rules = advantages if isinstance(advantages, Mapping) else {"advantage": advantages}
    columns: dict[str, Mapping[str, Any]] = {
        "rewards": rewards or {},
        "advantages": rules,
        "component_advantages": component_advantages or {},
    }
    alone: dict[str, Any] = {"tokens": tokens, **(per_row or {})}
    if group is not None:
        alone["group"] = group
    named = alone | {f"{kind}[{name!r}]": v for kind, values in columns.items() for name, v in values.items()}
    for name, value in named.items():
        if len(value) != len(segments):
            raise ValueError(f"{name} has {len(value)} rows, segments {tuple(segments.shape)}")
    for rule, credit in rules.items():
        if isinstance(credit, torch.Tensor):
            require_shape(f"advantages[{rule!r}]", credit, tuple(segments.shape), "segments")
    views = []
    for row in range(len(segments)) if rows is None else rows:
        arguments: dict[str, Any] = {name: value[row] for name, value in (per_row or {}).items()}
        for kind, values in columns.items():
            arguments[kind] = {name: value[row] for name, value in values.items()}
        if group is not None:
            others = group == group[row]
            others[row] = False
            arguments["peers"] = {name: torch.as_tensor(v)[others] for name, v in columns["rewards"].items()}
        views.append(token_credit(tokens[row], segments=segments[row], **arguments, **common))
    return views


def write_html(views: TokenCredit | Sequence[TokenCredit], path: str | PathLike[str]) -> Path:
    """Write `render_html(views)` to a file.

    Args:
        views: one view or several.
        path: the file; its folder must exist.

    Returns:
        The path written.

    Reference: ours.

    Example:
        >>> import tempfile
        >>> view = token_credit(["ok"], segments=[1], advantages=[0.5], title="one token")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_html(view, folder + "/credit.html").name
        'credit.html'
    """
    target = Path(path)
    target.write_text(render_html(views), encoding="utf-8")
    return target
