"""BFCL: questions with tools, and gold calls with several accepted values."""

from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from rewards.accepted import Accepted
from rewards.gold import Gold, GoldCall, GoldError, as_gold
from rewards.readers._fields import widened
from rewards.rows import MalformedRowError, Report, RowError, read_lines, warn_of_row
from rewards.schema import ToolSchemaError, ToolSet
from rewards.trajectories import Trajectory

# BFCL writes the types of Python, Java and JavaScript. "" stands for a type it does not know.
_TYPES = {
    "dict": "object",
    "hashmap": "object",
    "float": "number",
    "double": "number",
    "long": "integer",
    "int": "integer",
    "bool": "boolean",
    "tuple": "array",
    "list": "array",
    "arraylist": "array",
    "char": "string",
    "str": "string",
    "any": None,
    "": None,
}
_SCHEMAS = ("items", "additionalProperties", "not", "contains", "propertyNames")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMA_MAPS = ("properties", "$defs", "definitions", "patternProperties")


def read_bfcl(
    path: str | PathLike[str], answers: str | PathLike[str] | None = None, on_error: Report = warn_of_row
) -> Iterator[Trajectory]:
    """Read the rows of one single-turn BFCL file.

    Gold is one step of parallel calls. Each argument is an `Accepted`; the "" among its values makes it optional unless
    the schema requires it. Where a gold value does not fit the schema that BFCL gives (a variable's name for an array,
    a string for a Java integer), the schema is widened by the type of that value, as BFCL's own checker does.

    Args:
        path: `BFCL_v4_<category>.json`, JSON lines.
        answers: the file of gold answers; None takes `possible_answer/` beside `path`, where it is. Without any, gold
            is empty for the irrelevance categories (no call is right) and None for others (unknown).
        on_error: told of each malformed row; the default warns.

    Yields:
        One trajectory a row, its source "file:line".

    Raises:
        OSError: a file cannot be read.

    Example:
        >>> import json, pathlib, tempfile
        >>> tool = {"name": "add", "parameters": {"type": "dict", "properties": {"a": {"type": "integer"}}}}
        >>> row = {"id": "simple_0", "question": [[{"role": "user", "content": "Add 1."}]], "function": [tool]}
        >>> answer = {"id": "simple_0", "ground_truth": [{"add": {"a": [1]}}]}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file, answers = pathlib.Path(folder, "BFCL_v4_simple.json"), pathlib.Path(folder, "answers.json")
        ...     _ = file.write_text(json.dumps(row)), answers.write_text(json.dumps(answer))
        ...     [trajectory] = read_bfcl(file, answers)
        >>> trajectory.gold.steps[0][0].name, trajectory.tools[0]["function"]["parameters"]["type"]
        ('add', 'object')

    Reference: the file format of BFCL v4; ours.
    """
    file = Path(path)
    beside = file.parent / "possible_answer" / file.name
    gold_file = Path(answers) if answers is not None else beside if beside.exists() else None
    gold: dict[str, tuple[int, Any]] = {}
    if gold_file is not None:
        for line, row in read_lines(gold_file, on_error):
            gold[str(row.get("id"))] = (line, row.get("ground_truth"))
    for line, row in read_lines(file, on_error):
        try:
            yield _bfcl_row(row, gold, gold_file, f"{file.name}:{line}")
        except MalformedRowError as error:
            on_error(RowError(str(file), line, error.field, error.message))
        except RecursionError:
            on_error(RowError(str(file), line, "row", "nested too deep"))


def _bfcl_row(
    row: Mapping[str, Any], gold: Mapping[str, tuple[int, Any]], gold_file: Path | None, source: str
) -> Trajectory:
    name = row.get("id")
    if not isinstance(name, str) or not name:
        raise MalformedRowError("id", f"expected a non-empty string, got {name!r}")
    question = row.get("question")
    if not isinstance(question, list) or len(question) != 1 or not isinstance(question[0], list):
        raise MalformedRowError("question", "expected one turn, a list of messages")
    if not all(isinstance(m, dict) and isinstance(m.get("content"), str) for m in question[0]):
        raise MalformedRowError("question", "a message is an object with a text as its content")
    functions = _functions(row.get("function"))
    for function in functions.values():
        if not isinstance(function["parameters"], dict):
            raise MalformedRowError("function", f"tool {function['name']!r}: parameters: expected an object")
    try:
        ToolSet(functions.values())
    except ToolSchemaError as error:
        raise MalformedRowError("function", str(error)) from error
    steps: list[Any] | None = [] if "irrelevance" in name else None
    if name in gold:
        line, calls = gold[name]
        where = f"ground_truth ({gold_file}:{line})"
        steps = [[_gold_call(call, functions, where) for call in _calls(calls, where)]]
    elif gold_file is not None and steps is None:
        raise MalformedRowError("id", f"{name!r} has no answer in {gold_file}")
    try:
        checked: Gold | None = None if steps is None else as_gold(steps)
    except GoldError as error:
        raise MalformedRowError("ground_truth", str(error)) from error
    tools = tuple({"type": "function", "function": function} for function in functions.values())
    return Trajectory(tuple(question[0]), tools, checked, name, source)


