"""Faults that someone could make, each shown to be caught by the checks that the package itself must pass."""

import importlib
import sys
import types

import jaxtyping
import pytest
import torch

from tests.moe_routing import checks

SEEDS = range(12)


@pytest.fixture(autouse=True)
def _unchecked():
    """Mutants may break shapes; the assertions, not the type checker, must catch them."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


def mutate(module: str, old: str, new: str) -> types.ModuleType:
    """A copy of the module in which ``old``, which must occur exactly once, reads ``new``."""
    original = importlib.import_module(f"moe_routing.{module}")
    with open(str(original.__file__), encoding="utf-8") as file:
        source = file.read()
    assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times in {module}"
    copy = types.ModuleType(f"mutant_{module}")
    copy.__file__ = original.__file__
    sys.modules[copy.__name__] = copy
    try:
        exec(compile(source.replace(old, new), str(original.__file__), "exec"), copy.__dict__)
    finally:
        del sys.modules[copy.__name__]
    return copy


def implementation(module: str, function: str, old: str, new: str):
    """The function on top of a mutant: its own, or that of copies of the modules between the two."""
    mutants = [mutate(module, old, new)]
    if not hasattr(mutants[0], function):
        for user in ("steering", "injection")[module == "steering" :]:
            copy = mutate(user, "import torch\n", "import torch \n")
            for mutant in mutants:
                for name, value in vars(mutant).items():
                    if name in vars(copy) and getattr(value, "__module__", "") == mutant.__name__:
                        setattr(copy, name, value)
            mutants.append(copy)
    return getattr(mutants[-1], function)


def killed(check, implementation) -> bool:
    for seed in SEEDS:
        try:
            check(implementation, seed)
        except AssertionError:
            return True
    return False


# name: (module, function, check, old, new)
MUTANTS = {
    "gap counts 1 - i/k": (
        "metrics", "expert_set_gap", checks.check_gap_at_threshold,
        "changed.float() / max(selected.shape[-1], 1), valid",
        "1 - (selected.shape[-1] - changed).double() / selected.shape[-1], valid",
    ),
    "gap crosses fields": (
        "metrics", "expert_set_gap", checks.check_gap, "valid = neighbours(field) &", "valid = (field >= 0) &",
    ),
    "gap looks ahead": (
        "metrics", "expert_set_gap", checks.check_gap,
        "own.roll(1, 1)", "own.roll(-1, 1)",
    ),
    "jaccard divides by k": (
        "metrics", "jaccard_similarity", checks.check_jaccard, "(k + changed).clamp(min=1)", "max(k, 1) + 0 * changed",
    ),
    "histogram counts what stayed": (
        "metrics", "shift_histogram", checks.check_shift_histogram,
        "scatter_add(0, changed, ", "scatter_add(0, selected.shape[-1] - changed, ",
    ),
    "cv with the sample std": (
        "metrics", "load_cv", checks.check_load_cv,
        "deviation.square().mean(-1).sqrt()", "deviation.std(-1)",
    ),
    "cv forgets idle experts": (
        "metrics", "load_cv", checks.check_load_cv,
        "deviation.square().mean(-1)", "(deviation.square() * (rows[part] > 0)).sum(-1) / (rows[part] > 0).sum(-1)",
    ),
    "cv counts prompts": (
        "metrics", "load_cv", checks.check_load_cv,
        "counted = (trajectory >= 0) &", "counted = (trajectory >= -1) &",
    ),
    "consensus ties to the higher index": (
        "consensus", "consensus_experts", checks.check_consensus,
        "counts.sort(dim=-1, descending=True, stable=True).indices[:, :size]",
        "counts.shape[1] - 1 - counts.flip(1).sort(dim=-1, descending=True, stable=True).indices[:, :size]",
    ),
    "consensus of the least used": (
        "consensus", "consensus_experts", checks.check_consensus, "descending=True", "descending=False",
    ),
    "balance pools layers": (
        "balance", "load_balancing_loss", checks.check_load_balancing,
        "return (frequency * mean_prob).sum(-1)",
        "pooled = [x.expand(1, -1) if x.dim() == 1 else x for x in (frequency, mean_prob)]\n"
        "        return (pooled[0].mean(0) * pooled[1].mean(0)).sum(-1).expand(self.tokens.shape)",
    ),
    "balance without 1/k": (
        "balance", "load_balancing_loss", checks.check_load_balancing,
        "self.counts.shape[-1] / max(self.k, 1)", "self.counts.shape[-1]",
    ),
    "balance counts padding": (
        "balance", "load_balancing_loss", checks.check_load_balancing,
        "counted = as_mask(mask) & recorded", "counted = (as_mask(mask) | True) & recorded",
    ),
    "usage counts twice": (
        "information", "TurnStatistics", checks.check_information,
        "usage.to(weights.dtype))", "usage.to(weights.dtype) * 2)",
    ),
    "information counts turns that do not exist": (
        "information", "TurnStatistics", checks.check_information,
        "counted = eligible &", "counted = (eligible | True) &",
    ),
    "absent takes the whole sum": (
        "information", "TurnStatistics", checks.check_information,
        "self.usage_sum[..., None, :] - self.joint_sum)", "self.usage_sum[..., None, :] + 0 * self.joint_sum)",
    ),
    "absent and present swapped": (
        "information", "TurnStatistics", checks.check_information,
        "torch.stack([1 - present, present], dim=-1)", "torch.stack([present, 1 - present], dim=-1)",
    ),
    "a constant operation adds noise": (
        "information", "TurnStatistics", checks.check_information,
        "return select(telling[:, None, None], value)", "return value + 1e-9",
    ),
    "control forgets the tokens": (
        "turns", "turn_control", checks.check_turn_control, "turns * tokens.long()", "turns + 0 * tokens",
    ),
    "control needs nine turns": (
        "turns", "turn_control", checks.check_turn_control,
        "turns >= min_turns).expand_as", "turns > min_turns).expand_as",
    ),
    "control ignores absence": (
        "turns", "turn_control", checks.check_turn_control, "+ absent.sum(-2, keepdim=True)", "+ 0 * absent.sum()",
    ),
    "loss lets the previous token learn": (
        "objectives", "token_consistency_loss", checks.check_token_loss,
        "previous_scores(log_probs.detach(), pairs.previous)", "previous_scores(log_probs, pairs.previous)",
    ),
    "overlap lets the previous token learn": (
        "objectives", "token_consistency_loss", checks.check_token_loss,
        "shift_rows(log_probs).detach().exp()", "shift_rows(log_probs).exp()",
    ),
    "loss gate is strict": (
        "objectives", "token_consistency_loss", checks.check_token_loss,
        "(gap <= gap_threshold)", "(gap < gap_threshold)",
    ),
    "loss pulls to its own experts": (
        "objectives", "token_consistency_loss", checks.check_token_loss,
        "shift_rows(selected).clamp(min=0)", "selected.clamp(min=0)",
    ),
    "loss is not renormalised": (
        "objectives", "token_consistency_loss", checks.check_token_loss,
        '_short_softmax(current if target == "mass" else earlier)',
        '(current if target == "mass" else earlier).exp()',
    ),
    "closed pairs are not pairs": (
        "objectives", "token_consistency_loss", checks.check_token_loss,
        "valid = pairs.valid & reachable", "valid = pairs.close & reachable",
    ),
    "gradient with the wrong sign of the turn term": (
        "steering", "router_gradient", checks.check_router_gradient,
        "control.to(dtype) * _number(", "control.to(dtype) * -_number(",
    ),
    "gradient with the wrong sign of the token term": (
        "steering", "router_gradient", checks.check_router_gradient, "weight * share", "-weight * share",
    ),
    "gradient that does not lower the other experts": (
        "steering", "router_gradient", checks.check_router_gradient, "addcmul_(probs[1:], weight, value=-1).", "",
    ),
    "gradient without the mean direction": (
        "router", "router_gradient", checks.check_router_gradient,
        "torch.ops.aten._softmax_backward_data.out(direction, probs, -1, probs.dtype, grad_input=direction)",
        "direction.mul_(probs)",
    ),
    "gradient without the sigmoid's slope": (
        "steering", "router_gradient", checks.check_router_gradient,
        'if self.activation == "sigmoid":', "if False:",
    ),
    "faint sigmoids are lost": (
        "router", "router_gradient", checks.check_faint_rows, "FAINT_LOGIT = -40.0", "FAINT_LOGIT = -1e9",
    ),
    "pairs across blocks are lost": (
        "steering", "router_gradient", checks.check_blocks, "halo = min(tokens.start, 1)", "halo = 0",
    ),
    "rho over the whole batch": (
        "rho", "gradient_share", checks.check_share,
        "row = field.clamp(min=0).long()", "row = field.clamp(min=0).long() * 0",
    ),
    "rho is a mean": (
        "rho", "gradient_share", checks.check_share,
        'scatter_reduce(0, row, norm, "amax")', 'scatter_reduce(0, row, norm, "mean")',
    ),
    "rho by the sum of absolute values": (
        "rho", "gradient_share", checks.check_share,
        "torch.linalg.vector_norm(wide, dim=-1)", "torch.linalg.vector_norm(wide, ord=1, dim=-1)",
    ),
    "rho is left out": (
        "steering", "router_gradient", checks.check_router_gradient,
        "if rho else table.new_ones", "if False else table.new_ones",
    ),
    "token term of every pair": (
        "steering", "router_gradient", checks.check_router_gradient,
        "row, pairs.close, pairs.previous", "row, pairs.valid, pairs.previous",
    ),
    "tokens outside fields are steered": (
        "steering", "router_gradient", checks.check_router_gradient,
        "torch.where(field >= 0, field, control.shape[0])", "field.clamp(min=0)",
    ),
    "a closed gate tensor is ignored": (
        "steering", "router_gradient", checks.check_gradient_edges, "-_number(gate, table) * share", "-share",
    ),
    "half precision is computed in half": (
        "steering", "router_gradient", checks.check_gradient_edges,
        "dtype = torch.promote_types(compute_dtype(logits), grad_in.dtype)", "dtype = grad_in.dtype",
    ),
    "the result is widened": (
        "injection", "router_gradient", checks.check_gradient_edges,
        "return grad_out\n\n\ndef steer_and_count", "return grad_out.double()\n\n\ndef steer_and_count",
    ),
    "a NaN silences its field": (
        "rho", "gradient_share", checks.check_share, "& torch.isfinite(norm) & (norm > 0)", "& (norm != 0)",
    ),
    "NaN logits spread": (
        "injection", "router_gradient", checks.check_gradient_edges, "replace_rows_(out, ~active, grad_in)", "pass",
    ),
    "gradients that are not finite are repaired": (
        "injection", "router_gradient", checks.check_gradient_edges,
        "replace_rows_(out, ~active, grad_in)", "replace_rows_(out, ~active, grad_in.nan_to_num())",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_killed(name):
    module, function, check, old, new = MUTANTS[name]
    with torch.random.fork_rng():
        assert killed(check, implementation(module, function, old, new)), f"the checks let '{name}' pass"


@pytest.mark.parametrize(("module", "function", "check"), sorted({m[:3] for m in MUTANTS.values()}, key=str))
def test_the_unbroken_code_passes_the_same_checks(module, function, check):
    """Also shows that the copies work: a check that fails for another reason would kill every mutant."""
    assert not killed(check, implementation(module, function, "import torch\n", "import torch \n"))
