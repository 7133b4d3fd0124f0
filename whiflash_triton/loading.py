"""From names to parts: source folders, tokenizer, drafters, router, dtype."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import torch

from .arms import KINDS, Arm, parse_arm
from .checkpoints import TargetShape, load_dflash, load_eagle3, load_router
from .default_model import NAME, ensure_default_model
from .drafters.base import Drafter
from .drafters.calibration import FILE as CALIBRATION_FILE
from .drafters.calibration import Calibration, read_calibration
from .drafters.dflash import DFlashDrafter
from .drafters.eagle3 import Eagle3Drafter
from .layers import cpu_computes_bfloat16
from .routers.base import Router
from .routers.entropy import EntropyRouter
from .routers.neural import NeuralRouter
from .routers.static import StaticRouter
from .routers.throughput import Costs, ThroughputRouter, measure_costs
from .target import Target
from .weights import resolve_folder

log = logging.getLogger(__name__)
ASSETS = Path(__file__).parent / "assets"
# On a CPU verifying more rows soon costs more than the later slots bring; the packed products (layers.py) are laid out for eight.
CPU_LENGTHS = {"lookup": 7, "dflash": 3, "eagle3": 2, "ddtree": 7, "eagle3-tree": 7, "mixed": 7}
MEASURED_ROWS = 640  # cache rows of the cost measurement: contexts up to 512
CUDA_LENGTHS = {"lookup": 16, "eagle3": 7, "ddtree": 64, "eagle3-tree": 32, "mixed": 64}


def pick_device(device: str | torch.device | None) -> torch.device:
    """None: CUDA where there is one. ValueError for a device that is not there or that nothing here runs on."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = str(device).partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise ValueError(f"device {str(device)!r} is not supported: cpu, cuda or cuda:N")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {str(device)!r} is not there: PyTorch sees {torch.cuda.device_count()} CUDA devices")
    return torch.device(device)


def default_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the device computes in it, else float32."""
    if device.type == "cuda":
        return torch.bfloat16
    return torch.bfloat16 if cpu_computes_bfloat16() else torch.float32


def resolve_source(target) -> tuple[object, dict[str, Path]]:
    """(what load_target takes, the assets that belong to it). The embedded default is fetched and converted on first use."""
    if target == NAME:
        folder = ASSETS / NAME
        return ensure_default_model(), {p.name: p for p in folder.iterdir()} if folder.is_dir() else {}
    if isinstance(target, (str, Path)) and not str(target).endswith(".gguf"):
        return resolve_folder(str(target)), {}
    return target, {}


def load_tokenizer(source):
    """The tokenizer beside the target, or None for a live model that does not say where it came from."""
    from transformers import AutoTokenizer

    if isinstance(source, (str, Path)):
        path = Path(source)
        if path.suffix == ".gguf":
            return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        has_tokenizer = any((path / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model"))
        return AutoTokenizer.from_pretrained(path) if has_tokenizer else None
    name = getattr(source.config, "_name_or_path", "")
    return AutoTokenizer.from_pretrained(name) if name else None


def load_drafters(
    target: Target, paths: dict[str, object], taps: dict[str, tuple[int, ...] | None], rows: int
) -> dict[str, Drafter]:
    """The drafters whose path is not None; a `calibration.json` beside a drafter's folder is read too."""
    c = target.config
    shape = TargetShape(c.num_layers, c.hidden_size, c.vocab_size)
    drafters: dict[str, Drafter] = {}
    for kind, load, build in (("dflash", load_dflash, DFlashDrafter), ("eagle3", load_eagle3, Eagle3Drafter)):
        if paths.get(kind) is not None:
            config, tensors = load(paths[kind], target=shape, taps=taps.get(kind))
            drafters[kind] = build(config, tensors, target, rows)
            drafters[kind].calibration = _calibration(kind, Path(paths[kind]))
    return drafters


def _calibration(kind: str, folder: Path) -> Calibration | None:
    file = folder.parent / CALIBRATION_FILE
    return read_calibration(file).get(kind) if folder.is_dir() and file.is_file() else None


def default_lengths(drafters: dict[str, Drafter], device: torch.device) -> dict[str, int]:
    """Size of every arm these drafters can draft, where it names none: few nodes on a CPU, the checkpoint's own block elsewhere."""
    lengths = CPU_LENGTHS
    if device.type != "cpu":
        lengths = CUDA_LENGTHS | {kind: d.max_draft for kind, d in drafters.items() if kind == "dflash"}
    able = {kind: n for kind, n in lengths.items() if set(Arm(kind).needs) <= set(drafters)}
    return {kind: min(n, drafters[kind].max_draft) if kind in drafters else n for kind, n in able.items()}


