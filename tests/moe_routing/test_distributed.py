import torch
from torch.testing import assert_close

from moe_routing import load_balancing_loss, router_probs
from tests.moe_routing.cases import rich_case
from tests.moe_routing.processes import finish, start
from tests.moe_routing.rank import one_step


def test_two_ranks_with_half_of_the_batch_each_hold_the_numbers_of_one_with_all_of_it(tmp_path):
    processes = [start("rank", str(rank), str(tmp_path)) for rank in range(2)]
    case = rich_case(31)
    table, gradient, slope = one_step(case, slice(None))
    assert table["information"].sum() > 0
    assert table["gap"] != 0
    alone = load_balancing_loss(router_probs(case.logits.float()), case.selected, case.field >= 0)
    assert_close(table["balance"].float(), alone)
    for process in processes:
        finish(process)
    parts = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for name, value in table.items():
        assert torch.equal(parts[0][0][name], parts[1][0][name]), f"ranks disagree on {name}"
        assert_close(parts[0][0][name], value, rtol=1e-6, atol=1e-9)
    assert_close(torch.cat([part[1] for part in parts]), gradient, rtol=1e-6, atol=1e-7)
    assert_close(torch.cat([part[2] for part in parts]), slope, rtol=1e-6, atol=1e-9)
