"""``torch.compile(fullgraph=True)`` takes every primitive whole, and value and gradient stay those of eager mode.

One subprocess without the shape annotations, whose run-time checks a compiler cannot trace.
"""

import os
import subprocess
import sys

SCRIPT = """
import torch
from credit import (aggregate_loss, assign_credit, format_weighted_ce, group_advantage, kl_k3, policy_loss, run_ids,
                    tool_summary_segments)

g = torch.Generator().manual_seed(0)
rand = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)
mask = torch.rand(6, 9, generator=g) < 0.6
mask[2] = False
group = torch.tensor([7, -3, 10**9, 7, 7, -3])
present = torch.tensor([True, True, True, True, False, True])
segments = tool_summary_segments(mask)
old, advantages, ref = rand(6, 9), rand(6, 9), rand(6, 9)
nan = torch.where(mask, 0.0, torch.nan)
weights = torch.tensor([[1.0, 0.5], [0.0, 2.0]], dtype=torch.float64)
protocol = mask & (advantages > 0)
MODE = "seq_mean_token_sum_norm"

def both(x):
    result = policy_loss(x, old, advantages, mask, mode=MODE)
    return result.loss + result.stats.kl_sum + result.stats.ratio_max

CASES = {{
    "group_advantage": (lambda r: group_advantage(r, group, present), rand(6), "{wide}"),
    "assign_credit": (lambda a: assign_credit(a, segments, weights), rand(6, 2), "{narrow}"),
    "assign_runs": (lambda a: assign_credit(a, segments, weights[:, :1]), rand(6, 9, 1), "{narrow}"),
    "policy_loss": (lambda x: policy_loss(x + nan, old, advantages, mask).loss, rand(6, 9), "{wide}"),
    "policy_stats": (both, rand(6, 9), "{narrow}"),
    "kl_k3": (lambda x: kl_k3(x, ref), rand(6, 9), "{narrow}"),
    "aggregate_loss": (lambda x: aggregate_loss(x + nan, mask, MODE, 4.0), rand(6, 9), "{narrow}"),
    "format_weighted_ce": (lambda x: format_weighted_ce(x + nan, mask, protocol), rand(6, 9), "{narrow}"),
}}
for name, (function, leaf, backend) in CASES.items():
    results = []
    for call in (function, torch.compile(function, fullgraph=True, backend=backend)):
        x = leaf.clone().requires_grad_()
        out = call(x)
        (out * torch.linspace(1, 2, out.numel(), dtype=out.dtype).view(out.shape)).sum().backward()
        results.append((out.detach(), x.grad))
    for got, wanted in zip(*results):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)
    print("same", name)
for name, function in (("run_ids", run_ids), ("tool_summary_segments", tool_summary_segments),
                       ("unless_followed", lambda m: tool_summary_segments(m, final="unless_followed"))):
    assert torch.equal(torch.compile(function, fullgraph=True, backend="eager")(mask), function(mask))
    print("same", name)
"""


def test_compiles_whole_and_equals_eager():
    script = SCRIPT.format(wide="aot_eager", narrow="eager")
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "JAXTYPING_DISABLE": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert done.stdout.count("same") == 11
