"""Start a test module as a script in its own process."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Some installed packages bring a top-level `tests`, which would win over this directory of the same name.
BOOTSTRAP = """
import runpy, sys, types
tests = sys.modules["tests"] = types.ModuleType("tests")
tests.__path__ = [sys.argv[1]]
sys.argv = sys.argv[2:]
runpy.run_module(sys.argv[0], run_name="__main__")
"""


def start(module: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """``tests.moe_routing.<module>`` with arguments; read its output with :func:`finish`."""
    command = [sys.executable, "-c", BOOTSTRAP, str(ROOT / "tests"), f"tests.moe_routing.{module}", *arguments]
    env = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.Popen(command, env=env, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen[str], timeout: float = 240) -> str:
    """Output of a process that must succeed; its errors are shown otherwise."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.returncode == 0, err[-4000:]
    return out
