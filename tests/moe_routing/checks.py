"""Checks of one implementation against the references and the facts of the specification.

Each takes the implementation and a seed, so that the tests run them on the package and the mutant tests run the very
same ones on broken copies of it.
"""

import math

import torch
from torch.testing import assert_close

from moe_routing import blocks
from tests.moe_routing import reference as ref
from tests.moe_routing.cases import ACTIVATIONS, TARGETS, Case, make_case


def option(options, seed):
    return options[seed % len(options)]


def plain(case: Case, **options):
    """Arguments of router_gradient besides the two tensors, at weights large enough to see."""
    defaults = {
        "field": case.field,
        "selected": case.selected,
        "num_pairs": max(len(ref.pairs(case.field)), 1),
        "lambda_turn": 0.7,
        "lambda_token": 0.3,
    }
    return defaults | options


def control_of(case: Case, activation: str) -> torch.Tensor:
    """Control table by the package's definition, in loops."""
    q = ref.usage(ref.probs(case.logits, activation), case.field, case.num_fields)
    turns = sum(row is not None for row in q)
    table = torch.zeros(case.num_fields, case.experts, dtype=torch.float64)
    if turns < 8:
        return table
    pmi = [ref.pmi(q, case.labels, o) for o in range(case.labels.shape[1])]
    for f, row in enumerate(q):
        if row is not None:
            tokens = int((case.field == f).sum())
            table[f] = sum(p[int(case.labels[f, o])] for o, p in enumerate(pmi)) / (turns * tokens)
    return table


def check_gap(fn, seed):
    case = make_case(seed)
    value, valid = fn(case.selected, case.field)
    assert valid.nonzero().flatten().tolist() == ref.pairs(case.field)
    expected = [ref.gap(case.selected, t) if t in ref.pairs(case.field) else 0.0 for t in range(len(case.field))]
    assert_close(value, torch.tensor(expected, dtype=torch.float32), rtol=0, atol=0)


def check_jaccard(fn, seed):
    case = make_case(seed)
    value, valid = fn(case.selected, case.field)
    for t in ref.pairs(case.field):
        assert bool(valid[t])
        assert math.isclose(float(value[t]), ref.jaccard(case.selected, t), rel_tol=1e-6)
    assert int(valid.sum()) == len(ref.pairs(case.field))
    assert value[~valid].eq(0).all()


def check_shift_histogram(fn, seed):
    case = make_case(seed)
    assert fn(case.selected, case.field).tolist() == ref.shift_histogram(case.selected, case.field)


def check_load_cv(fn, seed):
    case = make_case(seed)
    got = fn(case.selected, case.field, case.experts)
    ids = sorted({f for f in case.field.tolist() if f >= 0})
    loads = [ref.counts(case.selected, case.field, f, case.experts) for f in ids]
    assert_close(got, torch.tensor([ref.load_cv(c) for c in loads], dtype=got.dtype), rtol=1e-6, atol=1e-7)
    for value, load in zip(got.tolist(), loads):
        assert (value == 0) == (len(set(load)) == 1)
        assert value <= math.sqrt(case.experts / case.k - 1) * (1 + 1e-6)
    same = torch.arange(case.k).expand(9, -1)
    collapsed = fn(same, torch.zeros(9, dtype=torch.long), case.experts)
    assert_close(collapsed, torch.tensor([math.sqrt(case.experts / case.k - 1)]), rtol=1e-6, atol=1e-7)


def check_consensus(fn, seed):
    case = make_case(seed)
    size = 1 + seed % case.experts
    got = fn(case.selected, case.field, case.experts, size, case.num_fields)
    expected = [ref.consensus(case.selected, case.field, f, case.experts, size) for f in range(case.num_fields)]
    assert got.tolist() == expected


def check_load_balancing(fn, seed):
    case = make_case(seed)
    p = ref.probs(case.logits, "softmax")
    mask = case.field >= 0
    n = int(mask.sum())
    expected = 0.0
    for e in range(case.experts):
        hits = sum(e in case.selected[t].tolist() for t in range(len(mask)) if mask[t])
        expected += hits / max(n, 1) * float(p[mask, e].sum()) / max(n, 1)
    got = fn(p, case.selected, mask)
    assert_close(got, torch.tensor(expected * case.experts / case.k, dtype=got.dtype), rtol=1e-9, atol=1e-12)
    everyone = torch.arange(case.experts)[:, None]
    uniform = torch.full((2, case.experts, case.experts), 1 / case.experts, dtype=torch.float64)
    assert_close(fn(uniform, everyone.expand(2, -1, 1), everyone[:, 0] >= 0), torch.ones(2, dtype=torch.float64))
    # Layers that collapse, each on another expert, look balanced when they are pooled before the product.
    collapsed = torch.eye(case.experts, dtype=torch.float64)[:, None].expand(-1, 3, -1)
    value = fn(collapsed, everyone[:, None].expand(-1, 3, 1), torch.ones(3, dtype=torch.bool))
    assert_close(value, torch.full((case.experts,), case.experts, dtype=torch.float64))


