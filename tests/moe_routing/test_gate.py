import math
import warnings

import pytest
import torch

from moe_routing import EntropyGate


def test_both_ends_of_the_range_are_open():
    gate = EntropyGate(0.1, 0.2)
    assert [gate(h) for h in (0.1, 0.2, 0.15, 0.0999, 0.2001)] == [1.0, 1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("entropy", [math.nan, math.inf, -math.inf, -0.1])
def test_an_entropy_out_of_reason_closes_the_gate(entropy):
    assert EntropyGate()(entropy) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_ends_are_those_of_the_dtype(dtype):
    low, high = torch.tensor(0.1, dtype=dtype), torch.tensor(0.2, dtype=dtype)
    above, below = high * (1 + torch.finfo(dtype).eps), low * (1 - torch.finfo(dtype).eps)
    gate = EntropyGate(0.1, 0.2)
    assert [gate(h) for h in (low, high, below, above)] == [1.0, 1.0, 0.0, 0.0]
    slow = EntropyGate(0.0, 0.3, hysteresis=0.1)
    assert [slow(torch.tensor(h, dtype=dtype)) for h in (0.5, 0.3 - 0.1, 0.3)] == [0.0, 1.0, 1.0]


def test_tensors_are_accepted_and_the_state_is_reported():
    gate = EntropyGate()
    assert (gate(torch.tensor(0.1)), gate(0.5)) == (1.0, 0.0)
    metrics = gate.metrics()
    assert metrics == {"gate": 0.0, "gate_entropy": 0.5, "gate_open_share": 0.5}


def test_an_entropy_with_a_graph_is_read_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert EntropyGate()(torch.tensor(0.1, requires_grad=True)) == 1.0


def test_without_hysteresis_the_gate_has_no_memory():
    gate = EntropyGate(0.0, 0.2)
    gate(0.9)
    assert gate(0.2) == 1.0


def test_hysteresis_delays_only_the_reopening():
    gate = EntropyGate(0.0, 0.2, hysteresis=0.05)
    assert [gate(h) for h in (0.19, 0.21, 0.19, 0.15, 0.19)] == [1.0, 0.0, 0.0, 1.0, 1.0]


def test_hysteresis_is_that_of_both_ends():
    gate = EntropyGate(0.1, 0.3, hysteresis=0.05)
    assert [gate(h) for h in (0.12, 0.09, 0.12, 0.2, 0.12)] == [1.0, 0.0, 0.0, 1.0, 1.0]


def test_a_resumed_gate_goes_on_as_the_first_one():
    gate, resumed = EntropyGate(0.0, 0.2, hysteresis=0.05), EntropyGate(0.0, 0.2, hysteresis=0.05)
    gate(0.5)
    resumed.load_state_dict(gate.state_dict())
    assert resumed(0.19) == gate(0.19) == 0.0
    assert resumed.metrics() == gate.metrics()


@pytest.mark.parametrize("options", [{"low": 1.0}, {"hysteresis": -0.1}, {"hysteresis": 0.2}, {"high": math.nan}])
def test_an_empty_range_is_an_error(options):
    with pytest.raises(ValueError, match="no entropy lies in"):
        EntropyGate(**options)
