"""The algebra of the exact experiment against loops over explicit gradients, and its theorems by enumeration."""

import itertools
import math

import pytest
import torch

from benchmarks import exact
from benchmarks.exact import Problem
from benchmarks.experiment import compare
from benchmarks.plan import noise_plan
from credit import GRPO, SLCA

torch.manual_seed(0)


def make(groups=(3, 3), without_tool=(1,), parameters=7, seed=0):
    """A problem with known gradients; rows in `without_tool` have a summary only."""
    generator = torch.Generator().manual_seed(seed)
    size = sum(groups)
    has_tool = torch.tensor([row not in without_tool for row in range(size)])
    gradients = torch.randn(size, parameters, generator=generator, dtype=torch.float64)
    gradients[~has_tool] = 0.0
    problem = Problem(
        tool=torch.rand(size, generator=generator, dtype=torch.float64),
        summary=torch.rand(size, generator=generator, dtype=torch.float64),
        group=torch.repeat_interleave(torch.arange(len(groups)), torch.tensor(groups)),
        segments=torch.stack([torch.where(has_tool, 0, -1), torch.ones(size, dtype=torch.long)], dim=1),
        gram=gradients @ gradients.T,
        weight=0.125,
    )
    return problem, gradients


def signs(problem, sigma):
    """Every outcome of a noise that is ±σ with equal probability: `[2^B, B]`, an exact expectation."""
    return sigma * torch.tensor(list(itertools.product([-1.0, 1.0], repeat=len(problem.tool))), dtype=torch.float64)


def vectors(advantages, problem, gradients):
    return problem.weight * advantages @ gradients


def population(values):
    """Trace of the covariance over all rows, by loop."""
    mean = sum(values) / len(values)
    return float(sum(((value - mean) ** 2).sum() for value in values) / len(values))


@pytest.mark.parametrize("groups", [(3, 3), (5, 1), (2, 2, 2)])
def test_predicted_variances_equal_enumeration(groups):
    problem, gradients = make(groups)
    noise = signs(problem, 0.7)
    raw = torch.where(problem.has_tool, problem.tool + problem.summary + noise, 0.0)
    assert population(vectors(raw, problem, gradients)) == pytest.approx(exact.local_variance(problem, 0.7), rel=1e-9)
    centred = exact.tool_advantages(problem, GRPO(scale="none"), noise)
    expected = exact.centred_variance(problem, 0.7)
    assert population(vectors(centred, problem, gradients)) == pytest.approx(expected, rel=1e-9)
    scale = torch.full_like(problem.tool, 2.0)
    assert exact.centred_variance(problem, 0.7, scale) == pytest.approx(expected / 4)


def test_directional_deviation_equals_enumeration():
    problem, gradients = make()
    scale = torch.full_like(problem.tool, 2.0)
    along = torch.where(problem.has_tool, torch.randn(6, dtype=torch.float64), 0.0)
    advantages = exact.tool_advantages(problem, GRPO(scale="none"), signs(problem, 0.7)) / 2.0
    products = vectors(advantages, problem, gradients) @ (gradients.T @ along)
    deviation = exact.directional_deviation(problem, 0.7, scale, along)
    assert float(products.std(correction=0)) == pytest.approx(deviation, rel=1e-9)


def test_trace_variance_and_cosines_equal_loops():
    problem, gradients = make()
    advantages = exact.tool_advantages(problem, GRPO(), exact.redraw(problem, 0.5, 40))
    explicit = vectors(advantages, problem, gradients)
    variance, error = exact.trace_variance(advantages, problem)
    assert variance == pytest.approx(float(explicit.var(dim=0).sum()), rel=1e-9)
    assert error > 0
    reference = exact.tool_advantages(problem, SLCA(), torch.zeros(1, 6, dtype=torch.float64))[0]
    target = vectors(reference, problem, gradients)
    wanted = [float(torch.cosine_similarity(row, target, dim=0)) for row in explicit]
    assert exact.cosines(advantages, reference, problem).tolist() == pytest.approx(wanted, abs=1e-9)
    assert exact.cosines(0 * advantages, reference, problem).tolist() == [0.0] * 40


def test_group_variance_equals_loop_over_groups():
    problem, gradients = make((3, 2, 4))
    advantages = exact.tool_advantages(problem, GRPO(), exact.redraw(problem, 0.5, 10))
    wanted = 0.0
    for row in advantages:
        parts = [problem.weight * row[problem.group == g] @ gradients[problem.group == g] for g in range(3)]
        mean = sum(parts) / 3
        wanted += float(sum(((part - mean) ** 2).sum() for part in parts)) * 3 / 2 / len(advantages)
    assert exact.group_variance(advantages, problem) == pytest.approx(wanted, rel=1e-9)


