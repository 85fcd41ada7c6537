"""With GRPO on one component the trainer is TRL's own, parameter for parameter, in every loss TRL knows."""

import copy
import os

import pytest
import torch
from trl import GRPOTrainer

from credit import GRPO
from credit.adapters.trl import CreditGRPOTrainer
from tests.credit.adapters.scripted import ScriptedRollout, summary_reward, tool_reward

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
TWICE = {"num_iterations": 2, "max_steps": 4}
OPTIONS = {
    "dapo": {},
    "grpo": {"loss_type": "grpo", "beta": 0.1},
    "bnpo, dual clip": {"loss_type": "bnpo", "delta": 1.5} | TWICE,
    "dr_grpo": {"loss_type": "dr_grpo", "epsilon": 1e-3} | TWICE,
    "cispo": {"loss_type": "cispo"} | TWICE,
    "cispo, sequence": {"loss_type": "cispo", "importance_sampling_level": "sequence"} | TWICE,
    "sapo": {"loss_type": "sapo"} | TWICE,
    "vespo": {"loss_type": "vespo"} | TWICE,
    "luspo": {"loss_type": "luspo"},
    "entropy": {"top_entropy_quantile": 0.5, "entropy_coef": 0.1},
    "off-policy mask": {"off_policy_mask_threshold": 1e-4} | TWICE,
    "accumulation": {"gradient_accumulation_steps": 4, "steps_per_generation": 2, "max_steps": 3},
    "steps per generation": {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "max_steps": 3},
}


def train(cls, model, tokenizer, dataset, args, **settings):
    trained = copy.deepcopy(model)
    trainer = cls(trained, args=args, train_dataset=dataset, processing_class=tokenizer, **settings)
    trainer.train()
    return trained


def assert_same(model, ours, theirs, tolerance=1e-6):
    moved = 0.0
    for (name, before), mine, other in zip(
        model.named_parameters(), ours.parameters(), theirs.parameters(), strict=True
    ):
        torch.testing.assert_close(mine, other, atol=tolerance, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
        moved = max(moved, float((mine - before).detach().abs().max()))
    assert moved > 1000 * tolerance  # a run that stands still agrees with anything


@pytest.mark.parametrize("option", OPTIONS)
def test_grpo_is_stock_trl(model, tokenizer, dataset, config, option):
    options = {"max_steps": 3, "learning_rate": 0.5} | OPTIONS[option]
    rollout = ScriptedRollout(tokenizer)
    functions, weights = [tool_reward, summary_reward], [1.0, 0.5]
    theirs = train(
        GRPOTrainer,
        model,
        tokenizer,
        dataset,
        config(**options, reward_weights=weights),
        reward_funcs=list(functions),
        rollout_func=rollout,
    )
    ours = train(
        CreditGRPOTrainer,
        model,
        tokenizer,
        dataset,
        config(**options),
        rule=GRPO(eps=1e-4),
        components={"summary": functions},
        component_weights={"summary": weights},
        rollout_func=rollout,
    )
    assert_same(model, ours, theirs)


def sampled_score(completions, **_):
    return [None if i % 4 == 1 else float(len(str(c)) % 5) for i, c in enumerate(completions)]


def test_grpo_is_stock_trl_on_sampled_text_with_missing_rewards(model, tokenizer, dataset, config):
    def arguments():
        return config(max_steps=3, learning_rate=0.5, max_completion_length=8)

    stock = {"reward_funcs": [sampled_score]}
    theirs = train(GRPOTrainer, model, tokenizer, dataset, arguments(), **stock)
    routed = {"rule": GRPO(eps=1e-4), "components": {"tool": sampled_score}}
    ours = train(CreditGRPOTrainer, model, tokenizer, dataset, arguments(), **routed)
    assert_same(model, ours, theirs)
