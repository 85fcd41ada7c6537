"""Rows of `moe_routing` on whole selections: consensus, replay, drift, and the interventions on a router."""

import torch
from torch import Tensor

from benchmarks.speed_table_case import Case, Made, size_of
from benchmarks.speed_table_routed import EXPERTS, FIELD_TOKENS, K, Routed, case_of, plain, routed
from moe_routing import (
    consensus_agreement,
    consensus_experts,
    consensus_overlap,
    consensus_selection,
    expert_counts,
    low_rank_mix,
    recorded_selection,
    replayed_selection,
    routing_drift,
    selected_weights,
    specialization_gap,
    tiered_topk,
)


def drift_case(tokens: int) -> Made:
    it = routed(tokens)
    other = it.selected.roll(1, 0)

    def ours() -> list[Tensor]:
        found = routing_drift(other, it.selected, it.probs, it.mask)
        return [found.exact_match, found.jaccard, found.selected_mass]

    def loop() -> list[Tensor]:
        rows = [t for t, here in enumerate(it.mask.tolist()) if here]
        sets = [(set(other[t].tolist()), set(it.selected[t].tolist()), it.probs[t].tolist()) for t in rows]
        exact = [float(r == s) for r, s, _ in sets]
        jaccard = [len(r & s) / len(r | s) for r, s, _ in sets]
        mass = [sum(p[e] for e in r & s) / sum(p[e] for e in s) for r, s, p in sets]
        return [torch.tensor(figures).mean() for figures in (exact, jaccard, mass)]

    return Made(ours, loop, size_of(other, it.selected, it.mask) + 4 * K * tokens)


def gap_case(fields: int) -> Made:
    it = Routed(fields * FIELD_TOKENS)
    counts = expert_counts(it.selected, it.field, fields, EXPERTS)

    def loop() -> Tensor:
        share, labels = counts / counts.sum(-1, keepdim=True), it.labels
        parts: tuple[list[Tensor], list[Tensor]] = ([], [])
        for i in range(fields):
            for j in range(i + 1, fields):
                parts[bool((labels[i] & labels[j]).any())].append(torch.minimum(share[i], share[j]).sum())
        return torch.stack(parts[True]).mean() - torch.stack(parts[False]).mean()

    return Made(lambda: specialization_gap(counts, it.labels), loop, size_of(counts, it.labels))


def mix_case(hidden: int) -> Made:
    weight, groups = torch.randn(EXPERTS, hidden, generator=torch.Generator().manual_seed(8)), 16

    def loop() -> Tensor:
        out = torch.empty_like(weight)
        for rows in torch.arange(EXPERTS).chunk(groups):
            out[rows] = weight[rows].mean(0, keepdim=True)
        return out

    return Made(lambda: low_rank_mix(weight, groups), loop, 2 * size_of(weight))


def tiered_case(tokens: int) -> Made:
    it, tiers = Routed(tokens), torch.arange(EXPERTS) % 4
    scores = it.logits.round(decimals=1)

    def composed() -> Tensor:  # a tie goes to the lower tier, then to the lower id
        order = torch.arange(EXPERTS)[torch.argsort(tiers, stable=True)]
        return order[scores[:, order].argsort(dim=-1, descending=True, stable=True)[:, :K]]

    return Made(lambda: tiered_topk(scores, tiers, K), composed, size_of(scores) + 8 * K * tokens)


def _weights(it: Routed) -> Tensor:
    chosen = it.logits.softmax(-1).gather(-1, it.selected)
    return chosen / chosen.sum(-1, keepdim=True)


def _replay(it: Routed) -> Tensor:
    out, recorded = it.selected.roll(1, 0).clone(), (it.selected >= 0).all(-1)
    out[recorded] = it.selected[recorded]
    return out


def _checked(it: Routed) -> Tensor:
    for row in it.selected.tolist():
        assert len(set(row)) == K
        assert min(row) >= 0
        assert max(row) < EXPERTS
    return torch.where(it.mask[:, None], it.selected, -1)


def overlap_case(tokens: int) -> Made:
    it = routed(tokens)
    consensus = it.consensus()

    def loop() -> Tensor:
        sets, owners = [set(row) for row in consensus.tolist()], it.field.tolist()
        return torch.tensor([len(set(row) & sets[f]) / K for row, f in zip(it.selected.tolist(), owners)])

    traffic = size_of(it.selected, it.field, consensus) + 4 * tokens
    return Made(lambda: consensus_overlap(it.selected, it.field, consensus), loop, traffic)


def agreement_case(tokens: int) -> Made:
    it = routed(tokens)
    consensus = it.consensus()

    def composed() -> Tensor:
        return it.probs.gather(1, consensus[it.field]).clamp(max=1 / K).sum(-1)

    traffic = size_of(it.field, consensus) + 4 * (K + 1) * tokens
    return Made(lambda: consensus_agreement(it.probs, it.field, consensus)[0], composed, traffic)


def _ids(it: Routed) -> int:
    return size_of(it.selected, it.field)


LOOP = "loop over fields"
CASES: tuple[Case, ...] = (
    case_of("consensus_experts", plain(lambda it: consensus_experts(it.selected, it.field, EXPERTS, K),
            Routed.consensus, lambda it: _ids(it) + 8 * K * it.fields), LOOP, naive_at=4096,
            note="experts of each field are ranked"),
    case_of("consensus_overlap", overlap_case, "loop over tokens", naive_at=4096, note="k² comparisons for each token"),
    case_of("consensus_agreement", agreement_case, "`gather` and `clamp`",
            note="k scattered reads for each token, the twin's too, cost more than as many bytes in a row; ids are "
            "checked, and tokens outside fields looked for"),
    case_of("consensus_selection", plain(lambda it: consensus_selection(it.selected, it.field, EXPERTS),
            lambda it: it.consensus()[it.field], lambda it: _ids(it) + size_of(it.selected)), LOOP, naive_at=4096,
            note="experts of each field are ranked"),
    case_of("routing_drift", drift_case, "loop over sets", naive_at=2048, note="k² comparisons for each token"),
    case_of("specialization_gap", gap_case, "loop over pairs", largest=1024, unit="fields", naive_at=64,
            note="every pair of fields is compared: quadratic by definition, while the floor is that of the counts"),
    case_of("recorded_selection", plain(lambda it: recorded_selection(it.selected, EXPERTS, it.mask), _checked,
            lambda it: 2 * size_of(it.selected) + it.tokens), "loop over rows", naive_at=4096,
            note="rows are searched for an expert that stands twice"),
    case_of("replayed_selection", plain(lambda it: replayed_selection(it.selected, it.selected.roll(1, 0)), _replay,
            lambda it: 3 * size_of(it.selected)), "masked assignment", note="a row is recorded if all of it is"),
    case_of("selected_weights", plain(lambda it: selected_weights(it.logits, it.selected), _weights,
            lambda it: size_of(it.logits, it.selected) + 4 * K * it.tokens), "`softmax`, `gather`, division",
            note="an exponential for each entry, the twin's too; ids are read once more to be checked, as is the mass"),
    case_of("low_rank_mix", mix_case, "loop over groups", largest=16384, unit="hidden units",
            note="sums by group, then one row for each expert"),
    case_of("tiered_topk", tiered_case, "`argsort` twice", note="a stable sort of every row, for exact ties"),
)  # fmt: skip