def statistics(cls, case: Case, activation="softmax"):
    q = ref.usage(ref.probs(case.logits, activation), case.field, case.num_fields)
    rows = [torch.zeros(case.experts, dtype=torch.float64) if row is None else row for row in q]
    table = torch.stack(rows) if rows else torch.zeros(0, case.experts, dtype=torch.float64)
    return q, cls.from_usage(table, case.labels, case.eligible())


def check_information(cls, seed):
    """pmi and I against loops; 0 <= I <= min(H(E), H(Y)); I = H(E) - H(E|Y); a constant label adds exactly 0."""
    case = make_case(seed)
    q, stats = statistics(cls, case)
    turns = [i for i, row in enumerate(q) if row is not None]
    assert int(stats.num_turns) == len(turns)
    got_pmi, got = stats.pmi(), stats.information()
    if not turns:
        assert got_pmi.eq(0).all()
        assert got.eq(0).all()
        return
    for o in range(case.labels.shape[1]):
        assert_close(got_pmi[o], ref.pmi(q, case.labels, o), rtol=1e-8, atol=1e-8)
        table, share = ref.joint(q, case.labels, o)
        value = float(got[o])
        assert math.isclose(value, ref.information(q, case.labels, o), rel_tol=1e-6, abs_tol=1e-9)
        h_e, h_y = ref.entropy(table.sum(0).tolist()), ref.entropy(share)
        assert -1e-9 <= value <= min(h_e, h_y) + 1e-9
        conditional = sum(s * ref.entropy((row / s).tolist()) for row, s in zip(table, share) if s > 0)
        assert math.isclose(value, h_e - conditional, abs_tol=1e-8)
        if len({bool(case.labels[i, o]) for i in turns}) == 1:
            assert got_pmi[o].eq(0).all()
            assert value == 0
    # A label that is independent of the usage: every turn appears once with it and once without.
    usage = torch.stack([q[i] for i in turns] * 2)
    labels = torch.tensor([[True]] * len(turns) + [[False]] * len(turns))
    independent = cls.from_usage(usage, labels, torch.ones(len(labels), dtype=torch.bool))
    assert abs(float(independent.information())) < 1e-12


def check_turn_control(fn, seed):
    case = make_case(seed)
    activation = option(ACTIVATIONS, seed)
    q = ref.usage(ref.probs(case.logits, activation), case.field, case.num_fields)
    if not any(row is not None for row in q):
        return
    turns = sum(row is not None for row in q)
    pmi = torch.stack([ref.pmi(q, case.labels, o) for o in range(case.labels.shape[1])])
    tokens = case.tokens_of_field()
    got = fn(pmi, case.labels, tokens, turns)
    assert_close(got, control_of(case, activation), rtol=1e-9, atol=1e-12)
    mean = fn(pmi, case.labels, tokens, torch.tensor(turns), reduction="mean")
    assert_close(mean, got / case.labels.shape[1], rtol=1e-9, atol=1e-12)


def check_token_loss(fn, seed):
    """Value and gradient of every target against loops."""
    case = make_case(seed)
    for target in TARGETS:
        for activation in ACTIVATIONS:
            threshold = option((0.5, 0.0, 1.0, -1.0, 0.3), seed)
            z = case.logits.clone().requires_grad_()
            loss, valid = fn(
                z, case.selected, case.field, gap_threshold=threshold, target=target, activation=activation
            )
            assert valid.nonzero().flatten().tolist() == ref.pairs(case.field)
            w = case.logits.clone().requires_grad_()
            p = ref.probs(w, activation)
            expected = torch.zeros(len(case.field), dtype=torch.float64)
            for t in ref.pairs(case.field):
                if ref.gap(case.selected, t) <= threshold:
                    expected[t] = ref.token_loss(p, case.selected, t, target)
            assert_close(loss, expected, rtol=1e-9, atol=1e-12)
            if expected.requires_grad:
                assert_close(
                    torch.autograd.grad(loss.sum(), z)[0],
                    torch.autograd.grad(expected.sum(), w)[0],
                    rtol=1e-9,
                    atol=1e-12,
                )


def check_router_gradient(fn, seed):
    """Equality with autograd of the explicit objective, at rho = 1 and with rho from loops."""
    case = make_case(seed)
    for index, target in enumerate(TARGETS):
        activation = option(ACTIVATIONS, seed + index)
        threshold = option((0.5, 0.0, 1.0, -1.0, 0.3), seed + index)
        control = control_of(case, activation)
        for use_rho in (False, True):
            options = plain(case, control=control, gap_threshold=threshold, rho=use_rho)
            got = fn(case.logits, case.grad_in, **options, activation=activation, target=target)
            expected = ref.injection(
                case,
                lambda_turn=0.7,
                lambda_token=0.3,
                threshold=threshold,
                activation=activation,
                target=target,
                num_pairs=options["num_pairs"],
                use_rho=use_rho,
            )
            assert_close(got, case.grad_in + expected, rtol=1e-9, atol=1e-11)
            outside = case.field < 0
            assert torch.equal(got[outside], case.grad_in[outside])
            if activation == "softmax":
                assert (got - case.grad_in).sum(-1).abs().max() < 1e-12 if got.numel() else True


