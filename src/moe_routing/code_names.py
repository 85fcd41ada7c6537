"""API names that a turn uses: read from the Python code of its tool-use field."""

import ast
import re
import warnings
from collections.abc import Iterator

_FENCE = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)
_STRING_OR_COMMENT = re.compile(
    r"(?:'''.*?(?:'''|\Z)|\"\"\".*?(?:\"\"\"|\Z)|'(?:\\.|[^'\\\n])*'?|\"(?:\\.|[^\"\\\n])*\"?|#[^\n]*)", re.DOTALL
)
_CALL = re.compile(r"(?<![\w.])apis\s*\.\s*(\w+)\s*\.\s*(\w+)\s*\(")


def code_api_names(turn: object) -> list[str]:
    """``app.method`` of every ``apis.app.method`` that a piece of Python uses, in order, repetitions included.

    Code is parsed, so comments and strings do not count; ``spotify = apis.spotify`` and the like are followed, and
    a method that is handed on, as to a pager, counts as used. Code that does not parse, as an agent's often does
    not, is searched for calls outside strings and comments instead. Of a text with fenced blocks only these count.

    Args:
        turn: the text of the turn's tool-use field; None for a turn without one.

    Raises:
        TypeError: for anything but text.

    Reference: paper appendix C.6; the reading of code is ours.

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
        if not self._use(node) and self._path(node) is None:
            self.visit(node.value)
            self._paths.pop(node.target.id, None)

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
            path = self._path(node.value)
            if path is not None:
                self._paths[node.target.id] = path
            return path
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
