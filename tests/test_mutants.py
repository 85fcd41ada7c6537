"""The suite can fail: each primitive is broken in several named ways, and the suite's own check must notice.

A mutant is a module of the package with a line or two of its source replaced, or a wrapper around the real function.
"""

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from credit import (
    _safe,
    advantages,
    aggregation,
    assignment,
    divergence,
    guard,
    losses,
    rules,
    segments,
    stats,
    supervised,
    temporal,
)
from tests.credit import checks_credit as cc
from tests.credit import checks_losses as cl
from tests.credit import checks_safe as cs


def mutate(module: types.ModuleType, name: str, *edits: tuple[str, str]) -> Callable[..., Any]:
    """Function ``name`` of a copy of ``module`` in which each edit's first string, found once, became its second."""
    source = Path(str(module.__file__)).read_text()
    for old, new in edits:
        assert source.count(old) == 1, f"{module.__name__} holds {source.count(old)} times: {old}"
        source = source.replace(old, new)
    copy = types.ModuleType(f"{module.__name__}_mutant")
    exec(compile(source, f"<mutant of {module.__name__}>", "exec"), copy.__dict__)
    return copy.__dict__[name]


# Wrappers: faults of a whole approach


def fixed_stride(rewards, group, present=None, **options):
    """Groups of three consecutive rows, whatever the ids say."""
    return advantages.group_advantage(rewards, torch.arange(len(rewards)) // 3, present, **options)


def one_group(rewards, group, present=None, **options):
    return advantages.group_advantage(rewards, torch.zeros_like(group), present, **options)


def raw_when_alone(rewards, group, present=None, **options):
    out = advantages.group_advantage(rewards, group, present, **options)
    return torch.where((group[:, None] == group[None]).sum(1) == 1, rewards, out)


def truncated_ids(rewards, group, present=None, **options):
    return advantages.group_advantage(rewards, group.to(torch.int16), present, **options)


def mean_of_means(loss, mask, mode="token_mean", denominator=None, **options):
    mode = "seq_mean_token_mean" if mode == "token_mean" else mode
    return aggregation.aggregate_loss(loss, mask, mode, denominator, **options)


def constant_aggregation(logp, old_logp, advantages, mask, **options):
    return losses.policy_loss(logp, old_logp, advantages, mask, **{**options, "mode": "token_mean"})


MUTANTS: dict[str, tuple[Callable[[], Callable[..., Any]], Callable[[Any], None]]] = {}


def add(check: Callable[[Any], None], module: types.ModuleType, name: str, **faults: Any) -> None:
    """Register mutants: a fault is ``(old, new)``, a tuple of such pairs, or a wrapper."""
    for fault, change in faults.items():
        if callable(change):
            make = lambda change=change: change  # noqa: E731
        else:
            edits = (change,) if isinstance(change[0], str) else change
            make = lambda edits=edits: mutate(module, name, *edits)  # noqa: E731
        MUTANTS[f"{name}-{fault}"] = (make, check)


add(cs.check_select, _safe, "select", multiplies=("torch.where(mask, values, values.new_zeros(()))", "mask * values"))
add(
    cs.check_divide,
    _safe,
    "safe_divide",
    single_where=(
        "quotient = numerator / torch.where(usable, denominator, torch.ones_like(denominator))",
        "quotient = numerator / denominator",
    ),
    ignores_fill=("torch.full_like(quotient, fill)", "torch.zeros_like(quotient)"),
)
add(
    cs.check_log,
    _safe,
    "safe_log",
    single_where=("torch.log(torch.where(usable, x, torch.ones_like(x)))", "torch.log(x)"),
    ignores_fill=("torch.full_like(x, fill)", "torch.zeros_like(x)"),
)
add(
    cs.check_sqrt,
    _safe,
    "safe_sqrt",
    single_where=("torch.sqrt(torch.where(usable, x, torch.ones_like(x)))", "torch.sqrt(x)"),
)
add(
    cs.check_masked_mean,
    _safe,
    "masked_mean",
    counts_masked=("mask.sum(dim).to(wide)", "torch.ones_like(mask).sum(dim).to(wide)"),
    half_precision=("wide = compute_dtype(x)", "wide = x.dtype"),
)

add(
    cc.check_run_ids,
    segments,
    "run_ids",
    off_by_one=("learnable.to(torch.int32) - 1", "learnable.to(torch.int32)"),
    counts_tokens=("(learnable & ~before)", "(learnable & before)"),
    counts_along_the_batch=(".cumsum(dim=1,", ".cumsum(dim=0,"),
    narrow=("dtype=torch.int32)", "dtype=torch.int8)"),
    numbers_masked=("begun * learnable.to(torch.int32) - 1", "begun - 1"),
)
add(
    cc.check_tool_summary,
    segments,
    "tool_summary_segments",
    first_run_is_summary=("runs == _row_max(runs)", "runs == 0"),
    lone_run_is_tool=("runs == _row_max(runs)", "(runs == _row_max(runs)) & (runs > 0)"),
    padding_is_environment=("real & ~learnable", "~learnable"),
    followed_inverted=("summary & ~followed", "summary & followed"),
    any_environment_follows=(
        "_row_max(last_environment) > _row_max(last_learnable)",
        "_row_max(last_environment) >= 0",
    ),
    masked_tokens_marked=("learnable.to(torch.int8) + summary", "torch.ones_like(summary).to(torch.int8) + summary"),
)
add(
    cc.check_segments_ignore_padding,
    segments,
    "tool_summary_segments",
    last_column_is_summary=(
        "summary = learnable & (runs == _row_max(runs))",
        "summary = learnable & (runs == runs[:, -1:])",
    ),
)
add(
    cc.check_spans,
    segments,
    "spans_to_segments",
    closed_end=("edges.index_put_((row, stop),", "edges.index_put_((row, (stop + 1).clamp(max=tokens)),"),
    touching_refused=("later[:, 1] < earlier[:, 2]", "later[:, 1] <= earlier[:, 2]"),
    overlap_by_one_missed=("later[:, 1] < earlier[:, 2]", "later[:, 1] < earlier[:, 2] - 1"),
    overlap_unchecked=("_require_disjoint(table[stop > start])", "None"),
    range_off_by_one=("(stop > tokens)", "(stop > tokens + 1)"),
    starts_overwrite=(
        "segment + 1, accumulate=True)\n    edges.index_put_((row, stop)",
        "segment + 1)\n    edges.index_put_((row, stop)",
    ),
)

add(
    cc.check_advantage,
    advantages,
    "group_advantage",
    wrong_sign=("values - _of_rows(mean, index)", "_of_rows(mean, index) - values"),
    counts_absent=("_group_sum(taking_part.to(values.dtype),", "_group_sum(torch.ones_like(values),"),
    absent_in_spread=("select(taking_part, values - _of_rows(mean, index))", "(values - _of_rows(mean, index))"),
    population_std=("(count - correction)", "(count)"),
    epsilon_inside_sqrt=(
        "_group_sum(unit * unit, index, groups), freedom))",
        "_group_sum(unit * unit, index, groups), freedom) + eps)",
    ),
    no_epsilon=("spread + eps", "spread"),
    uncentred=("values - _of_rows(mean, index)", "values"),
    min_size_ignored=("count >= min_size", "count >= 1"),
    min_size_off_by_one=("count >= min_size", "count > min_size"),
    scale_ignored=('if scale == "none" else', 'if scale == "nothing" else'),
    fixed_stride=fixed_stride,
    one_group=one_group,
)
add(
    cc.check_equal_rewards,
    advantages,
    "group_advantage",
    residue=(" & (high != low)", ""),
)
add(
    cc.check_absent_rows,
    advantages,
    "group_advantage",
    nan_enters=("values = select(taking_part, rewards)", "values = rewards"),
    absent_judged=(
        ("judged = taking_part & _of_rows((count", "judged = _of_rows((count"),
        ("select(taking_part, values - _of_rows(mean, index))", "(values - _of_rows(mean, index))"),
    ),
)
add(
    cc.check_lone_rows,
    advantages,
    "group_advantage",
    raw_reward=raw_when_alone,
    no_freedom_over_eps=("torch.where(freedom > 0, spread + eps, 0.0)", "(spread + eps)"),
)
add(
    cc.check_group_ids,
    advantages,
    "group_advantage",
    fixed_stride=fixed_stride,
    truncated=truncated_ids,
    unsorted_ranks=("scatter(0, order, rank)", "copy_(rank)"),
)
add(
    cc.check_advantage_gradient,
    advantages,
    "group_advantage",
    detached_mean=(
        "safe_divide(_group_sum(values, index, groups), count)",
        "safe_divide(_group_sum(values, index, groups), count).detach()",
    ),
    detached_std=(
        "torch.where(freedom > 0, spread + eps, 0.0)",
        "torch.where(freedom > 0, spread + eps, 0.0).detach()",
    ),
)
add(
    cc.check_advantage_precision,
    advantages,
    "group_advantage",
    half_statistics=(".to(statistics_dtype(rewards))", ""),
    squares_overflow=(
        ("unit = centred / _of_rows(_nonzero(reach), index)", "unit = centred"),
        ("spread = reach * ", "spread = "),
    ),
    dtype_changes=("select(judged, scaled).to(rewards.dtype)", "select(judged, scaled)"),
)
add(
    cc.check_present_must_be_finite,
    advantages,
    "group_advantage",
    unchecked=('require_finite("rewards", rewards, taking_part)', "None"),
)

add(
    cc.check_assign,
    assignment,
    "assign_credit",
    masked_get_segment_zero=("_pick(columns, segments.long() + 1,", "_pick(columns, segments.long().clamp(min=0) + 1,"),
    off_by_one=("_pick(columns, segments.long() + 1,", "_pick(columns, segments.long(),"),
    weights_ignored=("weights * select(finite, each)", "(weights != 0) * select(finite, each)"),
    weights_ignored_when_finite=("advantages @ weights.T", "advantages @ (weights != 0).to(weights.dtype).T"),
    row_flipped=(
        "columns = torch.nn.functional.pad(table.flatten(1)",
        "columns = torch.nn.functional.pad(table.flip(0).flatten(1)",
    ),
)
add(
    cc.check_assign_runs,
    assignment,
    "assign_credit",
    narrow_overflow=("runs.long() * kinds", "runs * kinds"),
    runs_ignored=("run_ids(segments >= 0) if runs is None else runs", "run_ids(segments >= 0)"),
    wrong_stride=("runs.long() * kinds", "runs.long() * (kinds + 1)"),
)
add(
    cc.check_assign_gradient,
    assignment,
    "assign_credit",
    zero_weight_never_learns=(
        "torch.where(finite, weights * select(finite, each), loud)",
        "select(weights != 0, weights * each)",
    ),
    weights_detached=("torch.where(finite, weights * select", "torch.where(finite, weights.detach() * select"),
    weights_detached_when_finite=("advantages @ weights.T", "advantages @ weights.detach().T"),
)
add(
    cc.check_assign_silence,
    assignment,
    "assign_credit",
    zero_times_nan=(
        ("torch.where(finite, weights * select(finite, each), loud).sum(-1)", "advantages @ weights.T"),
        ("and bool(finite.all())", "and True"),
    ),
    nan_in_weight_gradient=(
        "torch.where(finite, weights * select(finite, each), loud)",
        "torch.where(finite | (weights != 0), weights * torch.where(finite | (weights != 0), each, 0.0), 0.0)",
    ),
    nan_hidden=("weights * select(finite, each), loud)", "weights * select(finite, each), 0.0)"),
)
add(
    cc.check_assign_bounds,
    assignment,
    "assign_credit",
    runs_unchecked=('_require_below("runs", torch.where(segments >= 0, runs, -1)', '_require_below("runs", 0 * runs'),
    segments_unchecked=("if largest >= bound:", "if largest > bound:"),
)

add(
    cc.check_turn_returns,
    temporal,
    "turn_returns",
    past_instead_of_future=("step[:, None] - step[None, :]", "step[None, :] - step[:, None]"),
    discount_off_by_one=("ahead.clamp(min=0))", "(ahead.clamp(min=0) + 1))"),
    absent_counted=("(select(exists, rewards).to(", "(rewards.to("),
    absent_credited=("return select(exists, (select", "return select(exists | True, (select"),
    half_precision=("dtype=statistics_dtype(rewards), device", "dtype=rewards.dtype, device"),
)
add(
    cc.check_step_advantage,
    temporal,
    "step_advantage",
    anchor_ignored=("if anchor is not None:", "if False:"),
    anchors_across_groups=("ids = ids * max", "ids = 0 * ids * max"),
    anchors_collide=("ids * max(returns.numel(), 1)", "ids"),
    by_turn=(
        "    flat = group_advantage(",
        "    ids = ids * 99 + torch.arange(returns.shape[1])\n    flat = group_advantage(",
    ),
    row_only=('require_finite("returns", returns, exists)', "None"),
)

add(
    lambda make: cc.check_rule(make, "slca", tool=0.3, summary=2.0),
    rules,
    "SLCA",
    weights_swapped=("[[self.tool, 0.0], [0.0, self.summary]]", "[[0.0, self.tool], [self.summary, 0.0]]"),
    weights_lost=("[[self.tool, 0.0], [0.0, self.summary]]", "[[1.0, 0.0], [0.0, 1.0]]"),
    leak=("[[self.tool, 0.0], [0.0, self.summary]]", "[[self.tool, 0.1], [0.0, self.summary]]"),
    presence_of_the_other=("has_segment(segments, Segment.SUMMARY)", "has_segment(segments, Segment.TOOL)"),
    presence_ignored=("has_segment(segments, Segment.SUMMARY)", "torch.ones_like(group, dtype=torch.bool)"),
    missing_is_zero=("given = present & ~rewards.isnan()", "given, rewards = present, rewards.nan_to_num()"),
)
add(
    cc.check_slca_isolation,
    rules,
    "SLCA",
    leak=("[[self.tool, 0.0], [0.0, self.summary]]", "[[self.tool, 1e-9], [0.0, self.summary]]"),
)
add(
    cc.check_summary_branch,
    rules,
    "SLCA",
    inverted=("select(marked, advantages[:, 1])", "select(~marked, advantages[:, 1])"),
    ignored=("if not self.summary_branch:", "if False:"),
    zeroes_guarded=("select(marked, advantages[:, 1])", "select(marked & False, advantages[:, 1])"),
)
add(
    lambda make: cc.check_rule(make, "grpo", alpha=0.25),
    rules,
    "GRPO",
    alpha_ignored=('[[self.alpha if name == "tool" else 1.0]', "[[1.0]"),
    alpha_on_the_summary=('[[self.alpha if name == "tool" else 1.0]', '[[self.alpha if name == "summary" else 1.0]'),
    tool_only=("return [[1.0], [1.0]]", "return [[1.0], [0.0]]"),
    rows_without_tokens_counted=("learnable = learns(segments)", "learnable = (segments >= -1).any(dim=1)"),
)
add(
    lambda make: cc.check_rule(make, "toolpo", local=0.4),
    rules,
    "ToolPO",
    local_everywhere=("[[1.0, self.local], [1.0, 0.0]]", "[[1.0, self.local], [1.0, self.local]]"),
    weight_lost=("[[1.0, self.local], [1.0, 0.0]]", "[[1.0, 1.0], [1.0, 0.0]]"),
)
add(
    lambda make: cc.check_rule(make, "rltr"),
    rules,
    "RLTR",
    summary_learns=("[[1.0], [0.0]]", "[[1.0], [1.0]]"),
)
add(
    lambda make: cc.check_rule(make, "support", summary_to_tool=True, tool_to_summary=False),
    rules,
    "SupportControl",
    paths_swapped=(
        "[[1.0, float(self.summary_to_tool)], [float(self.tool_to_summary), 1.0]]",
        "[[1.0, float(self.tool_to_summary)], [float(self.summary_to_tool), 1.0]]",
    ),
    rescaled=("[[1.0, float(self.summary_to_tool)]", "[[0.5, 0.5 * float(self.summary_to_tool)]"),
)
add(
    cc.check_guard,
    guard,
    "omission_guard",
    called_inverted=("& ~as_mask(called)", "& as_mask(called)"),
    required_ignored=("as_mask(required) & ~", "~"),
    subtracts=("torch.where(marked, penalty, summary)", "torch.where(marked, summary + penalty, summary)"),
    tool_kept=("torch.where(marked, 0.0, tool)", "tool"),
    constant_penalty=("torch.where(marked, penalty, summary)", "torch.where(marked, -0.5, summary)"),
)

add(
    cl.check_aggregate,
    aggregation,
    "aggregate_loss",
    mean_of_means=mean_of_means,
    empty_rows_counted=("else nonempty.sum()", "else torch.ones_like(nonempty).sum()"),
    denominator_ignored=("total = counted if denominator is None else", "total = counted if True else"),
    horizon_ignored=("mask.shape[1] if horizon is None else horizon", "mask.shape[1]"),
    row_mean_over_the_width=("return safe_divide(share, length)", "return share / mask.shape[1]"),
    tokens_everywhere=('counted = length.sum() if mode == "token_mean" else nonempty.sum()', "counted = length.sum()"),
)
add(
    cl.check_aggregate_masked,
    aggregation,
    "aggregate_loss",
    multiplies=("select(chosen, loss)", "(chosen * loss)"),
    empty_is_nan=("share = safe_divide(nonempty, total.expand_as(nonempty))", "share = nonempty / total"),
    empty_row_is_nan=("return safe_divide(share, length)", "return share / length"),
)
add(
    cl.check_aggregate_split,
    aggregation,
    "aggregate_loss",
    own_count=("total = counted if denominator is None else", "total = counted if True else"),
    own_width=("mask.shape[1] if horizon is None else horizon", "mask.sum(1).max() if len(mask) else 1"),
)
add(
    cl.check_aggregate_precision,
    aggregation,
    "aggregate_loss",
    half_sum=("dtype=compute_dtype(loss)", "dtype=loss.dtype"),
)

add(
    cl.check_policy_value,
    losses,
    "policy_loss",
    wrong_sign=("return (-gain * weight)", "return (gain * weight)"),
    widths_swapped=("(1 - clip_low, 1 + clip_high,", "(1 - clip_high, 1 + clip_low,"),
    constant_dual=("torch.inf if dual_clip is None else dual_clip)\n", "3.0)\n"),
    clips_both_sides=("torch.clamp(ratio, max=ceiling, out=change)", "torch.clamp(ratio, floor, ceiling, out=change)"),
    one_sign_lost=("    gain += torch", "    torch"),
    float32_bounds=("bounds = (1 - clip_low,", "bounds = (float(torch.tensor(1 - clip_low, dtype=torch.float32)),"),
    exponent_unbounded=("torch.exp(change.clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO), out", "torch.exp(change, out"),
    ratio_inverted=("logp.to(dtype) - old_logp.to(dtype)", "old_logp.to(dtype) - logp.to(dtype)"),
    mode_ignored=constant_aggregation,
)
add(
    cl.check_policy_gradient,
    losses,
    "policy_loss",
    through_the_clip=("learnable.copy_(stopped.logical_not_()).neg_()", "learnable"),
    through_the_bound=(".logical_or_(far)", ""),
    without_ratio=("slope = keep_(ratio, learnable.copy", "slope = keep_(torch.ones_like(ratio), learnable.copy"),
    wrong_sign=("slope * -(grad_loss", "slope * (grad_loss"),
    weight_after_the_clip=(
        "ratio if ratio_weight is None else ratio.mul_(unweighted)",
        "unweighted if ratio_weight is None else (credit.mul_(ratio), unweighted)[1]",
    ),
    row_weight_lost=("(grad_loss.to(weight.dtype) * weight)", "(grad_loss.to(weight.dtype) * weight.mean())"),
)
add(
    cl.check_policy_upstream,
    losses,
    "policy_loss",
    upstream_ignored=("(grad_loss.to(weight.dtype) * weight)", "weight"),
)
add(
    cl.check_policy_masked,
    losses,
    "policy_loss",
    multiplies_credit=("keep_(advantages.to(dtype, copy=True), learnable)", "mask * advantages.to(dtype)"),
    multiplies_weight=("keep_(ratio_weight.to(dtype, copy=True), learnable)", "(mask * ratio_weight.to(dtype))"),
)
add(
    cl.check_policy_loud,
    losses,
    "policy_loss",
    nan_ratio_hidden=("(ratio < floor) & falls, ", "~(ratio >= floor), "),
    nan_advantage_hidden=("neg_()).mul_(credit)", "neg_()).mul_(credit).nan_to_num_()"),
)
add(
    cl.check_dual_clip,
    losses,
    "policy_loss",
    on_positive_advantages=(
        "torch.clamp(credit, min=0, out=spare)).sum(dim=1)",
        "torch.clamp(credit, min=0, out=spare)).maximum(min(dual, 1e9) * credit.clamp(min=0)).sum(dim=1)",
    ),
    constant_ignored=("torch.inf if dual_clip is None else dual_clip)\n", "torch.inf)\n"),
    value_only=(".logical_or_(dualled)", ""),
)
add(
    cl.check_kinks,
    losses,
    "policy_loss",
    doubled_at_the_kink=(
        "slope = keep_(ratio, ",
        "slope = keep_(ratio * (1 + ((ratio - ceiling).abs() < 1e-9).double()), ",
    ),
)
add(
    cl.check_policy_rows,
    losses,
    "policy_loss",
    reversed=("advantages[:, None].expand(logp.shape)", "advantages.flip(0)[:, None].expand(logp.shape)"),
)
add(
    cl.check_policy_precision,
    losses,
    "policy_loss",
    half=("        dtype = compute_dtype(logp)\n", "        dtype = logp.dtype\n"),
)
add(
    cl.check_policy_stats,
    losses,
    "policy_loss",
    high_counts_zeros=("high & (credit > 0)", "high & (credit >= 0)"),
    low_counts_dual=("for which in (mask, low,", "for which in (mask, low | dualled,"),
    kl_reversed=(
        ("spare = torch.expm1(change)", "spare = torch.expm1(-change)"),
        ("spare.sub_(change).sum()", "spare.add_(change).sum()"),
    ),
    counts_masked=("for which in (mask, low,", "for which in (mask | True, low,"),
    multiplies_change=(
        "keep_(logp.to(dtype) - old_logp.to(dtype), learnable)",
        "mask * (logp.to(dtype) - old_logp.to(dtype))",
    ),
    largest_of_masked=(
        "unweighted = keep_(torch.exp(change.clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO), out=spare), learnable)",
        "unweighted = torch.exp(change.clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO), out=spare)",
    ),
    before_the_weight=(
        "falls = credit < 0\n",
        "falls, ratio = credit < 0, unweighted\n",
    ),
)
add(
    cl.check_policy_memory,
    losses,
    "policy_loss",
    keeps_two=(
        (
            "ctx.save_for_backward(slope.to(logp.dtype), weight)",
            "ctx.save_for_backward(slope.to(logp.dtype), weight, mask)",
        ),
        ("slope, weight = ctx.saved_tensors", "slope, weight, _ = ctx.saved_tensors"),
    ),
    keeps_wide=("slope.to(logp.dtype), weight)", "slope.double(), weight)"),
)

add(
    cl.check_kl,
    divergence,
    "kl_k3",
    reversed=("ref_logp.to(dtype) - logp.to(dtype)", "logp.to(dtype) - ref_logp.to(dtype)"),
    cancels=("growth = torch.expm1(bounded)", "growth = torch.exp(bounded) - 1"),
    gradient_sign=("keep_(growth.neg_(), ", "keep_(growth, "),
    gradient_beyond_the_bound=("bit_mask(inside, dtype)", "bit_mask(inside | True, dtype)"),
    nan_through_zero=("keep_(grad * slope, bit_mask(grad != 0, grad.dtype))", "grad * slope"),
    unbounded=("apart.clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO)", "apart"),
    k2=("torch.sub(growth, bounded, out=bounded).clamp_(min=0.0)", "0.5 * bounded * bounded"),
)
add(
    cl.check_ce,
    supervised,
    "format_weighted_ce",
    weight_lost=("weight * _share(protocol", "_share(protocol"),
    format_over_all_tokens=("_share(protocol, format_denominator, dtype)", "_share(target, format_denominator, dtype)"),
    nan_enters=("bit_mask(mask, weight.dtype)", "bit_mask(mask | True, weight.dtype)"),
    wrong_sign=("return -trained", "return trained"),
    upstream_ignored=("(weight * -grad.to(weight.dtype))", "(-weight)"),
    subset_unchecked=("if bool(outside.any()):", "if False:"),
    shifted_twice=(
        "target, protocol = as_mask(mask), as_mask(format_mask)",
        "target, protocol = as_mask(mask).roll(1, 1), as_mask(format_mask).roll(1, 1)",
    ),
)
add(
    cl.check_ce_split,
    supervised,
    "format_weighted_ce",
    own_count=("count if denominator is None else", "count if True else"),
)
add(
    cl.check_segment_statistics,
    stats,
    "segment_statistics",
    second_moment=("safe_divide(self.squares, self.tokens) - mean * mean", "safe_divide(self.squares, self.tokens)"),
    zeros_of_others=("values.eq_(0)", "values.ne_(0)"),
    segments_shifted=("clamp(-1, num_segments)", "clamp(0, num_segments)"),
    one_set_only=("SegmentStatistics(*_of_segments(sums.sum(1)))", "SegmentStatistics(*_of_segments(sums[:, 0]))"),
    variance_for_deviation=('"std": safe_sqrt(variance)', '"std": variance'),
    count_for_share=("self.tokens.sum().expand_as(self.tokens)", "torch.ones_like(self.tokens)"),
)
add(
    cl.check_clip_statistics,
    stats,
    "clip_statistics",
    maxima_added=('joined["ratio_max"] = torch.maximum(self.ratio_max, other.ratio_max)', "pass"),
    half_difference=("new.to(dtype) - old.to(dtype)", "(new - old).to(dtype)"),
    low_of_any_sign=("return falls & (ratio < 1 - clip_low)", "return (ratio < 1 - clip_low)"),
    dual_on_both=("dual = falls & (ratio >", "dual = (ratio >"),
)

NOT_A_KILL = (NameError, SyntaxError, ImportError, TypeError, AttributeError)


@pytest.mark.parametrize("name", MUTANTS)
def test_the_check_notices(name):
    make, check = MUTANTS[name]
    with pytest.raises(Exception) as caught:
        check(make())
    assert not isinstance(caught.value, NOT_A_KILL), f"the mutant is malformed: {caught.value!r}"
    assert "holds" not in str(caught.value) or "times:" not in str(caught.value), str(caught.value)


MODULES = (
    _safe,
    segments,
    advantages,
    assignment,
    temporal,
    rules,
    guard,
    aggregation,
    losses,
    divergence,
    supervised,
    stats,
)


def test_the_same_checks_pass_on_an_unedited_copy():
    """What kills a mutant is its edit, not that it is a copy."""
    pairs = {(name.split("-")[0], check) for name, (_, check) in MUTANTS.items()}
    for function, check in pairs:
        (module,) = (m for m in MODULES if getattr(vars(m).get(function), "__module__", None) == m.__name__)
        check(mutate(module, function))
