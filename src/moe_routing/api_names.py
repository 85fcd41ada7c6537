"""API names that a turn uses: read from Python code, or from JSON tool calls."""

import ast
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

_FENCE = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)
_STRING_OR_COMMENT = re.compile(
    r"(?:'''.*?(?:'''|\Z)|\"\"\".*?(?:\"\"\"|\Z)|'(?:\\.|[^'\\\n])*'?|\"(?:\\.|[^\"\\\n])*\"?|#[^\n]*)", re.DOTALL
)
_CALL = re.compile(r"(?<![\w.])apis\s*\.\s*(\w+)\s*\.\s*(\w+)\s*\(")
_THINK = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_THINK_TAG = re.compile(r"</?think>")
_TAG = "<tool_call>"
_NAME_KEYS = ("name", "tool_name", "tool")


def code_api_names(turn: object) -> list[str]:
    """``app.method`` of every ``apis.app.method`` that a piece of Python uses, in order, repetitions included.

    Code is parsed, so comments and strings do not count; ``spotify = apis.spotify`` and the like are followed, and
    a method that is handed on, as to a pager, counts as used. Code that does not parse, as an agent's often does
    not, is searched for calls outside strings and comments instead. Of a text with fenced blocks only these count.

    Args:
        turn: the text of the turn's tool-use field; None for a turn without one.

    Raises:
        TypeError: for anything but text.

    >>> code_api_names("phone = apis.phone\\nphone.show_contacts()  # not apis.phone.delete_contact()")
    ['phone.show_contacts']
    """
    if turn is None:
        return []
    if not isinstance(turn, str):
        raise TypeError(f"code of a turn must be text, got {type(turn).__name__}")
    blocks = _FENCE.findall(turn)
    return [name for block in (blocks or [turn]) for name in _names_of_block(block)]


def _names_of_block(code: str) -> list[str]:
    reader = _ApiReader()
    try:
        with warnings.catch_warnings():
            # An agent's invalid escape is no concern of the person who trains it.
            warnings.simplefilter("ignore")
            reader.visit(ast.parse(code))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        blank = _STRING_OR_COMMENT.sub(lambda match: '""' if match.group()[0] != "#" else "", code)
        return [f"{app}.{method}" for app, method in _CALL.findall(blank)]
    return reader.names


