"""The kernels compiled for GPUs that are not there: no spills, rows in 128-bit accesses, no bytes moved in vain.

In processes of their own: Triton decides on its first import whether to compile or to interpret.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]


def figures(*arguments, how="-m"):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, how, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("capability", "dtypes", "number"), [(80, ["bfloat16"], 2), (90, ["bfloat16", "float32"], 1), (100, ["float32"], 0)]
)
def test_no_spills_and_wide_rows(capability, dtypes, number):
    """One configuration of each; `benchmarks.kernel_report` goes through them all."""
    target = ["--capabilities", str(capability), "--dtypes", *dtypes, "--number", str(number)]
    codes = figures("benchmarks.kernel_report", "--json", *target)
    assert len(codes) == 6 * len(dtypes)
    assert {code["kernel"] for code in codes} == {"norms", "inject"}
    for code in codes:
        assert code["capability"] == capability
        assert code["spills"] == code["stack"] == 0, code
        assert code["wide"], code
        assert code["loads"]["128"] >= code["row_loads"] >= 1, code
    assert all(code["stores"]["128"] == code["row_stores"] for code in codes if code["kernel"] == "inject")


def test_bytes_moved_are_those_that_have_to_move():
    for call in figures("benchmarks.kernel_traffic", "256"):
        parts = [part for kernel in call["kernels"].values() for part in kernel.values()]
        moved = sum(part["moved"] for part in parts)
        assert call["floor"] <= moved <= 1.001 * call["floor"], call
        assert moved <= 1.4 * call["once"]
        inject, norms = call["kernels"]["inject"], call["kernels"]["norms"]
        assert {name.split(" ", 1)[1] for name in norms if name.startswith("read")} == {"grad_in", "field"}
        assert [name for name in inject if name.startswith("write")] == ["write out"]


NEW_NUMBERS = """
import json
import torch
from benchmarks.gpu_cases import ROUTERS, make_call
from benchmarks.kernel_code import compile_call

call = make_call(ROUTERS[0], 40, torch.bfloat16, "cpu")
names = ("gate", "lambda_turn", "lambda_token")

def compiled(values):
    return compile_call(call, 90, 0, **dict(zip(names, values, strict=True)))

on_device = [compiled(torch.tensor(values)) for values in ([1.0, 0.5, 0.25], [0.0, 2.0, 3.0])]
on_device.append(compiled(torch.tensor([9.0, 1.0, 0.5, 0.25])[1:]))
given = [compiled(values) for values in ((1.0, 0.5, 0.25), (0.5, 1.0, 16.0))]
same = [[one.code is other.code for one, other in zip(group[0], group[-1])] for group in (on_device, given)]
same.append([one.code is other.code for one, other in zip(*on_device[:2])])
print(json.dumps({"same": same, "codes": [vars(code.read()) for code in on_device[0]]}))
"""


def test_new_numbers_compile_nothing():
    """Neither new values nor another place in memory; the device's own are read without a spill."""
    found = figures(NEW_NUMBERS, how="-c")
    assert found["same"] == [[True, True]] * 3
    assert [code["kernel"] for code in found["codes"]] == ["norms", "inject"]
    assert all(code["spills"] == code["stack"] == 0 for code in found["codes"])
