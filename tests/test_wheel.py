"""The wheel holds the three packages and their type markers, and imports alone beside the light base."""

import subprocess
import sys
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("credit", "moe_routing", "rewards")
LIGHT = ("torch", "einops", "jaxtyping")

ISOLATED = """
import importlib.metadata, importlib.util, sys

allowed = set(sys.stdlib_module_names) | set({packages!r}) | {{"wadler_lindig"}} | set({light!r})
outside = [d for d in importlib.metadata.packages_distributions() if d not in allowed]

class Hide:
    def find_spec(self, name, path=None, target=None):
        caller = sys._getframe(1)
        while "importlib" in caller.f_code.co_filename:
            caller = caller.f_back
        if caller.f_globals.get("__name__", "").split(".")[0] in {packages!r} and name.split(".")[0] in outside:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Hide())
sys.path.insert(0, {target!r})
for name in {packages!r}:
    module = __import__(name)
    assert module.__file__.startswith({target!r}), module.__file__
    assert module.__all__
"""


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    for tool in ("hatchling", "build"):
        try:
            version(tool)
        except PackageNotFoundError:
            pytest.fail(f"{tool} is missing: install the dev extra")
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT), cwd=out)
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_holds_the_packages_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    roots = {name.split("/")[0] for name in names}
    assert {root for root in roots if not root.endswith(".dist-info")} == set(PACKAGES)
    for package in PACKAGES:
        assert f"{package}/__init__.py" in names
        assert f"{package}/py.typed" in names
    sources = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*.py")}
    assert sources == {name for name in names if name.endswith(".py")}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_asks_for_the_light_base_only(wheel):
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in archive.namelist() if name.endswith("METADATA"))
    needs = [line for line in archive.read(metadata).decode().splitlines() if line.startswith("Requires-Dist:")]
    base = {line.split()[1].split(">")[0] for line in needs if "extra ==" not in line}
    assert base == set(LIGHT)


def test_installed_alone_all_three_import(wheel, tmp_path):
    target = tmp_path / "site"
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(*pip, "--no-deps", "--no-index", "--no-compile", "--target", str(target), str(wheel), cwd=tmp_path)
    script = ISOLATED.format(packages=PACKAGES, light=LIGHT, target=str(target))
    run(sys.executable, "-I", "-c", script, cwd=tmp_path)
