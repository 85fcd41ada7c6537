"""One rank of two, run as a script: half of the rows, under DDP or FSDP2, with statistics reduced over both."""

import datetime
import sys

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from moe_routing.adapters.transformers import RoutingControl
from tests.moe_routing.adapters import steering
from tests.moe_routing.adapters.tiny_families import tiny_model

WAYS = [("ddp", "backbone"), ("fsdp2", "backbone"), ("fsdp2", "router")]


def wrapped(kind: str) -> nn.Module:
    model = tiny_model("qwen3_moe")
    if kind == "ddp":
        return DistributedDataParallel(model, find_unused_parameters=True)
    mesh = init_device_mesh("cpu", (2,))
    for part in [*model.layers, model]:
        fully_shard(part, mesh=mesh)
    return model


def step(rank: int, model: nn.Module, reach: str) -> dict[str, torch.Tensor]:
    rows = slice(2 * rank, 2 * rank + 2)
    ids, field = steering.tokens()[rows], steering.fields()[rows]
    weight = torch.randn(steering.ROWS, steering.LENGTH, 32, generator=torch.Generator().manual_seed(2)).double()[rows]
    with RoutingControl(model, reach=reach, **steering.STRONG) as control:
        with torch.no_grad(), control.record(field, steering.labels(), steering.kinds()):
            model(input_ids=ids, use_cache=False)
        tables = control.tables(0.1)
        with control.bind(field, tables):
            (model(input_ids=ids, use_cache=False)[0] * weight).tanh().sum().backward()
    found = steering.gradients(getattr(model, "module", model))
    return {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in found.items()}


def main(rank: int, folder: str) -> None:
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=120),
    )
    try:
        torch.save({(kind, reach): step(rank, wrapped(kind), reach) for kind, reach in WAYS}, f"{folder}/{rank}.pt")
    finally:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
