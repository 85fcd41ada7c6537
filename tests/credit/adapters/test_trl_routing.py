"""Routing control inside TRL's trainer: what it adds to the gradients of one step, and what it leaves alone."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from trl import GRPOTrainer

import moe_routing as mr
from credit.adapters import trl_routing
from credit.adapters.trl_ranks import require_own_rows
from credit.adapters.trl_routing import RoutedGRPOTrainer
from moe_routing.adapters.transformers import RoutingControl
from moe_routing.adapters.trl import TurnRouting
from tests.credit.adapters import routed as run


@pytest.fixture(scope="module")
def plain(tokenizer, tmp_path_factory):
    """The gradient of one step without routing."""
    _, _, (gradient,), _ = run.train(tokenizer, tmp_path_factory.mktemp("plain"))
    return gradient


@pytest.fixture(scope="module")
def steered(tokenizer, tmp_path_factory):
    return run.train(tokenizer, tmp_path_factory.mktemp("steered"), run.STRONG)


@pytest.mark.parametrize("changes", [{}, {"num_iterations": 2}, {"gradient_checkpointing": True}])
def test_injected_gradient_is_that_of_the_objective(tokenizer, tmp_path, plain, changes):
    trainer, batches, (gradient,), _ = run.train(tokenizer, tmp_path, run.STRONG | {"rho": False}, **changes)
    assert trainer.state.log_history[0]["routing/added_forward"] == (0.0 if "num_iterations" in changes else 1.0)
    assert (batches[0]["prompt_mask"][:, 0] == 0).any()  # some prompts are padded
    model = run.tiny_moe(tokenizer).train()
    (-run.objective(model, batches[0], tokenizer, **run.STRONG)).backward()
    want = {name: p.grad for name, p in model.named_parameters() if name in plain and p.grad is not None}
    got = run.difference(gradient, plain)
    rest = got.keys() - want.keys()
    assert all(float(got[name].abs().max()) < 1e-5 for name in rest)
    run.assert_close({name: got[name] for name in want}, want)


def test_log(steered):
    trainer, batches, _, hook = steered
    logged = trainer.state.log_history[0]
    fields = run.turns_of(batches[0], trainer.processing_class)
    for kind in ("think", "tool"):
        assert logged[f"routing/turns_{kind}"] == sum(key[2] == kind for key in fields) >= 8
        assert logged[f"routing/information_{kind}"] > 0
    assert logged["routing/pairs"] == sum(b == a + 1 for at in fields.values() for a, b in itertools.pairwise(at))
    assert 0 < logged["routing/survived"] <= 1
    assert int(hook.tables.num_pairs) == logged["routing/pairs"]


def test_closed_gate_changes_no_bit(tokenizer, tmp_path, plain):
    shut = run.STRONG | {"gate": mr.EntropyGate(0.0, 1e-3)}
    trainer, batches, (gradient,), _ = run.train(tokenizer, tmp_path, shut)
    assert all(torch.equal(gradient[name], plain[name]) for name in plain)
    logged = trainer.state.log_history[0]
    assert logged["routing/gate"] == 0.0
    assert logged["routing/gate_entropy"] == pytest.approx(run.policy_entropy(batches[0], tokenizer), rel=1e-5)


def test_generation_is_what_it_was(tokenizer, tmp_path):
    """The model's own samples in the second step, after a first one with the added forward."""
    sampled = {"scripted": False, "max_steps": 2, "learning_rate": 0.0, "max_completion_length": 5}
    _, with_routing, _, hook = run.train(tokenizer, tmp_path, run.STRONG, **sampled)
    _, without, _, _ = run.train(tokenizer, tmp_path, **sampled)
    assert hook.tables is not None
    assert len(without) == 2
    assert not torch.equal(without[0]["completion_ids"], without[1]["completion_ids"])
    for a, b in zip(with_routing, without, strict=True):
        assert torch.equal(a["completion_ids"], b["completion_ids"])
        assert torch.equal(a["advantages"], b["advantages"])


