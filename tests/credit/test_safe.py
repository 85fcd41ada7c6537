"""Where-safe arithmetic, at the edge where the unsafe form turns NaN."""

import pytest
import torch

from credit import _safe
from tests.credit.checks_safe import check_divide, check_log, check_masked_mean, check_select, check_sqrt


@pytest.mark.parametrize(
    ("check", "function"),
    [
        (check_select, _safe.select),
        (check_divide, _safe.safe_divide),
        (check_log, _safe.safe_log),
        (check_sqrt, _safe.safe_sqrt),
        (check_masked_mean, _safe.masked_mean),
    ],
    ids=lambda part: getattr(part, "__name__", None),
)
def test_checks(check, function):
    check(function)


def test_the_usual_forms_do_turn_nan():
    """The trap that the double where avoids: one where on the output leaves a NaN in the gradient."""
    x = torch.zeros(1, requires_grad=True)
    torch.where(x > 0, torch.sqrt(x), 0.0).sum().backward()
    assert x.grad.isnan().all()


def test_masks_in_any_dtype():
    for dtype in (torch.bool, torch.int32, torch.uint8, torch.float32, torch.bfloat16):
        assert _safe.as_mask(torch.tensor([0, 1], dtype=dtype)).tolist() == [False, True]


def test_dtypes():
    assert _safe.compute_dtype(torch.zeros(1, dtype=torch.bfloat16)) == torch.float32
    assert _safe.compute_dtype(torch.zeros(1, dtype=torch.float64)) == torch.float64
    assert _safe.statistics_dtype(torch.zeros(1, dtype=torch.bfloat16)) == torch.float64
    assert _safe.statistics_dtype(torch.zeros(1, device="meta")) == torch.float64


def test_errors_name_the_argument_and_both_shapes():
    with pytest.raises(ValueError, match=r"mask has shape \(2,\), but logp asks for \(3,\)"):
        _safe.require_shape("mask", torch.zeros(2), (3,), "logp")
    with pytest.raises(ValueError, match=r"logp has shape \(2,\), but \[batch, tokens\]"):
        _safe.require_matrix("logp", torch.zeros(2))
    ugly = torch.tensor([[0.0, float("nan")], [float("inf"), 0.0]])
    with pytest.raises(ValueError, match=r"r\[1, 0\] is inf"):
        _safe.require_finite("r", ugly, torch.tensor([[True, False], [True, True]]))
    _safe.require_finite("r", ugly, torch.eye(2) > 0)


def test_what_is_kept_by_bits_can_be_differentiated_twice_and_mapped():
    values = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([True, False, True, True]).expand(3, 4)
    assert torch.autograd.gradcheck(lambda x: _safe.keep(mask, x * x), values)
    assert torch.autograd.gradgradcheck(lambda x: _safe.keep(mask, x * x), values)
    assert torch.equal(torch.vmap(_safe.keep)(mask, values), _safe.select(mask, values))
