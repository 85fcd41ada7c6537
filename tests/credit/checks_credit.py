"""What segments, advantages, assignment and rules must do, as plain functions of the function under test.

``test_*.py`` runs them on the package; ``tests/test_mutants.py`` runs them on broken copies and expects them to fail.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tests import reference

Fn = Callable[..., Any]
NAN, INF = float("nan"), float("inf")
LONG = torch.int64


def expect_error(call: Callable[[], Any], *parts: str) -> None:
    """The call raises ``ValueError`` and its message holds every part."""
    message = None
    try:
        call()
    except ValueError as error:
        message = str(error)
    assert message is not None, f"no error that says {parts}"
    missing = [part for part in parts if part not in message]
    assert not missing, f"{message!r} does not say {missing}"


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def same(got: Tensor, wanted: Any, tolerance: float = 1e-9) -> None:
    wanted = torch.as_tensor(wanted, dtype=torch.float64).reshape(got.shape)
    torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance)


def masks() -> Iterator[Tensor]:
    """Hand-picked and random masks, empty ones among them."""
    yield torch.tensor([[1, 1, 0, 0, 1, 1], [0, 1, 0, 1, 0, 0], [0] * 6, [1] * 6, [0, 0, 0, 0, 0, 1]]).bool()
    for shape in ((0, 3), (3, 0), (0, 0), (1, 1)):
        yield torch.ones(shape, dtype=torch.bool)
    for seed in range(6):
        yield torch.rand((4, 9), generator=rng(seed)) < 0.2 + 0.1 * seed


# Segments


def check_run_ids(fn: Fn) -> None:
    for mask in masks():
        got = fn(mask)
        assert got.dtype == LONG
        assert got.tolist() == reference.run_ids(mask.tolist())
        for dtype in (torch.int8, torch.int64, torch.bfloat16):
            assert torch.equal(fn(mask.to(dtype)), got)
    alternating = torch.arange(600)[None] % 2 == 0
    assert int(fn(alternating).max()) == 299


def check_tool_summary(fn: Fn) -> None:
    for seed, mask in enumerate(masks()):
        assert fn(mask).tolist() == reference.tool_summary_segments(mask.tolist())
        real = mask | (torch.rand(mask.shape, generator=rng(seed)) < 0.5)
        for completion in (None, real):
            wanted = reference.tool_summary_segments(
                mask.tolist(), "unless_followed", None if completion is None else completion.tolist()
            )
            assert fn(mask, final="unless_followed", completion_mask=completion).tolist() == wanted


def check_segments_ignore_padding(fn: Fn) -> None:
    for mask in masks():
        wider = torch.nn.functional.pad(mask, (0, 3))
        assert torch.equal(fn(wider), torch.nn.functional.pad(fn(mask), (0, 3), value=-1))


def check_spans(fn: Fn) -> None:
    spans = [(1, 4, 6, 2), (0, 2, 2, 1), (0, 0, 2, 0), (1, 0, 4, 5), (0, 2, 6, 1), (2, 1, 3, -1)]
    assert fn(spans, 6).tolist() == reference.spans_to_segments(spans, 6, 3)
    assert fn(spans, 6, rows=5).tolist() == reference.spans_to_segments(spans, 6, 5)
    assert fn([], 4).shape == (0, 4)
    assert fn([], 4, rows=2).tolist() == [[-1] * 4] * 2
    for wrong in [(0, 0, 7, 0), (0, -1, 2, 0), (0, 3, 2, 0), (-1, 0, 1, 0), (3, 0, 1, 0), (0, 0, 1, -2)]:
        expect_error(lambda wrong=wrong: fn([*spans, wrong], 6, rows=3), str(wrong), "(3, 6)")
    for first, second in [((0, 0, 2, 0), (0, 1, 3, 1)), ((0, 0, 5, 0), (0, 4, 5, 0)), ((0, 1, 2, 0), (0, 1, 2, 0))]:
        expect_error(lambda pair=(second, first): fn(list(pair), 6), str(first), str(second), "overlap")
    expect_error(lambda: fn([(0, 0, 9, 0), (0, 1, 2, 0), (0, 8, 9, 0)], 9), "overlap")


# Group advantages


def groups(seed: int, rows: int = 14, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards (NaN or infinite where absent), group ids of uneven sizes in no order, and presence."""
    g = rng(seed)
    ids = torch.tensor([-7, 2 * 10**8, 5, 5, 0, 0, 0])
    group = ids[torch.randint(len(ids), (rows,), generator=g)]
    present = torch.rand(rows, generator=g) < 0.8
    rewards = torch.randn(rows, generator=g, dtype=torch.float64).to(dtype)
    ugly = torch.tensor([NAN, INF, -INF], dtype=dtype)[torch.randint(3, (rows,), generator=g)]
    return torch.where(present, rewards, ugly), group, present


