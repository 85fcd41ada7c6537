"""Whether a call fits the schema of its tool: validators compiled once per schema, errors as short problems."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

from rewards._json import MAX_DEPTH, depth_exceeds
from rewards.calls import ToolCall, read_call

# Problems after these say nothing new, and hostile arguments could hold a million.
_MOST_PROBLEMS = 20
_LONGEST_MESSAGE = 200
# The words for a recursive schema with alternatives cost the number of alternatives to the power of the depth.
_DEEPEST_EXPLAINED = 4
_KINDS = {"required": "missing_required", "type": "wrong_type", "additionalProperties": "extra_property"}


class ToolSchemaError(ValueError):
    """A tool that the caller brought is not one; the message names the tool and the field."""


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a call.

    Attributes:
        kind: "invalid_call", "unknown_tool", "missing_required", "wrong_type", "extra_property", "invalid_value".
        field: the path of the argument ("filters.0.name"), "" for the call as a whole.
        message: the same in words.
    """

    kind: str
    field: str
    message: str


class ToolSet(Sequence[Mapping[str, Any]]):
    """Tools whose schemas are checked and compiled once; use it where the same list scores many rollouts.

    Every function that takes `tools` takes a `ToolSet` or a plain list; a plain list is read anew on each call, so
    changing it in place is safe, and only compiled schemas are remembered.

    Args:
        tools: `{"type": "function", "function": {"name", "description", "parameters"}}` or the inner object alone.

    Raises:
        ToolSchemaError: a tool without a name, a name twice with different schemas, or parameters that are no schema.

    Example:
        >>> tools = ToolSet([{"name": "add", "parameters": {"type": "object", "required": ["a"]}}])
        >>> [problem.message for problem in tools.validate(ToolCall("add", {}))]
        ['"a" is a required property']

    Reference: ours.
    """

    def __init__(self, tools: Iterable[Mapping[str, Any]]) -> None:
        self._tools = tuple(tools)
        self._functions: dict[str, Mapping[str, Any]] = {}
        # One look-up a call for all: where a row is scored once, memory is what a score waits for.
        self._known: dict[str, tuple[Callable[[Any], bool], Any, Any]] = {}
        for index, tool in enumerate(self._tools):
            function = _function(tool, index)
            name, parameters = function["name"], function.get("parameters")
            if name in self._functions and self._functions[name] != function:
                raise ToolSchemaError(f"tools[{index}]: tool {name!r} is defined twice")
            self._functions[name] = function
            validator = _validator(name, parameters)
            self._known[name] = (validator.is_valid, parameters, validator)

    def __len__(self) -> int:
        return len(self._tools)

    def __getitem__(self, index: Any) -> Any:
        return self._tools[index]

    def function(self, name: str) -> Mapping[str, Any] | None:
        """The tool of that name, without the outer `{"type": "function"}`; None if there is none."""
        return self._functions.get(name)

    def parameters(self, name: str) -> Any:
        """The schema of that tool's arguments; None if there is none."""
        return self._known[name][1] if name in self._known else None

    def is_valid(self, call: ToolCall) -> bool:
        """`not self.validate(call)`, without the words."""
        found = self._known.get(call.name)
        if found is None or call.status != "ok" or not (call._bounded or not depth_exceeds(call.arguments)):
            return False
        try:
            return bool(found[0](call.arguments))
        except ValueError:  # half of a surrogate pair, or a value that JSON does not have
            return False

    def validate(self, call: ToolCall) -> list[Problem]:
        """What is wrong with a call; empty = valid."""
        if self.is_valid(call):
            return []
        if call.status != "ok":
            return [Problem("invalid_call", "", call.reason or call.status)]
        if call.name not in self._known:
            return [Problem("unknown_tool", "", f"no tool is named {call.name[:_LONGEST_MESSAGE]!r}")]
        if depth_exceeds(call.arguments):
            return [Problem("invalid_value", "", f"nested deeper than {MAX_DEPTH}")]
        if depth_exceeds(call.arguments, _DEEPEST_EXPLAINED) and _may_recur(self.parameters(call.name)):
            return [_unexplained(call.arguments, self.parameters(call.name))]
        try:
            errors = islice(self._known[call.name][2].iter_errors(call.arguments), _MOST_PROBLEMS)
            return [_problem(error) for error in errors]
        except ValueError as error:
            return [Problem("invalid_value", "", f"not JSON: {error}"[:_LONGEST_MESSAGE])]


def as_toolset(tools: Iterable[Mapping[str, Any]] | ToolSet) -> ToolSet:
    """`tools`, compiled."""
    return tools if isinstance(tools, ToolSet) else ToolSet(tools)


def as_call(call: ToolCall | Mapping[str, Any]) -> ToolCall:
    """A call made by hand: a `ToolCall`, or `{"name": …, "arguments": …}` read by the parser's rules."""
    if isinstance(call, ToolCall):
        return call
    if depth_exceeds(call):
        return ToolCall("", {}, "invalid_arguments", f"nested deeper than {MAX_DEPTH}")
    name, arguments, status, reason, notes = read_call(call)
    return ToolCall(name, arguments, status, reason, notes=notes)


