"""Slow twins of the credit primitives: Python floats and loops over lists, written from the formulas alone.

Nothing here imports the package. Tensors come in as nested lists (``tensor.tolist()``), results go out the same way.
"""

import math

SMALLEST, LARGEST = -20.0, 20.0


def run_ids(mask):
    rows = []
    for row in mask:
        ids, run, inside = [], -1, False
        for learnable in row:
            if learnable and not inside:
                run += 1
            inside = bool(learnable)
            ids.append(run if inside else -1)
        rows.append(ids)
    return rows


def tool_summary_segments(mask, final="last_run", completion_mask=None):
    rows = []
    for i, row in enumerate(run_ids(mask)):
        last = max(row, default=-1)
        cut = False
        for t in range(len(row)):
            after_last = last >= 0 and row[t] < 0 and all(later < 0 for later in row[t:])
            cut = cut or (after_last and (completion_mask is None or bool(completion_mask[i][t])))
        tool_only = final == "unless_followed" and cut
        rows.append([-1 if run < 0 else (1 if run == last and not tool_only else 0) for run in row])
    return rows


def spans_to_segments(spans, tokens, rows):
    out = [[-1] * tokens for _ in range(rows)]
    for row, start, stop, segment in spans:
        for t in range(start, stop):
            out[row][t] = segment
    return out


def group_advantage(rewards, group, present=None, eps=1e-6, correction=1, scale="std", min_size=2):
    present = [True] * len(rewards) if present is None else present
    out = []
    for i in range(len(rewards)):
        peers = [rewards[j] for j in range(len(rewards)) if group[j] == group[i] and present[j]]
        if not present[i] or len(peers) < min_size or len(set(peers)) == 1:
            out.append(0.0)
            continue
        mean = math.fsum(peers) / len(peers)
        if scale == "none":
            out.append(rewards[i] - mean)
        elif len(peers) <= correction:
            out.append(0.0)
        else:
            variance = math.fsum((r - mean) ** 2 for r in peers) / (len(peers) - correction)
            out.append((rewards[i] - mean) / (math.sqrt(variance) + eps))
    return out


def assign_credit(advantages, segments, weights, runs=None):
    per_run = bool(advantages) and bool(advantages[0]) and isinstance(advantages[0][0], list)
    if per_run and runs is None:
        runs = run_ids([[s >= 0 for s in row] for row in segments])
    out = []
    for b, row in enumerate(segments):
        credits = []
        for t, segment in enumerate(row):
            if segment < 0:
                credits.append(0.0)
                continue
            parts = advantages[b][runs[b][t]] if per_run else advantages[b]
            credits.append(math.fsum(w * a for w, a in zip(weights[segment], parts) if w != 0))
        out.append(credits)
    return out


def omission_guard(tool, summary, required, called, penalty=-0.5):
    pairs = []
    for i in range(len(tool)):
        pairs.append((0.0, penalty) if required[i] and not called[i] else (tool[i], summary[i]))
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def route(method, rewards, group, segments, *, alpha=1.0, tool=1.0, summary=1.0, local=1.0, cross=(0.0, 0.0)):
    """The table of methods, row by row: components, presence, weights."""
    has = {kind: [kind in row for row in segments] for kind in (0, 1)}
    learnable = [any(s >= 0 for s in row) for row in segments]

    def normalise(values, present):
        there = [p and not math.isnan(v) for p, v in zip(present, values)]
        return group_advantage(values, group, there)

    if method == "grpo":
        total = [alpha * t + s for t, s in zip(rewards["tool"], rewards["summary"])]
        columns, weights = [normalise(total, learnable)], [[1.0], [1.0]]
    elif method == "toolpo":
        columns = [normalise(rewards["global"], learnable), normalise(rewards["local"], has[0])]
        weights = [[1.0, local], [1.0, 0.0]]
    elif method == "rltr":
        columns, weights = [normalise(rewards["tool"], has[0])], [[1.0], [0.0]]
    else:
        columns = [normalise(rewards["tool"], has[0]), normalise(rewards["summary"], has[1])]
        weights = [[tool, cross[0]], [cross[1], summary]]
    return assign_credit([list(row) for row in zip(*columns)], segments, weights)