def check_gradient_edges(fn, seed):
    """Closed gate, half precision, zero rows and rows that are not finite."""
    case = make_case(seed)
    if not len(case.field):
        return
    options = plain(case, control=torch.randn(case.num_fields, case.experts, dtype=torch.float64))
    for closed in ({"gate": 0.0}, {"lambda_turn": 0.0, "lambda_token": 0.0}, {"gate": torch.tensor(0.0)}):
        assert torch.equal(fn(case.logits, case.grad_in, **options | closed), case.grad_in)
    for dtype in (torch.bfloat16, torch.float16):
        low = fn(case.logits.to(dtype), case.grad_in.to(dtype), **options)
        assert low.dtype == dtype
        wide = fn(case.logits.to(dtype).float(), case.grad_in.to(dtype).float(), **options)
        assert_close(low, wide.to(dtype), rtol=0, atol=0)
    bad = case.grad_in.clone()
    row = seed % len(bad)
    bad[row, 0] = option((math.nan, math.inf, -math.inf), seed)
    silent = (row + 1) % len(bad)
    bad[silent] = 0
    got = fn(case.logits, bad, **options)
    assert torch.equal(got.isfinite(), bad.isfinite())
    assert got[silent].eq(0).all() or silent == row
    other = torch.ones(len(bad), dtype=torch.bool)
    other[row] = False
    # A row that is not finite takes no part: its field fares as if its gradient had been zero.
    quiet = bad.clone()
    quiet[row] = 0
    assert torch.equal(got[other], fn(case.logits, quiet, **options)[other])
    broken = case.logits.clone()
    broken[row, -1] = option((math.nan, math.inf), seed)
    got = fn(broken, case.grad_in, **options)
    assert got.isfinite().all()
    assert torch.equal(got[row], case.grad_in[row])


def check_gap_at_threshold(fn, seed):
    """A gap of i/k is not above the number i/k, in single precision and for every k in use."""
    k = 1 + seed % 32
    for changed in range(k + 1):
        selected = torch.stack([torch.arange(k), torch.arange(changed, k + changed)])
        gap, _ = fn(selected, torch.zeros(2, dtype=torch.long))
        assert bool(gap[1] <= changed / k), (changed, k)


def check_share(fn, seed):
    """rho against loops; a row that is not finite is left out of its field's maximum."""
    case = make_case(seed)
    value, active = fn(case.grad_in, case.field, case.num_fields)
    assert_close(value, torch.tensor(ref.rho(case.grad_in, case.field), dtype=torch.float64), rtol=1e-12, atol=0)
    assert torch.equal(active, case.field >= 0)
    if len(case.field):
        bad, quiet = case.grad_in.clone(), case.grad_in.clone()
        bad[seed % len(bad), 0], quiet[seed % len(bad)] = math.nan, 0
        assert torch.equal(fn(bad, case.field, case.num_fields)[0], fn(quiet, case.field, case.num_fields)[0])


def check_blocks(fn, seed):
    """Blocks of rows change no bit, whatever their length and however ugly the rows; of a sigmoid perhaps the last."""
    case = make_case(seed)
    target, activation = option(TARGETS, seed), option(ACTIVATIONS, seed // 4)
    options = plain(case, control=control_of(case, activation).float(), activation=activation, target=target)
    logits, grad_in = case.logits.float(), case.grad_in.to(option((torch.float32, torch.bfloat16), seed // 8))
    if len(logits) > 3:
        row = torch.arange(4) * (len(logits) // 4)
        logits[row[0]], logits[row[1], 0], logits[row[2], 1] = -90.0, math.nan, -math.inf
        grad_in[row[3]] = -0.0
    before = blocks.BLOCK_ELEMENTS
    try:
        for rho in (True, False):
            whole = fn(logits, grad_in, **options, rho=rho)
            for rows in (1, 2, 5):
                blocks.BLOCK_ELEMENTS = rows * case.experts
                got = fn(logits, grad_in, **options, rho=rho)
                if activation == "softmax":
                    assert torch.equal(got, whole)
                assert_close(got, whole)
                assert torch.equal(torch.signbit(got), torch.signbit(whole))
            blocks.BLOCK_ELEMENTS = before
    finally:
        blocks.BLOCK_ELEMENTS = before


def check_faint_rows(fn, seed):
    """Sigmoids that all underflow still make a distribution, as do the probabilities of experts far down."""
    case = make_case(seed)
    if not len(case.field):
        return
    target = option(TARGETS, seed)
    faint = case.logits - 300.0
    faint[:, 0] += option((0.0, 300.0), seed)
    for activation in ACTIVATIONS:
        control = torch.randn(case.num_fields, case.experts, dtype=torch.float64)
        options = plain(case, control=control, activation=activation, target=target)
        got = fn(faint.float(), case.grad_in.float(), **options)
        want = fn(faint, case.grad_in, **options)
        assert_close(got, want.float(), rtol=1e-4, atol=1e-4)
