"""The omission guard: answering without the tool that the task required is not rewarded."""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from credit._safe import as_mask, require_floating, require_shape


def omission_guard(
    tool: Float[Tensor, " batch"],
    summary: Float[Tensor, " batch"],
    required: Shaped[Tensor, " batch"],
    called: Shaped[Tensor, " batch"],
    penalty: float = -0.5,
) -> tuple[Float[Tensor, " batch"], Float[Tensor, " batch"]]:
    """Override the rewards of rows that had to use a tool and emitted no call.

    On such a row the tool reward becomes 0 and the summary reward ``penalty``, in place of any score, an absent one
    included. The row has no tool run, so the signal reaches summary tokens only. Call it before normalising.

    Args:
        tool: tool rewards; returned unchanged elsewhere.
        summary: summary rewards; returned unchanged elsewhere.
        required: rows whose task needs a tool.
        called: rows that emitted at least one ``<tool_call>`` opening tag.
        penalty: summary reward of a marked row.

    Returns:
        The pair ``(tool, summary)``.

    Raises:
        ValueError: shapes differ, or a reward is an integer, which would cut the penalty off.

    Example:
        >>> score = torch.tensor([0.9, 0.9])
        >>> omission_guard(score, score, torch.tensor([True, True]), torch.tensor([True, False]))
        (tensor([0.9000, 0.0000]), tensor([ 0.9000, -0.5000]))

    Reference:
        SLCA eq. 21.
    """
    for name, value in (("summary", summary), ("required", required), ("called", called)):
        require_shape(name, value, tuple(tool.shape), "tool")
    for name, value in (("tool", tool), ("summary", summary)):
        require_floating(name, value)
    marked = as_mask(required) & ~as_mask(called)
    return torch.where(marked, 0.0, tool).to(tool.dtype), torch.where(marked, penalty, summary).to(summary.dtype)
