"""Checkpoints in the names of the model hub: every weight comes back, or the message names the one that does not."""

import pytest
import torch
from transformers import Trainer, TrainingArguments

from credit.adapters.trl_checkpoints import WholeCheckpoints, load_saved_model
from tests.credit.adapters.routed import tiny_moe


class WholeTrainer(WholeCheckpoints, Trainer):
    """transformers' own trainer, with whole checkpoints."""


def other(tokenizer, dtype=torch.float32):
    """The same architecture with other weights, at which a run is resumed."""
    model = tiny_moe(tokenizer).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    return model


def trainer_of(cls, model, folder):
    return cls(model, TrainingArguments(str(folder), use_cpu=True, report_to=[], save_strategy="no"))


def differing(model, saved):
    weights = saved.state_dict()
    return [name for name, weight in model.state_dict().items() if not torch.equal(weight, weights[name])]


@pytest.mark.parametrize("best", [False, True])
@pytest.mark.parametrize("shard", ["5GB", "100KB"])
def test_every_weight_comes_back(tokenizer, tmp_path, best, shard):
    saved, model = tiny_moe(tokenizer), other(tokenizer)
    saved.save_pretrained(tmp_path / "checkpoint-1", max_shard_size=shard)
    trainer = trainer_of(WholeTrainer, model, tmp_path)
    if best:
        trainer.state.best_model_checkpoint = str(tmp_path / "checkpoint-1")
        trainer._load_best_model()
    else:
        trainer._load_from_checkpoint(str(tmp_path / "checkpoint-1"))
    assert differing(model, saved) == []
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_transformers_alone_loses_the_experts(tokenizer, tmp_path):
    """The day this fails, the mixin has become superfluous."""
    saved, model = tiny_moe(tokenizer), other(tokenizer)
    saved.save_pretrained(tmp_path / "checkpoint-1")
    trainer_of(Trainer, model, tmp_path)._load_from_checkpoint(str(tmp_path / "checkpoint-1"))
    assert differing(model, saved)
    assert all("experts" in name for name in differing(model, saved))


@pytest.mark.parametrize("router", [torch.bfloat16, torch.float32])
def test_half_precision_is_kept_as_it_was(tokenizer, tmp_path, router):
    saved, model = tiny_moe(tokenizer).bfloat16(), other(tokenizer, torch.bfloat16)
    for each in (saved, model):
        for layer in each.model.layers:
            layer.mlp.gate.to(router)
    with torch.no_grad():
        saved.model.layers[0].mlp.gate.weight.add_(2**-12)  # which bfloat16 cannot hold
    saved.save_pretrained(tmp_path)
    load_saved_model(model, str(tmp_path))
    assert differing(model, saved) == []
    assert model.model.layers[0].mlp.gate.weight.dtype == router
    assert model.model.layers[0].mlp.experts.down_proj.dtype == torch.bfloat16


def test_a_weight_that_is_not_there_is_named(tokenizer, tmp_path):
    saved, model = tiny_moe(tokenizer), tiny_moe(tokenizer)
    weights = saved.state_dict()
    del weights["model.layers.1.mlp.gate.weight"]
    saved.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(ValueError, match=r"these weights of Qwen3MoeForCausalLM: \['model.layers.1.mlp.gate.weight'\]"):
        load_saved_model(model, str(tmp_path))
