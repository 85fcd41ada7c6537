"""One rank of two, run as a script: half of the rows, under DDP, with statistics reduced over both."""

import datetime
import sys

import torch
from torch.nn.parallel import DistributedDataParallel

from moe_routing.adapters.transformers import RoutingControl
from tests.moe_routing.adapters import steering
from tests.moe_routing.adapters.tiny_families import tiny_model


def step(rank: int) -> dict[str, torch.Tensor]:
    rows = slice(2 * rank, 2 * rank + 2)
    ids, field = steering.tokens()[rows], steering.fields()[rows]
    model = DistributedDataParallel(tiny_model("qwen3_moe"), find_unused_parameters=True)
    weight = torch.randn(steering.ROWS, steering.LENGTH, 32, generator=torch.Generator().manual_seed(2)).double()[rows]
    with RoutingControl(model, **steering.STRONG) as control:
        with torch.no_grad(), control.record(field, steering.labels(), steering.kinds()):
            model(input_ids=ids)
        tables = control.tables()
        with control.bind(field, tables):
            (model(input_ids=ids, use_cache=False)[0] * weight).tanh().sum().backward()
    return steering.gradients(model.module)


def main(rank: int, folder: str) -> None:
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=120),
    )
    try:
        torch.save(step(rank), f"{folder}/{rank}.pt")
    finally:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
