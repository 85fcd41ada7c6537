"""BFCL's own verdict on a list of calls, without its model handlers.

Importing `ast_checker` imports `bfcl_eval.constants.model_config`, and with it every vendor's SDK; and
`bfcl_eval.constants.eval_config` makes folders beside the installed package. Neither is needed to compare calls, so
the import runs with a stub for the first and a temporary project folder for the second, and both are taken back.
"""

import functools
import json
import os
import re
import sys
import tempfile
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks.bfcl_source import language_of

# How BFCL's handler of Qwen's function-calling models finds the JSON; it takes a tag in a string for the end.
_BLOCK = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
_MODEL_CONFIG = "bfcl_eval.constants.model_config"

# Rows of the pinned release whose own gold its checker rejects: no model can be right on them.
UNANSWERABLE = frozenset(
    {
        "parallel_multiple_12",
        "parallel_multiple_26",
        "live_simple_106-63-0",
        "live_simple_112-68-0",
        "live_multiple_507-149-4",
        "live_multiple_862-181-3",
        "live_multiple_964-207-0",
    }
)


def bfcl_valid(
    functions: Sequence[Mapping[str, Any]],
    calls: Sequence[Mapping[str, Any]],
    ground_truth: Sequence[Mapping[str, Any]],
    category: str,
) -> bool:
    """True if BFCL's checker accepts `calls` (each with `name` and `arguments`) for a row of `category`.

    Calls of a Java or JavaScript row come as `bfcl_source.as_written` makes them. `functions` and `ground_truth` are
    the row's own, as they lie in BFCL's files. A checker that raises on what a model wrote (arguments that are no
    object, unhashable values) has not accepted it.
    """
    check, languages = _checker()
    answer = [{call["name"]: call["arguments"]} for call in calls]
    if not answer or not all(isinstance(call["arguments"], Mapping) for call in calls):
        return False
    try:
        verdict = check(list(functions), answer, list(ground_truth), languages[language_of(category)], category, "any")
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return False
    return bool(verdict["valid"])


def json_texts(turns: Sequence[str]) -> list[str]:
    """What stands between the tags of a rollout."""
    return [text for turn in turns for text in _BLOCK.findall(turn)]


def decoded_calls(turns: Sequence[str]) -> list[dict[str, Any]]:
    """The calls of a rollout as BFCL's handler decodes them: unreadable ones left out, nothing else checked."""
    calls: list[Any] = []
    for text in json_texts(turns):
        try:
            calls.append(json.loads(text))
        except ValueError:
            continue
    return [{call["name"]: dict(call["arguments"])} for call in calls if isinstance(call, dict)]


@functools.cache
def _checker() -> tuple[Callable[..., dict[str, Any]], Any]:
    with _isolated():
        from bfcl_eval.constants.enums import Language
        from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker
    return ast_checker, {language.name.lower(): language for language in Language}


@contextmanager
def _isolated() -> Iterator[None]:
    stub = types.ModuleType(_MODEL_CONFIG)
    stub.MODEL_CONFIG_MAPPING = defaultdict(lambda: types.SimpleNamespace(underscore_to_dot=False))  # type: ignore[attr-defined]
    old_module, old_root = sys.modules.get(_MODEL_CONFIG), os.environ.get("BFCL_PROJECT_ROOT")
    known = set(sys.modules)
    with tempfile.TemporaryDirectory() as folder:
        sys.modules[_MODEL_CONFIG] = stub
        os.environ["BFCL_PROJECT_ROOT"] = folder
        try:
            yield
        finally:
            del sys.modules[_MODEL_CONFIG]
            if old_module is not None:
                sys.modules[_MODEL_CONFIG] = old_module
            # A later import of the real package must not find a project folder that is gone.
            for name in [name for name in sys.modules if name.startswith("bfcl_eval") and name not in known]:
                del sys.modules[name]
            os.environ.pop("BFCL_PROJECT_ROOT")
            if old_root is not None:
                os.environ["BFCL_PROJECT_ROOT"] = old_root
