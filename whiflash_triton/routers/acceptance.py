"""Acceptance head (ours): from the target's final hidden state, how far each drafter's chain would be accepted.

A two-layer MLP like the neural router's, with one output a slot of every arm: output j of an arm is the logit of the chance that
its j-th drafted token is right, given that those before it are. A folder of the format holds config.json (`kind` "acceptance",
`hidden_size`, `width`, `activation` "gelu", `hidden_is_normed` true, `slots` as in {"dflash": 7, "eagle3": 7}) and
model.safetensors: fc1.weight [M, H], fc1.bias [M], fc2.weight [sum of slots, M], fc2.bias, the arms in the order of `slots`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from ..checkpoint_files import CheckpointError, read_config, read_tensors, resolve, write_checkpoint
from ..checkpoint_formats import Fields


@dataclass
class AcceptanceHead:
    """slots: arm kind -> drafted tokens it tells of; w1 [M, H], b1 [M], w2 [S, M], b2 [S], float32."""

    slots: dict[str, int]
    w1: torch.Tensor
    b1: torch.Tensor
    w2: torch.Tensor
    b2: torch.Tensor

    def expected(self, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        """hidden [..., H] after the final norm -> by arm kind, P(at least j drafted tokens are accepted), float32 [..., slots]."""
        logits = F.linear(F.gelu(F.linear(hidden.float(), self.w1, self.b1)), self.w2, self.b2)
        parts = logits.sigmoid().split(list(self.slots.values()), -1)
        return {kind: part.cumprod(-1) for kind, part in zip(self.slots, parts, strict=True)}

    def save(self, folder: str | Path, dtype: torch.dtype = torch.float32) -> None:
        config = {
            "kind": "acceptance", "hidden_size": self.w1.shape[1], "width": self.w1.shape[0], "activation": "gelu",
            "hidden_is_normed": True, "slots": self.slots,
        }  # fmt: skip
        tensors = {"fc1.weight": self.w1, "fc1.bias": self.b1, "fc2.weight": self.w2, "fc2.bias": self.b2}
        write_checkpoint(folder, config, tensors, int8=False, dtype=dtype)

    @classmethod
    def load(cls, path: str | Path, *, hidden_size: int, device: torch.device | str = "cpu") -> AcceptanceHead:
        """From a hub id or folder. CheckpointError for another format, or for another target's head."""
        folder = resolve(path)
        fields = Fields(read_config(folder), f"{folder}/config.json")
        for key, kind, only in (("kind", str, "acceptance"), ("activation", str, "gelu"), ("hidden_is_normed", bool, True)):
            if (given := fields.take(key, kind)) != only:
                raise CheckpointError(f"{fields.where}: {key} is {given!r}; an acceptance head has {only!r}")
        size, width, slots = fields.size("hidden_size"), fields.size("width"), fields.take("slots", dict)
        fields.finish()
        if size != hidden_size:
            raise CheckpointError(
                f"{fields.where}: hidden_size is {size} but the target has {hidden_size}: they must belong together"
            )
        if not slots or not all(type(n) is int and n > 0 for n in slots.values()):
            raise CheckpointError(
                f"{fields.where}: slots is {slots!r}; write the drafted tokens of every arm, as in {{'eagle3': 7}}"
            )
        name, state = read_tensors(folder)
        outputs = sum(slots.values())
        shapes = {"fc1.weight": (width, size), "fc1.bias": (width,), "fc2.weight": (outputs, width), "fc2.bias": (outputs,)}
        found = {key: tuple(t.shape) for key, t in state.items()}
        if found != shapes:
            raise CheckpointError(f"{folder}/{name}: holds {found}, config.json asks for {shapes}")
        return cls(slots, *(state[key].to(device=device, dtype=torch.float32) for key in shapes))
