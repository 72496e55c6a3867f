"""CUDA's own compiler takes the kernels: the installation has compiled them.

It goes on without a word where it fails, so that quire runs on the CPU all the same. With CI set, warnings and kernels
whose registers do not suffice make it fail too (CMakeLists.txt).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

NVCC = shutil.which("nvcc")


@pytest.mark.skipif(NVCC is None, reason="CUDA's compiler (nvcc) is not on the PATH")
@pytest.mark.skipif(os.environ.get("QUIRE_CUDA") == "OFF", reason="QUIRE_CUDA=OFF")
def test_built_where_nvcc_is() -> None:
    found = importlib.util.find_spec("quire.kernels")
    assert found is not None and found.submodule_search_locations is not None
    names = [path.name for folder in found.submodule_search_locations for path in Path(folder).glob("_cuda.*")]
    assert names, f"{NVCC} is there, and quire.kernels._cuda was not built: CI=1 pip install -v -e . says why"
    code = "import quire.kernels._cuda as c; assert c.device == 'cuda' and c.architectures; c.attention_workspace"
    subprocess.run([sys.executable, "-c", code], check=True)
