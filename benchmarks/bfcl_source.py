"""Arguments as Java and JavaScript source text: BFCL's checker wants every argument of such a row written so."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_LITERAL = re.compile(r"true|false|-?[0-9.]+([eE][+-]?[0-9]+)?")


def language_of(category: str) -> str:
    """`python`, `java` or `javascript`, the language whose rules the checker applies."""
    return category.removeprefix("simple_") if category in ("simple_java", "simple_javascript") else "python"


def as_written(
    calls: Sequence[Mapping[str, Any]], functions: Sequence[Mapping[str, Any]], category: str
) -> list[dict[str, Any]]:
    """The calls as the checker takes them: as they are for Python, arguments as source text for Java and JavaScript.

    `functions` are the row's schemas with BFCL's own type names: they say how a value is written.
    """
    language = language_of(category)
    if language == "python":
        return [dict(call) for call in calls]
    write = _java if language == "java" else _javascript
    types = {function["name"]: function["parameters"]["properties"] for function in functions}
    return [
        {
            "name": call["name"],
            "arguments": {
                key: write(value, types.get(call["name"], {}).get(key, {})) for key, value in call["arguments"].items()
            },
        }
        for call in calls
    ]


def _java(value: Any, schema: Mapping[str, Any]) -> str:
    kind, inner = schema.get("type", ""), schema.get("items", {})
    if isinstance(value, str):
        return _text(value, kind)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return f"{value}{ {'long': 'L', 'float': 'f'}.get(kind, '') }"
    if isinstance(value, list):
        # The checker's array reader keeps the quotes of a text and its list reader cuts them off.
        items = ", ".join(_element(item, inner, quoted=kind != "Array") for item in value)
        return f"new Object[]{{{items}}}" if kind == "Array" else f"new ArrayList<>(Arrays.asList({items}))"
    if isinstance(value, dict):
        puts = " ".join(f'put("{key}", {_element(item, {}, quoted=True)});' for key, item in value.items())
        return f"new HashMap<String, Object>() {{{{ {puts} }}}}"
    return "null"


def _text(value: str, kind: str) -> str:
    """A name stands bare; a text that reads like a number or a boolean needs its quotes to stay a text."""
    bare = kind in ("String", "any", "") or not _LITERAL.fullmatch(value)
    return value if bare else f'"{value}"'


def _element(value: Any, schema: Mapping[str, Any], quoted: bool) -> str:
    return f'"{value}"' if quoted and isinstance(value, str) else _java(value, schema)


def _javascript(value: Any, schema: Mapping[str, Any]) -> str:
    if isinstance(value, str):
        return f'"{value}"' if schema.get("type") == "String" else _text(value, schema.get("type", ""))
    if isinstance(value, float) and value.is_integer() and schema.get("type") == "float":
        return f"{value:.1f}"
    return json.dumps(value, ensure_ascii=False)
