"""Every mis-shaped call names the argument, its shape, and the shape that was wanted.

The shape annotations are switched off here: users call without the import hook, and see these messages.
"""

import jaxtyping
import pytest
import torch

from credit import (
    GRPO,
    RLTR,
    SLCA,
    SupportControl,
    ToolPO,
    aggregate_loss,
    assign_credit,
    clip_statistics,
    format_weighted_ce,
    group_advantage,
    kl_k3,
    omission_guard,
    policy_loss,
    run_ids,
    segment_statistics,
    spans_to_segments,
    step_advantage,
    tool_summary_segments,
    turn_returns,
)


@pytest.fixture(autouse=True)
def _without_annotations():
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


F23, F24, F32 = torch.zeros(2, 3), torch.zeros(2, 4), torch.zeros(3, 2)
V2, V3 = torch.zeros(2), torch.zeros(3)
I2, I3, I23, I24 = (torch.zeros(shape, dtype=torch.int64) for shape in ((2,), (3,), (2, 3), (2, 4)))
EYE = torch.eye(2)
A22, A33 = torch.zeros(2, 2), torch.zeros(3, 3)

TABLE = [
    (lambda: run_ids(V2), ["mask", "(2,)"]),
    (lambda: run_ids(torch.zeros(2, 3, 1)), ["mask", "(2, 3, 1)"]),
    (lambda: tool_summary_segments(V2), ["mask", "(2,)"]),
    (
        lambda: tool_summary_segments(F23, final="unless_followed", completion_mask=F24),
        ["completion_mask", "(2, 4)", "mask", "(2, 3)"],
    ),
    (lambda: tool_summary_segments(F23, final="first"), ["final", "'first'"]),
    (lambda: spans_to_segments([(0, 0, 9, 1)], 5), ["spans", "(0, 0, 9, 1)", "(1, 5)"]),
    (lambda: spans_to_segments([(0, 0, 4)], 5), ["spans", "(0, 0, 4)"]),
    (lambda: spans_to_segments([(0, 0, 1)] * 4, 5), ["spans", "(0, 0, 1)"]),
    (lambda: spans_to_segments([], -1), ["tokens", "-1"]),
    (lambda: spans_to_segments([], 1, rows=-2), ["rows", "-2"]),
    (lambda: group_advantage(F23, I2), ["rewards", "(2, 3)"]),
    (lambda: group_advantage(V3, I2), ["group", "(2,)", "rewards", "(3,)"]),
    (lambda: group_advantage(V2, I2, V3), ["present", "(3,)", "rewards", "(2,)"]),
    # Integers would pass, and the advantages of rewards 0 and 1 would be cut off to 0.
    (lambda: group_advantage(I2, I2), ["rewards", "(2,)", "int64", "floating"]),
    (lambda: group_advantage(I2.bool(), I2), ["rewards", "(2,)", "bool", "floating"]),
    (lambda: group_advantage(V2, V2), ["group", "(2,)", "float32", "integers"]),
    *[
        (
            lambda make=make: make()({name: (I2, V2)[i > 0] for i, name in enumerate(make.components)}, I2, I23),
            [f"rewards['{make.components[0]}']", "(2,)", "int64"],
        )
        for make in (SLCA, GRPO, ToolPO, RLTR, SupportControl)
    ],
    (lambda: omission_guard(I2, V2, V2, V2), ["tool", "int64"]),
    (lambda: omission_guard(V2, I2, V2, V2), ["summary", "int64"]),
    (lambda: assign_credit(A22.long(), I23, EYE), ["advantages", "(2, 2)", "int64"]),
    (lambda: turn_returns(I23, F23), ["rewards", "(2, 3)", "int64"]),
    (lambda: step_advantage(I23, I2, F23), ["returns", "(2, 3)", "int64"]),
    (lambda: aggregate_loss(I23, F23), ["loss", "(2, 3)", "int64"]),
    (lambda: group_advantage(V2, I2, scale="sdt"), ["scale", "'sdt'"]),
    (lambda: group_advantage(V2, I2, eps=-1e-6), ["eps", "-1e-06"]),
    (lambda: turn_returns(V3, V3), ["rewards", "(3,)"]),
    (lambda: turn_returns(F23, F23, discount=1.5), ["discount", "1.5"]),
    (lambda: turn_returns(F23, F24), ["present", "(2, 4)", "rewards", "(2, 3)"]),
    (lambda: step_advantage(V3, I3, V3), ["returns", "(3,)"]),
    (lambda: step_advantage(F23, I2, F24), ["present", "(2, 4)", "returns", "(2, 3)"]),
    (lambda: step_advantage(F23, I3, F23), ["group", "(3,)", "returns", "(2,)"]),
    (lambda: step_advantage(F23, I2, F23, anchor=I24), ["anchor", "(2, 4)", "returns", "(2, 3)"]),
    (lambda: assign_credit(A33, I23, EYE), ["advantages", "(3, 3)", "segments", "(2, 3)"]),
    (lambda: assign_credit(V2, I23, EYE), ["advantages", "(2,)", "segments", "(2, 3)"]),
    (lambda: assign_credit(A22, I2, EYE), ["advantages", "(2, 2)", "segments", "(2,)"]),
    (lambda: assign_credit(F23, I23, EYE), ["weights", "(2, 2)", "advantages", "(2, 3)"]),
    (lambda: assign_credit(A22, I23, V2), ["weights", "(2,)", "advantages", "(2, 2)"]),
    (lambda: assign_credit(A22, I23 + 2, EYE), ["segments", "(2, 3)", "2", "weights", "(2, 2)"]),
    (
        lambda: assign_credit(torch.zeros(2, 1, 2), I23, EYE, runs=I24),
        ["runs", "(2, 4)", "segments", "(2, 3)"],
    ),
    (
        lambda: assign_credit(torch.zeros(2, 1, 2), I23, EYE, runs=I23 + 1),
        ["runs", "(2, 3)", "1", "advantages", "(2, 1, 2)"],
    ),
    (lambda: omission_guard(V2, V3, V2, V2), ["summary", "(3,)", "tool", "(2,)"]),
    (lambda: omission_guard(V2, V2, V3, V2), ["required", "(3,)", "tool", "(2,)"]),
    (lambda: omission_guard(V2, V2, V2, V3), ["called", "(3,)", "tool", "(2,)"]),
    *[
        (
            lambda make=make: make()(dict.fromkeys(make.components, V3), I2, I23),
            [f"rewards['{make.components[0]}']", "(3,)", "segments", "(2,)"],
        )
        for make in (SLCA, GRPO, ToolPO, RLTR, SupportControl)
    ],
    *[
        (lambda make=make: make()(dict.fromkeys(make.components, V2), I3, I23), ["group", "(3,)", "rewards", "(2,)"])
        for make in (SLCA, GRPO, ToolPO, RLTR, SupportControl)
    ],
    (
        lambda: SLCA(summary_branch=False)({"tool": V2, "summary": V2}, I2, I23, omitted=V3),
        ["omitted", "(3,)", "group", "(2,)"],
    ),
    (lambda: policy_loss(V2, V2, V2, V2), ["logp", "(2,)"]),
    (lambda: policy_loss(F23, F24, V2, F23), ["old_logp", "(2, 4)", "logp", "(2, 3)"]),
    (lambda: policy_loss(F23, F23, F24, F23), ["advantages", "(2, 4)", "logp", "(2, 3)"]),
    (lambda: policy_loss(F23, F23, V3, F23), ["advantages", "(3,)", "logp", "(2,)"]),
    (lambda: policy_loss(F23, F23, V2[:1], F23), ["advantages", "(1,)", "logp", "(2,)"]),
    (lambda: policy_loss(F23, F23, torch.zeros(()), F23), ["advantages", "()", "logp", "(2, 3)"]),
    (lambda: policy_loss(F23, F23, F23[:, :1], F23), ["advantages", "(2, 1)", "logp", "(2, 3)"]),
    (lambda: policy_loss(F23, F23, V2, F24), ["mask", "(2, 4)", "logp", "(2, 3)"]),
    (lambda: policy_loss(F23, F23, V2, F23, ratio_weight=F24), ["ratio_weight", "(2, 4)", "logp", "(2, 3)"]),
    (lambda: policy_loss(F23, F23, V2, F23, mode="mean"), ["mode", "'mean'"]),
    (lambda: policy_loss(F23, F23, V2, F23, dual_clip=1.0), ["dual_clip", "1.0"]),
    (lambda: policy_loss(F23, F23, V2, F23, dual_clip=float("nan")), ["dual_clip", "nan"]),
    (lambda: policy_loss(F23, F23, V2, F23, clip_low=-0.1), ["clip_low", "-0.1"]),
    (lambda: policy_loss(F23, F23, V2, F23, clip_high=float("nan")), ["clip_high", "nan"]),
    (lambda: policy_loss(F23, F23, V2, F23, denominator=-4), ["denominator", "-4"]),
    (lambda: aggregate_loss(F23, F23, denominator=float("nan")), ["denominator", "nan"]),
    (lambda: aggregate_loss(F23, F23, horizon=0), ["horizon", "0"]),
    (lambda: aggregate_loss(V2, V2), ["loss", "(2,)"]),
    (lambda: aggregate_loss(F23, F24), ["mask", "(2, 4)", "loss", "(2, 3)"]),
    (lambda: aggregate_loss(F23, F23, "sum"), ["mode", "'sum'"]),
    (lambda: kl_k3(F23, F24), ["ref_logp", "(2, 4)", "logp", "(2, 3)"]),
    (lambda: format_weighted_ce(F23, F24, F23), ["mask", "(2, 4)", "logp", "(2, 3)"]),
    (lambda: format_weighted_ce(F23, F23, F24), ["format_mask", "(2, 4)", "logp", "(2, 3)"]),
    (lambda: segment_statistics(F23, I24), ["segments", "(2, 4)", "advantages", "(2, 3)"]),
    (lambda: clip_statistics(F23, F24, F23, I23), ["old_logp", "(2, 4)", "logp", "(2, 3)"]),
    (lambda: clip_statistics(F23, F23, F24, I23), ["advantages", "(2, 4)", "logp", "(2, 3)"]),
    (lambda: clip_statistics(F23, F23, F23, I24), ["segments", "(2, 4)", "logp", "(2, 3)"]),
]


@pytest.mark.parametrize(("call", "parts"), TABLE, ids=[f"{parts[0]}-{i}" for i, (_, parts) in enumerate(TABLE)])
def test_message(call, parts):
    with pytest.raises(ValueError) as caught:
        call()
    missing = [part for part in parts if part not in str(caught.value)]
    assert not missing, f"{caught.value} does not say {missing}"
