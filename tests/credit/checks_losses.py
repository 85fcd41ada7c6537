"""What aggregation, losses, divergence, supervised loss and statistics must do, as functions of what is tested."""

import math
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from tests import reference
from tests.credit.checks_credit import INF, NAN, Fn, expect_error, rng, same

MODES = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")
DENOMINATORS = {"token_mean": 11.0, "seq_mean_token_mean": 5.0, "seq_mean_token_sum": 5, "seq_mean_token_sum_norm": 4.0}


def mask_case(seed: int, rows: int = 4, width: int = 6) -> Tensor:
    """Rows of unequal length; one row has no token."""
    mask = torch.rand((rows, width), generator=rng(seed)) < 0.6
    mask[seed % rows] = False
    return mask


def loss_case(seed: int, scale: float = 0.7, width: int = 6) -> dict[str, Tensor]:
    """Log-probabilities whose ratios reach both clips and the dual clip; advantages of both signs, some exactly 0."""
    g = rng(seed)
    shape = (4, width)
    old = -torch.rand(shape, generator=g, dtype=torch.float64) * 3
    advantages = torch.randn(shape, generator=g, dtype=torch.float64)
    advantages[torch.rand(shape, generator=g) < 0.1] = 0.0
    logp = old + scale * torch.randn(shape, generator=g, dtype=torch.float64)
    return {"logp": logp, "old_logp": old, "advantages": advantages, "mask": mask_case(seed, width=width)}


def poison(case: dict[str, Tensor], value: float) -> dict[str, Tensor]:
    mask = case["mask"]
    return {k: v if k == "mask" else torch.where(mask, v, torch.full_like(v, value)) for k, v in case.items()}


