"""Router probabilities and the way a derivative travels back from them to the logits."""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from credit._safe import compute_dtype, on_processor
from moe_routing.blocks import row_blocks

Activation = Literal["softmax", "sigmoid"]
# Of a row whose highest logit is above, sigmoids that underflow float32 are below 1e-19 of the sum.
FAINT_LOGIT = -40.0


def check_activation(activation: str) -> None:
    """Raise ``ValueError`` for an activation that this package does not know."""
    if activation not in ("softmax", "sigmoid"):
        raise ValueError(f"activation must be 'softmax' or 'sigmoid', got {activation!r}")


def router_log_probs(
    logits: Float[Tensor, "*layers tokens experts"], activation: Activation = "softmax"
) -> Float[Tensor, "*layers tokens experts"]:
    """Logarithm of :func:`router_probs`, computed without leaving log space.

    Reference: paper section 2.2 (softmax); the sigmoid form is ours.

    >>> router_log_probs(torch.tensor([[-200.0, -200.0]]), "sigmoid").exp()
    tensor([[0.5000, 0.5000]])
    """
    check_activation(activation)
    return F.log_softmax(router_scores(logits.to(compute_dtype(logits)), activation), dim=-1)


def router_scores(
    logits: Float[Tensor, "*layers tokens experts"], activation: Activation
) -> Float[Tensor, "*layers tokens experts"]:
    """Logarithms of the unnormalised probabilities, so that ``p = softmax(scores)`` for either activation."""
    return logits if activation == "softmax" else F.logsigmoid(logits)


def router_probs(
    logits: Float[Tensor, "*layers tokens experts"], activation: Activation = "softmax"
) -> Float[Tensor, "*layers tokens experts"]:
    """Distribution of the router over all experts.

    ``p = softmax(z)``, or ``p = sigmoid(z) / sum sigmoid(z)`` for the DeepSeek-V3 and GLM-4 kind.

    Args:
        logits: raw router logits, any floating dtype. A router that softens only its top-k is described by the
            softmax over all experts too.
        activation: the router's own score function.

    Returns:
        Probabilities in float32 (float64 for float64 logits).

    Raises:
        ValueError: for an unknown activation.

    Reference: paper section 2.2 (softmax); the sigmoid form is ours.

    >>> router_probs(torch.zeros(1, 4))
    tensor([[0.2500, 0.2500, 0.2500, 0.2500]])
    """
    check_activation(activation)
    wide = logits.to(compute_dtype(logits))
    learns = wide.requires_grad and torch.is_grad_enabled()
    if activation == "softmax" or learns or not on_processor(wide) or wide.numel() == 0:
        return torch.softmax(router_scores(wide, activation), dim=-1)
    table = wide.reshape(-1, wide.shape[-1])
    probs = torch.empty_like(table)
    for rows in row_blocks(table):
        usable_probs(table[rows], activation, out=probs[rows])
    return probs.reshape(wide.shape)


def chosen_probs(
    logits: Float[Tensor, "tokens experts"], selected: Int[Tensor, "tokens k"]
) -> Float[Tensor, "tokens k"]:
    """Softmax over all experts in float32, gathered at the selection.

    >>> chosen_probs(torch.zeros(1, 4), torch.tensor([[2, 3]]))
    tensor([[0.2500, 0.2500]])
    """
    if not on_processor(logits) or (logits.requires_grad and torch.is_grad_enabled()):
        return torch.softmax(logits.float(), dim=-1).gather(1, selected)
    chosen = logits.new_empty(selected.shape, dtype=torch.float32)
    blocks = row_blocks(logits)
    space = chosen.new_empty(blocks[0].stop, logits.shape[1])
    for rows in blocks:
        probs = torch.softmax(logits[rows].float(), dim=-1, out=space[: rows.stop - rows.start])
        torch.gather(probs, 1, selected[rows], out=chosen[rows])
    return chosen


def usable_rows(logits: Float[Tensor, "*layers tokens experts"]) -> Bool[Tensor, "*layers tokens"]:
    """True where a row of logits defines a distribution: no NaN, no +inf, and at least one finite entry.

    A single -inf is legal: that expert is pruned and has probability 0.
    """
    top = logits.amax(-1) if logits.shape[-1] else logits.new_full(logits.shape[:-1], float("nan"))
    return torch.isfinite(top)


def pull_back(
    probs: Float[Tensor, "tokens experts"],
    logits: Float[Tensor, "tokens experts"],
    direction: Float[Tensor, "tokens experts"],
    activation: Activation = "softmax",
) -> Float[Tensor, "tokens experts"]:
    """Derivative at the logits of a function whose derivative at the probabilities is ``direction``.

    ``p * (v - <p, v>)`` for softmax, times ``1 - sigmoid(z)`` for sigmoid routers.

    >>> pull_back(torch.tensor([[0.5, 0.5]]), torch.zeros(1, 2), torch.tensor([[1.0, 0.0]]))
    tensor([[ 0.2500, -0.2500]])
    """
    inner = (probs * direction).sum(-1, keepdim=True)
    return logit_slope(probs * (direction - inner), logits, activation)


def usable_probs(
    logits: Float[Tensor, "tokens experts"], activation: Activation, *, out: Float[Tensor, "tokens experts"]
) -> Bool[Tensor, " tokens"]:
    """:func:`usable_rows`, and in ``out`` their :func:`router_probs`; a row that is not usable may hold anything."""
    if activation == "softmax":
        torch.softmax(logits, dim=-1, out=out)
        # One NaN, one +inf or nothing but -inf makes the sum of a row NaN, and with it every entry.
        return ~torch.isnan(out[:, 0])
    top = logits.amax(-1)
    usable = torch.isfinite(top)
    if not on_processor(logits):
        torch.softmax(router_scores(logits, activation), dim=-1, out=out)
        return usable
    torch.sigmoid(logits, out=out)
    out.div_(out.sum(-1, keepdim=True))
    # Scores that all underflow are renormalised in log space, which costs three times as much.
    faint = (top < FAINT_LOGIT).nonzero()[:, 0]
    if faint.numel():
        out.index_copy_(0, faint, torch.softmax(router_scores(logits[faint], activation), dim=-1))
    return usable


def softmax_pull_(
    direction: Float[Tensor, "tokens experts"], probs: Float[Tensor, "tokens experts"]
) -> Float[Tensor, "tokens experts"]:
    """``p * (v - <p, v>)`` in place of ``v``.

    >>> softmax_pull_(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.5, 0.5]]))
    tensor([[ 0.2500, -0.2500]])
    """
    if on_processor(direction):
        # The backward of softmax is this very product: one pass in place of three.
        torch.ops.aten._softmax_backward_data.out(direction, probs, -1, probs.dtype, grad_input=direction)
        return direction
    direction.mul_(probs)
    return direction.addcmul_(probs, direction.sum(-1, keepdim=True), value=-1)


def logit_slope(
    gradient: Float[Tensor, "tokens experts"], logits: Float[Tensor, "tokens experts"], activation: Activation
) -> Float[Tensor, "tokens experts"]:
    """Last factor of the chain rule: 1 for softmax, ``1 - sigmoid(z) = sigmoid(-z)`` for sigmoid routers."""
    return gradient if activation == "softmax" else gradient * torch.sigmoid(-logits)