def validate_call(call: ToolCall | Mapping[str, Any], tools: Iterable[Mapping[str, Any]] | ToolSet) -> list[Problem]:
    """Check a call against its tool's schema (JSON Schema, draft 2020-12).

    Args:
        call: a parsed call, or `{"name": …, "arguments": …}`.
        tools: OpenAI-style tool schemas, or a `ToolSet` of them.

    Returns:
        What is wrong, at most 20 problems; empty = valid.

    Raises:
        ToolSchemaError: one of the tools is not one. Nothing about the call raises.
        ImportError: `jsonschema-rs` is not installed (`pip install credit-routing[rewards]`).

    Example:
        >>> tools = [{"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}]
        >>> validate_call({"name": "add", "arguments": {"a": 1}}, tools)
        []
        >>> validate_call({"name": "add", "arguments": {"a": "one"}}, tools)
        [Problem(kind='wrong_type', field='a', message='"one" is not of type "integer"')]

    Reference: the schema validation of SLCA eq. 23; the problems are ours.
    """
    return as_toolset(tools).validate(as_call(call))


def _function(tool: object, index: int) -> Mapping[str, Any]:
    where = f"tools[{index}]"
    if not isinstance(tool, Mapping):
        raise ToolSchemaError(f"{where}: a tool is an object, got {type(tool).__name__}")
    function = tool.get("function", tool)
    if not isinstance(function, Mapping):
        raise ToolSchemaError(f"{where}.function: expected an object, got {type(function).__name__}")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise ToolSchemaError(f"{where}.name: expected a non-empty string, got {function.get('name')!r}")
    return function


def _problem(error: Any) -> Problem:
    path = list(error.instance_path)
    detail = error.kind.as_dict() if error.kind.name in ("required", "additionalProperties") else {}
    path += [detail["property"]] if "property" in detail else list(detail.get("unexpected", ()))[:1]
    message = error.message
    if len(message) > _LONGEST_MESSAGE:
        message = message[:_LONGEST_MESSAGE] + "…"
    return Problem(_KINDS.get(error.kind.name, "invalid_value"), ".".join(map(str, path)), message)


def _may_recur(schema: object) -> bool:
    return '$ref"' in (text := json.dumps(schema)) or '$dynamicRef"' in text


def _unexplained(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> Problem:
    """The one problem of deep arguments that do not fit a schema which may be recursive."""
    missing = next((key for key in schema.get("required") or () if key not in arguments), None)
    if missing is not None:
        return Problem("missing_required", missing, f'"{missing}" is a required property')
    return Problem("invalid_value", "", f"nested deeper than {_DEEPEST_EXPLAINED} and not what the schema describes")


def _validator(name: str, parameters: object) -> Any:
    compiled, error = _compiled({"type": "object"} if parameters is None else parameters)
    if error:
        raise ToolSchemaError(f"tool {name!r}: parameters{error}")
    return compiled


def schema_error(schema: object) -> str:
    """What is wrong with a schema; "" if nothing."""
    return _compiled(schema)[1]


def is_instance(value: Any, schema: object) -> bool:
    """Whether a value fits a sound schema; what is not JSON fits none."""
    try:
        return bool(_compiled(schema)[0].is_valid(value))
    except ValueError:
        return False


def _compiled(schema: object) -> tuple[Any, str]:
    if not isinstance(schema, (Mapping, bool)):
        return None, f": expected a schema, got {type(schema).__name__}"
    if depth_exceeds(schema):
        return None, f": nested deeper than {MAX_DEPTH}"
    try:
        canonical = json.dumps(schema, sort_keys=True)
    except (TypeError, ValueError) as error:
        return None, f": not JSON: {error}"
    return _compile(canonical)


@lru_cache(maxsize=16384)
def _compile(schema: str) -> tuple[Any, str]:
    """The compiled validator of a schema's canonical JSON, or what is wrong with the schema."""
    try:
        import jsonschema_rs
    except ImportError as error:
        raise ImportError("checking calls needs jsonschema-rs: pip install credit-routing[rewards]") from error
    value = json.loads(schema)
    try:
        return jsonschema_rs.Draft202012Validator(value, retriever=_refuse), ""
    except ValueError as error:
        return None, _schema_error(value, error)


def _refuse(uri: str) -> Any:
    raise ValueError(f"{uri} is outside the schema, and a reward fetches nothing")


def _schema_error(schema: Any, error: Any) -> str:
    """The better words of `jsonschema`, where it is installed and agrees that the schema is wrong."""
    try:
        from jsonschema import Draft202012Validator, SchemaError
    except ImportError:
        return f": {error}"
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as worse:
        return f"{''.join(f'.{step}' for step in worse.absolute_path)}: {worse.message}"
    return f": {getattr(error, 'message', error)}"