SHARED = {"gradient_accumulation_steps": 1, "steps_per_generation": 2, "max_steps": 2, "learning_rate": 0.0}


@pytest.fixture(scope="module")
def shared(tokenizer, tmp_path_factory):
    """The gradients of two steps without routing."""
    return run.train(tokenizer, tmp_path_factory.mktemp("shared"), **SHARED)[2]


def test_steps_that_share_a_generation_batch(tokenizer, tmp_path, shared):
    """Two optimizer steps of one micro-batch each: together they inject twice the batch's gradient."""
    _, batches, routed, _ = run.train(tokenizer, tmp_path, run.STRONG | {"rho": False}, **SHARED)
    assert len(routed) == 2
    parts = [run.difference(a, b) for a, b in zip(routed, shared, strict=True)]
    model = run.tiny_moe(tokenizer).train()
    (-2 * run.objective(model, batches[0], tokenizer, **run.STRONG)).backward()
    want = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    run.assert_close({name: parts[0][name] + parts[1][name] for name in want}, want)


def test_every_pass_over_a_generation_batch_is_steered_alike(tokenizer, tmp_path, shared):
    """Two passes of two steps each, with evaluations in between, which change no bit."""
    changes = SHARED | {"num_iterations": 2, "max_steps": 4}
    evaluated = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
    _, batches, routed, _ = run.train(tokenizer, tmp_path, run.STRONG | {"rho": False}, **changes, **evaluated)
    assert [batch["completion_ids"].shape[0] for batch in batches] == [8, 4, 4, 4, 4, 4, 4, 4, 4]
    assert len(routed) == 4
    model = run.tiny_moe(tokenizer).train()
    (-2 * run.objective(model, batches[0], tokenizer, **run.STRONG)).backward()
    want = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for first in (0, 2):
        parts = [run.difference(routed[first + i], shared[i]) for i in range(2)]
        run.assert_close({name: parts[0][name] + parts[1][name] for name in want}, want)


def test_the_last_window_of_an_epoch_may_be_short(tokenizer, tmp_path):
    """Three generation batches of one micro-batch each in windows of two: the last is a step of its own."""
    changes = {
        "steps_per_generation": 1, "max_steps": -1, "num_train_epochs": 1, "learning_rate": 0.0, "prompts": 3,
    }  # fmt: skip
    _, batches, routed, _ = run.train(tokenizer, tmp_path, run.STRONG | {"rho": False}, **changes)
    _, _, plain, _ = run.train(tokenizer, tmp_path, **changes)
    assert len(batches) == 3
    assert len(routed) == 2
    for step, own in enumerate((batches[:2], batches[2:])):
        model = run.tiny_moe(tokenizer).train()
        for batch in own:
            (-run.objective(model, batch, tokenizer, **run.STRONG) / len(own)).backward()
        want = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        got = run.difference(routed[step], plain[step])
        run.assert_close({name: got[name] for name in want}, want)


def test_a_step_of_several_generation_batches(tokenizer, tmp_path):
    """Each injects the gradient of its own objective, by its share in the loss; truncated rollouts take no part."""
    changes = {
        "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "steps_per_generation": 1,
        "mask_truncated_completions": True, "prompts": 4,
    }  # fmt: skip
    trainer, batches, (routed,), hook = run.train(tokenizer, tmp_path, run.STRONG | {"rho": False}, **changes)
    _, _, (plain,), _ = run.train(tokenizer, tmp_path, **changes)
    assert len(batches) == 2
    assert not torch.equal(batches[0]["prompt_ids"], batches[1]["prompt_ids"])
    assert not batches[1]["completion_mask"][3].any()
    assert trainer.state.log_history[0]["routing/turns_think"] == 12
    assert hook.tables.num_turns == {"think": 12, "tool": 6}
    model = run.tiny_moe(tokenizer).train()
    for batch in batches:
        (-run.objective(model, batch, tokenizer, **run.STRONG) / 2).backward()
    want = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    got = run.difference(routed, plain)
    run.assert_close({name: got[name] for name in want}, want)


