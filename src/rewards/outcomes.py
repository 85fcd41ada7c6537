"""Outcome rewards that need no judge."""

import math
from collections.abc import Sequence

from rewards.calls import ParsedCalls
from rewards.gold import as_gold
from rewards.pairing import pair_calls
from rewards.process import Tools, read_turns, tally
from rewards.schema import as_toolset


def reference_rule(
    turns: Sequence[str | ParsedCalls],
    gold: object,
    tools: Tools | None,
    *,
    row: str | None = None,
    format: str = "hermes",
) -> bool:
    """Whether a rollout made exactly the gold calls.

        R = 1[N_valid = N_open = N_close, names equal, |Y_init| = |G_init|,
              every gold call g has its own call y with K_req(g) ⊆ K(y) and y[k] ≈ g[k] for k in K_req(g)]

    K_req are the gold arguments that may not be left out. What a call gives beyond them is not checked, nor is the
    order of calls across rounds.

    Args:
        turns: assistant texts in order, or their parsed calls.
        gold: gold calls by step, as in `process_score`.
        tools: OpenAI-style tool schemas or a `ToolSet`; None: calls are valid if they parse.
        row: what to call the row in an error.
        format: the format of calls in texts, as in `parse_tool_calls`.

    Returns:
        Whether all of it holds. No model output raises.

    Raises:
        GoldError, ToolSchemaError, TypeError: as in `process_score`.

    Example:
        >>> gold = [[{"name": "add", "arguments": {"a": 1}}]]
        >>> reference_rule(['<tool_call>{"name": "add", "arguments": {"a": "1"}}</tool_call>'], gold, tools=None)
        True

    Reference: SLCA eq. 28; the pairing is any that satisfies the condition (ours).
    """
    toolset = None if tools is None else as_toolset(tools)
    steps = read_turns(turns, format, toolset)
    expected = as_gold(gold, row)
    made = tally(steps, toolset)
    if len(made.calls) != len(expected.flat) or made.first != expected.first:
        return False
    if not made.valid == made.opened == made.closed:
        return False
    pairs = pair_calls(made.calls, expected, toolset, lambda pair: 1.0 * (pair.missed_required == 0))
    return len(pairs) == len(made.calls) and not sum([pair.missed_required for pair in pairs])


def unified_total(tool: float | None, summary: float | None, alpha: float = 1.0) -> float | None:
    """One scalar of the two component rewards, as the unified baseline takes it.

        R = α·R_tool + R_sum

    Args:
        tool: tool reward, None = not scored.
        summary: summary reward, None = not scored.
        alpha: the ratio λ_tool / λ_sum, finite and not negative.

    Returns:
        R, or None where a component is absent: an absent score is not a zero.

    Raises:
        ValueError: `alpha` is negative, infinite or NaN.

    Example:
        >>> unified_total(0.5, -0.5, alpha=3.0)
        1.0

    Reference: SLCA eq. 29, before its normalisation.
    """
    if not (math.isfinite(alpha) and alpha >= 0):
        raise ValueError(f"alpha: expected a finite number >= 0, got {alpha}")
    return None if tool is None or summary is None else alpha * tool + summary
