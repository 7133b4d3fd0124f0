"""The kernels that a call would launch, with the types and constants Triton would compile them for; nothing is launched."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple
from unittest.mock import patch

from whiflash_triton.autotune import lookup
from whiflash_triton.autotune.compile_report import CompileReport, compile_kernel

OPTIONS = {"num_warps": 4, "num_stages": 3}  # Triton's own where a launch says nothing


class Launch(NamedTuple):
    """One specialisation of one kernel, as `compile_kernel` takes it; equal launches compile to the same binary."""

    module: str
    name: str
    signature: tuple[tuple[str, str], ...]
    constexprs: tuple[tuple[str, Any], ...]
    num_warps: int
    num_stages: int


class Recording(NamedTuple):
    kernel: str  # what `lookup.pick` was asked for
    key: dict[str, int | str]
    launches: list[Launch]


def record(call: Callable[[], Any], config: dict[str, Any] | None = None) -> Recording:
    """Run ``call``, a launch wrapper with its inputs on any device, under ``config`` (None: what `lookup.pick` says).

    No kernel runs, and no GPU is needed. Works in a process that does not interpret kernels.
    """
    from triton.runtime import JITFunction

    asked, launches = [], []

    def answer(kernel: str, key: dict[str, int | str]) -> dict[str, Any]:
        asked.append((kernel, key))
        return config if config is not None else lookup.find(kernel, key)

    def keep(self, *args, grid, warmup=False, **kwargs) -> None:
        launches.append(_launch(self, args, kwargs))

    with lookup.answered_by(answer), patch.object(JITFunction, "run", keep):
        call()
    assert len(asked) == 1 and launches, f"{len(asked)} look-ups and {len(launches)} launches in one call"
    return Recording(*asked[0], launches)


def compile_launch(launch: Launch, arch: int) -> CompileReport:
    """Compile ahead of time for ``sm_<arch>``; spills and too much shared memory are reported, not raised."""
    fn = getattr(import_module(launch.module), launch.name)
    options = (launch.num_warps, launch.num_stages)
    return compile_kernel(fn, dict(launch.signature), dict(launch.constexprs), arch, *options, strict=False)


def _launch(fn: Any, args: tuple, kwargs: dict[str, Any]) -> Launch:
    values = dict(zip(fn.arg_names, args, strict=False)) | {name: x for name, x in kwargs.items() if name in fn.arg_names}
    options = OPTIONS | {name: x for name, x in kwargs.items() if name not in fn.arg_names}
    signature, constexprs = {}, {}
    for parameter in fn.params:
        value = values[parameter.name]
        kind = None if parameter.is_constexpr else _type(value, parameter)
        if kind is None:
            constexprs[parameter.name] = value
        else:
            signature[parameter.name] = kind
    return Launch(fn.fn.__module__, fn.__name__, tuple(signature.items()), tuple(constexprs.items()), **options)


def _type(value: Any, parameter: Any) -> str | None:
    """Type as `compile_kernel` spells it; None where Triton makes the value a constant."""
    from triton.runtime.jit import mangle_type

    if value is None or (type(value) is int and value == 1 and not parameter.do_not_specialize):
        return None
    kind = parameter.annotation_type or mangle_type(value)
    aligned = type(value) is int and value % 16 == 0 and not parameter.do_not_specialize
    return f"{kind}:16" if aligned else kind
