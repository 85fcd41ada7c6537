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
        "selected[:, :, None] == shift_rows(selected)[:, None, :]",
        "selected[:, :, None] == selected.roll(-1, 0)[:, None, :]",
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
        "deviation.square().mean(-1)", "(deviation.square() * (counts > 0)).sum(-1) / (counts > 0).sum(-1)",
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
        "q = select(counted[:, None], usage.to(dtype))", "q = select(counted[:, None], usage.to(dtype)) * 2",
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
        "turns", "turn_control", checks.check_turn_control, "(turns * tokens)", "(turns + 0 * tokens)",
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
        "target_weights(log_probs.detach(), pairs.previous, target)",
        "target_weights(log_probs, pairs.previous, target)",
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
        "torch.softmax(shift_rows(scores.gather(1, previous.roll(-1, 0))), dim=-1)",
        "shift_rows(scores.gather(1, previous.roll(-1, 0))).exp()",
    ),
    "closed pairs are not pairs": (
        "objectives", "token_consistency_loss", checks.check_token_loss,
        "valid = pairs.valid & reachable", "valid = pairs.close & reachable",
    ),
    "gradient with the wrong sign of the turn term": (
        "injection", "router_gradient", checks.check_router_gradient,
        "mul_((lambda_turn * scale)", "mul_((-lambda_turn * scale)",
    ),
    "gradient with the wrong sign of the token term": (
        "injection", "router_gradient", checks.check_router_gradient,
        "weight[:, None] * q", "-weight[:, None] * q",
    ),
    "gradient without the mean direction": (
        "injection", "router_gradient", checks.check_router_gradient,
        "direction.sub_(mean[:, None]).mul_(probs)", "direction.mul_(probs)",
    ),
    "gradient without the sigmoid's slope": (
        "injection", "router_gradient", checks.check_router_gradient,
        "logit_slope(injection, z, activation)", "injection",
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
        "size.div_(peak[:, None]), dim=-1)", "size.div_(peak[:, None]), ord=1, dim=-1)",
    ),
    "rho is left out": (
        "injection", "router_gradient", checks.check_router_gradient,
        "if rho else unit_share(grad_in, field)", "if False else unit_share(grad_in, field)",
    ),
    "token term of every pair": (
        "injection", "router_gradient", checks.check_router_gradient,
        "acting = pairs.close", "acting = pairs.valid",
    ),
    "tokens outside fields are steered": (
        "rho", "unit_share", checks.check_unit_share,
        "counted = (field >= 0) & torch.isfinite(grad_in).all(-1)", "counted = torch.isfinite(grad_in).all(-1)",
    ),
    "a closed gate tensor is ignored": (
        "injection", "router_gradient", checks.check_gradient_edges, "scale = -gate * share", "scale = -share",
    ),
    "half precision is computed in half": (
        "injection", "router_gradient", checks.check_gradient_edges,
        "dtype = torch.promote_types(compute_dtype(logits), grad_in.dtype)", "dtype = grad_in.dtype",
    ),
    "the result is widened": (
        "injection", "router_gradient", checks.check_gradient_edges, ".add_(g).to(grad_in.dtype)", ".add_(g)",
    ),
    "a NaN silences its field": (
        "rho", "gradient_share", checks.check_share,
        "& torch.isfinite(peak) & (peak > 0)", "& (peak != 0)",
    ),
    "NaN logits spread": (
        "injection", "router_gradient", checks.check_gradient_edges,
        "added = active & (bound < torch.finfo(grad_in.dtype).max)", "added = torch.isfinite(g).all(-1)",
    ),
    "gradients that are not finite are repaired": (
        "injection", "router_gradient", checks.check_gradient_edges, ".add_(g).to(", ".add_(g.nan_to_num()).to(",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_killed(name):
    module, function, check, old, new = MUTANTS[name]
    with torch.random.fork_rng():
        assert killed(check, getattr(mutate(module, old, new), function)), f"the checks let '{name}' pass"


@pytest.mark.parametrize(("module", "function", "check"), sorted({m[:3] for m in MUTANTS.values()}, key=str))
def test_the_unbroken_code_passes_the_same_checks(module, function, check):
    """Also shows that the copies work: a check that fails for another reason would kill every mutant."""
    assert not killed(check, getattr(mutate(module, "import torch\n", "import torch \n"), function))
