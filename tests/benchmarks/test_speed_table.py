"""The table of primitives on tiny sizes: nothing public is missing, twins and peers agree, the section lands."""

import importlib
from dataclasses import replace

import pytest
import torch

from benchmarks import speed_table
from benchmarks.sections import read_section, write_section
from benchmarks.speed_table import CASES, EXEMPT, Row, copy_of, measure, render
from benchmarks.speed_table_case import Case, Made, exponent, gradient_of, require_same
from benchmarks.timing import Spread

SCORES = ("parse_tool_calls", "process_score", "reference_rule", "action_score", "planner_score")


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def public(package: str) -> set[str]:
    return {f"{package}.{name}" for name in importlib.import_module(package).__all__}


def test_every_public_name_has_a_row_or_a_reason():
    covered = {name for case in CASES for name in case.covers}
    wanted = public("credit") | public("moe_routing") | public("rewards")
    assert wanted - covered - set(EXEMPT) == set()
    assert covered & set(EXEMPT) == set()
    assert (covered | set(EXEMPT)) - wanted == set(), "a row or a reason for what is not public"
    assert {f"rewards.{name}" for name in SCORES} <= covered
    assert all(EXEMPT.values())


def test_rows_have_names_of_their_own_and_sizes_over_a_decade():
    assert len({case.name for case in CASES}) == len(CASES)
    for case in CASES:
        sizes = case.sizes()
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == case.largest
        assert 9 < sizes[-1] / sizes[0] < 11


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_twin_and_peers_give_the_same_values(case):
    made = case.make(48)
    require_same(case, made)
    assert (made.traffic > 0) == (not case.covers[0].startswith("rewards.")), "every tensor primitive has a floor"


def plain(ours, naive, **more):
    return Case(covers=("credit.x",), make=lambda n: Made(ours, naive, 8 * n), largest=80, unit="entries",
                naive="loop", **more)  # fmt: skip


def test_a_twin_that_differs_is_named():
    case = plain(lambda: torch.ones(3), lambda: torch.ones(3) + 1e-3)
    with pytest.raises(AssertionError, match=r"`x`, loop"):
        require_same(case, case.make(3))
    with pytest.raises(AssertionError, match="gives 2"):
        require_same(case, Made(lambda: 1, lambda: 2))
    with pytest.raises(AssertionError, match=r"`x`, loop"):
        measure(case, 1)


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_the_exponent_is_that_of_the_power_law(power):
    sizes = [10, 22, 46, 100]
    assert exponent(sizes, [3e-3 * size**power for size in sizes]) == pytest.approx(power)


def test_a_copy_moves_what_it_says():
    copy = copy_of(1000)
    assert copy().numel() == 500


def test_a_gradient_is_taken_afresh():
    slope = gradient_of(lambda x: (x * x).sum(), torch.tensor([3.0]))
    assert [slope().item() for _ in range(2)] == [6.0, 6.0]


def test_a_twin_that_is_slow_runs_at_its_own_size():
    made = []

    def make(size):
        made.append(size)
        return Made(lambda: size, lambda: size, 8 * size)

    case = Case(covers=("credit.x",), make=make, largest=1000, unit="rows", naive="loop", naive_at=60)
    row = measure(case, 1)
    assert sorted(made) == [60, 100, 215, 464, 1000]
    assert "loop at 60" in " ".join(row.cells())


def found(floors, **more):
    case = plain(lambda: 0, lambda: 0, **more)
    one = Spread(1.0, 1.0, 1.0)
    spread = None if floors is None else Spread(floors, floors, floors)
    return Row(case, 80, one, spread, one, 80, {"peer": one}, 1.0)


def test_what_is_slow_must_say_why():
    assert found(1.9, note="sorted").cells()[-1] == ""
    assert found(2.1, note="sorted").cells()[-1] == "sorted"
    assert found(2.1).cells()[-1] == "**not explained**"
    assert found(None, note="sorted").cells()[-1] == ""
    assert replace(found(1.0, note="checked"), naive=Spread(0.9, 0.9, 0.9)).cells()[-1] == "checked", "than its twin"
    text = render([found(1.0), found(3.0, note="sorted"), found(None)], 5)
    assert "1 of 2 are within 2" in text
    assert "peer 1 (1 to 1)" in text


def test_the_section_is_written_beside_the_others(tmp_path, monkeypatch, capsys):
    target = tmp_path / "RESULTS.md"
    write_section(target, "Speed", "kept")
    few = [case for case in CASES if case.covers[0] in ("credit.run_ids", "rewards.process_score")]
    monkeypatch.setattr(speed_table, "CASES", [replace(case, largest=100) for case in few])
    options = ["--rounds", "1", "--threads", "1", "--output", str(target)]
    assert speed_table.main(options) == 0
    section = read_section(target, speed_table.TITLE)
    assert read_section(target, "Speed") == "kept"
    for expected in (
        "`run_ids`",
        "`process_score`",
        "100 rollouts",
        "Not in the table",
        "`credit.Segment`",
        "Machine:",
    ):
        assert expected in section
    assert speed_table.main([*options, "--only", "run_ids"]) == 0
    assert read_section(target, speed_table.TITLE) == section, "a part of the table replaces nothing"
    assert "`run_ids` | 100 rollouts" in capsys.readouterr().out