def test_an_adapter_learns_from_it(tokenizer, tmp_path):
    """LoRA on the attention: what is injected at the routers reaches both factors, checkpointed or not."""
    changes = {"adapter": True, "gradient_checkpointing": True}
    _, batches, (routed,), _ = run.train(tokenizer, tmp_path, run.STRONG | {"rho": False}, **changes)
    _, _, (plain,), _ = run.train(tokenizer, tmp_path, **changes)
    assert all("lora" in name for name in plain)
    model = run.tiny_moe(tokenizer, adapter=True).train()
    (-run.objective(model, batches[0], tokenizer, **run.STRONG)).backward()
    got = run.difference(routed, plain)
    run.assert_close(got, {name: model.get_parameter(name).grad for name in got})


def test_a_scale_that_cannot_be_read_is_refused():
    """DeepSpeed scales half-precision losses in a place of its own."""
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(scaler=None, mixed_precision="fp16", num_processes=1),
        args=SimpleNamespace(steps_per_generation=1),
        current_gradient_accumulation_steps=1,
    )
    with pytest.raises(NotImplementedError, match="fp16"):
        RoutedGRPOTrainer._gradient_scale(trainer)
    trainer.accelerator.scaler = SimpleNamespace(get_scale=lambda: 8.0)
    assert RoutedGRPOTrainer._gradient_scale(trainer) == 8.0


@pytest.mark.parametrize("kind", ["tensor", "context", "sequence", "pipeline"])
def test_ranks_that_share_a_batch_are_refused(kind):
    """TRL would have them sample and shuffle by themselves; the weight of the injection counts ranks with own rows."""

    def trainer_of(size):
        sizes = dict.fromkeys(("tensor", "context", "sequence", "pipeline"), 1) | {kind: size}
        layout = SimpleNamespace(pp_size=sizes["pipeline"])
        getters = {f"get_{kind[0]}p_size": lambda kind=kind: sizes[kind] for kind in ("tensor", "context", "sequence")}
        return SimpleNamespace(model=SimpleNamespace(config=SimpleNamespace(distributed_config=layout)), **getters)

    with pytest.raises(NotImplementedError, match=rf"3 ranks share each batch \({kind} parallelism\)"):
        require_own_rows(trainer_of(3))
    require_own_rows(trainer_of(1))


def test_an_absent_parallelism_that_is_written_as_0_hides_no_other():
    trainer = SimpleNamespace(
        model=None, get_tp_size=lambda: 0, get_cp_size=lambda: 2, get_sp_size=lambda: 1
    )  # DeepSpeed's autotp_size is 0 by default
    with pytest.raises(NotImplementedError, match=r"2 ranks share each batch \(context parallelism\)"):
        require_own_rows(trainer)


