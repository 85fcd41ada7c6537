"""Swap the code of one function for a mutated copy, so that every caller sees it."""

import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from importlib import import_module
from typing import Any


@contextmanager
def mutated(function: str, old: str, new: str) -> Iterator[None]:
    """`function` ("module:name" or "module:Class.name") with `old` replaced by `new` in its source, once."""
    module_name, _, path = function.partition(":")
    module = import_module(f"rewards.{module_name}")
    target: Any = reduce(lambda owner, name: inspect.getattr_static(owner, name), path.split("."), module)
    target = inspect.unwrap(getattr(target, "fget", None) or getattr(target, "func", None) or target)
    source = textwrap.dedent(inspect.getsource(target))
    assert source.count(old) == 1, f"{function}: {old!r} stands {source.count(old)} times in the source"
    lines = source.replace(old, new).splitlines()
    # Without its decorators the definition is the bare function.
    start = next(i for i, line in enumerate(lines) if line.startswith("def "))
    scope: dict[str, Any] = {}
    exec("\n".join(lines[start:]), vars(module), scope)
    original, target.__code__ = target.__code__, scope[target.__name__].__code__
    try:
        yield
    finally:
        target.__code__ = original
