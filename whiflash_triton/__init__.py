"""Lossless speculative decoding that routes every round between two drafting paradigms."""

from __future__ import annotations

from importlib.util import find_spec

__all__ = ["Arm", "Output", "Stats", "WhiFlashDecoder", "__version__"]
_HOMES = {"WhiFlashDecoder": "decoder", "Output": "stats", "Stats": "stats", "Arm": "arms"}

for _folder in ("kernels", "autotune"):
    if find_spec(f"{__name__}.{_folder}") is None:
        raise ImportError(
            f"whiflash_triton/{_folder} is not a folder: it is a symbolic link to ../{_folder} that git or a copy did not keep "
            "(on Windows: git config core.symlinks true, then clone again); restore the link or install the wheel"
        )


def __getattr__(name: str):
    """Public names, imported when first used: `import whiflash_triton` alone loads neither torch nor transformers."""
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    if name == "__version__":
        from importlib.metadata import version

        return version("whiflash-triton")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
