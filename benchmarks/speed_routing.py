"""Cost of routing control: time and memory of a training step with it on and off, and of its gradient.

Part of `make bench`. Candidates take turns and ratios are taken within a round (see :mod:`benchmarks.timing`); the
two gradients are compared before they are timed. The section replaces the one of its name in the report.
"""

import argparse
import datetime
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.routing_cases import Step, gradient_candidates, moe_model, peak_bytes
from benchmarks.sections import write_section
from benchmarks.speed import Aim, require_agreement, spread
from benchmarks.timing import Rounds, Spread, interleave, machine, versions

TITLE = "Cost of routing control"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the section."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed_routing", description=__doc__)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256, help="per row")
    parser.add_argument("--gradient-tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1, help="1 times processor seconds, more the wall clock")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("RESULTS.md"))
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)

    step = Step(moe_model(chosen.layers, chosen.hidden, chosen.experts), chosen.rows, chosen.tokens)
    off, on = peak_bytes(step.off), peak_bytes(step.on)  # the two runs warm up what is timed
    weights = sum(parameter.nbytes for parameter in step.model.parameters())
    timed = interleave({"off": step.off, "on": step.on}, chosen.rounds, warmup=1)
    k = min(8, chosen.experts)
    candidates = gradient_candidates(chosen.gradient_tokens, chosen.experts, k)
    require_agreement({name: candidate() for name, candidate in candidates.items()}, 1e-5)
    slopes = interleave(candidates, 2 * chosen.rounds + 1)

    memory = (weights + on) / (weights + off)
    aims = [
        Aim("step, control on / off: time", timed.ratio("on", "off"), 1.05, at_least=False),
        Aim("step, control on / off: peak memory", Spread(memory, memory, memory), 1.02, at_least=False),
        Aim("gradient, autograd / `router_gradient`: time", slopes.ratio("autograd", "ours"), 3, at_least=True),
    ]
    shape = (
        f"{chosen.layers} layers, hidden size {chosen.hidden}, {chosen.experts} experts of which {k} are selected, "
        f"{weights / 1e6:.0f} MB of float32 weights, {chosen.rows}×{chosen.tokens} tokens"
    )
    section = _section(shape, aims, timed, slopes, (off, on), chosen.gradient_tokens)
    write_section(chosen.output, TITLE, section)
    print(f"# {TITLE}\n\n{section}")
    return 0


def _section(shape: str, aims: list[Aim], timed: Rounds, slopes: Rounds, peak: tuple[int, int], tokens: int) -> str:
    rows = "\n".join(aim.row() for aim in aims)
    times = "\n".join(
        f"| {name} | {spread(found.time(key).scaled(1e3))} | {kept} |"
        for name, found, key, kept in (
            ("step, control off", timed, "off", f"{peak[0] / 1e6:.1f}"),
            ("step, control on", timed, "on", f"{peak[1] / 1e6:.1f}"),
            ("`router_gradient`", slopes, "ours", ""),
            ("autograd through the objective", slopes, "autograd", ""),
        )
    )
    today = datetime.date.today().isoformat()
    return f"""Written by `python -m benchmarks.speed_routing` on {today}. Medians with the smallest and largest in
brackets, over {len(timed.seconds["on"])} rounds of the step and {len(slopes.seconds["ours"])} of the gradient.

* Machine: {machine()}
* Versions: {versions(("torch", "transformers"))}
* Model: the shape of Qwen3-MoE, {shape}.
  A model of full size spends a larger part of its step outside the routers.
* Step: forward under the old policy, forward, backward, SGD update. *On* attaches the control, records the old-policy
  forward and the expert selection in it, builds the tables, steers the backward, works out what is logged and detaches.
  Memory is that of the tensors made in the step at their peak; the ratio has the weights on both sides.
* Gradient: {tokens} tokens, rho = 1, equal to autograd's within 1e-5; both are given the turn statistics.

| ratio | aim | found | |
| --- | --- | --- | --- |
{rows}

| | ms | MB at the peak |
| --- | --- | --- |
{times}
"""


if __name__ == "__main__":
    raise SystemExit(main())