class _ApiReader(ast.NodeVisitor):
    """Collects uses of ``apis.app.method`` in source order and follows plain assignments of their prefixes."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._paths: dict[str, tuple[str, ...]] = {"apis": ("apis",)}

    def visit_Assign(self, node: ast.Assign) -> None:
        self._assign(node.targets, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._assign([node.target], node.value)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self._use(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if not self._use(node):
            self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self._use(node)

    def _assign(self, targets: list[ast.expr], value: ast.expr) -> None:
        """Read the value, but what only gets another name, then let the names stand for what they hold now."""
        bindings = [binding for target in targets for binding in _bindings(target, value)]
        paths = {name: path for name, held in bindings if held is not None and (path := self._path(held))}
        self._read(value, {id(held) for name, held in bindings if name in paths})
        for target in targets:
            self.visit(target)
        for name, _ in bindings:
            self._paths.pop(name, None)
        self._paths.update(paths)

    def _read(self, value: ast.expr, renamed: set[int]) -> None:
        if id(value) in renamed:
            return
        if isinstance(value, (ast.Tuple, ast.List)):
            for part in value.elts:
                self._read(part, renamed)
        else:
            self.visit(value)

    def _use(self, node: ast.expr) -> bool:
        path = self._path(node)
        if path is None or len(path) != 3:
            return False
        self.names.append(".".join(path[1:]))
        return True

    def _path(self, node: ast.expr) -> tuple[str, ...] | None:
        """``("apis", app, method)`` or a prefix of it, if the expression is that."""
        if isinstance(node, ast.Name):
            return self._paths.get(node.id)
        if isinstance(node, ast.NamedExpr):
            self._assign([node.target], node.value)
            return self._path(node.value)
        if isinstance(node, ast.Attribute):
            parent = self._path(node.value)
            return (*parent, node.attr) if parent is not None else None
        return None


def _bindings(target: ast.expr, value: ast.expr | None) -> Iterator[tuple[str, ast.expr | None]]:
    """Names that an assignment gives, each with the expression behind it where one can tell."""
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Starred):
        yield from _bindings(target.value, None)
    elif isinstance(target, (ast.Tuple, ast.List)):
        for part, held in zip(target.elts, _unpacked(value, target.elts)):
            yield from _bindings(part, held)


def _unpacked(value: ast.expr | None, targets: list[ast.expr]) -> list[ast.expr | None]:
    """What each of the targets receives of a tuple that is written out, None where one cannot tell."""
    parts = value.elts if isinstance(value, (ast.Tuple, ast.List)) else []
    stars = [at for at, target in enumerate(targets) if isinstance(target, ast.Starred)]
    before, after = (stars[0], len(targets) - stars[0] - 1) if stars else (len(targets), 0)
    fits = len(parts) >= before + after if stars else len(parts) == before
    if not fits or any(isinstance(part, ast.Starred) for part in parts):
        return [None] * len(targets)
    return [*parts[:before], *[None] * len(stars), *parts[len(parts) - after :]]


def tool_call_names(turn: object) -> list[str]:
    """Tool names of a turn's JSON calls, in order, repetitions included.

    Args:
        turn: calls as mappings (``{"name": ...}`` or OpenAI's ``{"function": {"name": ...}}``), alone or in
            sequences, or text: ``<tool_call>`` tags, each with one object, several, or a list, or bare JSON
            without tags. Text inside ``<think>`` is reasoning and holds no calls. What is no JSON holds none.

    Raises:
        TypeError: for anything but text, mappings, sequences of these, and None.

    >>> tool_call_names('<think><tool_call>{"name": "no"}</tool_call></think><tool_call>{"name": "yes"}</tool_call>')
    ['yes']
    """
    if turn is None:
        return []
    if isinstance(turn, str):
        return _names_of_text(blank_reasoning(turn, _THINK))
    if isinstance(turn, Mapping):
        return _names_of_value(turn)
    if isinstance(turn, (list, tuple)):
        return [name for call in turn for name in tool_call_names(call)]
    raise TypeError(f"calls of a turn must be text, mappings or a sequence of them, got {type(turn).__name__}")


def _names_of_text(text: str) -> list[str]:
    """Names in the JSON behind each tag, or in the whole text when there is no tag."""
    names: list[str] = []
    at = text.find(_TAG)
    if at < 0:
        return _names_of_json(text, 0)[0]
    while at >= 0:
        found, stop = _names_of_json(text, at + len(_TAG))
        names += found
        # Decoding says where the call ends: a tag quoted inside an argument is not the next call.
        at = text.find(_TAG, stop)
    return names


def _names_of_json(text: str, start: int) -> tuple[list[str], int]:
    """Names of the JSON values from ``start`` on, and where the last of them ends."""
    values = list(_json_values(text, start))
    return [name for value, _ in values for name in _names_of_value(value)], values[-1][1] if values else start


def _json_values(text: str, start: int) -> Iterator[tuple[Any, int]]:
    """JSON values that follow one another from ``start`` on, each with the place where it ends."""
    decoder, stop = json.JSONDecoder(), start
    while True:
        while stop < len(text) and (text[stop].isspace() or text[stop] == ","):
            stop += 1
        try:
            value, stop = decoder.raw_decode(text, stop)
        except (ValueError, RecursionError):
            return
        yield value, stop


def blank_reasoning(text: str, reasoning: re.Pattern[str]) -> str:
    """``text`` with blanks, as many, in place of what ``reasoning`` finds; a tag inside the JSON of a call is not one.

    >>> thought = re.compile("<think>.*?</think>")
    >>> blank_reasoning('<think>a</think><tool_call>{"name": "b", "arguments": ["<think>"]}</think>', thought).strip()
    '<tool_call>{"name": "b", "arguments": ["<think>"]}</think>'
    """
    if not _THINK_TAG.search(text):
        return text
    quoted = [tag.span() for start, stop in _calls(text) for tag in _THINK_TAG.finditer(text, start, stop)]
    return _blank(text, [found.span() for found in reasoning.finditer(_blank(text, quoted))])


def _calls(text: str) -> Iterator[tuple[int, int]]:
    """Where the JSON behind each tag begins and ends."""
    at = text.find(_TAG)
    while at >= 0:
        start = stop = at + len(_TAG)
        for value, end in _json_values(text, start):
            if not isinstance(value, (dict, list)):  # the tag itself was quoted: what follows is no call
                break
            stop = end
        yield start, stop
        at = text.find(_TAG, stop)


def _blank(text: str, spans: list[tuple[int, int]]) -> str:
    edges = [0, *(edge for span in spans for edge in span), len(text)]
    pieces = [text[start:stop] for start, stop in pairwise(edges)]
    return "".join(" " * len(piece) if odd % 2 else piece for odd, piece in enumerate(pieces))


def _names_of_value(value: Any) -> list[str]:
    if isinstance(value, list):
        return [name for item in value for name in _names_of_value(item)]
    if not isinstance(value, Mapping):
        return []
    function = value.get("function")
    if isinstance(function, Mapping):
        return _names_of_value(function)
    if isinstance(value.get("tool_calls"), list):
        return _names_of_value(value["tool_calls"])
    named = [value[key] for key in _NAME_KEYS if isinstance(value.get(key), str)]
    return named[:1]
