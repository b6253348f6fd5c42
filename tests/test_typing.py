"""Type checkers find the package after an editable install, and resolve its names."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import parallel2d

SCRIPT = """
import parallel2d
from torch import nn

from parallel2d import OptimizerConfig, ParallelConfig, build_mesh, build_optimizer, parallelize
from parallel2d.models.llama import Llama

mesh = build_mesh(strategy="hybrid")
model = parallelize(nn.Linear(2, 2), mesh, ParallelConfig("hybrid"))
optimizer = build_optimizer(model, OptimizerConfig("adamw"))
reveal_type(parallel2d.parallelize(nn.Linear(2, 2), mesh))
reveal_type(optimizer)
reveal_type(parallel2d.__version__)
Llama.no_such_name
parallelize("model", mesh)
parallelize(nn.Linear(2, 2), mesh, broadcast=0)
ParallelConfig("hybrid", bucket="layer")
parallel2d.paralelize
"""


@pytest.mark.extras("mypy")
def test_mypy_follows_the_package_from_a_script_elsewhere(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", tmp_path / "cache"]
    done = subprocess.run(
        [*command, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    told = done.stdout
    assert "cannot find" not in told.lower(), told
    assert "import-not-found" not in told, told
    assert 'Revealed type is "torch.nn.modules.linear.Linear"' in told
    assert 'Revealed type is "torch.optim.optimizer.Optimizer"' in told
    assert 'Revealed type is "str"' in told
    errors = [line for line in told.splitlines() if ": error:" in line]
    assert len(errors) == 5, told
    assert "Llama" in errors[0]
    assert '"parallelize"' in errors[1]
    assert "str" in errors[1]
    assert 'Unexpected keyword argument "broadcast" for "parallelize"' in errors[2]
    assert 'Unexpected keyword argument "bucket" for "ParallelConfig"' in errors[3]
    assert "paralelize" in errors[4]


def test_editable_install_is_a_path():
    """An import hook would be invisible to type checkers and editors."""
    package = Path(parallel2d.__file__).parent
    for name in ("models", "conf"):
        assert (package / name).is_dir()
        assert (package / name).resolve() == package.resolve().parent / name
    # The folder on the path: nothing but the package can be imported from elsewhere.
    settings = tomllib.loads(Path(package.resolve().parent, "pyproject.toml").read_text())
    exposed = package.resolve().parent / settings["tool"]["setuptools"]["package-dir"][""]
    assert [path.name for path in exposed.iterdir() if path.suffix != ".egg-info"] == ["parallel2d"]
    assert (exposed / "parallel2d").resolve() == package.resolve()
