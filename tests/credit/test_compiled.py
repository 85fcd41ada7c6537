"""Credit and loss under ``torch.compile(fullgraph=True)``: eager's values and gradients, compiled once for all sizes.

In processes of their own: the run-time type checks of the test run cannot be traced.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compiled.py")


def run(*arguments: str) -> str:
    root = str(SCRIPT.parents[2])
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env={**os.environ, "JAXTYPING_DISABLE": "1", "PYTHONPATH": root},
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout


NO_COMPILER = not (shutil.which("g++") or shutil.which("clang++"))


def test_one_graph_for_every_size_equals_eager():
    assert run("eager", "more").count("same") == 13


@pytest.mark.parametrize(
    "backend",
    ["aot_eager", pytest.param("inductor", marks=pytest.mark.skipif(NO_COMPILER, reason="no C++ compiler"))],
)
def test_credit_and_loss_compiled_equal_eager(backend):
    assert run(backend, "core").count("same") == 4
