"""The arithmetic of the injection: numbers of each token first, then the table of tokens by experts, block by block."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from credit._safe import compute_dtype, on_processor, safe_divide, select
from moe_routing.blocks import row_blocks
from moe_routing.objectives import Target, close_pairs, target_weights
from moe_routing.rho import gradient_share
from moe_routing.router import Activation, router_scores, softmax_pull_, usable_probs

# Of experts whose probabilities add up to more, those that underflow float32 have shares below 1e-18.
FAINT_SHARE = 1e-20
BY_TOKEN = ("row", "close", "previous", "scale", "active")


class Steering(NamedTuple):
    """All of an injection but the tables of tokens by experts.

    Attributes:
        table: control rows times ``lambda_turn``, and a row of zeros.
        pull: ``lambda_token / num_pairs``.
        row: row of the table for each token.
        close: tokens that the token term acts on.
        previous: experts of the token before.
        scale: ``-gate rho``.
        active: tokens that may get an injection.
    """

    table: Float[Tensor, "rows experts"]
    pull: Float[Tensor, ""]
    row: Int[Tensor, " tokens"]
    close: Bool[Tensor, " tokens"]
    previous: Int[Tensor, "tokens k"]
    scale: Float[Tensor, " tokens"]
    active: Bool[Tensor, " tokens"]
    activation: Activation
    target: Target

    @classmethod
    def of(
        cls,
        logits: Float[Tensor, "tokens experts"],
        grad_in: Float[Tensor, "tokens experts"],
        field: Int[Tensor, " tokens"],
        control: Float[Tensor, "fields experts"],
        selected: Int[Tensor, "tokens k"],
        num_pairs: int | Int[Tensor, ""],
        lambda_turn: float | Float[Tensor, ""],
        lambda_token: float | Float[Tensor, ""],
        gap_threshold: float,
        gate: float | Float[Tensor, ""],
        activation: Activation,
        target: Target,
        rho: bool,
    ) -> "Steering":
        """From the arguments of ``router_gradient``. With rho = 1 the gradient is not looked at."""
        dtype = torch.promote_types(compute_dtype(logits), grad_in.dtype)
        # A spare row for tokens outside fields: a table may have no row at all.
        nothing = control.new_zeros(1, control.shape[1], dtype=dtype)
        table = torch.cat([control.to(dtype) * _number(lambda_turn, nothing), nothing])
        row = torch.where(field >= 0, field, control.shape[0]).long()
        pull = safe_divide(_number(lambda_token, table), _number(num_pairs, table))
        pairs = close_pairs(selected, field, gap_threshold)
        # A token without either term is left alone: adding zeros would turn its -0.0 into 0.0.
        moved = (table.abs().amax(-1) != 0)[row] | (pairs.close & (pull != 0))
        share = gradient_share(grad_in, field, control.shape[0])[0].to(dtype) if rho else table.new_ones(field.shape)
        scale = -_number(gate, table) * share
        return cls(table, pull, row, pairs.close, pairs.previous, scale, moved & (scale != 0), activation, target)

    def blocks(
        self, logits: Float[Tensor, "tokens experts"]
    ) -> Iterator[tuple[slice, Float[Tensor, "block experts"] | None, Bool[Tensor, " block"]]]:
        """Blocks of tokens with their injection, still without ``scale``, and where it counts.

        None stands for a block in which it nowhere counts. An injection is overwritten by the next: a new buffer for
        each would come from the system page by page. Each block reads one row more, as a token looks back.
        """
        blocks = row_blocks(logits)
        longest = 1 + max(block.stop - block.start for block in blocks)
        shape = (longest, logits.shape[1])
        probs, direction = (torch.empty(shape, dtype=self.table.dtype, device=logits.device) for _ in range(2))
        for tokens in blocks:
            halo = min(tokens.start, 1)
            z = logits[tokens.start - halo : tokens.stop].to(self.table.dtype)
            part = self._replace(**{name: getattr(self, name)[tokens.start - halo : tokens.stop] for name in BY_TOKEN})
            if on_processor(z) and not bool(part.active[halo:].any()):
                yield tokens, None, part.active[halo:]
            else:
                usable = part.direct(z, probs[: z.shape[0]], direction[: z.shape[0]])
                yield tokens, direction[halo : z.shape[0]], (part.active & usable)[halo:]

    def direct(
        self,
        z: Float[Tensor, "tokens experts"],
        probs: Float[Tensor, "tokens experts"],
        direction: Float[Tensor, "tokens experts"],
    ) -> Bool[Tensor, " tokens"]:
        """Write the injection into ``direction`` and return where it may be used; ``probs`` is room to work in.

        Rows that are not usable are not cleaned: memory traffic is what this costs.
        """
        usable = usable_probs(z, self.activation, out=probs)
        torch.index_select(self.table, 0, self.row, out=direction)
        # The first row is the halo, or a token that nothing precedes.
        now, previous = direction[1:], self.previous[1:]
        acting = self.close[1:] & usable[1:] & usable[:-1]
        if self.target == "overlap":
            weight = select(acting, self.pull)
            now.addcmul_(weight[:, None], select(acting[:, None], probs[:-1]))
            softmax_pull_(direction, probs)
        else:
            share, reachable = self.shares(z, probs, previous)
            weight = select(acting & reachable, self.pull)[:, None]
            softmax_pull_(direction, probs)
            now.addcmul_(probs[1:], weight, value=-1).scatter_add_(1, previous, weight * share)
        if self.activation == "sigmoid":
            direction.mul_(torch.neg(z, out=probs).sigmoid_())
        return usable

    def shares(
        self, z: Float[Tensor, "rows experts"], probs: Float[Tensor, "rows experts"], previous: Int[Tensor, "tokens k"]
    ) -> tuple[Float[Tensor, "tokens k"], Bool[Tensor, " tokens"]]:
        """``target_weights`` of each row but the first, from probabilities where they have not underflowed."""
        if not on_processor(z):
            return self._shares_of_scores(z[:-1], z[1:], previous)
        current = probs[1:].gather(1, previous)
        chosen = current if self.target == "mass" else probs[:-1].gather(1, previous)
        if self.target == "uniform_topk":
            chosen = torch.ones_like(chosen)
        total, reachable = chosen.sum(-1), torch.ones_like(current[:, 0], dtype=torch.bool)
        share = chosen / total[:, None]
        # What underflowed may be pruned. One look at two numbers, and NaN fails the comparison.
        if current.numel() == 0 or (current.amin().item() > 0 and total.amin().item() > FAINT_SHARE):
            return share, reachable
        lost = (~((current.amin(-1) > 0) & (total > FAINT_SHARE))).nonzero()[:, 0]
        exact, found = self._shares_of_scores(z[:-1][lost], z[1:][lost], previous[lost])
        return share.index_copy_(0, lost, exact), reachable.index_copy_(0, lost, found)

    def _shares_of_scores(
        self,
        before: Float[Tensor, "tokens experts"],
        now: Float[Tensor, "tokens experts"],
        previous: Int[Tensor, "tokens k"],
    ) -> tuple[Float[Tensor, "tokens k"], Bool[Tensor, " tokens"]]:
        earlier, current = (router_scores(z.gather(1, previous), self.activation) for z in (before, now))
        return target_weights(current, earlier, self.target)


def _number(value: int | float | Tensor, like: Tensor) -> Float[Tensor, ""]:
    """A number in the dtype and on the device of ``like``; one that is there already is not read."""
    if isinstance(value, Tensor):
        return value.to(like)
    return like.new_full((), value)
