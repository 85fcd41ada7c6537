"""Which ranks hold rows of their own: what TRL's trainer counts, groups and averages over."""

from typing import Any


def require_own_rows(trainer: Any) -> None:
    """Raise unless every rank of a GRPO trainer works on rows of its own.

    Under tensor, context, sequence and pipeline parallelism several ranks work on one batch. TRL's GRPO trainer does
    not: it seeds every rank by itself, so that the ranks of one batch sample other completions for it, shuffle its
    rows another way and add up layers of different tokens; and it gathers each row once from every rank, so that
    blocks of ``num_generations`` rows are no groups any more. Gradients are then averaged over fewer ranks than
    ``num_processes``. Experts that are spread over data-parallel ranks leave every rank its own rows.

    Raises:
        NotImplementedError: ranks share a batch; the message says how many, and by which parallelism.

    Example:
        >>> from types import SimpleNamespace
        >>> sizes = {"get_tp_size": lambda: 2, "get_cp_size": lambda: 1, "get_sp_size": lambda: 1}
        >>> require_own_rows(SimpleNamespace(model=None, **sizes))
        Traceback (most recent call last):
        NotImplementedError: 2 ranks share each batch (tensor parallelism), but TRL's GRPO trainer generates and
        shuffles on every rank by itself: they would work on different rows. Use DDP, FSDP or DeepSpeed, and for
        experts DistributedConfig(fsdp_size=N, ep_size=N)
    """
    config = getattr(trainer.model, "config", None)
    layout = getattr(config, "distributed_config", None)
    sizes = {
        "tensor": trainer.get_tp_size(),
        "context": trainer.get_cp_size(),
        "sequence": trainer.get_sp_size(),
        "pipeline": getattr(layout, "pp_size", 1) or 1,
    }
    sharing, kinds = 1, []
    for kind, size in sizes.items():
        sharing *= size or 1  # DeepSpeed writes 0 for none
        kinds += [kind] * (size > 1)
    if sharing > 1:
        raise NotImplementedError(
            f"{sharing} ranks share each batch ({' and '.join(kinds)} parallelism), but TRL's GRPO trainer generates "
            "and shuffles on every rank by itself: they would work on different rows. Use DDP, FSDP or DeepSpeed, and "
            "for experts DistributedConfig(fsdp_size=N, ep_size=N)"
        )
