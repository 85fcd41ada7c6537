"""The comparison with BFCL's checker on a few rows: gold, corruptions, figures, and that it can fail."""

import json
import random
from pathlib import Path

import pytest

pytest.importorskip("jsonschema_rs")
pytest.importorskip("scipy")

from benchmarks import bfcl_agreement, bfcl_items
from benchmarks.bfcl import data_folder, read_category
from benchmarks.bfcl_agreement import CATEGORIES, agreement, disagreements
from benchmarks.bfcl_checker import decoded_calls
from benchmarks.bfcl_items import Item, make_items
from benchmarks.bfcl_source import as_written
from benchmarks.bfcl_speed import GROUP, rollouts
from benchmarks.corruptions import CORRUPTIONS
from rewards import ProcessScore

try:
    data_folder()
except FileNotFoundError as error:
    pytest.skip(str(error), allow_module_level=True)


@pytest.fixture(scope="module")
def items() -> tuple[list[Item], list[Item]]:
    return make_items(CATEGORIES, limit=4)


def test_gold_is_perfect_in_every_category(items: tuple[list[Item], list[Item]]) -> None:
    golden, _ = items
    assert {item.row.category for item in golden} == set(CATEGORIES)
    assert {item.verdict for item in golden} == {"TTT"}


def test_agrees_where_both_define_right_or_wrong(items: tuple[list[Item], list[Item]]) -> None:
    _, corrupted = items
    for ours in (1, 2):
        same, of = agreement(corrupted, "F", ours)
        assert of > 300
        assert same >= 0.99 * of
        same, of = agreement(corrupted, "T", ours)
        assert of > 50
        assert same >= 0.97 * of


def test_every_corruption_occurs_and_changes_the_answer() -> None:
    rows = [row for category in CATEGORIES for row in read_category(category)[:80]]
    for name, corruption in CORRUPTIONS.items():
        cases = [(row, corruption.make(row, random.Random(row.id))) for row in rows]
        made = [(row, case) for row, case in cases if case is not None]
        assert made, name
        if name not in ("gold", "calls listed in one tag", "merged steps"):
            # As text: 5 and 5.0 are equal to Python.
            assert all(json.dumps(case.turns) != json.dumps([row.answer]) for row, case in made), name


def test_corruptions_are_the_same_each_time_and_leave_the_row_alone() -> None:
    row = read_category("parallel")[0]
    before = json.dumps([row.answer, row.gold])
    for corruption in CORRUPTIONS.values():
        assert corruption.make(row, random.Random("a")) == corruption.make(row, random.Random("a"))
    assert json.dumps([row.answer, row.gold]) == before


def test_source_text() -> None:
    functions = [
        {
            "name": "f",
            "parameters": {
                "properties": {
                    "n": {"type": "long"},
                    "s": {"type": "String"},
                    "a": {"type": "ArrayList", "items": {"type": "String"}},
                    "i": {"type": "integer"},
                }
            },
        }
    ]
    arguments = {"n": 5, "s": "x", "a": ["p", "q"], "i": "7", "unknown": True}
    calls = [{"name": "f", "arguments": arguments}]
    assert as_written(calls, functions, "simple_java")[0]["arguments"] == {
        "n": "5L",
        "s": "x",
        "a": 'new ArrayList<>(Arrays.asList("p", "q"))',
        "i": '"7"',
        "unknown": "true",
    }
    assert as_written(calls, functions, "simple_javascript")[0]["arguments"]["a"] == '["p", "q"]'
    assert as_written(calls, functions, "parallel") == calls


def test_a_scorer_that_accepts_all_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    perfect = ProcessScore(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, True)
    monkeypatch.setattr(bfcl_items, "process_score", lambda *arguments: perfect)
    _, corrupted = make_items(["simple_python"], limit=2)
    same, of = agreement(corrupted, "F", 1)
    assert same == 0 < of
    assert ("unknown tool", "FTF") in disagreements(corrupted)


def test_what_is_timed(items: tuple[list[Item], list[Item]]) -> None:
    golden, _ = items
    group = rollouts(golden[:1])
    assert len({text for item in group for text in item.turns}) == len(group) == GROUP
    assert all(item.judged().verdict == "TTT" for item in group)
    for item in golden:
        made = [{call["name"]: call["arguments"]} for call in item.row.answer]
        assert decoded_calls(item.turns) == made
        assert item.checked_from_text()


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        bfcl_agreement.main(["--categories", "parallel", "--limit", "2", "--rounds", "1", "--out", str(tmp_path)]) == 0
    )
    figures = json.loads((tmp_path / "bfcl_agreement.json").read_text())
    assert figures["gold"] == {"BFCL checker": 2, "process score": 2, "reference rule": 2}
    assert figures["confusion"]["split parallel step"]["parallel"] == {"TFF": 2}
    assert all(rate > 0 for rates in figures["items_per_second"].values() for rate in rates.values())
    assert figures["agreement"]["process score"]["both define as wrong"]["of"] > 20
    printed = capsys.readouterr().out
    assert "split parallel step" in printed
    assert "items/s, gold" in printed
