"""Every mode of the TRL trainer on a tiny model: which token gets which advantage, for real."""

import inspect
import os
import types

import pytest
import torch

import credit.adapters.trl
from credit import GRPO, RLTR, SLCA, policy_loss
from credit.adapters.trl import CreditGRPOTrainer, environment_reward
from tests.credit.adapters.scripted import (
    CALL,
    END,
    SCRIPTS,
    ScriptedRollout,
    masks_of,
    none_if_nan,
    record,
    script_generate,
    slca,
    summary_reward,
    tool_reward,
)

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
BOTH = {"tool": [tool_reward], "summary": [summary_reward]}


@pytest.fixture
def trainer(model, tokenizer, dataset, config):
    """Build a trainer on scripted rollouts; keyword arguments of ``CreditGRPOTrainer`` and, in ``args``, of TRL."""

    def make(args=None, scripts=SCRIPTS, **changes):
        settings = {
            "components": BOTH,
            "rollout_func": ScriptedRollout(tokenizer, scripts),
            "train_dataset": dataset,
            "processing_class": tokenizer,
            "args": config(**(args or {})),
        }
        settings |= changes
        if settings["rollout_func"] is None:
            del settings["rollout_func"]
        return CreditGRPOTrainer(model, **settings)

    return make


def assert_slca(batch, size=4):
    """The routed advantages of a batch are those of the plain-Python reference, token by token."""
    columns = batch["rewards"].T.tolist()  # a single one where one function feeds both components
    tool, summary = none_if_nan(columns[0]), none_if_nan(columns[-1])
    expected = torch.tensor(slca(tool, summary, masks_of(batch), size))
    torch.testing.assert_close(batch["advantages"], expected, atol=1e-5, rtol=0)


def test_rollout_function_with_env_mask(trainer):
    run = trainer()
    batches = record(run)
    run.train()
    for batch in batches:
        assert_slca(batch)
        assert (batch["advantages"][batch["segments"] < 0] == 0).all()
    logged = run.state.log_history[0]
    assert logged["credit/tool/token_share"] + logged["credit/summary/token_share"] == pytest.approx(1)
    assert logged["credit/tool/advantage_std"] > 0
    assert logged["credit/summary/clip_high"] == 0
    last = batches[-1]
    means = [sum(r) / sum(m) for r, m in zip(last["advantages"].tolist(), masks_of(last), strict=True)]
    assert list(run._logs["advantages"]) == pytest.approx(means, abs=1e-6)


def weather(city: str) -> str:
    """
    Weather of a city.

    Args:
        city: Its name.

    Returns:
        The weather.
    """
    return f"sunny in {city}"


def calls_then_answers(text, row):
    """Row 0 answers at once; the others call, the third one twice."""
    answered = text.count("<tool_response>")
    if (row == 0 and answered == 0) or answered > (row == 2 and answered < 2):
        return "It is sunny." + END
    return CALL + END


def by_length(completions, **_):
    return [float(len(str(turns)) % 7) for turns in completions]


def by_turns(completions, **_):
    return [float(len(turns)) for turns in completions]


def test_tools(model, tokenizer, trainer):
    script_generate(model, tokenizer, calls_then_answers)
    components = {"tool": [by_length], "summary": [by_turns]}
    run = trainer(rollout_func=None, tools=[weather], components=components, args={"max_completion_length": 256})
    batches = record(run)
    run.train()
    assert run.state.log_history[0]["tools/call_frequency"] > 0
    for batch in batches:
        assert {0, 1} <= set(batch["segments"].unique().tolist())
        assert_slca(batch)


class Office:
    """An environment with one tool and a reward of its own."""

    def reset(self, **_):
        self.asked = 0
        return " Go."

    def weather(self, city: str) -> str:
        """
        Weather of a city.

        Args:
            city: Its name.

        Returns:
            The weather.
        """
        self.asked += 1
        return "sunny"

    def get_reward(self) -> float:
        return float(self.asked)


def test_environment_factory_and_its_own_reward(model, tokenizer, trainer):
    script_generate(model, tokenizer, calls_then_answers)
    components = {"tool": [environment_reward], "summary": [by_length]}
    run = trainer(
        rollout_func=None,
        environment_factory=Office,
        components=components,
        args={"max_completion_length": 256},
    )
    batches = record(run)
    run.train()
    assert batches[0]["rewards"][:, 0].unique().numel() > 1
    for batch in batches:
        assert_slca(batch)


def test_environment_reward_outside_every_component_is_refused(trainer):
    with pytest.raises(ValueError, match=r"get_reward.*Office.*environment_reward"):
        trainer(rollout_func=None, environment_factory=Office)


