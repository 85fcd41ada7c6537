"""The omission guard: a summary earns nothing where a tool was required and none was called."""

from collections.abc import Sequence
from dataclasses import dataclass

from rewards.calls import ParsedCalls
from rewards.process import read_turns


@dataclass(frozen=True)
class GuardedScore:
    """Summary reward and success after the guard.

    Attributes:
        summary: the summary reward; None = absent.
        success: whether the rollout counts as a success.
        omitted: the guard acted.
    """

    summary: float | None
    success: bool
    omitted: bool


def guard_omission(
    turns: Sequence[str | ParsedCalls],
    summary: float | None,
    success: bool,
    *,
    required: bool,
    penalty: float = -0.5,
    format: str = "hermes",
) -> GuardedScore:
    """Put the penalty in the place of the summary reward where a required call was omitted.

        R_sum = −0.5 and success = 0  if a tool is required and no turn opens a `<tool_call>`

    An opening tag is enough, be the call invalid; one in reasoning is none. The judge is asked all the same, so what
    it said comes in as `summary` and is overridden, absent or not.

    Args:
        turns: assistant texts in order, or their parsed calls.
        summary: the judge's score, None = absent.
        success: whether the rollout would count as a success.
        required: whether the task needs a tool.
        penalty: the reward of an omission.
        format: the format of calls in texts, as in `parse_tool_calls`; what opens a call there is its opening tag.

    Returns:
        Reward, success, and whether the guard acted. No model output raises.

    Raises:
        TypeError: `turns` is one text, or holds something else.

    Example:
        >>> guard_omission(["It is 4."], 1.0, True, required=True)
        GuardedScore(summary=-0.5, success=False, omitted=True)

    Reference: SLCA eq. 21, appendix A.5. `credit.omission_guard` is the same rule on tensors, with the tool reward.
    """
    omitted = required and not sum(step.num_open for step in read_turns(turns, format))
    return GuardedScore(penalty if omitted else summary, success and not omitted, omitted)
