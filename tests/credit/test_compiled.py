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


def test_one_graph_for_every_size_equals_eager():
    assert run("aot_eager", "all").count("same") == 17


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler for inductor")
def test_generated_code_equals_eager():
    assert run("inductor", "core").count("same") == 4
