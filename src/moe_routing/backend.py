"""Which implementation of the router gradient runs: the Triton kernel or PyTorch."""

import functools
import importlib.util
import os
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from moe_routing.kernels import MAX_EXPERTS, MAX_K

Kernel = Literal["triton", "torch"]

VARIABLE = "MOE_ROUTING_KERNEL"
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def kernel_choice(device: torch.device | str) -> Kernel:
    """The implementation that tensors on ``device`` are given to.

    Triton where the device is a GPU and Triton 3.4 or newer is installed, else PyTorch. The environment variable
    ``MOE_ROUTING_KERNEL=triton|torch`` forces either; with ``TRITON_INTERPRET=1``, set before Triton is first
    imported, the kernel runs on CPU tensors too.

    Raises:
        ValueError: for another value of the variable.
        ImportError: if it asks for Triton and Triton is not installed.
        RuntimeError: if it asks for Triton on a device that is no GPU, without the interpreter.

    >>> kernel_choice("cpu")
    'torch'
    """
    wanted, on_gpu = os.environ.get(VARIABLE, ""), torch.device(device).type == "cuda"
    if wanted not in ("", "triton", "torch"):
        raise ValueError(f"{VARIABLE} must be 'triton' or 'torch', got {wanted!r}")
    if wanted != "triton":
        return "triton" if on_gpu and not wanted and _installed() else "torch"
    if not _installed():
        raise ImportError(
            f"{VARIABLE}=triton, but triton is not installed or older than 3.4: pip install 'credit-routing[kernel]'"
        )
    if not on_gpu and os.environ.get("TRITON_INTERPRET", "0") in ("", "0"):
        raise RuntimeError(
            f"{VARIABLE}=triton, but the tensors are on {torch.device(device)}: the kernel needs a GPU, "
            "or TRITON_INTERPRET=1 set before triton is imported"
        )
    return "triton"


@functools.cache
def _installed() -> bool:
    found = importlib.util.find_spec("triton")
    # The kernels need 3.4, and PyTorch 2.6 and 2.7 bring older ones, which have no such file; nothing is imported here.
    folders = found.submodule_search_locations if found else None
    return any(Path(folder, "knobs.py").exists() for folder in folders or ())


def use_kernel(
    logits: Float[Tensor, "tokens experts"],
    grad_in: Float[Tensor, "tokens experts"],
    selected: Int[Tensor, "tokens k"],
) -> bool:
    """Whether the kernel takes this call: it computes in float32, and reads at most 1024 experts and k = 32.

    Never under ``torch.compile``, which fuses the PyTorch form itself.
    """
    if torch.compiler.is_compiling() or kernel_choice(logits.device) == "torch":
        return False
    known = logits.dtype in KERNEL_DTYPES and grad_in.dtype in KERNEL_DTYPES
    return known and 1 <= logits.shape[-1] <= MAX_EXPERTS and 1 <= selected.shape[-1] <= MAX_K
