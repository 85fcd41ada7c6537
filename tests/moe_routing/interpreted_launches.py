"""What a call of the kernel puts on the device, and the memory it works in; run like ``interpreted_kernels``."""

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from moe_routing import RouterInjection, cleared, fused, hooks, kernels
from moe_routing.arguments import check_router_shapes
from moe_routing.survival import SurvivalTotal
from tests.moe_routing.interpreted_kernels import sized
from tests.moe_routing.kernel_cases import run
from tests.moe_routing.test_mutants import mutate

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

# Operations that make a tensor without a word to the device.
FREE = {"slice", "view", "unbind", "detach", "alias", "select", "empty", "empty_like", "_unsafe_view", "split"}
STEP = {name: torch.tensor(value) for name, value in (("gate", 0.5), ("lambda_turn", 0.7), ("lambda_token", 0.3))}


class Operations(TorchDispatchMode):
    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name not in FREE:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def device_operations(monkeypatch):
    """Everything that a call puts on the device, in order; the kernels themselves do nothing."""
    found: list[str] = []

    class Counted:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            return lambda *arguments, **constants: found.append(self.kernel.__name__)

    built = kernels.kernels()
    fake = {name: Counted(getattr(built, name)) for name in ("norms", "inject")}
    monkeypatch.setattr(fused, "kernels", lambda: SimpleNamespace(**fake, interpreted=True))
    # On a device no id is looked at.
    monkeypatch.setattr(hooks, "check_router_gradient", check_router_shapes)

    def count(call):
        call()  # the first may fill a chunk
        found.clear()
        with Operations(found):
            call()
        return list(found)

    return count


@pytest.mark.parametrize("numbers", [{}, STEP])
def test_two_launches_and_nothing_else(device_operations, numbers):
    case = sized(5, 6, 2, num_pairs=torch.tensor(3), **numbers)

    def call(**options):
        return device_operations(
            lambda: fused.fused_router_gradient(case.logits, case.grad_in, **case.options, **options)
        )

    assert call() == ["_norms", "_inject"]
    assert call(out=case.grad_in) == ["_norms", "_inject"]
    assert call(survival=fused.survival_sums(case.logits.device)) == ["_norms", "_inject"]
    assert call(survival=True) == ["_norms", "_inject", "sum"]


@pytest.mark.parametrize("numbers", [{}, STEP | {"gate": 1.0}])
@pytest.mark.parametrize("scale", [2.0, torch.tensor(2.0)])
def test_a_router_that_reports_survival_takes_two_launches_as_well(device_operations, numbers, scale):
    case = sized(6, 6, 2, num_pairs=torch.tensor(3), **numbers)
    steer, total = RouterInjection(**case.options, scale=scale), SurvivalTotal()
    for shape in ((6, 6), (2, 3, 6)):
        z, g = case.logits.view(shape), case.grad_in.view(shape)
        assert device_operations(lambda z=z, g=g: steer(z, g)) == ["_norms", "_inject"]
        assert device_operations(lambda z=z, g=g: steer(z, g, total)) == ["_norms", "_inject"]
    parts = []
    assert device_operations(lambda: steer(z, g, parts.append)) == ["_norms", "_inject", "sum"]


def test_the_layers_of_a_step_share_their_fills(device_operations, monkeypatch):
    monkeypatch.setattr(fused, "_CLEARED", cleared.Cleared())
    case = sized(5, 6, 2, num_pairs=torch.tensor(3))
    table = torch.randn(2000, 6)  # 8 kB of maxima for a layer
    options = case.options | {"control": table}

    def step():
        for _ in range(128):
            fused.fused_router_gradient(case.logits, case.grad_in, **options)

    found = device_operations(step)
    assert len(found) == 257
    assert found.count("zeros") == 1


def check_calls_across_chunks(module, count=120):
    """Each call as if it were alone, whatever lies in the memory of the earlier ones: they had gradients far larger."""
    module.CHUNK = 300
    cases = [sized(4, 3, 1, seed=i, field=torch.tensor([0, 2, 2, 1])) for i in range(4)]
    cases = [replace(case, grad_in=case.grad_in * 10.0 ** (3 * (i % 2))) for i, case in enumerate(cases)]
    for i, fields in enumerate((3, 40, 3, 700)):  # the last asks for more than a chunk
        table = cases[i].options["control"]
        wide = torch.cat([table, table.new_ones(fields - len(table), table.shape[1])])
        cases[i] = replace(cases[i], options=cases[i].options | {"control": wide})
    alone = []
    for case in cases:
        fused._CLEARED = module.Cleared()
        alone.append(run(case, survival=True))
    fused._CLEARED = memory = module.Cleared()
    take, pieces = memory.take, []

    def take_and_keep(count, device):
        pieces.append(take(count, device))
        return pieces[-1]

    memory.take = take_and_keep
    for i in range(count):
        got, sums = run(cases[i % 4], survival=bool(i % 3))
        assert torch.equal(got, alone[i % 4][0]), f"call {i} differs from the same call alone"
        if sums is not None:
            assert torch.equal(sums.count, alone[i % 4][1].count)
        for piece in pieces:
            piece.fill_(float("nan") if i % 2 else 1e300)
        pieces.clear()


