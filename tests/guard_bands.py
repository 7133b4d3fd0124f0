"""Guard bands for kernels under Triton's interpreter: every launch runs on copies of its tensors that lie in one arena.

Between them, and in the gaps that their strides leave, lies a pattern: NaN bytes by floats, large integers by integers.
Every address that is loaded or stored is checked before it is touched, and afterwards the bytes that the kernel may not
write (bands, gaps, inputs) are compared with what they were. What may be written goes back to the caller's tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import numpy as np
import torch
from triton.runtime import interpreter

BAND = 4096  # bytes before, between and after buffers
FLOATS, INTEGERS = 0xFF, 0x7F  # a byte that, repeated, makes a NaN of every float, a large positive number of every integer
WRITES = {  # what each kernel of the package may write; kernels of tests may write everything
    "_partial_kernel": ("key_ptr", "sums_ptr", "score_ptr", "drawn_ptr"),
    "_merge_kernel": ("token_ptr", "logsumexp_ptr", "entropy_ptr", "topk_logit_ptr", "topk_token_ptr"),
    "_kv_compaction_kernel": ("cache_ptr", "features_ptr"),
    "_kv_injection_kernel": ("cache_ptr",),
    "_entropy_rule_kernel": ("decision_ptr",),
    "_mlp_partial_kernel": ("partial_ptr",),
    "_mlp_decide_kernel": ("score_ptr", "decision_ptr"),
    "_tree_attention_split_kernel": ("part_ptr", "lse_ptr"),
    "_tree_attention_merge_kernel": ("out_ptr",),
    "_tree_build_kernel": ("token_ptr", "parent_ptr", "depth_ptr", "score_ptr"),
    "_ancestor_words_kernel": ("words_ptr",),
    "_tree_walk_kernel": ("path_ptr", "length_ptr", "bonus_ptr"),
}


@dataclass
class Arena:
    """Copies of one launch's storages; ``readable`` and ``writable`` say of every byte whether the kernel may touch it."""

    kernel: str
    memory: torch.Tensor  # uint8
    readable: np.ndarray
    writable: np.ndarray
    places: dict[int, int]  # address of a storage -> where its copy begins
    arguments: dict[str, tuple[int, int]]  # first byte and the one past the last

    def check(self, verb: str, allowed: np.ndarray, pointers, mask) -> None:
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        touched = pointers.data[mask.data.astype(bool)].astype(np.int64) - self.memory.data_ptr()
        inside = (touched >= 0) & (touched + size <= len(allowed))
        fine = inside & allowed[np.where(inside, touched, 0)] & allowed[np.where(inside, touched + size - 1, 0)]
        if not fine.all():
            at = int(touched[~fine][0])
            name, (begin, end) = min(self.arguments.items(), key=lambda item: max(item[1][0] - at, at - item[1][1] + 1))
            where = f"byte {at - begin} of {name}, which has {end - begin}"
            raise AssertionError(f"{self.kernel} {verb} where it may not: {where}; {np.sum(~fine)} such addresses at once")


@contextmanager
def guard_bands() -> Iterator[None]:
    """Within, every launch of an interpreted kernel is guarded; what it does wrong raises with the kernel's name."""
    launch, load, store = (
        interpreter.InterpretedFunction.run,
        interpreter.InterpreterBuilder.create_masked_load,
        interpreter.InterpreterBuilder.create_masked_store,
    )
    arenas: list[Arena] = []  # the launch under way

    def guarded_run(self, *args, grid, warmup, **options):
        arguments = dict(zip(self.arg_names, args, strict=False)) | options
        tensors = {name: x for name, x in arguments.items() if isinstance(x, torch.Tensor)}
        arena = _lay_out(self, tensors)
        before = arena.memory.numpy().copy()
        arenas.append(arena)
        try:
            launch(self, grid=grid, warmup=warmup, **arguments | {name: _moved(x, arena) for name, x in tensors.items()})
        finally:
            arenas.pop()
        changed = arena.memory.numpy() != before
        spoilt = np.flatnonzero(changed & ~arena.writable)
        assert not len(spoilt), f"{arena.kernel} changed {len(spoilt)} bytes that it may not, of {arena.arguments}: {spoilt[:8]}"
        _bring_back(tensors, arena)

    def guarded_load(self, pointers, mask, *rest):
        if arenas:
            arenas[-1].check("reads", arenas[-1].readable, pointers, mask)
        return load(self, pointers, mask, *rest)

    def guarded_store(self, pointers, value, mask, *rest):
        if arenas:
            arenas[-1].check("writes", arenas[-1].writable, pointers, mask)
        return store(self, pointers, value, mask, *rest)

    with (
        patch.object(interpreter.InterpretedFunction, "run", guarded_run),
        patch.object(interpreter.InterpreterBuilder, "create_masked_load", guarded_load),
        patch.object(interpreter.InterpreterBuilder, "create_masked_store", guarded_store),
    ):
        yield


def _lay_out(kernel, tensors: dict[str, torch.Tensor]) -> Arena:
    """An arena with a copy of every storage, tensors that share one still sharing it."""
    name = kernel.__name__
    ours = kernel.fn.__module__.startswith("whiflash_triton.kernels")
    assert not ours or name in WRITES, f"say in {__name__}.WRITES what {name} may write"
    written = WRITES[name] if ours else tensors
    places, sources, size = {}, {}, BAND
    for x in tensors.values():
        storage = x.untyped_storage()
        if storage.data_ptr() not in places:
            places[storage.data_ptr()], sources[storage.data_ptr()] = size, storage
            size += -(-storage.nbytes() // 16) * 16 + BAND
    memory = torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage(size))
    arena = Arena(name, memory, np.zeros(size, bool), np.zeros(size, bool), places, {})
    image = memory.numpy()
    image[:] = INTEGERS
    for argument, x in tensors.items():
        storage = x.untyped_storage()
        begin = places[storage.data_ptr()]
        if x.is_floating_point():
            image[begin - BAND // 2 : begin + storage.nbytes() + BAND // 2] = FLOATS
        _mark(arena.readable, x, begin)
        if argument in written:
            _mark(arena.writable, x, begin)
        first = begin + x.storage_offset() * x.element_size()
        reach = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) + 1 if x.numel() else 0
        arena.arguments[argument] = (first, first + reach * x.element_size())
    for address, storage in sources.items():
        span = slice(places[address], places[address] + storage.nbytes())
        image[span] = np.where(arena.readable[span], _bytes(storage), image[span])
    return arena


def _mark(marks: np.ndarray, x: torch.Tensor, begin: int) -> None:
    """Set the bytes of the elements of x, whose storage begins at byte ``begin``."""
    if x.numel():
        size = x.element_size()
        strides = (*(step * size for step in x.stride()), 1)
        np.lib.stride_tricks.as_strided(marks[begin + x.storage_offset() * size :], (*x.shape, size), strides)[...] = True


def _moved(x: torch.Tensor, arena: Arena) -> torch.Tensor:
    offset = arena.places[x.untyped_storage().data_ptr()] // x.element_size() + x.storage_offset()
    return torch.empty(0, dtype=x.dtype).set_(arena.memory.untyped_storage(), offset, x.shape, x.stride())


def _bring_back(tensors: dict[str, torch.Tensor], arena: Arena) -> None:
    for storage in {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors.values()}.values():
        begin = arena.places[storage.data_ptr()]
        span = slice(begin, begin + storage.nbytes())
        target, marks = _bytes(storage), arena.writable[span]
        target[marks] = arena.memory.numpy()[span][marks]


def _bytes(storage: torch.UntypedStorage) -> np.ndarray:
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
