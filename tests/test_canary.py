"""The import hook checks shapes in all three packages. A misspelt package name in the options would check nothing."""

import jaxtyping
import pytest
import torch


def test_credit():
    from credit import kl_k3

    with pytest.raises(jaxtyping.TypeCheckError):
        kl_k3(torch.zeros(2, 3), torch.zeros(2, 4))
    with pytest.raises(jaxtyping.TypeCheckError):
        kl_k3(torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64))


def test_moe_routing():
    from moe_routing import metrics

    with pytest.raises(jaxtyping.TypeCheckError):
        metrics.entropy("not a tensor")


def test_rewards():
    from rewards.calls import parse_tool_calls

    with pytest.raises(jaxtyping.TypeCheckError):
        parse_tool_calls(3)


def test_the_hook_can_be_switched_off():
    from credit import kl_k3

    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        with pytest.raises(ValueError, match="ref_logp"):
            kl_k3(torch.zeros(2, 3), torch.zeros(2, 4))
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
