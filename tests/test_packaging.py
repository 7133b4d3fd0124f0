"""What is installed, from where it is imported, and the promises that README and continuous integration make about it."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STUB = '''
"""A stand-in for another project's package of the same name: every name imports, decorators change nothing."""
class _Any(type):
    def __getattr__(cls, name):
        return Anything
    def __or__(cls, other):
        return cls
class Anything(metaclass=_Any):
    def __init__(self, *args, **kwargs):
        pass
    def __or__(self, other):
        return self
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Anything if name[0].isupper() else lambda *args, **kwargs: lambda decorated: decorated
'''
FROM_THE_ROOT = """
from transformers.utils.import_utils import is_kernels_available
assert is_kernels_available(), "transformers does not see the stub"
import kernels
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM
from whiflash_triton.kernels import tree_attention
print(kernels.__file__)
print(tree_attention.__file__)
"""


def python(*arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *arguments], cwd=cwd, env=os.environ | environment, capture_output=True, text=True)


def test_the_name_kernels_does_not_collide(tmp_path):
    """transformers imports a package named kernels when one is installed; from the repository root it must not meet our folder."""
    from transformers.utils.import_utils import is_kernels_available

    version = inspect.signature(is_kernels_available).parameters["MIN_VERSION"].default
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text(STUB)
    metadata = tmp_path / f"kernels-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {version}\n")
    result = python("-c", FROM_THE_ROOT, PYTHONPATH=str(tmp_path))
    assert result.returncode == 0, result.stderr
    theirs, ours = result.stdout.split()
    assert theirs == str(tmp_path / "kernels/__init__.py") and ours == str(ROOT / "whiflash_triton/kernels/tree_attention.py")


@pytest.mark.parametrize("name", ["kernels", "autotune"])
def test_top_folders_are_reached_through_relative_links(name):
    link = ROOT / "whiflash_triton" / name
    assert os.readlink(link) == f"../{name}"
    assert not (ROOT / name / "__init__.py").exists()


def test_a_lost_link_is_one_clear_line(tmp_path):
    package = tmp_path / "whiflash_triton"
    package.mkdir()
    shutil.copy(ROOT / "whiflash_triton/__init__.py", package)
    (package / "kernels").write_text("../kernels")  # what git leaves where it makes no symbolic links
    result = python("-S", "-c", "import whiflash_triton", cwd=tmp_path)  # -S: no installed copy to fall back on
    assert result.returncode == 1
    assert result.stderr.strip().splitlines()[-1].startswith("ImportError: whiflash_triton/kernels is not a folder: ")


def test_import_is_cheap_and_names_are_there():
    code = (
        "import sys, whiflash_triton as w; assert not {'torch', 'transformers', 'triton'} & set(sys.modules)\n"
        "assert set(w.__all__) <= set(dir(w)); print(*(getattr(w, name) for name in w.__all__))"
    )
    result = python("-c", code)
    assert result.returncode == 0, result.stderr
    assert python("-c", "import whiflash_triton; whiflash_triton.Nothing").stderr.strip().endswith("no attribute 'Nothing'")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """Built from a copy, so that no build folder is left in the checkout."""
    tmp = tmp_path_factory.mktemp("wheel")
    source = tmp / "source"
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("whiflash_triton", "kernels", "autotune"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp), str(source))
    result = python(*build)
    assert result.returncode == 0, result.stderr
    (file,) = tmp.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        yield archive


def test_wheel_holds_every_file(wheel):
    names = set(wheel.namelist())
    folders = [ROOT / name for name in ("whiflash_triton", "kernels", "autotune")]
    files = [p for folder in folders for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    wanted = {str(p.relative_to(ROOT)) for p in files}
    wanted = {name if name.startswith("whiflash_triton/") else f"whiflash_triton/{name}" for name in wanted}
    assert wanted <= names, sorted(wanted - names)
    for part in ("kernels/tree_attention.py", "autotune/configs/default/tree_attention.json", "assets/"):
        assert any(name.startswith(f"whiflash_triton/{part}") for name in names), f"nothing of {part} in the wheel"
    assert not [name for name in names if name.startswith(("kernels/", "autotune/", "tests/"))]
    assert any(name.endswith("licenses/LICENSE") for name in names)
    entry = next(name for name in names if name.endswith("entry_points.txt"))
    assert "whiflash = whiflash_triton.cli:main" in wheel.read(entry).decode()


def test_wheel_works_without_the_checkout(wheel, tmp_path):
    wheel.extractall(tmp_path)
    code = "from whiflash_triton.kernels import tree_attention as t; from whiflash_triton.autotune import lookup; print(t.__file__)"
    result = python("-c", code, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == str(tmp_path / "whiflash_triton/kernels/tree_attention.py")


def code_files() -> list[Path]:
    folders = [ROOT / name for name in ("whiflash_triton", "kernels", "autotune", "tests", "benchmarks")]
    return [ROOT / ".ci/run", *(p for folder in folders for p in folder.rglob("*.py"))]


def test_no_code_file_is_above_400_lines():
    files = code_files()
    assert len(files) > 30
    assert {str(p): n for p in files if (n := len(p.read_text().splitlines())) > 400} == {}


def test_assets_are_at_most_30_mib():
    sizes = [p.stat().st_size for p in (ROOT / "whiflash_triton/assets").rglob("*") if p.is_file()]
    assert sum(sizes) <= 30 * 2**20


def test_licence():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0, January 2004" in text
    assert 'license = "Apache-2.0"' in (ROOT / "pyproject.toml").read_text()


def test_ci_runs_the_readme_test_command():
    readme = (ROOT / "README.md").read_text()
    (command,) = re.findall(r"^python -m venv \.venv && \. \.venv/bin/activate && (.* && pytest)$", readme, re.MULTILINE)
    shown = subprocess.run([ROOT / ".ci/run", "--show"], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == command == "pip install -e '.[test]' && pytest"


def test_readme_speaks_of_commands_and_arguments_that_exist():
    from whiflash_triton.cli import build_parser
    from whiflash_triton.decoder import WhiFlashDecoder

    readme = (ROOT / "README.md").read_text()
    commands = set(re.findall(r"whiflash ([a-z]+)", readme))
    (subcommands,) = (a.choices for a in build_parser()._actions if a.dest == "command")
    assert {"demo", "generate", "info", "train"} <= commands <= set(subcommands)
    (block,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    compile(block, "README.md", "exec")
    given = set(re.findall(r"^    (\w+)=", block, re.MULTILINE))
    assert given and given <= set(inspect.signature(WhiFlashDecoder.from_pretrained).parameters)
