"""Rows of `moe_routing` that measure: probabilities, similarity of neighbouring sets, load, entropy, fields."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.speed_table_case import Case, Made, size_of
from benchmarks.speed_table_routed import EXPERTS, FIELD_TOKENS, K, Routed, case_of, plain, routed, spread_out
from moe_routing import (
    coefficient_of_variation,
    count_fields,
    count_pairs,
    entropy,
    expert_counts,
    expert_set_gap,
    field_ids,
    jaccard_similarity,
    load_cv,
    load_entropy,
    router_entropy,
    router_log_probs,
    router_probs,
    shift_histogram,
)


def _pairwise(name: Any, value: Callable[[set[int], set[int]], float]) -> Callable[[int], Made]:
    def make(tokens: int) -> Made:
        it = routed(tokens)

        def loop() -> tuple[Tensor, Tensor]:
            return spread_out([value(before, now) for before, now in it.pairs()], it.valid())

        return Made(lambda: name(it.selected, it.field), loop, size_of(it.selected, it.field) + 5 * tokens)

    return make


def histogram_case(tokens: int) -> Made:
    it = routed(tokens)

    def loop() -> Tensor:
        out = [0] * (K + 1)
        for before, now in it.pairs():
            out[K - len(before & now)] += 1
        return torch.tensor(out)

    return Made(lambda: shift_histogram(it.selected, it.field), loop, size_of(it.selected, it.field))


def load_case(measure: Callable[..., Tensor], of_share: Callable[[Tensor], Tensor]) -> Callable[[int], Made]:
    def make(tokens: int) -> Made:
        it = routed(tokens)
        trajectory = it.field // 8

        def loop() -> Tensor:
            found = []
            for one in trajectory.unique():
                load = torch.bincount(it.selected[trajectory == one].flatten(), minlength=EXPERTS).float()
                found.append(of_share(load / load.sum()))
            return torch.stack(found)

        return Made(lambda: measure(it.selected, trajectory, EXPERTS), loop, size_of(it.selected, trajectory))

    return make


def _entropy(p: Tensor) -> Tensor:
    return -(p * p.clamp(min=1e-30).log()).sum(-1)


def _variation(p: Tensor) -> Tensor:
    return p.std(-1, correction=0) / p.mean(-1)


def field_ids_case(tokens: int) -> Made:
    trajectory, turn = torch.arange(tokens) // 256, torch.arange(tokens) // 32 % 8
    kind = torch.arange(tokens) // FIELD_TOKENS % 2

    def loop() -> tuple[Tensor, Tensor]:
        triples = list(zip(trajectory.tolist(), turn.tolist(), kind.tolist()))
        known = {triple: number for number, triple in enumerate(sorted(set(triples)))}
        return torch.tensor([known[triple] for triple in triples]), torch.tensor(list(known))

    return Made(lambda: field_ids(trajectory, turn, kind), loop, 4 * size_of(trajectory))


def _sigmoid(it: Routed) -> Tensor:
    scores = it.logits.sigmoid()
    return scores / scores.sum(-1, keepdim=True)


def _rows_out(it: Routed) -> int:
    return size_of(it.probs) + 4 * it.tokens


def _ids(it: Routed) -> int:
    return size_of(it.selected, it.field)


GATHERED = "counts go to single addresses"
CASES: tuple[Case, ...] = (
    case_of("router_probs", plain(lambda it: router_probs(it.logits), lambda it: it.logits.softmax(-1),
            lambda it: 2 * size_of(it.logits)), "`softmax`", what="softmax", note="an exponential for each entry"),
    case_of("router_probs", plain(lambda it: router_probs(it.logits, "sigmoid"), _sigmoid,
            lambda it: 2 * size_of(it.logits)), "`sigmoid`, then a division", what="sigmoid",
            note="an exponential for each entry; rows that would underflow to 0/0 are searched for"),
    case_of("router_log_probs", plain(lambda it: router_log_probs(it.logits), lambda it: it.logits.log_softmax(-1),
            lambda it: 2 * size_of(it.logits)), "`log_softmax`", note="an exponential for each entry"),
    case_of("entropy", plain(lambda it: entropy(it.probs), lambda it: _entropy(it.probs), _rows_out),
            "`-(p * p.log()).sum(-1)`", note="a logarithm for each entry, safe at 0"),
    case_of("router_entropy", plain(lambda it: router_entropy(it.probs, it.mask),
            lambda it: _entropy(it.probs)[it.mask].mean(), lambda it: size_of(it.probs)),
            "`-(p * p.log()).sum(-1)`, masked mean", note="a logarithm for each entry, safe at 0"),
    case_of("expert_set_gap", _pairwise(expert_set_gap, lambda a, b: 1 - len(a & b) / K), "loop over sets",
            naive_at=4096, note="k² comparisons for each pair"),
    case_of("jaccard_similarity", _pairwise(jaccard_similarity, lambda a, b: len(a & b) / len(a | b)),
            "loop over sets", naive_at=4096, note="k² comparisons for each pair"),
    case_of("shift_histogram", histogram_case, "loop over sets", naive_at=4096, note="k² comparisons for each pair"),
    case_of("expert_counts", plain(lambda it: expert_counts(it.selected, it.field, it.fields, EXPERTS),
            Routed.counts, lambda it: _ids(it) + 8 * EXPERTS * it.fields), "loop over fields", naive_at=4096,
            note=GATHERED),
    case_of("coefficient_of_variation", plain(lambda it: coefficient_of_variation(it.load),
            lambda it: _variation(it.load.float()), lambda it: size_of(it.load) + 4 * it.tokens),
            "`std / mean`", unit="rows of 128 experts", note="exact in int64 first, so that a uniform load gives 0"),
    case_of("load_cv", load_case(load_cv, _variation), "loop over trajectories", naive_at=8192, note=GATHERED),
    case_of("load_entropy", load_case(load_entropy, _entropy), "loop over trajectories", naive_at=8192, note=GATHERED),
    case_of("field_ids", field_ids_case, "dictionary", naive_at=16384,
            note="runs of equal triples are sorted, each as one number"),
    case_of("count_fields", plain(lambda it: count_fields(it.field),
            lambda it: torch.tensor(len(set(it.field.tolist()) - {-1})), lambda it: size_of(it.field)), "`set`",
            largest=1 << 20, note="ids are sorted"),
    case_of("count_pairs", plain(lambda it: count_pairs(it.field),
            lambda it: ((it.field[1:] == it.field[:-1]) & (it.field[1:] >= 0)).sum(),
            lambda it: size_of(it.field)), "`==` and `sum`",
            largest=1 << 20, note="comparisons with a boolean result, which PyTorch takes one entry at a time"),
)  # fmt: skip