def turn_returns(rewards, present, discount=1.0):
    out = []
    for row, here in zip(rewards, present):
        out.append(
            [
                math.fsum(discount ** (k - r) * row[k] for k in range(r, len(row)) if here[k]) if here[r] else 0.0
                for r in range(len(row))
            ]
        )
    return out


def step_advantage(returns, group, present, anchor=None, **options):
    flat, ids, here = [], [], []
    for b, row in enumerate(returns):
        for r, value in enumerate(row):
            flat.append(value)
            ids.append((group[b], None if anchor is None else anchor[b][r]))
            here.append(bool(present[b][r]))
    out = iter(group_advantage(flat, ids, here, **options))
    return [[next(out) for _ in row] for row in returns]


def token_loss(logp, old, advantage, low=0.2, high=0.2, dual=3.0, ratio_weight=1.0):
    ratio = math.exp(min(max(logp - old, SMALLEST), LARGEST)) * ratio_weight
    surrogate = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
    if advantage < 0 and dual is not None:
        surrogate = max(surrogate, dual * advantage)
    return -surrogate


def aggregate_loss(loss, mask, mode="token_mean", denominator=None, horizon=None):
    rows = [[x for x, m in zip(row, keep) if m] for row, keep in zip(loss, mask)]
    filled = [row for row in rows if row]
    tokens = sum(len(row) for row in filled)
    count = (tokens if mode == "token_mean" else len(filled)) if denominator is None else denominator
    if not filled or count == 0:
        return 0.0
    width = len(mask[0]) if horizon is None else horizon
    per_row = {
        "token_mean": lambda row: math.fsum(row),
        "seq_mean_token_mean": lambda row: math.fsum(row) / len(row),
        "seq_mean_token_sum": lambda row: math.fsum(row),
        "seq_mean_token_sum_norm": lambda row: math.fsum(row) / width,
    }[mode]
    return math.fsum(per_row(row) for row in filled) / count


def policy_loss(logp, old, advantages, mask, mode="token_mean", denominator=None, horizon=None, **clip):
    losses = []
    for b, row in enumerate(mask):
        per_row = not isinstance(advantages[b], list)
        losses.append(
            [
                token_loss(logp[b][t], old[b][t], advantages[b] if per_row else advantages[b][t], **clip) if m else 0.0
                for t, m in enumerate(row)
            ]
        )
    return aggregate_loss(losses, mask, mode, denominator, horizon)


def kl_k3(logp, ref):
    apart = min(max(ref - logp, SMALLEST), LARGEST)
    return math.expm1(apart) - apart


def format_weighted_ce(logp, mask, format_mask, weight=0.5):
    plain = [-x for row, keep in zip(logp, mask) for x, m in zip(row, keep) if m]
    protocol = [-x for row, keep in zip(logp, format_mask) for x, m in zip(row, keep) if m]
    first = math.fsum(plain) / len(plain) if plain else 0.0
    return first + (weight * math.fsum(protocol) / len(protocol) if protocol else 0.0)


def clip_sums(logp, old, advantages, chosen, low=0.2, high=0.2, dual=3.0):
    """tokens, clipped low, high and dual, sum of k3, largest ratio; over the entries where ``chosen``."""
    sums = [0, 0, 0, 0, 0.0, 0.0]
    for b, row in enumerate(chosen):
        for t, keep in enumerate(row):
            if not keep:
                continue
            change, advantage = min(max(logp[b][t] - old[b][t], SMALLEST), LARGEST), advantages[b][t]
            ratio = math.exp(change)
            sums[0] += 1
            sums[1] += advantage < 0 and ratio < 1 - low
            sums[2] += advantage > 0 and ratio > 1 + high
            sums[3] += advantage < 0 and dual is not None and ratio > dual
            sums[4] += math.expm1(change) - change
            sums[5] = max(sums[5], ratio)
    return sums


def segment_moments(advantages, segments, num_segments=2):
    """For each segment: tokens, mean, population standard deviation, share of exact zeros."""
    out = []
    for kind in range(num_segments):
        values = [a for row, kinds in zip(advantages, segments) for a, s in zip(row, kinds) if s == kind]
        if not values:
            out.append((0, 0.0, 0.0, 0.0))
            continue
        mean = math.fsum(values) / len(values)
        spread = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values))
        out.append((len(values), mean, spread, sum(v == 0 for v in values) / len(values)))
    return out