@pytest.fixture
def own_memory(monkeypatch):
    monkeypatch.setattr(fused, "_CLEARED", fused._CLEARED)  # put back at the end


def test_hundreds_of_calls_across_chunks(own_memory):
    check_calls_across_chunks(mutate("cleared", "import torch\n", "import torch \n"), count=200)


@pytest.mark.parametrize("change", ["= chunk, start", "= chunk, start + room // 2"])
def test_memory_that_is_handed_out_twice_is_noticed(own_memory, change):
    with pytest.raises(AssertionError):
        check_calls_across_chunks(mutate("cleared", "= chunk, start + room", change))


def test_two_threads_get_what_one_gets(own_memory, monkeypatch):
    monkeypatch.setattr(cleared, "CHUNK", 200)
    fused._CLEARED = cleared.Cleared()
    cases = [sized(4, 5, 2, seed=i) for i in range(2)]
    cases[1] = replace(cases[1], grad_in=1e4 * cases[1].grad_in)
    expected = [run(case)[0] for case in cases]
    wrong, start = [], threading.Barrier(2)

    def work(i):
        start.wait()
        wrong.extend(n for n in range(25) if not torch.equal(run(cases[i])[0], expected[i]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_survival_that_the_kernel_adds_up_is_the_sum_of_its_reports():
    total, parts = SurvivalTotal(), []
    for seed in range(3):
        case = sized(9, 6, 2, seed=seed, gap_threshold=1.0)
        steer = RouterInjection(**case.options, gate=0.5)
        half = case.grad_in.bfloat16()
        assert torch.equal(steer(case.logits, half, total), steer(case.logits, half, parts.append))
    whole, expected = total.collect(), sum(parts[1:], parts[0])
    assert 0 < expected.total < expected.count
    assert_close(whole.total, expected.total)
    assert_close(whole.count, expected.count)
    assert total.collect() is None


def test_inference_mode_leaves_nothing_behind(own_memory):
    fused._CLEARED = cleared.Cleared()
    case = sized(5, 6, 2)
    with torch.inference_mode():
        inside, sums = run(case, survival=True)
    outside, again = run(case, survival=True)
    assert torch.equal(inside, outside)
    assert torch.equal(sums.total, again.total)
    again.total.add_(1.0)


def test_control_of_a_model_in_the_kernel_is_that_in_pytorch(monkeypatch):
    """Gradients and survival; weights that are tensors change between steps without a new control."""
    pytest.importorskip("transformers")
    from moe_routing.adapters.transformers import RoutingControl
    from tests.moe_routing.adapters import steering
    from tests.moe_routing.adapters.tiny_families import tiny_model

    calls, launch = [], fused.fused_router_gradient
    monkeypatch.setattr(hooks, "fused_router_gradient", lambda *a, **k: calls.append(k["survival"]) or launch(*a, **k))
    found = {}
    for kernel in ("torch", "triton"):
        monkeypatch.setenv("MOE_ROUTING_KERNEL", kernel)
        model = tiny_model("qwen3_moe").float()
        turn, token = torch.tensor(0.0), torch.tensor(0.0)
        options = steering.STRONG | {"lambda_turn": turn, "lambda_token": token}
        with RoutingControl(model, **options) as control:
            base = steering.plain(model)
            tables = steering.record(control, model)
            assert steering.equal(steering.steered(model, control, tables), base)
            turn.fill_(30.0)
            token.fill_(3.0)
            found[kernel] = steering.steered(model, control, tables), control.metrics()
    assert len(calls) == 2 * len(control.routers)
    assert all(isinstance(memory, torch.Tensor) for memory in calls)
    assert steering.relative_error(base, found["torch"][0]) > 1e-2
    assert steering.relative_error(found["triton"][0], found["torch"][0]) < 1e-5
    assert_close(found["triton"][1]["routing/survived"], found["torch"][1]["routing/survived"], rtol=1e-3, atol=0)