def check_advantage(fn: Fn) -> None:
    for seed in range(12):
        rewards, group, present = groups(seed)
        plain = [rewards.tolist(), group.tolist(), present.tolist()]
        for options in (
            {},
            {"eps": 0.3},
            {"correction": 0},
            {"correction": 2},
            {"scale": "none"},
            {"min_size": 3},
            {"min_size": 1, "eps": 1e-2},
        ):
            same(fn(rewards, group, present, **options), reference.group_advantage(*plain, **options))
        everyone = torch.randn(14, dtype=torch.float64, generator=rng(seed))
        same(fn(everyone, group), reference.group_advantage(everyone.tolist(), group.tolist()))


def check_equal_rewards(fn: Fn) -> None:
    for value in (0.1, 3.3, 1000.1, 1e-30, -7.7, 0.0):
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            for count in (2, 7, 8):
                for eps in (1e-6, 1e-12, 0.0):
                    got = fn(torch.full((count,), value, dtype=dtype), torch.zeros(count, dtype=LONG), eps=eps)
                    assert (got == 0).all(), (value, dtype, count, eps, got)
    rewards = torch.tensor([3.3, NAN, 3.3, 3.3, 1.0, 2.0])
    got = fn(rewards, torch.tensor([1, 1, 1, 1, 2, 2]), ~rewards.isnan())
    assert (got[:4] == 0).all()
    assert (got[4:] != 0).all()


def check_absent_rows(fn: Fn) -> None:
    """An absent row changes nothing, forward or backward, whatever it holds."""
    for seed in range(8):
        rewards, group, present = groups(seed)
        tame = torch.where(present, rewards, 0.25)
        results = []
        for values in (rewards, tame):
            leaf = values.clone().requires_grad_()
            out = fn(leaf, group, present)
            out.backward(torch.linspace(-1, 1, len(out), dtype=out.dtype))
            results.append((out.detach(), leaf.grad))
        for got, wanted in zip(*results):
            assert torch.equal(got, wanted)
            assert (got[~present] == 0).all()


def check_lone_rows(fn: Fn) -> None:
    rewards, group = torch.tensor([1.0, 2.0, 3.0, 0.7]), torch.tensor([4, 4, 9, 2])
    got = fn(rewards, group)
    assert (got[2:] == 0).all()
    same(got[:2], [-(0.5**0.5), 0.5**0.5], 1e-5)
    alone = fn(rewards, torch.zeros(4, dtype=LONG), torch.tensor([False, False, True, False]))
    assert (alone == 0).all()
    assert fn(torch.zeros(0), torch.zeros(0, dtype=LONG)).shape == (0,)
    assert (fn(torch.tensor([5.0, 3.0]), torch.tensor([1, 1]), correction=2) == 0).all()


def check_group_ids(fn: Fn) -> None:
    """Only which rows share an id matters: not its value, sign, order or dtype."""
    for seed in range(4):
        rewards, group, present = groups(seed)
        wanted = fn(rewards, group, present)
        for move in (lambda g: -g, lambda g: g * 10**9 + 3, lambda g: g - 2**40, lambda g: g.to(torch.int32)):
            same(fn(rewards, move(group), present), wanted)
        order = torch.randperm(len(rewards), generator=rng(seed))
        same(fn(rewards[order], group[order], present[order]), wanted[order])