def sometimes(slot, index, **_):
    """No score for the first rollout of a group, and none at all for the second prompt."""
    return [None if s == 0 or i == 1 else float(s) for s, i in zip(slot, index, strict=True)]


def test_none_rewards_are_absent(trainer):
    run = trainer(components={"tool": [sometimes], "summary": [summary_reward]})
    batches = record(run)
    run.train()
    assert batches[0]["rewards"].isnan().any()
    for batch in batches:
        assert_slca(batch)
        assert not batch["advantages"].isnan().any()


def cut_counts_most(slot, **_):
    return [100.0 if s == 3 else float(s) for s in slot]


def test_truncated_rows_stay_out_of_the_statistics(trainer):
    run = trainer(
        components={"tool": [cut_counts_most], "summary": [cut_counts_most]},
        args={"mask_truncated_completions": True},
    )
    batches = record(run)
    run.train()
    for batch in batches:
        assert (batch["segments"][3::4] == -1).all()
        assert_slca(batch)  # the reference has no run in a masked row either
        # Three rollouts with rewards 0, 1, 2 have a summary; the fourth, with 100, must not show.
        summary = batch["advantages"][:3].masked_select(batch["segments"][:3] == 1)
        assert sorted(set(summary.round(decimals=3).tolist())) == [-1.0, 0.0, 1.0]


def test_aborted_rollouts_stay_out_of_the_statistics(trainer):
    scripts = (*SCRIPTS[:3], ((0, "aborted" + END),))
    run = trainer(scripts=scripts, components={"tool": [cut_counts_most], "summary": [cut_counts_most]})
    batches = record(run)
    run.train()
    assert_slca(batches[0])
    assert batches[0]["advantages"][:3].abs().max() == pytest.approx(1.0, abs=1e-3)


def guarded(row):
    return row["needs_tool"]


@pytest.mark.parametrize("required", ["needs_tool", guarded])
def test_omission_guard(trainer, required):
    run = trainer(tool_required=required)
    batches = record(run)
    run.train()
    for batch in batches:
        tool, summary = batch["rewards"].T.clone()
        omitted = torch.tensor([row["needs_tool"] and row["slot"] == 2 for row in batch["rows"]])
        assert omitted.any()
        tool[omitted], summary[omitted] = 0.0, -0.5
        assert_slca(batch | {"rewards": torch.stack([tool, summary], dim=1)})


def test_guard_keeps_its_signal_without_a_summary_branch(trainer):
    run = trainer(tool_required="needs_tool", rule=SLCA(summary_branch=False))
    batches = record(run)
    run.train()
    batch = batches[0]
    omitted = torch.tensor([row["needs_tool"] and row["slot"] == 2 for row in batch["rows"]])
    summary = torch.where(batch["segments"] == 1, batch["advantages"], 0.0)
    assert (summary[omitted].min(dim=1).values < 0).all()
    assert (summary[~omitted] == 0).all()


@pytest.mark.parametrize(("accumulation", "per_generation"), [(2, 2), (4, 2), (2, 4), (1, 2)])
def test_accumulation_equals_one_large_batch(model_path, trainer, model, accumulation, per_generation):
    """Two micro-batches are one batch of twice the size, for any number of steps that share a generation."""
    small = {"per_device_train_batch_size": 4, "max_steps": 2, "loss_type": "dapo"}
    run = trainer(args=small | {"gradient_accumulation_steps": accumulation, "steps_per_generation": per_generation})
    batches = record(run)
    run.train()
    assert all(len(batch["advantages"]) == 4 * per_generation for batch in batches)
    for batch in batches:
        assert_slca(batch)
    if accumulation != per_generation:
        return
    split = {name: parameter.clone() for name, parameter in model.named_parameters()}
    fresh = type(model).from_pretrained(model_path, dtype=torch.float32)
    model.load_state_dict(fresh.state_dict())
    whole = {"per_device_train_batch_size": 8, "max_steps": 2, "loss_type": "dapo"}
    trainer(args=whole).train()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(split[name], parameter, atol=1e-6, rtol=1e-5)


def test_evaluation_groups_by_its_own_size(trainer, dataset):
    args = {"num_generations_eval": 2, "per_device_eval_batch_size": 4}
    run = trainer(args=args, eval_dataset=dataset.select(range(4)))
    run.train()
    batches = record(run)
    metrics = run.evaluate()
    assert len(batches) == 2
    for batch in batches:
        assert_slca(batch, size=2)
    assert metrics["eval_loss"] == metrics["eval_loss"]
    assert run.state.log_history[-1]["eval_credit/tool/token_share"] > 0