def _functions(functions: object) -> dict[str, dict[str, Any]]:
    if not isinstance(functions, list) or not all(isinstance(function, dict) for function in functions):
        raise MalformedRowError(
            "function", "expected a list of objects (a multi-turn row brings its tools as Python classes)"
        )
    found: dict[str, dict[str, Any]] = {}
    for index, function in enumerate(functions):
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise MalformedRowError(f"function[{index}].name", f"expected a non-empty string, got {name!r}")
        try:
            found[name] = {**function, "parameters": standard_types(function.get("parameters", {}))}
        except RecursionError:
            raise MalformedRowError(f"function[{index}].parameters", "nested too deep") from None
    return found


def _calls(calls: object, where: str) -> list[tuple[str, Mapping[str, Any]]]:
    """The calls of BFCL's `[{name: {argument: [accepted, …]}}, …]`."""
    if not isinstance(calls, list):
        raise MalformedRowError(where, f"expected a list of calls, got {type(calls).__name__}")
    found: list[tuple[str, Mapping[str, Any]]] = []
    for index, call in enumerate(calls):
        if not isinstance(call, dict) or len(call) != 1:
            raise MalformedRowError(f"{where}[{index}]", "expected an object with one function name")
        ((name, arguments),) = call.items()
        if not isinstance(arguments, dict):
            raise MalformedRowError(f"{where}[{index}].{name}", "expected an object of arguments")
        for key, values in arguments.items():
            if not isinstance(values, list):
                raise MalformedRowError(f"{where}[{index}].{name}.{key}", "expected a list of accepted values")
        found.append((name, arguments))
    return found


def _gold_call(call: tuple[str, Mapping[str, Any]], functions: dict[str, dict[str, Any]], where: str) -> dict[str, Any]:
    name, arguments = call
    if name not in functions:
        raise MalformedRowError(where, f"gold calls {name!r}, which is not among the row's functions")
    parameters = functions[name]["parameters"]
    parameters["required"] = [key for key in parameters.get("required") or () if key in arguments]
    gold = {
        key: _accepted(values, parameters.get("properties", {}).get(key, {}), key in parameters["required"])
        for key, values in arguments.items()
    }
    for key, accepted in gold.items():
        if key in parameters.get("properties", {}):
            parameters["properties"][key] = _widened(parameters["properties"][key], accepted)
    return {"name": name, "arguments": gold}


def _accepted(values: list[Any], schema: Any, required: bool) -> Accepted:
    """BFCL's list of accepted values; "" among them says that the argument may be left out."""
    optional = "" in values and not required
    texts = not isinstance(schema, dict) or schema.get("type", "string") in ("string", ["string", "null"])
    kept = [_nested(value) for value in values if value != "" or texts or (required and len(values) == 1)]
    if not kept and not optional:
        # No value at all is BFCL's way to write the empty list.
        kept = [[]]
    return Accepted(tuple(kept), optional)


def _nested(value: Any) -> Any:
    """Inside an object, too, each value is a list of accepted ones."""
    if isinstance(value, dict):
        return {
            key: _accepted(item, {}, required=False) if isinstance(item, list) else item for key, item in value.items()
        }
    return [_nested(item) for item in value] if isinstance(value, list) else value


def _widened(schema: Any, accepted: Accepted) -> Any:
    """The schema, or one that also takes the types of the accepted values that it refuses."""
    plain = [
        Gold(((GoldCall("", {"value": value}),),)).calls()[0][0]["arguments"]["value"] for value in accepted.values
    ]
    return widened(schema, plain)


def standard_types(schema: Any) -> Any:
    """A schema with the type names of Python, Java and JavaScript replaced by those of JSON Schema.

    Example:
        >>> standard_types({"type": "dict", "properties": {"type": {"type": "float"}, "x": {"type": "any"}}})
        {'type': 'object', 'properties': {'type': {'type': 'number'}, 'x': {}}}

    Reference: ours.
    """
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "type" and isinstance(value, str):
            standard = _TYPES.get(value.lower(), value.lower())
            if standard is not None:
                # A default of null says that null may be given, whatever the type says.
                found[key] = [standard, "null"] if schema.get("default", 0) is None else standard
        elif key in _SCHEMAS:
            found[key] = standard_types(value)
        elif key in _SCHEMA_LISTS and isinstance(value, list):
            found[key] = [standard_types(part) for part in value]
        elif key in _SCHEMA_MAPS and isinstance(value, Mapping):
            found[key] = {name: standard_types(part) for name, part in value.items()}
        else:
            found[key] = value
    return found