def build_router(spec, drafters: dict[str, Drafter], target: Target, threshold: float | None = None) -> Router:
    """spec: a Router, "static:<arm>", "entropy", "throughput" (measures this device first, for a few seconds) or
    "throughput:<file>" (a table saved before), a router checkpoint (hub id, folder, .safetensors), or "auto".

    threshold belongs to the entropy and neural routers; ValueError where nothing would read it.
    """
    if threshold is not None and not math.isfinite(threshold):
        raise ValueError(f"router threshold {threshold}: give a finite number")
    unused = f"router threshold {threshold}: a static router and a Router object have no use for it"
    if not isinstance(spec, (str, Path)):
        if threshold is not None:
            raise ValueError(unused)
        if not hasattr(spec, "choose") or not hasattr(spec, "arms"):
            raise TypeError(f"a router needs `arms` and `choose(state)`; got {type(spec).__name__}")
        return spec
    lengths = default_lengths(drafters, target.device)
    text = str(spec)
    if text == "auto":
        kinds = list(drafters)
        text = "entropy" if len(kinds) == 2 else f"static:{kinds[0]}" if kinds else "static:ar"
    if text.startswith("static:"):
        if threshold is not None:
            raise ValueError(unused)
        kind = text.removeprefix("static:").partition(":")[0]
        missing = [name for name in Arm(kind).needs if name not in drafters] if kind in KINDS else []
        if missing:
            raise ValueError(
                f"router {text!r} needs a {missing[0]} drafter, and none is loaded: give {missing[0]}=... to from_pretrained"
            )
        return StaticRouter(parse_arm(text.removeprefix("static:"), lengths))
    if text == "throughput" or text.startswith("throughput:"):
        if threshold is not None:
            raise ValueError(unused)
        arms = throughput_arms(drafters, lengths, target.device)
        saved = text.removeprefix("throughput").removeprefix(":")
        rows = min([MEASURED_ROWS, *(d.cache.rows for d in drafters.values())])
        costs = Costs.load(saved) if saved else measure_costs(target, drafters, arms, rows)
        return ThroughputRouter(arms, costs)
    if not text or (text != "entropy" and not Path(text).exists() and "/" not in text):
        raise ValueError(
            f"unknown router {text!r}: static:<arm>, entropy, throughput, or a router checkpoint (hub id, folder or .safetensors)"
        )
    pair = _pair(text, drafters, lengths)
    if text == "entropy":
        return EntropyRouter(*pair) if threshold is None else EntropyRouter(*pair, threshold=threshold)
    config, tensors = load_router(spec, hidden_size=target.config.hidden_size)
    return NeuralRouter(config, tensors, *pair, device=target.device, threshold=threshold)


def throughput_arms(drafters: dict[str, Drafter], lengths: dict[str, int], device: torch.device) -> tuple[Arm, ...]:
    """What the throughput router chooses among: plain, a copy, chains of several lengths, and small trees."""
    texts = ["ar", f"lookup:{lengths['lookup']}"]
    if device.type == "cpu":
        texts += [
            "lookup:3",
            "dflash:1",
            "dflash:2",
            "dflash:3",
            "eagle3:1",
            "eagle3:2",
            "eagle3:3",
            "eagle3-tree:7:4:3",
            "mixed:7:4:3",
        ]
    else:
        texts += [f"dflash:{lengths.get('dflash', 1)}", "ddtree:64", "eagle3:3", "eagle3:7", "eagle3-tree:32", "mixed:64"]
    arms = (parse_arm(text) for text in texts)
    able = [arm for arm in arms if set(arm.needs) <= set(drafters)]
    return tuple(arm for arm in able if arm.kind not in drafters or arm.size <= drafters[arm.kind].max_draft)


def _pair(router: str, drafters: dict[str, Drafter], lengths: dict[str, int]) -> tuple[Arm, Arm]:
    missing = [kind for kind in ("dflash", "eagle3") if kind not in drafters]
    if missing:
        raise ValueError(f"router {router!r} chooses between two drafters; missing: {', '.join(missing)}")
    return Arm("dflash", lengths["dflash"]), Arm("eagle3", lengths["eagle3"])