def check_advantage_gradient(fn: Fn) -> None:
    """Autograd against finite differences, and against the derivative written out for one group."""
    for seed in range(4):
        _, group, present = groups(seed)
        rewards = torch.randn(14, generator=rng(seed), dtype=torch.float64, requires_grad=True)
        for scale in ("std", "none"):
            call = lambda r, scale=scale, group=group, present=present: fn(r, group, present, eps=0.1, scale=scale)  # noqa: E731
            assert torch.autograd.gradcheck(call, (rewards,), raise_exception=False)


def check_advantage_precision(fn: Fn) -> None:
    for dtype, tolerance in ((torch.bfloat16, 2**-8), (torch.float16, 2**-11), (torch.float32, 2e-7)):
        for seed in range(4):
            rewards, group, present = groups(seed, dtype=dtype)
            got = fn(rewards, group, present)
            assert got.dtype == dtype
            wanted = reference.group_advantage(rewards.tolist(), group.tolist(), present.tolist())
            same(got, wanted, tolerance)
    extreme = torch.tensor([60000.0, -60000.0, 60000.0], dtype=torch.float16)
    same(fn(extreme, torch.zeros(3, dtype=LONG)), [1 / 3**0.5, -2 / 3**0.5, 1 / 3**0.5], 1e-3)
    for size in (1e-200, 1e200):  # squares of these leave float64
        far = torch.tensor([size, -size, size], dtype=torch.float64)
        same(fn(far, torch.zeros(3, dtype=LONG), eps=0.0), [1 / 3**0.5, -2 / 3**0.5, 1 / 3**0.5])


def check_present_must_be_finite(fn: Fn) -> None:
    for value in (NAN, INF, -INF):
        rewards = torch.tensor([1.0, 2.0, value])
        expect_error(lambda rewards=rewards: fn(rewards, torch.tensor([0, 0, 1])), "rewards[2]", str(value))


# Assignment


