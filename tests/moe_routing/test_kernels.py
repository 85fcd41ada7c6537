"""The fused kernel and the choice between it and PyTorch."""

import importlib.util
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from moe_routing import backend, fused
from moe_routing.backend import kernel_choice, use_kernel
from tests.moe_routing.processes import ROOT

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def pytest_of(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", script, "-q", "-p", "no:cacheprovider", "--no-header", *arguments]
    env = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(command, env=env, cwd=ROOT, text=True, capture_output=True, timeout=280)


RUN = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
WITHOUT_TRITON = "import sys; sys.modules['triton'] = None\n" + RUN


@needs_triton
def test_the_kernel_under_the_interpreter():
    """In a process of its own: the interpreter must be chosen before Triton is imported."""
    chosen = {"TRITON_INTERPRET": "1", "MOE_ROUTING_KERNEL": "triton", "JAXTYPING_DISABLE": "1"}
    files = [f"tests/moe_routing/interpreted_{name}.py" for name in ("kernels", "launches")]
    done = pytest_of(RUN, *files, **chosen)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_without_triton_the_skip_is_named():
    done = pytest_of(WITHOUT_TRITON, "-rs", "-k", "interpreter or absent", "tests/moe_routing/test_kernels.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "triton is not installed" in done.stdout
    assert "1 passed, 1 skipped" in done.stdout


def test_absent_triton_means_pytorch_and_a_clear_error(monkeypatch):
    monkeypatch.setattr(backend, "_installed", lambda: False)
    monkeypatch.delenv("MOE_ROUTING_KERNEL", raising=False)
    assert kernel_choice("cuda") == "torch"
    monkeypatch.setenv("MOE_ROUTING_KERNEL", "triton")
    with pytest.raises(ImportError, match="triton is not installed"):
        kernel_choice("cuda")


def test_a_triton_that_is_too_old_is_none(monkeypatch, tmp_path):
    found = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    monkeypatch.setattr(backend, "_installed", backend._installed.__wrapped__)
    monkeypatch.delenv("MOE_ROUTING_KERNEL", raising=False)
    assert kernel_choice("cuda") == "torch"
    (tmp_path / "knobs.py").touch()
    assert kernel_choice("cuda") == "triton"


def test_a_gpu_with_triton_gets_the_kernel(monkeypatch):
    monkeypatch.setattr(backend, "_installed", lambda: True)
    monkeypatch.delenv("MOE_ROUTING_KERNEL", raising=False)
    assert kernel_choice("cuda:1") == "triton"
    assert kernel_choice(torch.device("cpu")) == "torch"
    monkeypatch.setenv("MOE_ROUTING_KERNEL", "torch")
    assert kernel_choice("cuda") == "torch"


def test_the_variable_forces_the_choice_or_says_why_not(monkeypatch):
    monkeypatch.setattr(backend, "_installed", lambda: True)
    monkeypatch.setenv("MOE_ROUTING_KERNEL", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert kernel_choice("cuda") == "triton"
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET"):
        kernel_choice("cpu")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert kernel_choice("cpu") == "triton"
    monkeypatch.setenv("MOE_ROUTING_KERNEL", "cuda")
    with pytest.raises(ValueError, match="'triton' or 'torch', got 'cuda'"):
        kernel_choice("cpu")


@pytest.mark.parametrize(
    ("dtype", "experts", "k", "taken"),
    [
        (torch.float32, 1024, 32, True),
        (torch.bfloat16, 7, 1, True),
        (torch.float64, 8, 2, False),
        (torch.float32, 1025, 8, False),
        (torch.float32, 64, 33, False),
        (torch.float32, 64, 0, False),
    ],
)
def test_what_the_kernel_takes(monkeypatch, dtype, experts, k, taken):
    monkeypatch.setattr(backend, "kernel_choice", lambda device: "triton")
    logits = torch.zeros(2, experts, dtype=dtype)
    assert use_kernel(logits, logits, torch.zeros(2, k, dtype=torch.long)) == taken


def test_calls_of_two_threads_do_not_meet_in_the_autotuner(monkeypatch):
    """It keeps the arguments of a call on itself, and each device has a backward thread of its own."""
    running, most = [], []

    class Tuner:
        def __getitem__(self, grid):
            def launch(*arguments, **constants):
                running.append(1)
                time.sleep(0.02)
                most.append(len(running))
                running.pop()

            return launch

    built = SimpleNamespace(tuned_norms=Tuner(), tuned_inject=Tuner(), interpreted=False)
    monkeypatch.setattr(fused, "kernels", lambda: built)
    rows, ids = torch.zeros(2, 4), torch.zeros(2, 1, dtype=torch.long)
    threads = [
        threading.Thread(target=fused.fused_router_gradient, args=(rows, rows, ids[:, 0], rows, ids, 1))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1, 1, 1]
