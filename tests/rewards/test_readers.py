"""BFCL's files: the released ones, where the package is installed, and malformed ones."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from rewards import Accepted, RowError, ToolSet, Trajectory, as_gold, process_score, read_bfcl, reference_rule, simulate
from tests.rewards.checks import block, call

CATEGORIES = {
    "simple_python": 400, "simple_java": 100, "simple_javascript": 50, "multiple": 200, "parallel": 200,
    "parallel_multiple": 200, "live_simple": 258, "live_multiple": 1053, "live_parallel": 16,
    "live_parallel_multiple": 24, "irrelevance": 240, "live_irrelevance": 884, "live_relevance": 16,
}  # fmt: skip


def _data() -> Path:
    spec = importlib.util.find_spec("bfcl_eval")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("BFCL's data is not here: pip install --no-deps bfcl-eval==2026.3.23")
    return Path(spec.submodule_search_locations[0]) / "data"


@pytest.mark.parametrize("category", CATEGORIES)
def test_released_gold_scores_one(category: str) -> None:
    errors: list[RowError] = []
    rows = list(read_bfcl(_data() / f"BFCL_v4_{category}.json", on_error=errors.append))
    assert errors == []
    assert len(rows) == CATEGORIES[category]
    for row in rows:
        if row.gold is None:
            assert category == "live_relevance"
            continue
        assert bool(row.gold.steps) == ("irrelevance" not in category)
        tools, answer = ToolSet(row.tools), row.gold.calls()
        turns = [block(*step) for step in answer]
        assert process_score(turns, row.gold, tools).total == 1.0, row.id
        assert reference_rule(turns, row.gold, tools), row.id
        assert all(simulate(one, tools).error is None for step in answer for one in step), row.id


def test_released_alternatives_all_match() -> None:
    for row in read_bfcl(_data() / "BFCL_v4_simple_python.json"):
        assert row.gold is not None
        (gold,) = row.gold.flat
        for key, accepted in gold.arguments.items():
            assert isinstance(accepted, Accepted)
            (arguments,) = (step[0]["arguments"] for step in row.gold.calls())
            for value in accepted.values:
                (value,) = as_gold([[{"name": "f", "arguments": {"x": value}}]]).calls()[0][0]["arguments"].values()
                turn = block({"name": gold.name, "arguments": {**arguments, key: value}})
                assert process_score([turn], row.gold, row.tools).total == 1.0, (row.id, key, value)
            if accepted.optional:
                less = {name: value for name, value in arguments.items() if name != key}
                assert process_score([block({"name": gold.name, "arguments": less})], row.gold, row.tools).total == 1.0
        back = Trajectory.from_row(json.loads(json.dumps(row.to_row())))
        assert back.gold == row.gold
        assert json.dumps(back.tools) == json.dumps(row.tools)


def test_multi_turn_rows_are_reported() -> None:
    errors: list[RowError] = []
    assert list(read_bfcl(_data() / "BFCL_v4_multi_turn_base.json", on_error=errors.append)) == []
    assert len(errors) == 200
    assert errors[0].line == 1


def _row(name: str, **changes: Any) -> dict[str, Any]:
    parameters = {
        "type": "dict",
        "required": ["x"],
        "properties": {
            "x": {"type": "float"},
            "type": {"type": "tuple", "items": {"type": "any"}},
            "unit": {"type": "string", "default": None},
        },
    }
    row = {
        "id": name,
        "question": [[{"role": "user", "content": "?"}]],
        "function": [{"name": "a.b", "description": "", "parameters": parameters}],
    }
    return row | changes


def _write(file: Path, rows: list[Any]) -> Path:
    file.parent.mkdir(exist_ok=True)
    file.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return file


def test_a_row_in_full(tmp_path: Path) -> None:
    truth = [{"a.b": {"x": [1, 2.5], "type": ["", [1]], "unit": [None, "m", ""]}}]
    _write(tmp_path / "possible_answer" / "BFCL_v4_x.json", [{"id": "x_0", "ground_truth": truth}])
    (row,) = read_bfcl(_write(tmp_path / "BFCL_v4_x.json", [_row("x_0")]))
    assert row.tools[0]["function"]["parameters"] == {
        "type": "object",
        "required": ["x"],
        "properties": {
            "x": {"type": "number"},
            "type": {"type": "array", "items": {}},
            "unit": {"type": ["string", "null"], "default": None},
        },
    }
    assert row.gold is not None
    assert row.gold.flat[0].arguments == {
        "x": Accepted((1, 2.5)), "type": Accepted(([1],), True), "unit": Accepted((None, "m", ""), True),
    }  # fmt: skip
    assert (row.id, row.source) == ("x_0", "BFCL_v4_x.json:1")
    assert row.prompt[0]["content"] == "?"


def test_schemas_may_refer_and_be_true(tmp_path: Path) -> None:
    parameters = {
        "type": "dict",
        "$defs": {"t": {"type": "int"}},
        "properties": {"x": {"$ref": "#/$defs/t"}, "y": True},
    }
    row = _row("x_0", function=[{"name": "a.b", "parameters": parameters}])
    answers = _write(tmp_path / "answers.json", [{"id": "x_0", "ground_truth": [{"a.b": {"x": [1], "y": [2, ""]}}]}])
    (made,) = read_bfcl(_write(tmp_path / "rows.json", [row]), answers)
    assert made.gold is not None
    assert process_score([block(call("a.b", x=1))], made.gold, made.tools).total == 1.0


@pytest.mark.filterwarnings("ignore:skipped")
def test_malformed_rows_are_reported_and_the_rest_goes_on(tmp_path: Path) -> None:
    bad: list[tuple[Any, str]] = [
        ("{not json", "row"),
        ("[1]", "row"),
        ("[" * 5000, "row"),
        (_row("x_3", id=None), "id"),
        (_row("x_4", question=[[{"role": "user"}]]), "question"),
        (_row("x_5", question=[[], []]), "question"),
        (_row("x_6", function="f"), "function"),
        (_row("x_7", function=[{"parameters": {}}]), "function[0].name"),
        (_row("x_8", function=[{"name": "f", "parameters": {"type": "text"}}]), "function"),
        (_row("x_9"), "id"),
        (_row("x_14", function=[{"name": "a.b", "parameters": True}]), "function"),
        (_row("x_15"), "row"),
        (_row("x_10"), "ground_truth"),
        (_row("x_11"), "ground_truth"),
        (_row("x_12"), "ground_truth"),
        (_row("x_13"), "ground_truth"),
    ]
    truths: dict[str, Any] = {
        "x_10": None, "x_11": [{"a.b": {"x": 1}}], "x_12": [{"other": {}}], "x_13": [{"a.b": {}, "c": {}}],
        "good": [{"a.b": {"x": [1]}}], "x_15": [{"a.b": {"x": [json.loads('{"a":' * 500 + "1" + "}" * 500)]}}],
    }  # fmt: skip
    truths |= {f"x_{i}": [{"a.b": {"x": [1]}}] for i in range(4, 9)}
    answers = _write(tmp_path / "answers.json", [{"id": k, "ground_truth": v} for k, v in truths.items()])
    file = _write(tmp_path / "rows.json", [_row("good"), *(row for row, _ in bad), _row("good")])
    errors: list[RowError] = []
    rows = list(read_bfcl(file, answers, errors.append))
    assert [row.source for row in rows] == ["rows.json:1", f"rows.json:{len(bad) + 2}"]
    assert [error.line for error in errors] == list(range(2, len(bad) + 2))
    for error, (_, field) in zip(errors, bad):
        assert error.field.startswith(field), error
        assert str(error).startswith(f"{file}:{error.line}: ")
    with pytest.warns(UserWarning, match=r"rows\.json:2: row: not JSON"):
        list(read_bfcl(file, answers))
    with pytest.raises(FileNotFoundError):
        list(read_bfcl(tmp_path / "none.json"))
