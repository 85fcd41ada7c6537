"""The README's first example runs as printed, and its commands exist."""

import contextlib
import io
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_first_example_prints_what_its_comments_say() -> None:
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1)
    expected = re.findall(r"^print\(.*\)  # (.*)$", code, re.MULTILINE)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), {})
    assert len(expected) == 2
    assert [line.replace(" ", "") for line in printed.getvalue().splitlines()] == [
        line.replace(" ", "") for line in expected
    ]


def test_every_make_target_named_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`?make ([a-z-]+)", README)) - {"their"}
    assert {"demo", "demo-real", "test", "lint", "bench"} <= named <= targets