def run(fn: Fn, case: dict[str, Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    leaf = case["logp"].clone().requires_grad_()
    result = fn(leaf, case["old_logp"], case["advantages"], case["mask"], **options)
    result.loss.backward()
    return result.loss.detach(), leaf.grad


def naive_loss(logp, old, advantages, mask, *, low=0.2, high=0.2, dual=3.0, mode="token_mean", **rest):
    """The formula in ordinary differentiable operations; the caller keeps masked places tame."""
    ratio = (logp - old).clamp(-20, 20).exp() * rest.get("ratio_weight", 1.0)
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    if dual is not None:
        surrogate = torch.where(advantages < 0, torch.maximum(surrogate, dual * advantages), surrogate)
    loss, length = torch.where(mask, -surrogate, 0.0), mask.sum(1)
    rows = length[length > 0]
    per_row = loss.sum(1)[length > 0]
    if mode == "token_mean":
        return per_row.sum() / rows.sum()
    if mode == "seq_mean_token_mean":
        return (per_row / rows).mean()
    return per_row.mean() / (mask.shape[1] if mode == "seq_mean_token_sum_norm" else 1)


# Aggregation


def check_aggregate(fn: Fn) -> None:
    for seed, mode in product(range(4), MODES):
        mask = mask_case(seed)
        loss = torch.randn(mask.shape, generator=rng(seed), dtype=torch.float64)
        for denominator, horizon in ((None, None), (DENOMINATORS[mode], None), (3.0, 17), (None, 17)):
            wanted = reference.aggregate_loss(loss.tolist(), mask.tolist(), mode, denominator, horizon)
            same(fn(loss, mask, mode, denominator, horizon=horizon), wanted, 1e-12)
            if denominator is not None:
                same(fn(loss, mask.int(), mode, torch.tensor(denominator), horizon=horizon), wanted, 1e-12)


def check_aggregate_masked(fn: Fn) -> None:
    """Masked losses change nothing, forward or backward; a batch of nothing is 0 with zero gradient."""
    for seed, mode, ugly in product(range(2), MODES, (NAN, INF)):
        mask = mask_case(seed)
        loss = torch.randn(mask.shape, generator=rng(seed), dtype=torch.float64)
        results = []
        for values in (loss, torch.where(mask, loss, ugly)):
            leaf = values.clone().requires_grad_()
            out = fn(leaf, mask, mode)
            out.backward()
            assert (leaf.grad[~mask] == 0).all()
            results.append((out.detach(), leaf.grad))
        assert all(torch.equal(a, b) for a, b in zip(*results))
    for mode, shape in product(MODES, ((3, 4), (0, 4), (3, 0))):
        leaf = torch.full(shape, NAN, requires_grad=True)
        out = fn(leaf, torch.zeros(shape), mode)
        out.backward()
        assert float(out.detach()) == 0.0
        assert (leaf.grad == 0).all()


def check_aggregate_split(fn: Fn) -> None:
    """Parts of any split, trimmed to their own width, add up to the whole when they share the global count."""
    for seed, mode in product(range(4), MODES):
        mask = mask_case(seed, rows=7)
        loss = torch.randn(mask.shape, generator=rng(seed), dtype=torch.float64)
        count = mask.sum() if mode == "token_mean" else mask.any(1).sum()
        whole = fn(loss, mask, mode)
        for sizes in ([1] * 7, [3, 4], [5, 0, 2]):
            parts = zip(loss.split(sizes), mask.split(sizes))
            same(sum(fn(part, keep, mode, count.double(), horizon=6) for part, keep in parts), whole, 1e-12)


def check_aggregate_precision(fn: Fn) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        out = fn(torch.full((4, 1000), 100.0, dtype=dtype), torch.ones(4, 1000))  # the sum, 4e5, leaves float16
        assert out.dtype == dtype
        same(out, 100.0)


# Policy loss


def check_policy_value(fn: Fn) -> None:
    for seed, mode in product(range(4), MODES):
        case = loss_case(seed)
        plain = [value.tolist() for value in case.values()]
        for low, high, dual, denominator in ((0.2, 0.2, 3.0, None), (0.1, 0.3, 1.5, 7.0), (0.2, 0.28, None, None)):
            got = fn(**case, clip_low=low, clip_high=high, dual_clip=dual, mode=mode, denominator=denominator)
            wanted = reference.policy_loss(*plain, mode=mode, denominator=denominator, low=low, high=high, dual=dual)
            same(got.loss, wanted, 1e-12)
    case = loss_case(9, scale=30.0)  # beyond the bound on the exponent
    same(fn(**case, dual_clip=None).loss, reference.policy_loss(*[v.tolist() for v in case.values()], dual=None))


def check_policy_gradient(fn: Fn) -> None:
    """The stored derivative against autograd through the formula, in every mode, beyond every clip."""
    for seed, mode, dual, scale in product(range(3), MODES, (3.0, 1.3, None), (0.7, 15.0)):
        case = loss_case(seed, scale)
        _, got = run(fn, case, clip_low=0.15, clip_high=0.25, dual_clip=dual, mode=mode)
        leaf = case["logp"].clone().requires_grad_()
        tame = (leaf, case["old_logp"], case["advantages"], case["mask"])
        naive_loss(*tame, low=0.15, high=0.25, dual=dual, mode=mode).backward()
        same(got, leaf.grad, 1e-10)
        if scale < 1:
            weight = torch.rand((4, 6), generator=rng(seed), dtype=torch.float64) + 0.5
            _, got = run(fn, case, dual_clip=dual, mode=mode, ratio_weight=weight)
            leaf = case["logp"].clone().requires_grad_()
            naive_loss(leaf, *tame[1:], dual=dual, mode=mode, ratio_weight=weight).backward()
            same(got, leaf.grad, 1e-10)


def check_policy_upstream(fn: Fn) -> None:
    """The gradient scales with what comes from above, and a second derivative is refused, not wrong."""
    case = loss_case(1)
    leaf = case["logp"].clone().requires_grad_()
    args = (leaf, case["old_logp"], case["advantages"], case["mask"])
    (one,) = torch.autograd.grad(fn(*args).loss, leaf)
    (three,) = torch.autograd.grad(-3 * fn(*args).loss, leaf)
    same(three, -3 * one, 1e-12)


def check_policy_masked(fn: Fn) -> None:
    for seed, mode, ugly in product(range(2), MODES, (NAN, INF, -INF)):
        case = loss_case(seed)
        weight = torch.rand((4, 6), generator=rng(seed), dtype=torch.float64) + 0.5
        clean = run(fn, case, mode=mode, ratio_weight=weight)
        dirty = run(
            fn,
            poison(case, ugly),
            mode=mode,
            ratio_weight=torch.where(case["mask"], weight, torch.tensor(ugly).double()),
        )
        assert all(torch.equal(a, b) for a, b in zip(clean, dirty))
        assert (dirty[1][~case["mask"]] == 0).all()
        mixed = {**poison(case, ugly), "old_logp": case["old_logp"]}
        assert all(torch.equal(a, b) for a, b in zip(clean, run(fn, mixed, mode=mode, ratio_weight=weight)))
    for mode, shape in product(MODES, ((2, 3), (0, 3), (2, 0))):
        nothing = {k: torch.full(shape, NAN) for k in ("logp", "old_logp", "advantages")}
        loss, grad = run(fn, {**nothing, "mask": torch.zeros(shape)}, mode=mode)
        assert float(loss) == 0.0
        assert (grad == 0).all()


def check_policy_loud(fn: Fn) -> None:
    """A NaN on a learnable token is not hidden: neither the loss nor the gradient is finite."""
    for name in ("logp", "old_logp", "advantages"):
        case = loss_case(2)
        case["mask"][0, 0] = True
        case[name][0, 0] = NAN
        loss, grad = run(fn, case)
        assert loss.isnan()
        assert grad[0, 0].isnan()


def check_dual_clip(fn: Fn) -> None:
    """Only a negative advantage is dual-clipped; beyond c its gradient is 0 and its loss is -cA; c is not ignored."""
    zeros, every = torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 1)
    for advantage, ratio, dual in product((2.0, -2.0), (0.5, 1.1, 1.9, 2.5, 4.0, 50.0), (2.0, 3.0, None)):
        log_ratio = torch.full((1, 1), math.log(ratio), dtype=torch.float64)
        case = {"logp": log_ratio, "old_logp": zeros, "advantages": zeros + advantage, "mask": every}
        loss, grad = run(fn, case, dual_clip=dual)
        plain_loss, plain_grad = run(fn, case, dual_clip=None)
        if advantage > 0 or dual is None or ratio <= dual:
            same(loss, plain_loss, 1e-12)
            same(grad, plain_grad, 1e-12)
        else:
            same(loss, -dual * advantage, 1e-12)
            assert float(grad) == 0.0
    case = loss_case(3, scale=4.0)
    assert len({float(fn(**case, dual_clip=c).loss) for c in (1.5, 3.0, 6.0, None)}) == 4


def check_kinks(fn: Fn) -> None:
    """At a kink the derivative lies between the one-sided ones."""
    every = torch.ones(1, 1)
    for advantage, edge, dual in product((1.5, -1.5), (0.8, 1.2, 3.0), (3.0, None)):
        slopes = []
        for shift in (-1e-6, 0.0, 1e-6):
            logp = torch.full((1, 1), math.log(edge) + shift, dtype=torch.float64)
            case = {"logp": logp, "old_logp": torch.zeros_like(logp), "advantages": torch.full_like(logp, advantage)}
            slopes.append(float(run(fn, {**case, "mask": every}, dual_clip=dual)[1]))
        low, high = min(slopes[0], slopes[2]), max(slopes[0], slopes[2])
        assert low - 1e-4 <= slopes[1] <= high + 1e-4


def check_policy_rows(fn: Fn) -> None:
    """An advantage per row is the same advantage on each of its tokens, and a row of another batch is refused."""
    case = loss_case(4)
    rows = torch.randn(4, generator=rng(4), dtype=torch.float64)
    for mode in MODES:
        wide = run(fn, {**case, "advantages": rows[:, None].expand(4, 6)}, mode=mode)
        assert all(torch.equal(a, b) for a, b in zip(wide, run(fn, {**case, "advantages": rows}, mode=mode)))


def check_policy_precision(fn: Fn) -> None:
    for dtype, tolerance in ((torch.bfloat16, 2**-8), (torch.float16, 2**-10), (torch.float32, 1e-6)):
        for seed in range(5, 9):
            case = {k: v if k == "mask" else v.to(dtype) for k, v in loss_case(seed, width=200).items()}
            exact = {k: v if k == "mask" else v.double() for k, v in case.items()}
            got, wanted = run(fn, case), run(fn, exact)
            assert got[0].dtype == got[1].dtype == dtype
            # Two roundings: of what is kept for the backward pass, and of its product there.
            for have, want in zip(got, wanted):
                torch.testing.assert_close(have.double(), want, rtol=2 * tolerance, atol=tolerance / 100)


def check_policy_stats(fn: Fn) -> None:
    for seed, dual in product(range(4), (3.0, 1.4, None)):
        case = loss_case(seed, scale=1.0)
        for values in (case, poison(case, NAN)):
            stats = fn(**values, clip_low=0.1, clip_high=0.3, dual_clip=dual).stats
            names = ("tokens", "clipped_low", "clipped_high", "clipped_dual", "kl_sum", "ratio_max")
            got = torch.stack([getattr(stats, name) for name in names])
            plain = [value.tolist() for value in case.values()]
            same(got, reference.clip_sums(*plain, low=0.1, high=0.3, dual=dual), 1e-6)
            assert not got.requires_grad
    far = {k: torch.full((1, 2), v, dtype=torch.float64) for k, v in (("logp", 0.3), ("old_logp", 0.0))}
    case = {**far, "advantages": torch.ones(1, 2).double(), "mask": torch.ones(1, 2)}
    shrunk = fn(**{**case, "logp": -case["logp"], "mask": torch.tensor([[1, 0]])}).stats  # no ratio above 1
    same(shrunk.ratio_max, math.exp(-0.3))
    halved = fn(**case, ratio_weight=torch.tensor([[0.5, 1.0]]).double()).stats  # ratio 1.35, or 0.67 once weighted
    assert float(halved.clipped_high) == 1.0


def saved_bytes(call: Any) -> list[Tensor]:
    kept: list[Tensor] = []
    with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        call()
    return kept


def check_policy_memory(fn: Fn) -> None:
    """Exactly one tensor of the batch's size is kept for backward, and nothing else that grows with the width."""
    for dtype in (torch.float32, torch.bfloat16):
        case = {k: v if k == "mask" else v.to(dtype) for k, v in loss_case(6, width=64).items()}
        leaf = case.pop("logp").requires_grad_()
        kept = saved_bytes(lambda leaf=leaf, case=case: fn(leaf, **case))
        sizes = sorted(t.numel() * t.element_size() for t in kept)
        assert sizes[-1] == leaf.numel() * leaf.element_size()
        assert sum(sizes[:-1]) <= 8 * len(leaf)


# Divergence, supervised loss


def check_kl(fn: Fn) -> None:
    g = rng(0)
    logp = torch.randn((3, 5), generator=g, dtype=torch.float64) * 4
    ref = logp + torch.tensor([0.0, 1e-7, -1e-4, 3.0, -30.0]).double()
    got = fn(logp, ref)
    wanted = [reference.kl_k3(a, b) for a, b in zip(logp.flatten().tolist(), ref.flatten().tolist())]
    torch.testing.assert_close(got.flatten(), torch.tensor(wanted).double(), rtol=1e-6, atol=0)
    tiny = torch.tensor([[0.0, 1e-4, -1e-4]])  # in float32 exp(d) - 1 - d would be rounding only
    torch.testing.assert_close(fn(torch.zeros(1, 3), tiny)[0, 1:], torch.tensor([5e-9, 5e-9]), rtol=1e-1, atol=0)
    for dtype in (torch.float32, torch.bfloat16):
        noise = 0.01 * torch.randn((50, 50), generator=g)
        assert (fn(torch.zeros_like(noise).to(dtype), noise.to(dtype)) >= 0).all()
    leaf = logp.clone().requires_grad_()
    fn(leaf, ref).sum().backward()
    twin = logp.clone().requires_grad_()
    apart = (ref - twin).clamp(-20, 20)
    (apart.exp() - apart - 1).sum().backward()
    same(leaf.grad, twin.grad, 1e-8)
    nan = torch.tensor([[NAN, 1.0, INF]], requires_grad=True)
    keep = torch.tensor([[False, True, False]])
    torch.where(keep, fn(nan, torch.tensor([[0.0, 0.5, -INF]])), 0.0).sum().backward()
    assert nan.grad.isfinite().all()
    assert nan.grad[0, [0, 2]].tolist() == [0.0, 0.0]
    assert nan.grad[0, 1] != 0


def ce_case(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    mask = mask_case(seed)
    fmt = mask & (torch.rand(mask.shape, generator=rng(seed)) < 0.5)
    return -torch.rand(mask.shape, generator=rng(seed), dtype=torch.float64) * 4, mask, fmt


def check_ce(fn: Fn) -> None:
    """One weighted cross-entropy with weights m/N + weight f/|f|: value and gradient, NaN under the mask or not."""
    for seed, weight in product(range(5), (0.5, 0.0, 2.0)):
        logp, mask, fmt = ce_case(seed)
        for dirty in (logp, torch.where(mask, logp, NAN)):
            leaf = dirty.clone().requires_grad_()
            loss = fn(leaf, mask, fmt, weight)
            same(loss, reference.format_weighted_ce(logp.tolist(), mask.tolist(), fmt.tolist(), weight), 1e-12)
            (2 * loss).backward()
            share = mask / mask.sum() + weight * fmt / fmt.sum().clamp(min=1)
            same(leaf.grad, -2 * share.double(), 1e-6)
    logp, mask, fmt = ce_case(0)
    same(fn(logp, mask, fmt), fn(logp, mask, fmt, 0.5), 0)
    same(
        fn(logp, mask, torch.zeros_like(mask)), reference.format_weighted_ce(logp.tolist(), mask.tolist(), [[]]), 1e-12
    )
    for shape in ((2, 3), (0, 3), (2, 0)):
        leaf = torch.full(shape, NAN, requires_grad=True)
        nothing = fn(leaf, torch.zeros(shape), torch.zeros(shape))
        nothing.backward()
        assert float(nothing.detach()) == 0.0
        assert (leaf.grad == 0).all()
    wrong = torch.tensor([[0, 0, 1]])
    expect_error(lambda: fn(torch.zeros(1, 3), torch.tensor([[1, 1, 0]]), wrong), "format_mask[0, 2]", "mask[0, 2]")


def check_ce_split(fn: Fn) -> None:
    for seed in range(4):
        logp, mask, fmt = ce_case(seed)
        counts = {"denominator": mask.sum().double(), "format_denominator": float(fmt.sum())}
        parts = [fn(logp[i : i + 1], mask[i : i + 1], fmt[i : i + 1], **counts) for i in range(4)]
        same(sum(parts), fn(logp, mask, fmt), 1e-6)


# Statistics


def check_segment_statistics(fn: Fn) -> None:
    for seed in range(4):
        segments = torch.randint(-2, 4, (5, 6), generator=rng(seed))
        credit = torch.randn((5, 6), generator=rng(seed), dtype=torch.float64)
        credit[0] = 0.0
        dirty = torch.where((segments >= 0) & (segments < 3), credit, NAN)
        stats = fn(dirty, segments, 3)
        got = stats.compute()
        wanted = reference.segment_moments(credit.tolist(), segments.tolist(), 3)
        tokens = sum(row[0] for row in wanted)
        same(got["token_share"], [row[0] / tokens for row in wanted])
        for column, name in ((1, "mean"), (2, "std"), (3, "zero")):
            same(got[name], [row[column] for row in wanted], 1e-7)
        joined = (fn(dirty[:2], segments[:2], 3) + fn(dirty[2:], segments[2:], 3)).compute()
        for name in got:
            same(joined[name], got[name], 1e-7)
    for shape in ((0, 4), (3, 0)):
        empty = fn(torch.zeros(shape), torch.zeros(shape, dtype=torch.int64)).compute()
        assert all((value == 0).all() for value in empty.values())


def check_clip_statistics(fn: Fn) -> None:
    for seed, dtype in product(range(3), (torch.float64, torch.float32, torch.bfloat16)):
        case = {k: v if k == "mask" else v.to(dtype) for k, v in loss_case(seed, scale=1.0).items()}
        mask = case.pop("mask")
        segments = torch.where(mask, torch.randint(0, 2, mask.shape, generator=rng(seed)), -1)
        dirty = [torch.where(mask, value, NAN) for value in case.values()]
        options = {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.4}
        stats = fn(*dirty, segments, **options)
        for kind in range(2):
            got = [float(getattr(stats, name)[kind]) for name in stats.__dataclass_fields__]
            plain = [value.tolist() for value in case.values()]
            wanted = reference.clip_sums(*plain, (segments == kind).tolist(), low=0.1, high=0.3, dual=1.4)
            assert [int(x) for x in got[:4]] == wanted[:4]
            same(torch.tensor(got[4:]), wanted[4:], 1e-5)
        halves = [
            fn(*[value[part] for value in dirty], segments[part], **options) for part in (slice(0, 1), slice(1, 4))
        ]
        for name, value in (halves[0] + halves[1]).compute().items():
            same(value, stats.compute()[name], 1e-6)
