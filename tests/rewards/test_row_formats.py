"""Rows of Toucan, Hermes, xLAM, TRL and SLCA: what is written is read, what is wrong is reported, the rest goes on."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rewards import (
    RowError,
    Trajectory,
    decompose,
    opening,
    process_score,
    read_chat,
    read_hermes,
    read_slca,
    read_toucan,
    read_xlam,
    split_by_conversation,
)
from rewards.rows import read_rows
from tests.rewards.checks import block

_json = st.none() | st.booleans() | st.integers(-9, 9) | st.text("aé'\"\\\n", max_size=4)
_call = st.fixed_dictionaries(
    {"name": st.sampled_from("fg"), "arguments": st.dictionaries(st.sampled_from("ab"), _json, max_size=2)}
)
_steps = st.lists(st.lists(_call, min_size=1, max_size=2), min_size=1, max_size=3)
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "fg"]
USER = {"role": "user", "content": "?"}


def entry(call: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])}}


def dialogue(steps: list[Any]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [USER]
    for step in steps:
        messages.append({"role": "assistant", "content": "", "tool_calls": [entry(call) for call in step]})
        messages += [{"role": "tool", "content": "1"} for _ in step]
    return [*messages, {"role": "assistant", "content": "done"}]


def toucan(steps: list[Any]) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [USER]
    for step in steps:
        messages += [{"role": "assistant", "content": "", "function_call": entry(call)["function"]} for call in step]
        messages += [{"role": "function", "content": "1", "name": call["name"]} for call in step]
    messages.append({"role": "assistant", "content": "done"})
    return {"uuid": "u", "messages": json.dumps(messages), "available_tools": json.dumps(TOOLS)}


def toucan_15(steps: list[Any]) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [USER]
    for step in steps:
        for call in step:
            said = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
            messages.append({"role": "tool_call", "content": str(said)})
        messages += [{"role": "tool_response", "content": "1"} for _ in step]
    return {"uuid": "u", "messages": str(messages), "tools": str(TOOLS)}


def hermes(steps: list[Any]) -> dict[str, Any]:
    turns = [{"from": "human", "value": "?"}]
    for step in steps:
        turns += [{"from": "gpt", "value": block(*step)}, {"from": "tool", "value": "1"}]
    return {"id": "u", "conversations": [*turns, {"from": "gpt", "value": "done"}], "tools": json.dumps(TOOLS)}


def hermes_card(steps: list[Any]) -> dict[str, Any]:
    row = hermes(steps)
    for turn in row["conversations"]:
        if turn["from"] == "gpt" and turn["value"] != "done":
            turn["value"] = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in steps[0])
            steps = steps[1:]
    text = "Signatures stand within <tools></tools> tags: <tools> " + " ".join(map(str, TOOLS)) + " </tools> Call."
    return {"id": "u", "conversations": [{"from": "system", "value": text}, *row["conversations"]]}


def messages(steps: list[Any]) -> dict[str, Any]:
    return {"id": "u", "messages": dialogue(steps), "tools": TOOLS}


def completion(steps: list[Any]) -> dict[str, Any]:
    first, *rest = dialogue(steps)
    return {"id": "u", "prompt": json.dumps([first]), "completion": rest, "tools": json.dumps(TOOLS)}


def slca(steps: list[Any]) -> dict[str, Any]:
    truth = {"gold_tool_calls": json.dumps(steps)}
    return {"id": "u", "prompt": [USER], "tools": json.dumps(TOOLS), "reward_model": {"ground_truth": truth}}


FORMATS: list[tuple[Callable[[list[Any]], dict[str, Any]], Any]] = [
    (toucan, read_toucan), (toucan_15, read_toucan), (hermes, read_hermes), (hermes_card, read_hermes),
    (messages, read_chat), (completion, read_chat), (slca, read_slca),
]  # fmt: skip


@pytest.mark.parametrize(("write", "read"), FORMATS)
@settings(max_examples=25, deadline=None)
@given(steps=_steps)
def test_what_is_written_is_read(write: Any, read: Any, steps: list[Any]) -> None:
    errors: list[RowError] = []
    rows = list(read([write(steps)], errors.append))
    assert errors == []
    (row,) = rows
    assert row.gold is not None
    assert row.gold.calls() == steps
    assert [tool["function"]["name"] for tool in row.tools] == ["f", "g"]
    assert (row.id, row.source) == ("u", "rows:1")
    assert process_score([block(*step) for step in row.gold.calls()], row.gold, row.tools).total == 1.0
    back = Trajectory.from_row(json.loads(json.dumps(row.to_row())))
    assert (back.gold, back.prompt) == (row.gold, row.prompt)
    if write is slca:
        return
    pairs = decompose(row)
    assert [pair.gold.calls() for pair in pairs] == [[step] for step in steps[1:]]
    assert [pair.id for pair in pairs] == [f"u#{turn}" for turn in range(2, len(steps) + 1)]
    for pair in pairs:
        at = len(pair.context)
        assert (pair.context, pair.action) == (row.messages[:at], row.messages[at])
        (again,) = read_chat([pair.to_row()])
        assert again.gold == pair.gold
        assert len(again.messages) == at


@settings(max_examples=25, deadline=None)
@given(_steps.map(lambda steps: steps[0]))
def test_xlam_is_read(step: list[Any]) -> None:
    tools = [{"name": name, "parameters": {"a": {"type": "Any"}, "b": {"type": "Any, optional"}}} for name in "fg"]
    (row,) = read_xlam([{"id": 3, "query": "?", "tools": json.dumps(tools), "answers": json.dumps(step)}])
    assert row.gold is not None
    assert row.gold.calls() == [step]
    assert process_score([block(*step)], row.gold, row.tools).total == 1.0
    assert row.id == "3"


def test_xlam_types() -> None:
    kinds = {"a": "str", "b": "List[int], optional", "c": "Dict[str, Any]", "d": "float", "e": "Callable", "f": "bool"}
    parameters = {key: {"type": kind, "description": "x"} for key, kind in kinds.items()} | {
        "g": {"type": "int", "default": 1}
    }
    tools = json.dumps([{"name": "f", "description": "", "parameters": parameters}])
    answer = '[{"name": "f", "arguments": {"a": "x", "c": {}, "d": 1, "f": true}}]'
    (row,) = read_xlam([{"query": "?", "tools": tools, "answers": answer}])
    schema = row.tools[0]["function"]["parameters"]
    types = {key: value.get("type") for key, value in schema["properties"].items()}
    assert types == {
        "a": "string", "b": "array", "c": "object", "d": "number", "e": None, "f": "boolean", "g": "integer",
    }  # fmt: skip
    # The answer leaves "e" out, so it cannot be required.
    assert schema["required"] == ["a", "c", "d", "f"]


def test_xlam_gold_fits_its_own_schema() -> None:
    tools = [{"name": "f", "parameters": {"a": {"type": "str"}, "b": {"type": "int, optional"}}}]
    answer = [{"name": "f", "arguments": {"a": 5}}, {"name": "f", "arguments": {"a": "x", "b": [1]}}]
    (row,) = read_xlam([{"query": "?", "tools": json.dumps(tools), "answers": json.dumps(answer)}])
    assert process_score([block(*answer)], row.gold, row.tools).total == 1.0
    wrong = [answer[0], {"name": "f", "arguments": {"a": {}, "b": [1]}}]
    assert process_score([block(*wrong)], row.gold, row.tools).format == 0.5


BAD: list[tuple[Any, dict[str, Any], str]] = [
    (read_chat, {}, "messages"),
    (read_chat, {"messages": []}, "messages"),
    (read_chat, {"messages": "[{'role': (1,)}]"}, "messages"),
    (read_chat, {"messages": [3]}, "messages[0]"),
    (read_chat, {"messages": [{"role": "robot", "content": ""}]}, "messages[0].role"),
    (read_chat, {"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    (read_chat, {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "messages[0].tool_calls[0]"),
    (read_chat, {"messages": [{"role": "assistant", "content": "<tool_call>{("}]}, "messages[0][0]"),
    (read_chat, {"prompt": "?", "tools": [{}]}, "tools"),
    (read_chat, {"prompt": "?", "tools": 3}, "tools"),
    (read_chat, {"prompt": "?", "gold": "[[{}]]"}, "gold"),
    (read_slca, {"prompt": [USER]}, "reward_model.ground_truth.gold_tool_calls"),
    (read_slca, slca([]) | {"reward_model": {"ground_truth": {"gold_tool_calls": "[3]"}}}, "reward_model"),
    (read_slca, slca([]) | {"prompt": None}, "prompt"),
    (read_toucan, {"messages": "[" * 5000}, "messages"),
    (read_toucan, {"messages": None}, "messages"),
    (read_toucan, {"messages": [3]}, "messages[0]"),
    (read_toucan, {"messages": [{"role": "assistant", "function_call": {"name": ""}}]}, "messages[0].function_call"),
    (read_toucan, {"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": "{("}}]},
     "messages[0].function_call.arguments"),
    (read_toucan, {"messages": [USER], "available_tools": "{"}, "available_tools"),
    (read_hermes, {"conversations": 3}, "conversations"),
    (read_hermes, {"conversations": [{"from": "cat", "value": ""}]}, "conversations[0]"),
    (read_hermes, {"conversations": [{"from": ["gpt"], "value": ""}]}, "conversations[0]"),
    (read_hermes, {"conversations": [{"from": "gpt", "value": "<tool_call>"}]}, "conversations[0][0]"),
    (read_hermes, {"conversations": [{"from": "system", "value": "<tools>{("}]}, "tools"),
    (read_xlam, {"query": "", "tools": "[]", "answers": "[]"}, "query"),
    (read_xlam, {"query": "?", "tools": "[]", "answers": "{}"}, "answers"),
    (read_xlam, {"query": "?", "tools": "[]", "answers": '[{"name": 3}]'}, "answers"),
    (read_xlam, {"query": "?", "tools": "[3]", "answers": "[]"}, "tools"),
    (read_xlam, {"query": "?", "tools": '[{"name": "f", "parameters": [1]}]', "answers": "[]"}, "tools"),
]  # fmt: skip


@pytest.mark.parametrize(("read", "bad", "field"), BAD)
@pytest.mark.parametrize("array", [False, True])
def test_a_malformed_row_is_reported_and_the_rest_goes_on(
    tmp_path: Path, read: Any, bad: dict[str, Any], field: str, array: bool
) -> None:
    good = {
        read_chat: {"prompt": "?"}, read_slca: slca([]), read_toucan: {"messages": [USER]},
        read_hermes: {"conversations": [{"from": "human", "value": "?"}]},
        read_xlam: {"query": "?", "tools": "[]", "answers": "[]"},
    }[read]  # fmt: skip
    lines = [json.dumps(row) for row in (good, bad, good)]
    file = tmp_path / "rows.json"
    file.write_text("[\n" + ",\n".join(lines) + "\n]" if array else "\n".join(lines))
    errors: list[RowError] = []
    rows = list(read(file, errors.append))
    assert len(rows) == 2
    (error,) = errors
    assert (error.file, error.line) == (str(file), 2 + array)
    assert error.field.startswith(field), error


def test_files(tmp_path: Path) -> None:
    errors: list[RowError] = []

    def load(text: str) -> list[tuple[int, Any]]:
        file = tmp_path / "rows.json"
        file.write_text(text)
        errors.clear()
        return [(line, row) for _, _, line, row in read_rows(file, errors.append)]

    long = {"a": "x" * 300_000, "b": [1] * 50_000}
    assert load(json.dumps([{"a": 1}, long, {"a": 2}], indent=0))[1] == (5, long)
    assert errors == []
    assert load("\n[\n\n{}, 3,\n{}\n]") == [(4, {}), (5, {})]
    assert [(error.line, error.field) for error in errors] == [(4, "row")]
    assert load('[{"a": 1},\n{"a": NO},\n{}]') == [(1, {"a": 1})]
    assert [error.line for error in errors] == [2]
    assert "the rest is not read" in errors[0].message
    assert load('[{"a": 1}') == [(1, {"a": 1})]
    assert len(errors) == 1
    assert load('[1]\n{"a": 1}\n[2, {}]') == [(2, {"a": 1})]
    assert [error.line for error in errors] == [1, 3]
    assert load("") == load("[]") == load(" \n") == []
    assert errors == []
    assert load("\ufeff" + '{"a": 1}') == load("\ufeff" + '[{"a": 1}]') == [(1, {"a": 1})]
    assert errors == []
    assert load('[{"a": 1}]\n{"a": 2}') == [(1, {"a": 1})]
    assert "text after the end" in errors.pop().message
    for text in (b'{"a": 1}\n{"a": "\xff"}\n{}', b'[{"a": 1},\n{"a": "\xff"},\n{}]'):
        (tmp_path / "rows.json").write_bytes(text)
        assert [line for _, _, line, _ in read_rows(tmp_path / "rows.json", errors.append)] == [1, 3]
        assert str(errors.pop()).endswith("rows.json:2: row: not UTF-8")
    (row,) = read_rows(iter([{"a": 1}, 3]), errors.append)  # type: ignore[list-item]
    assert row == ("rows", "rows", 1, {"a": 1})
    assert str(errors[0]) == "rows:2: row: expected an object, got int"


def test_compressed_files_and_tables(tmp_path: Path) -> None:
    errors: list[RowError] = []
    steps = [[{"name": "f", "arguments": {}}], [{"name": "g", "arguments": {"a": 1}}]]
    rows = [toucan(steps) | {"uuid": str(n)} for n in range(600)]
    lines = "\n".join(map(json.dumps, rows))
    for name, text in (("rows.jsonl.gz", lines), ("rows.json.gz", json.dumps(rows))):
        with gzip.open(tmp_path / name, "wt") as file:
            file.write(text)
        found = list(read_toucan(tmp_path / name, errors.append))
        assert [row.id for row in found] == [str(n) for n in range(600)]
        assert found[-1].source == f"{name}:{1 if 'json.' in name else 600}"
        cut = tmp_path / f"cut-{name}"
        cut.write_bytes((tmp_path / name).read_bytes()[:-300])
        assert 0 < len(list(read_toucan(cut, errors.append))) < 600
        assert "the compressed file is not whole" in errors.pop().message
    assert errors == []
    with gzip.open(tmp_path / "rows.jsonl.gz", "wt") as file:
        file.write("{}\n" + json.dumps(rows[0]))
    assert len(list(read_toucan(tmp_path / "rows.jsonl.gz", errors.append))) == 1
    assert errors.pop().line == 1

    pytest.importorskip("pyarrow")
    from pyarrow import Table
    from pyarrow.parquet import write_table

    write_table(Table.from_pylist([*rows, {"uuid": "bad", "messages": "["}]), tmp_path / "rows.parquet")
    found = list(read_toucan(tmp_path / "rows.parquet", errors.append))
    assert [row.id for row in found] == [str(n) for n in range(600)]
    assert found[0].gold is not None
    assert (found[0].gold.calls(), found[599].source) == (steps, "rows.parquet:600")
    assert [(error.line, error.field) for error in errors] == [(601, "messages")]
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "rows.parquet").read_bytes()[:-9])
    with pytest.raises(OSError, match=r"cut\.parquet: not a whole parquet file"):
        list(read_toucan(tmp_path / "cut.parquet"))


def test_hermes_tools_are_found_where_the_text_speaks_of_tags() -> None:
    text = f"In <tools></tools> tags: <tools> {TOOLS} </tools> Call what is in <tools></tools>, in <tools> tags."
    (row,) = read_hermes([{"conversations": [{"from": "system", "value": text}, {"from": "human", "value": "?"}]}])
    assert [tool["function"]["name"] for tool in row.tools] == ["f", "g"]


def test_parallel_calls_are_joined_and_others_are_not() -> None:
    call = {"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": "{'a': None}"}}
    spoken = {**call, "content": "Now this."}
    (row,) = read_toucan([{"messages": [USER, call, call, spoken, {"role": "function", "content": ""}, call]}])
    assert row.gold is not None
    assert [len(step) for step in row.gold.steps] == [2, 1, 1]
    assert row.gold.flat[0].arguments == {"a": None}
    assert [message["role"] for message in row.messages] == ["user", "assistant", "assistant", "tool", "assistant"]


def test_tables_fill_messages_with_nulls() -> None:
    said = [{**USER, "tool_calls": None}, {"role": "assistant", "content": "x", "tool_calls": None}]
    (row,) = read_chat([{"messages": said, "tools": None}])
    assert row.messages == (USER, {"role": "assistant", "content": "x"})
    assert row.gold is not None
    assert row.gold.steps == ()
    (bracket,) = read_chat([{"prompt": "[INST] Hi", "completion": " [1] See."}])
    assert [message["content"] for message in bracket.messages] == ["[INST] Hi", " [1] See."]
    (task,) = read_chat([{"prompt": "?", "completion": None}])
    assert task.gold is None


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), _steps), max_size=12), st.floats(0, 1), st.integers(0, 9))
def test_no_conversation_is_on_both_sides(said: list[Any], share: float, seed: int) -> None:
    rows: list[Any] = []
    for index, (text, steps) in enumerate(said):
        spoken = [{"role": "user", "content": f" {text.upper() if index % 2 else text}\n"}, *dialogue(steps)[1:]]
        (row,) = read_chat([{"messages": spoken, "id": str(index)}])
        rows += [row, *decompose(row, first=1)]
    train, held = split_by_conversation(rows, share, seed)
    assert not {opening(row) for row in train} & {opening(row) for row in held}
    assert sorted([*map(id, train), *map(id, held)]) == sorted(map(id, rows))
    back_train, back_held = split_by_conversation(rows[::-1], share, seed)
    assert (back_train[::-1], back_held[::-1]) == (train, held)
    assert split_by_conversation(rows, 0.0)[1] == split_by_conversation(rows, 1.0)[0] == []


def test_splits_have_their_share_and_errors_say_why() -> None:
    rows = [Trajectory(({"role": "user", "content": str(i)},)) for i in range(2000)]
    sizes = {len(split_by_conversation(rows, 0.1, seed)[1]) for seed in range(5)}
    assert len(sizes) > 1
    assert all(140 < size < 260 for size in sizes)
    assert {opening(Trajectory((), id="a")), opening(Trajectory((), id="b"))} == {"a", "b"}
    call = {"name": "f", "arguments": {}}
    no_user = Trajectory(tuple(dialogue([[call], [call]])[1:]), source="rows:3")
    assert [opening(row) for row in (no_user, *decompose(no_user))] == ["rows:3"] * 2
    for one, other in (("Café\u00a0ﬁn", "CAFE\u0301 FIN"), ("Straße", "STRASSE"), ("ΣΑΣ", "σας")):
        said = [opening(Trajectory(({"role": "user", "content": text},))) for text in (one, other)]
        assert said[0] == said[1]
    parts = Trajectory(({"role": "user", "content": [{"type": "text", "text": "What?"}]},))
    assert opening(parts) == opening(Trajectory(({"role": "user", "content": "what? "},)))
    images = [Trajectory(({"role": "user", "content": [{"type": "image", "url": url}]},)) for url in "ab"]
    assert len(set(map(opening, images))) == 2
    with pytest.raises(ValueError, match=r"eval_share: expected a share in \[0, 1\], got 1.5"):
        split_by_conversation(rows, 1.5)
    with pytest.raises(ValueError, match="first: expected at least 1"):
        decompose(rows[0], 0)
    broken = Trajectory(({"role": "assistant", "content": "<tool_call>{("},), id="c")
    with pytest.raises(ValueError, match=r"c: messages\[0\]: a tuple is not JSON"):
        decompose(broken, 1)
    assert decompose(broken) == []
    nameless = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": ""}}]}
    with pytest.raises(ValueError, match=r"c: messages\[0\]: no name"):
        decompose(Trajectory((nameless,), id="c"), 1)