def credit_case(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    g = rng(seed)
    advantages = torch.randn((4, 3), generator=g, dtype=torch.float64)
    segments = torch.randint(-2, 4, (4, 7), generator=g)
    weights = torch.randn((4, 3), generator=g, dtype=torch.float64)
    return advantages, segments, torch.where(torch.rand(weights.shape, generator=g) < 0.3, 0.0, weights)


def beside_nan(fn: Fn) -> Fn:
    """The function with one more row, of no segment and NaN advantages, that must not show in the others."""

    def call(advantages: Tensor, segments: Tensor, weights: Tensor) -> Tensor:
        extra = torch.full_like(advantages[:1].detach(), NAN)
        return fn(torch.cat([advantages, extra]), torch.cat([segments, -torch.ones_like(segments[:1])]), weights)[:-1]

    return call


def check_assign(fn: Fn) -> None:
    for seed in range(6):
        advantages, segments, weights = credit_case(seed)
        same(beside_nan(fn)(advantages, segments, weights), fn(advantages, segments, weights), 1e-12)
        for ids in (segments, segments.to(torch.int8), segments.clamp(min=-1), torch.full_like(segments, -9)):
            same(
                fn(advantages, ids, weights),
                reference.assign_credit(advantages.tolist(), ids.tolist(), weights.tolist()),
                1e-12,
            )
    for rows, width in ((0, 3), (3, 0), (0, 0)):
        got = fn(torch.zeros(rows, 2), torch.zeros(rows, width, dtype=LONG), torch.eye(2))
        assert got.shape == (rows, width)


def check_assign_runs(fn: Fn) -> None:
    for seed in range(6):
        _, segments, weights = credit_case(seed)
        advantages = torch.randn((4, 7, 3), generator=rng(seed), dtype=torch.float64)
        plain = [advantages.tolist(), segments.tolist(), weights.tolist()]
        same(fn(advantages, segments, weights), reference.assign_credit(*plain), 1e-12)
        runs = torch.randint(0, 7, segments.shape, generator=rng(seed))
        wanted = reference.assign_credit(*plain, runs.tolist())
        for dtype in (torch.int64, torch.int8):
            same(fn(advantages, segments, weights, runs=runs.to(dtype)), wanted, 1e-12)
    many = torch.ones(100, 1, dtype=torch.float64)
    deep = torch.arange(4, dtype=torch.float64)[None, :, None]
    got = fn(deep, torch.tensor([[99, 0]]), many, runs=torch.tensor([[3, 2]], dtype=torch.int8))
    same(got, [[3.0, 2.0]])


def check_assign_gradient(fn: Fn) -> None:
    """Linear maps have exact finite differences: the gradient in both arguments, zero weights included."""
    for seed in range(3):
        advantages, segments, weights = (x.requires_grad_() if x.is_floating_point() else x for x in credit_case(seed))
        call = lambda a, w, segments=segments: fn(a, segments, w)  # noqa: E731
        assert torch.autograd.gradcheck(call, (advantages, weights), raise_exception=False)
        call = lambda a, w, segments=segments: beside_nan(fn)(a, segments, w)  # noqa: E731
        assert torch.autograd.gradcheck(call, (advantages, weights), raise_exception=False)


def check_assign_silence(fn: Fn) -> None:
    """A NaN reaches neither a segment of weight 0 nor, backward, anything it was not used for."""
    segments = torch.tensor([[0, -1, 0], [0, 1, -1], [-1, -1, -1]])
    for ugly in (NAN, INF):
        advantages = torch.tensor([[1.0, ugly], [2.0, 3.0], [ugly, ugly]], requires_grad=True)
        weights = torch.tensor([[1.0, 0.0], [0.5, 1.0]], requires_grad=True)
        out = fn(advantages, segments, weights)
        same(out, [[1.0, 0.0, 1.0], [2.0, 4.0, 0.0], [0.0, 0.0, 0.0]])
        out.sum().backward()
        same(advantages.grad, [[2.0, 0.0], [1.5, 1.0], [0.0, 0.0]])
        same(weights.grad, [[4.0, 3.0], [2.0, 3.0]])
        assert not fn(advantages, segments, torch.ones(2, 2)).isfinite().all()


def check_assign_bounds(fn: Fn) -> None:
    advantages, weights = torch.zeros(1, 2), torch.eye(2)
    expect_error(lambda: fn(advantages, torch.tensor([[0, 2]]), weights), "segments", "(1, 2)", "weights", "(2, 2)")
    expect_error(lambda: fn(torch.zeros(1, 1, 2), torch.tensor([[0, 2]]), weights), "segments", "(1, 2)", "(2, 2)")
    expect_error(lambda: fn(torch.zeros(1, 1, 2), torch.tensor([[0, -1, 0]]), weights), "runs", "(1, 3)", "(1, 1, 2)")


# Time


def check_turn_returns(fn: Fn) -> None:
    for seed in range(4):
        present = torch.rand((3, 5), generator=rng(seed)) < 0.7
        rewards = torch.where(present, torch.randn((3, 5), generator=rng(seed), dtype=torch.float64), NAN)
        for discount in (1.0, 0.9, 0.0):
            leaf = rewards.clone().requires_grad_()
            got = fn(leaf, present, discount=discount)
            same(got, reference.turn_returns(rewards.tolist(), present.tolist(), discount))
            got.sum().backward()
            assert leaf.grad.isfinite().all()
            assert (leaf.grad[~present] == 0).all()
    long = fn(torch.ones(1, 300, dtype=torch.bfloat16), torch.ones(1, 300), discount=0.99)
    assert long.dtype == torch.bfloat16
    same(long[:, :1], [[(1 - 0.99**300) / 0.01]], 2**-8)
    assert fn(torch.zeros(0, 3), torch.zeros(0, 3)).shape == (0, 3)
    assert fn(torch.zeros(3, 0), torch.zeros(3, 0)).shape == (3, 0)


def check_step_advantage(fn: Fn) -> None:
    for seed in range(6):
        g = rng(seed)
        present = torch.rand((5, 3), generator=g) < 0.8
        returns = torch.where(present, torch.randn((5, 3), generator=g, dtype=torch.float64), NAN)
        other = (-1, 2)[seed % 2]  # far from 3 and next to it
        group = torch.tensor([3, other, 3, 3, other])
        anchor = torch.randint(0, 3, (5, 3), generator=g) * 10**9 - 1
        plain = [returns.tolist(), group.tolist(), present.tolist()]
        same(fn(returns, group, present), reference.step_advantage(*plain))
        same(fn(returns, group, present, anchor=anchor), reference.step_advantage(*plain, anchor.tolist()))
        same(
            fn(returns, group, present, scale="none", min_size=3),
            reference.step_advantage(*plain, scale="none", min_size=3),
        )
    expect_error(lambda: fn(torch.tensor([[1.0], [NAN]]), torch.tensor([0, 0]), torch.ones(2, 1)), "returns[1, 0]")


# Rules


def rule_case(seed: int, names: tuple[str, ...]) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Rewards with missing values, two groups, and rows of every kind: both segments, one, or none."""
    g = rng(seed)
    segments = torch.randint(-1, 2, (12, 6), generator=g)
    segments[0], segments[1], segments[2] = -1, 0, 1
    rewards = {}
    for name in names:
        values = torch.randn(12, generator=g, dtype=torch.float64)
        rewards[name] = torch.where(torch.rand(12, generator=g) < 0.1, NAN, values)
    return rewards, torch.randint(0, 2, (12,), generator=g) - 5, segments


def check_rule(make: Fn, method: str, **options: Any) -> None:
    """A rule equals its row of the table, whatever rows lack a segment or a reward."""
    names = make(**options).components
    settings = dict(options)
    if method == "support":
        settings = {"cross": (float(options["summary_to_tool"]), float(options["tool_to_summary"]))}
    for seed in range(5):
        rewards, group, segments = rule_case(seed, names)
        got = make(**options)(rewards, group, segments)
        plain = {name: values.tolist() for name, values in rewards.items()}
        same(got, reference.route(method, plain, group.tolist(), segments.tolist(), **settings))


def check_slca_isolation(make: Fn) -> None:
    """Tool tokens are the same bits under any summary reward, and the other way round."""
    for seed in range(5):
        rewards, group, segments = rule_case(seed, ("tool", "summary"))
        first = make()(rewards, group, segments)
        for name, own in (("summary", 0), ("tool", 1)):
            other = torch.where(torch.rand(12, generator=rng(seed)) < 0.5, NAN, 1e6 * rewards[name].nan_to_num() + 1)
            second = make()({**rewards, name: other}, group, segments)
            assert torch.equal(first[segments == own], second[segments == own])


def check_summary_branch(make: Fn) -> None:
    for seed in range(3):
        rewards, group, segments = rule_case(seed, ("tool", "summary"))
        omitted = torch.rand(12, generator=rng(seed)) < 0.5
        full = make()(rewards, group, segments)
        got = make(summary_branch=False)(rewards, group, segments, omitted=omitted)
        same(got, torch.where((segments == 1) & ~omitted[:, None], 0.0, full), 0)
        none = make(summary_branch=False)(rewards, group, segments)
        same(none, torch.where(segments == 1, 0.0, full), 0)


def check_guard(fn: Fn) -> None:
    tool, summary = torch.tensor([0.9, 0.8, NAN, 0.6]), torch.tensor([0.5, 0.4, NAN, 0.2])
    required, called = torch.tensor([1, 1, 1, 0]), torch.tensor([1, 0, 0, 0])
    for penalty in (-0.5, -2.0):
        got = fn(tool, summary, required, called, penalty)
        wanted = reference.omission_guard(tool.tolist(), summary.tolist(), required.tolist(), called.tolist(), penalty)
        for have, want in zip(got, wanted):
            assert have.dtype == torch.float32
            assert have.isfinite().all()
            same(have, want, 1e-6)
    assert math.isclose(float(fn(tool, summary, required, called)[1][1]), -0.5)
    leaves = [tool.clone().requires_grad_(), summary.clone().requires_grad_()]
    sum(part.sum() for part in fn(*leaves, required, called)).backward()
    for leaf in leaves:
        assert leaf.grad.tolist() == [1.0, 0.0, 0.0, 1.0]
