"""What `benchmarks.speed_routing` compares: a training step with and without routing control, and two gradients."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe_routing import (
    RoutingSummary,
    TurnStatistics,
    count_pairs,
    router_gradient,
    router_probs,
    token_objective,
    turn_control,
    turn_usage,
)
from moe_routing import turn_objective as turn_value
from moe_routing.adapters.summary import SelectionObserver
from moe_routing.adapters.transformers import RoutingControl
from moe_routing.selection import FieldSelection
from moe_routing.summary import field_owner

VOCABULARY, OPERATIONS, FIELD_TOKENS = 1024, 6, 16


def moe_model(layers: int, hidden: int, experts: int) -> nn.Module:
    """A random model with the proportions of Qwen3-30B-A3B: an expert is 3/8 as wide as the hidden states."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=hidden // 32,
        num_key_value_heads=max(hidden // 128, 1), head_dim=32, num_experts=experts,
        num_experts_per_tok=min(8, experts), moe_intermediate_size=hidden * 3 // 8, max_position_embeddings=4096,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config).train()


def fields(rows: int, tokens: int) -> Tensor:
    """Field ids of a batch: a prompt of one field's length, then fields of equal length."""
    place = torch.arange(tokens) // FIELD_TOKENS - 1
    return torch.where(place >= 0, place + place.max().add(1) * torch.arange(rows)[:, None], -1)


def labels(field: Tensor) -> Tensor:
    """Random operations of each field."""
    shape = (int(field.max()) + 1, OPERATIONS)
    return torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.3


class Step:
    """A step of policy optimisation: the forward under the old policy, forward, backward, and the update.

    The control changes gradients only, so with it on or off the same work is done on the same numbers.
    """

    def __init__(self, model: nn.Module, rows: int, tokens: int) -> None:
        self.model: Any = model
        self.field = fields(rows, tokens)
        self.labels = labels(self.field)
        self.kind = torch.arange(self.labels.shape[0]) % 2
        self.row = field_owner(self.field.flatten(), torch.arange(rows).repeat_interleave(tokens), len(self.labels))
        self.ids = torch.randint(VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(3))
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def off(self) -> None:
        """Without control: no hook is on the model."""
        with torch.no_grad():
            old = self._logp()
        self._loss(old).backward()
        self._update()

    def on(self) -> None:
        """With control, from attaching it to detaching it, and with what a trainer logs of expert selection."""
        with RoutingControl(self.model, gate=None) as control:
            observer = SelectionObserver(self.field.flatten(), len(self.labels))
            with torch.no_grad(), control.record(self.field, self.labels, self.kind) as recording:
                recording.observe = observer
                old = self._logp()
            with control.bind(self.field, control.tables()):
                self._loss(old).backward()
            self.logged = control.metrics() | self._selection(observer.selection())
        self._update()

    def _selection(self, selection: FieldSelection) -> dict[str, float]:
        summary = RoutingSummary.from_fields(selection, self.labels, self.row)
        gaps = [selection.specialization(self.labels, self.kind == kind) for kind in (0, 1)]
        return summary.metrics() | {f"gap_{kind}": float(gap.mean()) for kind, gap in enumerate(gaps)}

    def _logp(self) -> Tensor:
        scores: Tensor = self.model(input_ids=self.ids, use_cache=False).logits[:, :-1]
        return scores.log_softmax(-1).gather(-1, self.ids[:, 1:, None])[..., 0]

    def _loss(self, old: Tensor) -> Tensor:
        return -(self._logp() - old).exp().mean()

    def _update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def gradient_candidates(tokens: int, experts: int, k: int) -> dict[str, Callable[[], Tensor]]:
    """`router_gradient`, and the same gradient from autograd through the explicit objective, written in four ways.

    "autograd" is the objective as one would write it for float32 on clean input: a softmax, the usage of each turn, its
    score under a constant table of pmi, and the cross-entropy of close pairs. "autograd, pmi too" estimates that table
    in the call; "autograd, linear" is given the linearised table that `router_gradient` is given, a start that the
    objective does not offer; "autograd, our objectives" calls this package's, with their care for ugly input.
    """
    case = GradientCase.random(tokens, experts, k)
    return {
        "ours": case.ours,
        "autograd": lambda: case.through(case.plain),
        "autograd, pmi too": lambda: case.through(case.estimated),
        "autograd, linear": lambda: case.through(case.linear),
        "autograd, our objectives": lambda: case.through(case.package),
    }


@dataclass(frozen=True)
class GradientCase:
    """Inputs of one router's gradient, and the objective in several forms, each to be maximised."""

    logits: Tensor
    grad_in: Tensor
    field: Tensor
    selected: Tensor
    labels: Tensor
    statistics: TurnStatistics
    control: Tensor
    num_pairs: Tensor
    weights: dict[str, float]

    @classmethod
    def random(cls, tokens: int, experts: int, k: int) -> "GradientCase":
        """Sets change slowly, as a trained router's do: else no pair is close and half of the work is skipped."""
        random = torch.Generator().manual_seed(4)
        z = torch.randn(tokens, experts, generator=random)
        drift = torch.randn(tokens // FIELD_TOKENS + 1, experts, generator=random)
        field = torch.arange(tokens) // FIELD_TOKENS
        label = labels(field)
        usage, count = turn_usage(router_probs(z, "softmax"), field, label.shape[0])
        statistics = TurnStatistics.from_usage(usage, label, count > 0)
        return cls(
            logits=z, grad_in=torch.randn(tokens, experts, generator=random), field=field, labels=label,
            selected=(drift.repeat_interleave(FIELD_TOKENS, 0)[:tokens] + 0.3 * z).topk(k).indices,
            statistics=statistics, num_pairs=count_pairs(field),
            control=turn_control(statistics.pmi(), label, count, statistics.num_turns).float(),
            # Both terms are means over tokens: at weights of this size they show beside a gradient of size 1.
            weights={"lambda_turn": 10.0 * tokens, "lambda_token": 1.0 * tokens},
        )  # fmt: skip

    def ours(self) -> Tensor:
        """`router_gradient` with rho = 1."""
        return router_gradient(
            self.logits, self.grad_in, field=self.field, control=self.control, selected=self.selected,
            num_pairs=self.num_pairs, rho=False, **self.weights,
        )  # fmt: skip

    def through(self, objective: Callable[[Tensor], Tensor]) -> Tensor:
        """The incoming gradient minus that of an objective of the logits."""
        leaf = self.logits.detach().requires_grad_()
        (slope,) = torch.autograd.grad(objective(leaf), leaf)
        return self.grad_in - slope

    def plain(self, logits: Tensor) -> Tensor:
        """Usage of each turn times a constant table."""
        log_probs = logits.log_softmax(-1)
        score = (self._usage(log_probs.exp()) * self._per_turn(self.statistics.pmi().float())).sum()
        return self._weighted(score / self.labels.shape[0], log_probs)

    def estimated(self, logits: Tensor) -> Tensor:
        """The plug-in information: pmi from the usage at hand, held constant."""
        log_probs = logits.log_softmax(-1)
        usage = self._usage(log_probs.exp())
        label = self.labels.float()
        expert, present = usage.mean(0), label.mean(0)
        both = label.T @ usage / len(usage)
        joint = torch.stack([expert - both, both], 1)
        apart = torch.stack([1 - present, present], 1)[..., None] * expert
        pmi = torch.log((joint + 1e-12) / (apart + 1e-12)).clamp(-20, 20).detach()
        return self._weighted((joint * pmi).sum(), log_probs)

    def linear(self, logits: Tensor) -> Tensor:
        """Probabilities times the control row of their turn."""
        log_probs = logits.log_softmax(-1)
        return self._weighted((log_probs.exp() * self.control[self.field]).sum(), log_probs)

    def package(self, logits: Tensor) -> Tensor:
        """The objectives of this package."""
        usage, count = turn_usage(router_probs(logits, "softmax"), self.field, self.labels.shape[0])
        turn = turn_value(usage, self.labels, count > 0, self.statistics)
        token = token_objective(logits, self.selected, self.field, self.num_pairs)
        return self.weights["lambda_turn"] * turn + self.weights["lambda_token"] * token

    def _usage(self, probs: Tensor) -> Tensor:
        turns = len(self.labels)
        tokens = torch.bincount(self.field, minlength=turns)
        return probs.new_zeros(turns, probs.shape[1]).index_add(0, self.field, probs) / tokens[:, None]

    def _per_turn(self, pmi: Tensor) -> Tensor:
        return self.labels.float() @ (pmi[:, 1] - pmi[:, 0]) + pmi[:, 0].sum(0)

    def _weighted(self, turn: Tensor, log_probs: Tensor) -> Tensor:
        before, now = self.selected[:-1], self.selected[1:]
        kept = (now[:, :, None] == before[:, None, :]).any(-1).sum(-1)
        close = (self.field[1:] == self.field[:-1]) & (2 * kept >= now.shape[1])
        target = log_probs[:-1].detach().gather(1, before).softmax(-1)
        loss = -(target * log_probs[1:].gather(1, before)).sum(-1)
        token = torch.where(close, loss, 0.0).sum() / self.num_pairs
        return self.weights["lambda_turn"] * turn - self.weights["lambda_token"] * token


def peak_bytes(action: Callable[[], object]) -> int:
    """Most bytes that results of operations held at one time during ``action``; their own temporaries are not seen."""
    with _Live() as live:
        action()
    return live.peak


class _Live(TorchDispatchMode):
    """Adds up the storages of every result until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in given | self.known:
                    self.known.add(storage._cdata)
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def _freed(self, address: int, size: int) -> None:
        self.known.discard(address)
        self.now -= size
