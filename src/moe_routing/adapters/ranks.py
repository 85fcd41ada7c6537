"""Which ranks hold batches of their own, so that statistics count every batch once."""

from typing import Any

from torch import nn


def batch_groups(model: nn.Module) -> list[Any]:
    """Process groups to add sums up over, one after the other.

    Ranks of a tensor-parallel group of transformers, and those of its expert parallelism within one, work on one
    batch together: a sum over all ranks would count it once for each. What is left are the data-parallel axes.

    Returns:
        The groups of both data-parallel axes where transformers distributed a model below ``model``, else ``[None]``:
        all ranks.
    """
    for module in model.modules():
        meshes: Any = getattr(module, "_mesh_manager", None)
        if meshes is not None:
            return [meshes.get_mesh(axis).get_group() for axis in ("dp_replicate", "fsdp")]
    return [None]
