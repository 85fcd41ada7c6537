"""Replay, fixed consensus and low-rank routers on tiny models of every family that they claim."""

from types import SimpleNamespace

import jaxtyping
import pytest
import torch
from torch.nn import functional as F

from moe_routing import expert_tiers, low_rank_mix
from moe_routing.adapters import low_rank, weights
from moe_routing.adapters.consensus import consensus_likelihood, fixed_consensus
from moe_routing.adapters.families import FAMILIES as KNOWN
from moe_routing.adapters.low_rank import low_rank_router
from moe_routing.adapters.replay import RoutingReplay, record_selection
from moe_routing.adapters.transformers import RoutingControl
from moe_routing.adapters.weights import WEIGHT_RULES, WeightRule, replaceable_routers
from tests.moe_routing.adapters import steering
from tests.moe_routing.adapters.contexts import foreign
from tests.moe_routing.adapters.tiny_families import tiny_model

FAMILIES = sorted(WEIGHT_RULES)
MAIN = ["qwen3_moe", "mixtral", "olmoe", "glm4_moe", "deepseek_v3", "gpt_oss"]
TOKENS = steering.ROWS * steering.LENGTH


def run(model):
    """Loss and every gradient of one forward and backward."""
    loss = steering.forward(model, steering.tokens())
    loss.backward()
    return loss.detach(), steering.gradients(model)


def own_selection(model):
    with torch.no_grad(), record_selection(model) as trace:
        steering.forward(model, steering.tokens())
    return trace.selected


def depth(model):
    """Sparse layers: some families keep their first layer dense."""
    return len(replaceable_routers(model))


