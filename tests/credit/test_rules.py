"""The published methods as rules."""

import pytest
import torch

from credit import GRPO, RLTR, SLCA, SupportControl, ToolPO, omission_guard
from tests.credit.checks_credit import (
    check_rule,
    check_slca_isolation,
    check_summary_branch,
)


@pytest.mark.parametrize(
    ("check", "function"),
    [
        (check_slca_isolation, SLCA),
        (check_summary_branch, SLCA),
    ],
    ids=lambda part: getattr(part, "__name__", None),
)
def test_checks(check, function):
    check(function)


METHODS = [
    (SLCA, "slca", {}),
    (SLCA, "slca", {"tool": 0.3, "summary": 2.0}),
    (GRPO, "grpo", {}),
    (GRPO, "grpo", {"alpha": 0.25}),
    (ToolPO, "toolpo", {}),
    (ToolPO, "toolpo", {"local": 0.4}),
    (RLTR, "rltr", {}),
    *[
        (SupportControl, "support", {"summary_to_tool": a, "tool_to_summary": b})
        for a in (False, True)
        for b in (False, True)
    ],
]


@pytest.mark.parametrize(("make", "method", "options"), METHODS)
def test_a_rule_is_its_row_of_the_table(make, method, options):
    check_rule(make, method, **options)


def test_component_names():
    assert SLCA.components == GRPO.components == SupportControl.components == ("tool", "summary")
    assert ToolPO.components == ("global", "local")
    assert RLTR.components == ("tool",)


def test_rltr_takes_the_place_of_slca_without_reading_the_summary() -> None:
    tool, ignored = torch.tensor([0.0, 1.0]), torch.tensor([float("inf"), 1.0])
    group, segments = torch.tensor([0, 0]), torch.tensor([[0, -1, 1], [0, -1, 1]])
    with_summary = RLTR()({"tool": tool, "summary": ignored}, group, segments)
    assert torch.equal(with_summary, RLTR()({"tool": tool}, group, segments))
    with pytest.raises(ValueError, match="unknown: \\['global'\\]"):
        RLTR()({"tool": tool, "global": tool}, group, segments)


BOTH = torch.tensor([[0, -1, 1]] * 4)
GROUP = torch.zeros(4, dtype=torch.int64)
RISING = torch.tensor([1.0, 2.0, 3.0, 4.0])


@pytest.mark.parametrize("make", [SLCA, GRPO, ToolPO, RLTR, SupportControl])
def test_normalisation_options_reach_the_group_statistics(make):
    rewards = dict.fromkeys(make.components, RISING)
    plain = make()(rewards, GROUP, BOTH)
    assert (make(scale="none")(rewards, GROUP, BOTH) != plain).any()
    assert (make(eps=1.0)(rewards, GROUP, BOTH) != plain).any()
    assert (make(correction=0)(rewards, GROUP, BOTH) != plain).any()
    assert (make(min_size=5)(rewards, GROUP, BOTH) == 0).all()


@pytest.mark.parametrize("make", [SLCA, GRPO, ToolPO, RLTR, SupportControl])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_empty_batches_and_rows_without_a_token(make, dtype):
    rewards = {name: RISING.to(dtype) for name in make.components}
    got = make()(rewards, GROUP, BOTH)
    assert got.dtype == dtype
    assert got.isfinite().all()
    empty = BOTH.clone()
    empty[3] = -1
    shorter = make()({k: v[:3] for k, v in rewards.items()}, GROUP[:3], BOTH[:3])
    assert torch.equal(make()(rewards, GROUP, empty)[:3], shorter)
    assert make()(rewards, GROUP, BOTH[:, :0]).shape == (4, 0)
    nothing = {name: torch.zeros(0, dtype=dtype) for name in make.components}
    assert make()(nothing, GROUP[:0], BOTH[:0]).shape == (0, 3)


@pytest.mark.parametrize("make", [SLCA, GRPO, ToolPO, RLTR, SupportControl])
def test_absent_everywhere_is_zero_and_infinite_is_an_error_that_names_the_component(make):
    absent = dict.fromkeys(make.components, torch.full((4,), float("nan")))
    assert (make()(absent, GROUP, BOTH) == 0).all()
    name = make.components[-1]
    rewards = dict.fromkeys(make.components, RISING) | {name: torch.tensor([0.0, float("inf"), 1.0, 2.0])}
    with pytest.raises(ValueError, match=rf"rewards\['{name}'\]\[1\] is inf"):
        make()(rewards, GROUP, BOTH)
    rows_without = BOTH.clone()
    rows_without[1] = -1
    assert make()(rewards, GROUP, rows_without).isfinite().all()


def test_infinities_that_cancel_are_not_a_missing_value():
    rewards = {"tool": torch.tensor([float("inf"), 0.0]), "summary": torch.tensor([-float("inf"), 0.0])}
    with pytest.raises(ValueError, match="inf"):
        GRPO()(rewards, GROUP[:2], BOTH[:2])


def test_the_unified_total_is_summed_wide():
    rewards = {"tool": torch.tensor([256.0, 256.0, 256.0, 256.0]), "summary": torch.tensor([0.1, 0.2, 0.3, 0.4])}
    half = {name: values.bfloat16() for name, values in rewards.items()}
    assert (GRPO()(half, GROUP, BOTH)[:, 0].diff() > 0).all()


def test_grpo_takes_either_component_alone():
    alone = GRPO(alpha=3.0)({"tool": RISING}, GROUP, BOTH)
    torch.testing.assert_close(alone, GRPO()({"summary": RISING}, GROUP, BOTH))


@pytest.mark.parametrize("make", [SLCA, GRPO, ToolPO, RLTR, SupportControl])
def test_unknown_and_missing_components_are_named(make):
    rewards = dict.fromkeys(make.components, RISING)
    with pytest.raises(ValueError, match="'tol'"):
        make()({**rewards, "tol": RISING}, GROUP, BOTH)
    with pytest.raises(ValueError, match="missing.*" + make.components[0]):
        make()({}, GROUP, BOTH)


def test_the_guard_reaches_summary_tokens_only():
    """Row 1 had to call a tool and answered at once: it has no tool run, and its penalty lands on its summary."""
    segments = torch.tensor([[0, -1, 1], [1, 1, 1], [0, -1, 1], [0, -1, 1]])
    tool, summary = torch.tensor([0.2, 0.9, 0.5, 0.8]), torch.tensor([0.3, 0.9, 0.4, 0.5])
    required, called = torch.ones(4), torch.tensor([1, 0, 1, 1])
    tool, summary = omission_guard(tool, summary, required, called)
    credit = SLCA()({"tool": tool, "summary": summary}, GROUP, segments)
    assert (credit[1] < 0).all()
    unguarded = SLCA()({"tool": torch.tensor([0.2, 7.0, 0.5, 0.8]), "summary": summary}, GROUP, segments)
    assert torch.equal(credit, unguarded)  # the row takes no part in tool statistics