def test_flip_probability_holds_for_normalised_grpo_too():
    problem, _ = make((4, 4))
    noise = exact.redraw(problem, 0.4, 40_000)
    measured = (exact.tool_advantages(problem, GRPO(), noise) > 0).double().mean(dim=0)
    predicted = torch.where(problem.has_tool, exact.flip_probability(problem, 0.4), 0.0)
    assert torch.allclose(measured, predicted, atol=4 * 0.5 / math.sqrt(40_000))


def test_a_group_of_one_and_no_noise_have_defined_flips():
    problem, _ = make((5, 1))
    assert exact.flip_probability(problem, 0.3)[5] == 0.0
    certain = exact.flip_probability(problem, 0.0)
    assert set(certain.tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize("seed", range(3))
def test_every_exact_prediction_holds_and_slca_is_isolated(seed):
    problem, _ = make((4, 4), seed=seed)
    lines = {(line.quantity, line.estimator): line for line in compare(problem, 0.6, redraws=4000, seed=seed)}
    assert all(line.holds for line in lines.values() if line.theory == "exact")
    assert sum(line.theory == "exact" for line in lines.values()) == 6
    assert lines["trace variance", "SLCA"].measured == 0.0
    assert lines["trace variance", "GRPO"].measured > 0.0
    assert lines["below-mean trajectory reinforced", "SLCA"].measured == 0.0


def test_comparison_notices_a_wrong_prediction():
    from dataclasses import replace

    problem, _ = make((4, 4))
    line = compare(problem, 0.6)[0]
    assert line.holds
    assert replace(line, predicted=1.2 * line.predicted).holds is False
    assert replace(line, theory="approximate").holds is None


def test_plan_reaches_the_wanted_share():
    problem, _ = make((4, 4))
    plan = noise_plan(problem, 10, share=0.8)
    assert plan.share == pytest.approx(0.8)
    assert plan.sigma**2 == pytest.approx(4 * plan.unified_variance)
    assert noise_plan(problem, 10, sigma=plan.sigma) == plan
    assert noise_plan(problem, 40, share=0.8).separation == pytest.approx(2 * plan.separation)
    assert 0.0 < plan.efficiency < 1.0


def test_plan_refuses_what_it_cannot_plan():
    from dataclasses import replace

    problem, _ = make((4, 4))
    with pytest.raises(ValueError, match="share"):
        noise_plan(problem, 10, share=1.0)
    with pytest.raises(ValueError, match="nothing could be learned"):
        noise_plan(replace(problem, tool=torch.ones_like(problem.tool)), 10)


def test_gradients_add_up_to_the_trainers_loss():
    """`−Σ w A_i U_i` is the gradient of the token-mean policy loss with credit on tool tokens only."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from benchmarks.rollouts import Batch
    from credit import policy_loss

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=20,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        tie_word_embeddings=True,
    )
    model = Qwen3MoeForCausalLM(config)
    prompts, answers = torch.randint(1, 20, (3, 4)), torch.randint(1, 20, (3, 6))
    shown = torch.tensor([[1] * 6, [1] * 4 + [0] * 2, [1] * 5 + [0]]).bool()
    segments = torch.tensor([[0, 0, -1, 1, 1, 1], [1, 1, 1, 1, -1, -1], [0, -1, 0, 0, 1, -1]])
    padded = torch.tensor([[1] * 4, [0, 0, 1, 1], [0, 1, 1, 1]]).bool()
    batch = Batch(prompts, padded, answers, shown, segments >= 0, segments, torch.zeros(3).long(), [], [], [])
    gradients = exact.tool_gradients(model, batch)
    assert not gradients[1].any()
    advantages = torch.tensor([0.7, 2.0, -1.3])

    logp = torch.zeros(3, 6)
    for row in range(3):
        kept, length = prompts[row][padded[row]], int(shown[row].sum())
        ids = torch.cat([kept, answers[row, :length]])[None]
        scores = torch.log_softmax(model(input_ids=ids).logits[0, len(kept) - 1 : -1], dim=-1)
        logp[row, :length] = scores.gather(-1, answers[row, :length, None]).squeeze(-1)
    credit = torch.where(segments == 0, advantages[:, None], 0.0)
    policy_loss(logp, logp.detach(), credit, segments >= 0).loss.backward()
    wanted = torch.cat([p.grad.flatten() for p in model.parameters()])
    weight = 1.0 / int((segments >= 0).sum())
    assert torch.allclose(-weight * advantages @ gradients, wanted, atol=1e-6)