def fingerprint(model):
    """Everything that an intervention must give back."""
    state = {name: tensor.clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    wiring = [
        (name, list(module._forward_hooks), list(module._forward_pre_hooks), "forward" in vars(module))
        for name, module in model.named_modules()
    ]
    return state, wiring, [id(parameter) for parameter in model.parameters()]


def assert_restored(before, model):
    after = fingerprint(model)
    assert before[0].keys() == after[0].keys()
    assert before[1:] == after[1:]
    for name in before[0]:
        assert torch.equal(before[0][name], after[0][name]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_replaying_the_own_selection_is_bitwise_nothing(family):
    model = tiny_model(family)
    before = fingerprint(model)
    loss, gradients = run(model)
    with RoutingReplay(model, own_selection(model)):
        again, replayed = run(model)
    assert torch.equal(loss, again)
    assert steering.equal(gradients, replayed)
    with RoutingReplay(model, torch.full((TOKENS, depth(model), 2), -1)):
        again, replayed = run(model)
    assert torch.equal(loss, again)
    assert steering.equal(gradients, replayed)
    assert_restored(before, model)


@pytest.mark.parametrize("family", MAIN)
@pytest.mark.parametrize("renormalise", [True, False])
def test_replay_is_exact_in_bf16_with_grouped_experts(family, renormalise):
    model = tiny_model(family).bfloat16()
    model.set_experts_implementation("grouped_mm" if family != "gpt_oss" else "eager")
    for router in replaceable_routers(model):
        if hasattr(router.site.module, "norm_topk_prob"):
            router.site.module.norm_topk_prob = renormalise
    loss, gradients = run(model)
    with RoutingReplay(model, own_selection(model).short()):
        again, replayed = run(model)
    assert torch.equal(loss, again)
    assert steering.equal(gradients, replayed)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_foreign_selection_is_what_the_experts_receive(family):
    """Experts get the recorded ids with the weights of the current scores, and the router the gradient of that."""
    model, seen = tiny_model(family), []
    selected = foreign(layers=depth(model))
    plain_loss, plain_gradients = run(model)
    experts = [module for name, module in model.named_modules() if name.endswith(".experts")]
    assert len(experts) == depth(model)
    for module in experts:
        module.register_forward_pre_hook(lambda module, args: seen.append(args))
    with RoutingReplay(model, selected) as active:
        loss, gradients = run(model)
        _, outputs = steering.capture(model, active_sites(active))
    assert not torch.equal(loss, plain_loss)
    for layer, (_, (logits, got, ids)) in enumerate(outputs):
        assert torch.equal(ids, selected[:, layer])
        assert torch.equal(seen[layer][1], selected[:, layer])
        assert torch.equal(seen[layer][2].reshape(got.shape), got)
        score = logits.detach().double()
        score = score.sigmoid() if KNOWN[family].kind.startswith("sigmoid") else score.exp()
        ratio = got.detach().double() / score.gather(1, selected[:, layer])
        assert float((ratio / ratio[:, :1] - 1).abs().max()) < 1e-5
    for router in active.routers:
        for name, _ in router.site.module.named_parameters(router.site.name):
            assert float(gradients[name].abs().max()) > 0
            assert not torch.equal(gradients[name], plain_gradients[name])


def active_sites(active):
    return SimpleNamespace(routers=[router.site for router in active.routers])


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_absent_and_padding_rows_keep_the_live_selection(family):
    model, selected = tiny_model(family), foreign()
    own = own_selection(model)
    mask = torch.ones(steering.ROWS, steering.LENGTH)
    mask[:, -2:] = 0
    stale = torch.where(mask.reshape(-1, 1, 1) > 0, selected, 4711)
    stale[3] = -1
    with RoutingReplay(model, stale, mask=mask), record_selection(model) as trace:
        run(model)
    live = (mask.reshape(-1) == 0) | (torch.arange(TOKENS) == 3)
    assert torch.equal(trace.selected[~live], selected[~live])
    assert torch.equal(trace.selected[live][:, 0], own[live][:, 0])  # below layer 0 nothing differs


def test_routing_control_steers_the_replayed_selection():
    model, selected = tiny_model("qwen3_moe"), foreign()
    with RoutingReplay(model, selected), RoutingControl(model, **steering.STRONG) as control:
        with torch.no_grad(), control.record(steering.fields(), steering.labels(), steering.kinds()):
            _, seen = steering.capture(model, control)
        assert all(torch.equal(output[2], selected[:, layer]) for layer, (_, output) in enumerate(seen))
        tables = control.tables(0.1)
        assert not steering.equal(steering.steered(model, control, tables), steering.plain(model))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_replay_recomputes_the_same_selection(reentrant):
    model = tiny_model("qwen3_moe").train()
    with RoutingReplay(model, foreign()):
        loss, gradients = run(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    with RoutingReplay(model, foreign()):
        again, recomputed = run(model)
    assert torch.equal(loss, again)
    assert steering.equal(gradients, recomputed)


@pytest.mark.parametrize(
    ("selected", "message"),
    [
        (foreign(layers=3), r"selected has shape \(28, 3, 2\).*asks for \(28, 2, 2\)"),
        (foreign(k=3), r"selected has shape \(28, 2, 3\).*asks for \(28, 2, 2\)"),
        (foreign() + 1, r"selected of shape \(28, 2\) holds ids outside 0\.\.7"),
        (foreign()[..., :1].expand(-1, -1, 2), "an expert twice"),
        (foreign()[:5], r"selected has shape \(5, 2\), but the forward \(logits of .*\) asks for \(28, 2\)"),
    ],
)
def test_recordings_that_do_not_fit_are_errors(selected, message):
    model = tiny_model("qwen3_moe")
    before = fingerprint(model)
    with pytest.raises(ValueError, match=message), RoutingReplay(model, selected):
        run(model)
    assert_restored(before, model)


def test_replay_that_replays_nothing_is_an_error():
    model = tiny_model("qwen3_moe")
    before = fingerprint(model)
    with pytest.raises(RuntimeError, match="did not run inside RoutingReplay"), RoutingReplay(model, foreign()):
        pass
    active = RoutingReplay(model, foreign())
    with pytest.raises(RuntimeError, match="already active"), active, active:
        pass
    with pytest.raises(RuntimeError, match="2 of 2 routers"), record_selection(model) as trace:
        _ = trace.selected
    assert_restored(before, model)


@pytest.mark.parametrize("family", ["dbrx", "gemma4"])
def test_families_whose_selection_cannot_be_replaced_are_refused(family):
    model = tiny_model(family)
    with pytest.raises(NotImplementedError, match=rf"selection of \w+ \({family}\) cannot be replaced"):
        RoutingReplay(model, foreign())


class InterruptError(Exception):
    pass


def interrupted(model):
    steering.forward(model, steering.tokens())
    raise InterruptError


@pytest.mark.parametrize("family", MAIN)
def test_every_context_restores_the_model_after_an_exception(family):
    model = ungrouped(family).bfloat16()
    before = fingerprint(model)
    contexts = [
        lambda: RoutingReplay(model, foreign()),
        lambda: fixed_consensus(model, foreign(), steering.fields()),
        lambda: low_rank_router(model, 3, num_ranks=2),
        lambda: record_selection(model),
    ]
    for context in contexts:
        with pytest.raises(InterruptError), torch.no_grad(), context():
            interrupted(model)
        assert_restored(before, model)


def ungrouped(family):
    """Without a limit of the selection to groups, and with a selection bias that matters."""
    model = tiny_model(family)
    for module in model.modules():
        if hasattr(module, "topk_group"):
            module.topk_group = module.num_group
        if hasattr(module, "e_score_correction_bias"):
            module.e_score_correction_bias.copy_(torch.linspace(-1, 1, 8))
    return model


@pytest.mark.parametrize("family", MAIN)
def test_low_rank_router_ties_within_groups_and_fills_ranks(family):
    model = ungrouped(family)
    ids = steering.tokens()
    with torch.no_grad():
        with low_rank_router(model, 1, num_ranks=2), record_selection(model) as trace:
            steering.forward(model, ids)
        assert trace.selected.reshape(-1, 2).unique(dim=0).tolist() == [[0, 4]]  # the first expert of each rank
        with low_rank_router(model, 3), record_selection(model) as trace:
            sites = active_sites(RoutingReplay(model, foreign()))
            _, seen = steering.capture(model, sites)
        for layer, (_, (logits, got, _)) in enumerate(seen):
            assert logits.unique(dim=1).shape[1] <= 3
            assert int(torch.linalg.matrix_rank(logits, rtol=1e-6)) <= 3
            assert torch.allclose(got[:, :1], got)  # k=2 fits into the best group, whose members weigh the same
            first = trace.selected[:, layer, 0]
            assert torch.equal(trace.selected[:, layer, 1], first + 1)
            assert set(first.tolist()) <= {0, 3, 6}


@pytest.mark.parametrize("family", FAMILIES)
def test_low_rank_is_the_router_with_its_rows_mixed(family):
    """Logits, scores and the gradient of the weight are those of a router that owns the mixed rows."""
    model, mixed = ungrouped(family), ungrouped(family)
    for router in replaceable_routers(mixed):
        rows = (*router.site.module.parameters(), *router.site.module.buffers())
        with torch.no_grad():
            for tensor in rows:
                tensor.copy_(low_rank_mix(tensor, 3))
    with low_rank_router(model, 3), record_selection(model) as trace:
        loss, gradients = run(model)
    with RoutingReplay(mixed, trace.selected):  # there rounding breaks the ties
        want_loss, want = run(mixed)
    # The routers themselves compute their scores, and some their logits, in float32.
    assert torch.allclose(loss, want_loss, rtol=1e-6)
    routers = {f"{r.site.name}.{n}" for r in replaceable_routers(mixed) for n, _ in r.site.module.named_parameters()}
    want = {name: low_rank_mix(g, 3) if name in routers else g for name, g in want.items()}
    assert steering.relative_error(gradients, want) < 1e-5
    group = trace.selected[:, 0] * 3 // 8  # further up the ties that were broken otherwise have their effect
    assert torch.equal(group, own_selection(mixed)[:, 0] * 3 // 8)


def test_as_many_groups_as_experts_changes_nothing():
    model = ungrouped("deepseek_v3")
    loss, _ = run(model)
    with low_rank_router(model, 8):
        assert torch.equal(run(model)[0], loss)


def test_low_rank_refuses_group_limits_and_bad_sizes():
    model = tiny_model("deepseek_v3")
    before = fingerprint(model)
    limited = pytest.raises(NotImplementedError, match="DeepseekV3TopkRouter selects within 1 of 2 groups")
    with limited, low_rank_router(model, 1):
        pass
    for arguments in ({"num_groups": 9}, {"num_groups": 2, "num_ranks": 3}):
        free = ungrouped("qwen3_moe")
        with pytest.raises(ValueError, match="num_experts=8"), low_rank_router(free, **arguments):
            steering.forward(free, steering.tokens())
    assert_restored(before, model)


def causal_model():
    from transformers import Qwen3MoeForCausalLM

    from tests.moe_routing.adapters.tiny_families import tiny_config

    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(tiny_config("qwen3_moe", Qwen3MoeForCausalLM)).eval()


def test_consensus_likelihood_matches_a_loop_and_the_consensus_is_fixed():
    model, ids, field = causal_model(), steering.tokens(), steering.fields()
    before = fingerprint(model)
    got = consensus_likelihood(model, ids, field)
    with torch.no_grad():
        with record_selection(model) as trace:
            default = model(ids).logits
        with fixed_consensus(model, trace.selected, field), record_selection(model) as fixed_trace:
            fixed = model(ids).logits
    for logits, part in ((default, got.default), (fixed, got.fixed)):
        values = [
            F.log_softmax(logits[b, t - 1].double(), -1)[ids[b, t]]
            for b in range(steering.ROWS)
            for t in range(1, steering.LENGTH)
            if field[b, t] >= 0
        ]
        assert int(part.count) == len(values)
        assert torch.allclose(part.compute().double(), torch.stack(values).mean(), atol=1e-5)
    assert float(got.default.compute()) != float(got.fixed.compute())
    for f in range(steering.FIELDS):
        assert len(fixed_trace.selected[field.reshape(-1) == f].unique(dim=0)) <= 1
    assert_restored(before, model)


def test_consensus_of_prompts_only_and_of_a_model_in_training(monkeypatch):
    model, ids = causal_model(), steering.tokens()
    nothing = consensus_likelihood(model, ids, torch.full_like(ids, -1))
    assert float(nothing.default.count) == 0
    assert float(nothing.fixed.compute()) == 0
    with pytest.raises(ValueError, match="training mode"):
        consensus_likelihood(model.train(), ids, steering.fields())
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match=r"field has shape \(4, 6\), but input_ids asks for \(4, 7\)"):
        consensus_likelihood(model, ids, steering.fields()[:, :6])


@pytest.mark.parametrize("family", MAIN)
def test_a_wrong_weight_rule_fails_the_bitwise_check(family, monkeypatch):
    wrong = WeightRule("sigmoid", False) if WEIGHT_RULES[family].scoring != "sigmoid" else WeightRule("softmax", True)
    monkeypatch.setitem(WEIGHT_RULES, family, wrong)
    with pytest.raises(AssertionError):
        test_replaying_the_own_selection_is_bitwise_nothing(family)


def test_detached_weights_fail_the_bitwise_check(monkeypatch):
    plain = weights.selected_weights
    monkeypatch.setattr(weights, "selected_weights", lambda logits, *a, **k: plain(logits.detach(), *a, **k))
    with pytest.raises((AssertionError, RuntimeError)):
        test_replaying_the_own_selection_is_bitwise_nothing("qwen3_moe")


def test_a_replay_that_leaves_its_hooks_fails_the_restoration_check(monkeypatch):
    monkeypatch.setattr(weights, "remove", lambda attached: None)
    with pytest.raises(AssertionError):
        test_every_context_restores_the_model_after_an_exception("qwen3_moe")


def test_ties_by_index_fail_the_rank_check(monkeypatch):
    monkeypatch.setattr(low_rank, "expert_tiers", lambda *sizes: torch.zeros_like(expert_tiers(*sizes)))
    with pytest.raises(AssertionError):
        test_low_rank_router_ties_within_groups_and_fills_ranks("qwen3_moe")
