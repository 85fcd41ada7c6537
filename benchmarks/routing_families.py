"""The table of ``docs/routing_families.md``, built from the installed transformers and from what the adapter knows.

Run ``python -m benchmarks.routing_families`` to write it again.
"""

import ast
from pathlib import Path

import transformers

from moe_routing.adapters.families import FAMILIES

PAGE = Path(__file__).parents[1] / "docs" / "routing_families.md"

HEAD = """# Families that `RoutingControl` steers

Every modelling file of transformers {version} that records `router_logits`, found by reading the library's source:
{total} families, {controlled} controlled ({limited} of them within limits), {refused} refused. For each controlled
family a test builds a tiny model and compares every parameter's gradient under control with autograd through the
objective written out, token by token; a family whose score function follows the config is tested with one that is
accepted. *Hook* is the tensor whose gradient is changed. *Score* is the function behind the router's probabilities.
Written by `python -m benchmarks.routing_families`.

| Family | Recorded | Router | Score | Hook | Control |
|---|---|---|---|---|---|
"""


def recorders() -> dict[str, list[str]]:
    """Recorders of router logits by folder, as ``RouterClass[index]``.

    A family that is added to the library appears here by itself.
    """
    root = Path(transformers.__file__).parent / "models"
    found: dict[str, set[str]] = {}
    for path in sorted(root.glob("*/modeling_*.py")):
        source = path.read_text()
        if '"router_logits"' in source and "_can_record_outputs" in source:
            for name in _declared(ast.parse(source)):
                found.setdefault(path.parent.name, set()).add(name)
    return {family: sorted(names) for family, names in found.items()}


def _declared(tree: ast.Module) -> list[str]:
    """Every recorder in a dictionary entry ``"router_logits": ...`` of a modelling file."""
    values = [
        value
        for node in ast.walk(tree)
        if isinstance(node, ast.Dict)
        for key, value in zip(node.keys, node.values)
        if isinstance(key, ast.Constant) and key.value == "router_logits"
    ]
    calls = [
        call
        for value in values
        for call in ast.walk(value)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "OutputRecorder"
    ]
    return [f"{ast.unparse(call.args[0])}[{_index(call)}]" for call in calls]


def _index(call: ast.Call) -> str:
    return next((ast.unparse(word.value) for word in call.keywords if word.arg == "index"), "0")


def hook(family: str) -> str:
    """The tensor that the control takes hold of, in words."""
    known = FAMILIES[family]
    if known.source:
        return f"output of `{known.source}`"
    if known.attach:
        return f"logits of `{known.attach}`"
    if known.routers:
        return f"recorded tensor of `{known.routers[0]}`"
    return "recorded tensor"


def page() -> str:
    """The whole document."""
    rows, found = [], recorders()
    for family, names in found.items():
        known = FAMILIES[family]
        score = known.activation if known.activation in ("softmax", "sigmoid") else f"by config (`{known.activation}`)"
        tail = (
            ["–", "–", f"refused: {known.refused}"] if known.refused else [score, hook(family), known.limits or "yes"]
        )
        rows.append(" | ".join([f"| {family}", ", ".join(f"`{name}`" for name in names), known.kind, *tail]) + " |\n")
    refused = sum(bool(FAMILIES[family].refused) for family in found)
    head = HEAD.format(
        version=transformers.__version__,
        total=len(found),
        controlled=len(found) - refused,
        limited=sum(bool(FAMILIES[family].limits) for family in found),
        refused=refused,
    )
    return head + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE.name}")