def test_the_trainer_refuses_them(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(RoutedGRPOTrainer, "get_tp_size", lambda self: 2)
    with pytest.raises(NotImplementedError, match="2 ranks share each batch"):
        run.train(tokenizer, tmp_path)


def test_evaluation_is_untouched(tokenizer, steered):
    trainer, _, _, hook = steered
    tables = hook.tables
    with RoutingControl(trainer.model, **run.STRONG) as control:
        trainer.routing = TurnRouting(control)
        logged = trainer.evaluate(trainer.train_dataset)
        assert trainer.routing.tables is None
    assert not any("routing" in key for key in logged)
    assert hook.tables is tables


def test_an_error_in_a_step_leaves_nothing_bound(tokenizer, tmp_path, monkeypatch):
    """Training goes on, from the rest of the generation batch, as if nothing had been."""
    _, _, want, _ = run.train(tokenizer, tmp_path, run.STRONG, gradient_accumulation_steps=1, max_steps=1)
    trainer, _, _, _ = run.train(tokenizer, tmp_path, gradient_accumulation_steps=1, max_steps=1, learning_rate=0.0)
    whole, width = GRPOTrainer._compute_loss, []

    def breaks(self, model, inputs):
        loss = whole(self, model, inputs)
        width.append(inputs["completion_ids"].shape)
        if len(width) == 1:
            raise FloatingPointError("of the loss")
        return loss

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", breaks)
    with RoutingControl(trainer.model, **run.STRONG) as control:
        trainer.routing, trainer._step = TurnRouting(control), 0
        batch = next(iter(trainer.get_train_dataloader()))
        with pytest.raises(FloatingPointError):
            trainer.training_step(trainer.model, batch, None)
        assert trainer._binding is None
        trainer.evaluate(trainer.train_dataset)
        trainer.model.zero_grad()
        trainer.training_step(trainer.model, batch, None)
    got = {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
    run.assert_close(got, want[0])


def early(field, width):
    return torch.nn.functional.pad(field, (width - field.shape[1], 0), value=-1).roll(-1, 1)


def prompts_on_the_right(field, width):
    return torch.nn.functional.pad(field, (0, width - field.shape[1]), value=-1)


@pytest.mark.parametrize("mutant", [early, prompts_on_the_right])
def test_misaligned_fields_are_noticed(tokenizer, tmp_path, plain, monkeypatch, mutant):
    monkeypatch.setattr(trl_routing, "over_prompt", mutant)
    with pytest.raises(AssertionError):
        test_injected_gradient_is_that_of_the_objective(tokenizer, tmp_path, plain, {})


def test_a_wrong_weight_is_noticed(tokenizer, tmp_path, shared, monkeypatch):
    monkeypatch.setattr(RoutedGRPOTrainer, "_gradient_scale", lambda self: 1.0)
    with pytest.raises(AssertionError):
        test_steps_that_share_a_generation_batch(tokenizer, tmp_path, shared)


def test_fields_follow_their_rows(steered, tokenizer):
    """The micro-batches that TRL shuffled and cut carry the fields of their own rows."""
    trainer, batches, _, _ = steered
    fields = run.turns_of(batches[0], tokenizer)
    width, whole = batches[0]["prompt_ids"].shape[1], batches[0]["completion_ids"]
    wanted = {}
    for (row, _, kind), at in fields.items():
        wanted.setdefault((tuple(whole[row].tolist()), row // 4), []).append((kind, sorted(x - width for x in at)))
    seen = []
    for part in trainer._buffered_inputs:
        assert part["routing_field"].shape == part["completion_ids"].shape
        for ids, own, prompt in zip(part["completion_ids"], part["routing_field"], part["prompt_ids"], strict=True):
            first = [torch.equal(prompt, p) for p in batches[0]["prompt_ids"]].index(True) // 4
            found = [(own == f).nonzero().flatten().tolist() for f in own.unique() if f >= 0]
            assert sorted(found) == sorted(at for _, at in wanted[tuple(ids.tolist()), first])
            seen.append((tuple(ids.tolist()), first))
    assert sorted(seen) == sorted(wanted)
    order = [seen.index((tuple(ids.tolist()), row // 4)) for row, ids in enumerate(whole)]
    assert order != sorted(order)  # TRL did shuffle


def test_multimodal_batches_are_refused(steered):
    trainer = steered[0]
    ids = torch.ones(2, 4, dtype=torch.long)
    trainer._recording = True
    with pytest.raises(NotImplementedError, match="num_images"):
        trainer._get_per_token_logps_and_entropies(trainer.model, ids, ids, 2, num_images=[1, 1])


def test_two_ranks_inject_what_one_does(two, plain, steered):
    trainer, _, (gradient,), _ = steered
    want = run.difference(gradient, plain)
    for result in (rank["routing"] for rank in two):
        run.assert_close(result["injected"], want)
        run.assert_close(result["spread"], want)  # experts that lie on two ranks, each of which has rows of its own
        one = {key: value for key, value in trainer.state.log_history[0].items() if key.startswith("routing/")}
        assert result["log"].keys() == one.keys() >= {"routing/load_cv", "routing/specialization_gap_tool"}
        own = {"routing/survived"}  # of this rank
        for name in one.keys() - own:
            assert result["log"][name] == pytest.approx(one[name], rel=1e-5), name
