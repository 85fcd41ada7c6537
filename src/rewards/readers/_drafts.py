"""Schemas of older drafts, in the words of draft 2020-12."""

from collections.abc import Mapping
from typing import Any

_SCHEMAS = ("items", "additionalProperties", "not", "contains", "propertyNames", "if", "then", "else")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMA_MAPS = ("properties", "$defs", "definitions", "patternProperties")


def modern(schema: Any) -> Any:
    """The schema with draft 7's tuples, a list of `items` and `additionalItems`, as `prefixItems` and `items`."""
    if not isinstance(schema, Mapping):
        return schema
    found = dict(schema)
    if isinstance(found.get("items"), list):
        first, rest = found.pop("items"), found.pop("additionalItems", None)
        # An empty list says nothing of the items, and draft 2020-12 refuses an empty `prefixItems`.
        found |= ({"prefixItems": first} if first else {}) | ({} if rest is None else {"items": rest})
    for key in _SCHEMAS:
        if key in found:
            found[key] = modern(found[key])
    for key in _SCHEMA_LISTS:
        if isinstance(found.get(key), list):
            found[key] = [modern(item) for item in found[key]]
    for key in _SCHEMA_MAPS:
        if isinstance(found.get(key), Mapping):
            found[key] = {name: modern(item) for name, item in found[key].items()}
    return found


def modern_tool(tool: Any) -> Any:
    """The tool with its parameters in the words of draft 2020-12; what is no tool stays as it is."""
    if not isinstance(tool, Mapping):
        return tool
    if isinstance(tool.get("function"), Mapping):
        return {**tool, "function": modern_tool(tool["function"])}
    return {**tool, "parameters": modern(tool["parameters"])} if "parameters" in tool else tool
