"""Statistics as sums and counts."""

import pytest
import torch

from credit import clip_statistics, policy_loss, segment_statistics, stats
from tests.credit.checks_losses import (
    check_clip_statistics,
    check_segment_statistics,
)


@pytest.mark.parametrize(
    ("check", "function"),
    [
        (check_segment_statistics, segment_statistics),
        (check_clip_statistics, clip_statistics),
    ],
    ids=lambda part: getattr(part, "__name__", None),
)
def test_checks(check, function):
    check(function)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_segments_add_up_to_the_statistics_of_the_loss(dtype):
    g = torch.Generator().manual_seed(0)
    logp, old, advantages = torch.randn(3, 16, 32, generator=g).to(dtype)
    segments = torch.randint(-1, 2, (16, 32), generator=g)
    whole = policy_loss(logp, old, advantages, segments >= 0).stats
    parts = clip_statistics(logp, old, advantages, segments)
    for name in ("tokens", "clipped_low", "clipped_high", "clipped_dual"):
        assert getattr(parts, name).sum() == getattr(whole, name)
    torch.testing.assert_close(parts.kl_sum.sum(), whole.kl_sum, rtol=1e-5, atol=0)
    assert parts.ratio_max.max() == whole.ratio_max


def test_every_block_of_rows_is_counted(monkeypatch):
    g = torch.Generator().manual_seed(1)
    logp, old, advantages = torch.randn(3, 11, 24, generator=g)
    segments = torch.randint(-1, 3, (11, 24), generator=g)
    calls = (lambda: clip_statistics(logp, old, advantages, segments), lambda: segment_statistics(advantages, segments))
    whole = [vars(call()) for call in calls]
    monkeypatch.setattr(stats, "_BLOCK", 80)
    for call, wanted in zip(calls, whole, strict=True):
        for name, value in vars(call()).items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-12, atol=1e-12)
