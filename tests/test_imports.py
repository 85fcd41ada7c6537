"""The import graph: arrows point one way, and the packages import with torch, einops and jaxtyping alone."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"
PACKAGES = ("credit", "moe_routing", "rewards")
LIGHT = {"torch", "einops", "jaxtyping"}

# What a module of credit may import of credit at module level. A module that is not named here is a leaf at the edge
# (view, adapters): it may import any of these, and none of these may import it.
CORE = {
    "_safe": set(),
    "segments": {"_safe"},
    "advantages": {"_safe", "segments"},
    "assignment": {"_safe", "segments", "advantages"},
    "temporal": {"_safe", "segments", "advantages"},
    "guard": {"_safe"},
    "rules": {"_safe", "segments", "advantages", "assignment"},
    "aggregation": {"_safe"},
    "stats": {"_safe", "segments"},
    "losses": {"_safe", "aggregation", "stats"},
    "divergence": {"_safe"},
    "supervised": {"_safe"},
}
MOE_MAY_IMPORT = {"credit._safe", "credit.segments"}


def imports(source: str, everywhere: bool) -> Iterator[str]:
    """Dotted names that ``source`` imports: at module level only, or anywhere. TYPE_CHECKING blocks do not run."""
    todo = list(ast.parse(source).body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo += node.orelse
        elif everywhere or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            todo += ast.iter_child_nodes(node)


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(SRC.rglob("*.py")):
        parts = path.relative_to(SRC).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def offences(name: str, source: str) -> list[str]:
    """Imports of module ``name`` that the rules forbid."""
    package, edge = name.split(".")[0], ".adapters" in name
    light = sys.stdlib_module_names | set(PACKAGES) | (LIGHT if package != "rewards" else set())
    wrong = []
    for target in imports(source, everywhere=False):
        root = target.split(".")[0]
        if root not in light and not edge:
            wrong.append(f"{name} imports {root} at module level")
    for target in imports(source, everywhere=True):
        root = target.split(".")[0]
        if ".adapters" in target and not edge:
            wrong.append(f"{name} imports the adapter {target}")
        if root in ("trl", "transformers", "verl", "slime") and not edge:
            wrong.append(f"{name} imports {root}, as only adapters may")
        if root == "triton" and name != "moe_routing.kernels":
            wrong.append(f"{name} imports triton")
        if root == "torch" and package == "rewards" and not edge:
            wrong.append(f"{name} imports torch")
        if package == "rewards" and root in ("credit", "moe_routing"):
            wrong.append(f"{name} imports {root}")
        if package == "credit" and root in ("rewards", "moe_routing"):
            wrong.append(f"{name} imports {root}")
        if package == "moe_routing" and root == "rewards":
            wrong.append(f"{name} imports rewards")
        allowed = any(target == ok or target.startswith(ok + ".") for ok in MOE_MAY_IMPORT)
        if package == "moe_routing" and root == "credit" and not edge and not allowed:
            wrong.append(f"{name} imports {target}")
        core = name.removeprefix("credit.")
        if core in CORE and target.startswith("credit.") and target.split(".")[1] not in CORE[core]:
            wrong.append(f"{name} imports {target}, against the arrows")
    return wrong


def test_the_walk_sees_every_module():
    names = modules()
    assert set(PACKAGES) <= set(names)
    assert {f"credit.{core}" for core in CORE} <= set(names)


@pytest.mark.parametrize("name", modules())
def test_arrows(name):
    assert offences(name, modules()[name].read_text()) == []


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("credit.losses", "import numpy"),
        ("credit.view", "from rich import print"),
        ("credit._safe", "from credit.segments import run_ids"),
        ("credit.advantages", "def f():\n    from credit.losses import policy_loss"),
        ("credit.segments", "from credit import kl_k3"),
        ("credit.view", "def f():\n    from credit.adapters.trl import X"),
        ("credit.rules", "def f():\n    import trl"),
        ("credit.stats", "import rewards"),
        ("moe_routing.metrics", "from credit.losses import policy_loss"),
        ("moe_routing.metrics", "import credit"),
        ("moe_routing.injection", "def f():\n    import triton"),
        ("moe_routing.metrics", "from rewards.calls import parse_tool_calls"),
        ("rewards.calls", "def f():\n    import torch"),
        ("rewards.calls", "from credit.segments import run_ids"),
        ("rewards.schema", "if True:\n    import jsonschema"),
    ],
)
def test_the_rules_can_fail(name, source):
    assert offences(name, source)


def test_the_rules_allow_what_they_should():
    assert not offences("credit.adapters.trl", "import trl\nfrom credit.losses import policy_loss")
    assert not offences("credit.view", "def f():\n    import rich\nfrom credit.segments import run_ids")
    assert not offences("moe_routing.metrics", "from credit._safe import select\nfrom credit.segments import Field")
    assert not offences("rewards.schema", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import jsonschema")


BLOCKED = """
import sys

allowed = set(sys.stdlib_module_names) | {allowed!r}
seen = []

class Block:
    def find_spec(self, name, path=None, target=None):
        caller = sys._getframe(1)
        while "importlib" in caller.f_code.co_filename:
            caller = caller.f_back
        root = caller.f_globals.get("__name__", "").split(".")[0]
        # torch may use what it likes; the packages may not.
        if root in {packages!r} and name.split(".")[0] not in allowed | set({packages!r}):
            raise ImportError(f"{{name}} is blocked, wanted by {{caller.f_globals['__name__']}}")

sys.meta_path.insert(0, Block())
for name in {names!r}:
    __import__(name)
"""


def import_alone(names: list[str], packages: tuple[str, ...] = PACKAGES, path: str = "") -> subprocess.CompletedProcess:
    script = BLOCKED.format(allowed=LIGHT, packages=packages, names=names)
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = [{str(SRC)!r}, {path!r}]\n{script}"],
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_everything_but_adapters_imports_with_the_light_base_alone():
    names = [name for name in modules() if ".adapters." not in name]
    done = import_alone(names)
    assert done.returncode == 0, done.stderr


def test_the_blocked_process_can_fail(tmp_path):
    (tmp_path / "greedy.py").write_text("import numpy\n")
    done = import_alone(["greedy"], ("greedy",), str(tmp_path))
    assert done.returncode != 0
    assert "numpy is blocked, wanted by greedy" in done.stderr


def test_rewards_imports_without_torch():
    script = f"import sys; sys.path.insert(0, {str(SRC)!r}); sys.modules['torch'] = None; import rewards"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
