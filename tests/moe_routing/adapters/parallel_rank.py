"""One rank of two, run as a script: the layouts of expert and tensor parallelism that transformers offers for two."""

import datetime
import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers.distributed import DistributedConfig

from moe_routing.adapters.replay import RoutingReplay
from moe_routing.adapters.transformers import RoutingControl
from tests.moe_routing.adapters import steering
from tests.moe_routing.adapters.tiny_families import model_class

FAMILIES = ("qwen3_moe", "deepseek_v3", "gpt_oss")
# With `fsdp_size` each rank holds half of the rows; the others share the whole batch.
LAYOUTS: dict[str, dict[str, Any]] = {
    "experts by all-to-all": {"tp_size": 2, "ep_size": 2, "ep_implementation": "all_to_all"},
    "experts by all-reduce": {"tp_size": 2, "ep_size": 2, "ep_implementation": "all_reduce"},
    "experts as the library likes": {"tp_size": 2, "ep_size": 2},
    "experts over fsdp": {"fsdp_size": 2, "ep_size": 2},
    "tensors": {"tp_size": 2},
}
# The library wants a tensor-parallel plan beside that of the experts, and has none for this family.
PLANS = {"gpt_oss": {"embed_tokens": "embedding_rowwise"}}


def layout_of(family: str, layout: str) -> DistributedConfig:
    chosen = LAYOUTS[layout]
    plan = {"tp_plan": PLANS.get(family, "auto")} if "tp_size" in chosen else {}
    return DistributedConfig(**chosen | plan)


def foreign(model: nn.Module) -> Tensor:
    """Experts that no router asked for."""
    generator = torch.Generator().manual_seed(3)
    return torch.rand(steering.ROWS * steering.LENGTH, 2, 8, generator=generator).argsort(-1)[..., :2]


def gradients(model: nn.Module, rows: slice) -> dict[str, Tensor]:
    """Gradient of every parameter, put together from its shards."""
    hidden = model(input_ids=steering.tokens()[rows], use_cache=False)[0]
    weight = torch.randn(steering.ROWS, steering.LENGTH, 32, generator=torch.Generator().manual_seed(2)).double()[rows]
    (hidden * weight).tanh().sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return {name: g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for name, g in found.items()}


def step(model: nn.Module, rows: slice = slice(None)) -> dict[str, Any]:
    """A plain step, steered ones, and one with a replayed selection."""
    field, found = steering.fields()[rows], {"plain": gradients(model, rows)}

    def record(control: RoutingControl) -> None:
        with torch.no_grad(), control.record(field, steering.labels(), steering.kinds()):
            model(input_ids=steering.tokens()[rows], use_cache=False)

    for reach in ("backbone", "router"):
        with RoutingControl(model, reach=reach, normalizer="turns", **steering.STRONG) as control:
            record(control)
            everywhere = control.tables(0.1, process_group=torch.distributed.group.WORLD)
            record(control)
            tables = control.tables(0.1)
            with control.bind(field, tables):
                found[reach] = gradients(model, rows)
    per_row = foreign(model).reshape(steering.ROWS, steering.LENGTH, 2, 2)[rows]
    with RoutingReplay(model, per_row.flatten(0, 1)):
        found["replay"] = gradients(model, rows)
    names = ("num_pairs", "divisor", "num_turns", "information")
    found["tables"], found["over all ranks"] = ({n: getattr(t, n) for n in names} for t in (tables, everywhere))
    return found


def main(rank: int, folder: str) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2,
        timeout=datetime.timedelta(seconds=120),
    )  # fmt: skip
    try:
        found = {}
        for family in FAMILIES:
            for layout in LAYOUTS:
                model = model_class(family).from_pretrained(
                    f"{folder}/{family}", dtype=torch.float64, attn_implementation="eager",
                    experts_implementation="batched_mm", distributed_config=layout_of(family, layout),
                )  # fmt: skip
                rows = slice(2 * rank, 2 * rank + 2) if "fsdp_size" in LAYOUTS[layout] else slice(None)
                found[family, layout] = step(model.eval(), rows)
        torch.save(found, f"{folder}/{rank}.pt")
    finally:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