def test_resume_goes_on_as_if_never_stopped(trainer, model, model_path):
    args = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "learning_rate": 0.5}
    run = trainer(args=args)
    run.train()
    through = {name: parameter.clone() for name, parameter in model.named_parameters()}
    checkpoint = os.path.join(run.args.output_dir, "checkpoint-2")
    fresh = type(model).from_pretrained(model_path, dtype=torch.float32)
    model.load_state_dict(fresh.state_dict())
    trainer(args=args).train(resume_from_checkpoint=checkpoint)
    moved = 0.0
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(through[name], parameter, atol=1e-6, rtol=1e-5)
        moved = max(moved, float((parameter - fresh.get_parameter(name)).detach().abs().max()))
    assert moved > 1e-3


def test_summary_noise_cannot_reach_tool_tokens(trainer):
    """Theorem A.1 through the trainer: other summary rewards, bitwise the same tool advantages."""
    seen = []
    for noisy in (summary_reward, by_length):
        run = trainer(components={"tool": [tool_reward], "summary": [noisy]})
        batches = record(run)
        run.train()
        seen.append(batches[0])
    tool = seen[0]["segments"] == 0
    assert torch.equal(seen[0]["advantages"][tool], seen[1]["advantages"][tool])
    assert not torch.equal(seen[0]["advantages"], seen[1]["advantages"])


def test_delta_is_the_dual_clip(trainer):
    """TRL's two-sided clip and :func:`credit.policy_loss` agree in value and gradient, token by token credit."""
    run = trainer(args={"delta": 3.0, "beta": 0.0, "loss_type": "dapo"})
    batches = record(run)
    run.train()
    batch = {k: v for k, v in batches[0].items() if isinstance(v, torch.Tensor)}
    shift = torch.linspace(-3, 3, batch["advantages"].numel()).reshape(batch["advantages"].shape)
    with torch.no_grad():
        run._compute_loss(run.model, batch)
    batch["old_per_token_logps"] = run._logps - shift
    run.model.train()
    loss = run._compute_loss(run.model, batch)
    mine = torch.autograd.grad(loss, run.model.lm_head.weight)[0]

    mask = batch["segments"] >= 0
    run._mask = mask
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    logps = run._get_per_token_logps_and_entropies(run.model, ids, attention, mask.shape[1], compute_entropy=True)[0]
    run._mask = None
    reference = policy_loss(logps, batch["old_per_token_logps"], batch["advantages"], mask, dual_clip=3.0)
    torch.testing.assert_close(loss, reference.loss)
    expected = torch.autograd.grad(reference.loss, run.model.lm_head.weight)[0]
    torch.testing.assert_close(mine, expected, atol=1e-6, rtol=1e-4)
    assert run._metrics["train"]["credit/summary/clip_dual"][-1] > 0


@pytest.mark.parametrize("ugly", [float("nan"), float("inf"), -1e30])
def test_ugly_numbers_under_the_mask_change_nothing(trainer, ugly):
    """Two inner iterations and a reference model, so that every log-probability TRL knows is in the batch."""
    run = trainer(args={"beta": 0.1, "num_iterations": 2})
    batches = record(run)
    run.train()
    clean = {k: v for k, v in batches[0].items() if isinstance(v, torch.Tensor)}
    masked = clean["segments"] < 0
    keys = ("advantages", "old_per_token_logps", "ref_per_token_logps")
    dirty = clean | {key: clean[key].masked_fill(masked, ugly) for key in keys}
    run.model.train()

    def gradient(batch):
        run.model.zero_grad()
        loss = run._compute_loss(run.model, batch)
        loss.backward()
        return torch.cat([loss.detach()[None], run.model.lm_head.weight.grad.flatten()])

    reference = gradient(clean)
    assert reference.isfinite().all()
    assert torch.equal(reference, gradient(dirty))


def test_missing_scores_are_filled_in_without_masked_rows(trainer):
    """The 100 of a truncated row must not reach the mean that stands in for a missing score."""
    run = trainer(
        components={"tool": [tool_reward], "summary": [cut_counts_most, sometimes]},
        args={"mask_truncated_completions": True},
    )
    batches = record(run)
    run.train()
    # Summary totals 0 + (1 + 2) / 2, 1 + 1 and 2 + 2 in the first group.
    summary = [row[row != 0].unique().tolist() for row in batches[0]["advantages"][[0, 2]] * 1.0]
    totals = torch.tensor([1.5, 2.0, 4.0])
    expected = (totals - totals.mean()) / totals.std()
    assert summary[0][0] == pytest.approx(expected[0].item(), abs=1e-4)
    assert summary[1][0] == pytest.approx(expected[2].item(), abs=1e-4)


def test_final_unless_followed(trainer):
    cut = (SCRIPTS[0][0], SCRIPTS[0][1])
    run = trainer(scripts=(*SCRIPTS[:3], cut), final="unless_followed")
    batches = record(run)
    run.train()
    assert 1 not in batches[0]["segments"][3]
    assert 0 in batches[0]["segments"][3]


BAD = {
    "unknown": ({"components": BOTH | {"judge": [tool_reward]}}, r"components: unknown \['judge'\].*SLCA"),
    "missing": ({"components": {"tool": [tool_reward]}}, r"components \['tool'\] do not fit SLCA.*summary"),
    "empty": ({"components": {"tool": [], "summary": [tool_reward]}}, r"components\['tool'\] is empty"),
    "both": ({"reward_funcs": [tool_reward]}, "reward_funcs and components"),
    "count": ({"component_weights": {"tool": [1.0, 2.0]}}, r"component_weights\['tool'\] has 2 weights for 1"),
    "zero": ({"component_weights": {"tool": [0.0]}}, r"component_weights\['tool'\] must be finite"),
    "weights": ({"component_weights": {"judge": [1.0]}}, r"component_weights: unknown \['judge'\]"),
    "guard": (
        {"rule": RLTR(), "components": {"tool": [tool_reward]}, "tool_required": "needs_tool"},
        "tool_required needs the components",
    ),
    "level": ({"args": {"importance_sampling_level": "sequence"}}, "importance_sampling_level='sequence'"),
    "scale": ({"args": {"scale_rewards": "none"}}, "scale_rewards"),
    "objective": ({"args": {"multi_objective_aggregation": "normalize_then_sum"}}, "multi_objective"),
    "reward_weights": ({"args": {"reward_weights": [1.0, 1.0]}}, "component_weights instead"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_named(trainer, case):
    changes, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        trainer(**changes)


def test_missing_column_is_named(trainer):
    with pytest.raises(ValueError, match=r"tool_required: no column 'must_call'.*needs_tool"):
        trainer(tool_required="must_call").train()


def test_grpo_may_leave_a_component_out(trainer):
    run = trainer(rule=GRPO(), components={"tool": [tool_reward]})
    batches = record(run)
    run.train()
    row = batches[0]["advantages"][0]
    assert set(row.tolist()) == {0.0, row[0].item()}


def mutated(old, new):
    """The trainer with one line of its source changed."""
    source = inspect.getsource(credit.adapters.trl)
    assert source.count(old) == 1
    module = types.ModuleType("mutant")
    exec(compile(source.replace(old, new), "mutant", "exec"), module.__dict__)
    return module.CreditGRPOTrainer


MUTANTS = {
    "masked rows count": (
        "torch.where(learns[:, None], self._scored[0], torch.nan)",
        "self._scored[0]",
        test_missing_scores_are_filled_in_without_masked_rows,
    ),
    "rows of another rollout": (
        "routed[first : first",
        "routed.roll(1, 0)[first : first",
        test_rollout_function_with_env_mask,
    ),
    "guard does not tell the rule": (
        "omitted=required & ~called",
        "omitted=None",
        test_guard_keeps_its_signal_without_a_summary_branch,
    ),
    "guard on every row": (
        'named["summary"], required, called)',
        'named["summary"], ~called, called)',
        lambda make: test_omission_guard(make, "needs_tool"),
    ),
    "environment tokens learn": (
        "mask = learnable_mask(output)",
        'mask = output["completion_mask"].bool()',
        test_rollout_function_with_env_mask,
    ),
    "final is ignored": ("final=self.final", 'final="last_run"', test_final_unless_followed),
    "masked tokens are multiplied away": (
        "key in _PER_TOKEN if key in inputs",
        "key in ()",
        lambda make: test_ugly_numbers_under_the_mask_change_nothing(make, float("nan")),
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_noticed(trainer, monkeypatch, mutant):
    old, new, check = MUTANTS[mutant]
    monkeypatch.setitem(globals(), "CreditGRPOTrainer", mutated(old, new))
    with pytest.raises(AssertionError):
        check(trainer)


def test_a_mutant_without_a_change_passes(trainer, monkeypatch):
    monkeypatch.setitem(globals(), "CreditGRPOTrainer", mutated("_PER_TOKEN = (", "_PER_TOKEN = ("))
    test_rollout_function_with_env_mask(trainer)
