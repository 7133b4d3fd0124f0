"""Every text of a bench, timed: side after side, prompt after prompt, kept in a file so that a run can be cut and gone on with."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ..arms import Arm
from ..decoder import WhiFlashDecoder
from ..replay import replay
from ..stats import PHASES, Round
from .prompts import Prompt, ask

FILE = "runs.jsonl"
Key = tuple[str, int, str, int]  # prompt, turn, side, repeat


@dataclass
class Text:
    """What a side hands out: new tokens up to the end token, target forwards after the prompt's, and its rounds, if it has any."""

    tokens: list[int]
    forwards: int
    rounds: list[Round] | None = None


Side = Callable[[list[int], int], Text]  # (input ids, new tokens) -> Text


@dataclass
class Run:
    """One side's answer to one turn. seconds: the whole call, None if replayed; rounds: rows of ROUND, None for peers."""

    prompt: str
    turn: int
    side: str
    repeat: int
    seconds: float | None
    tokens: list[int]
    forwards: int
    rounds: list[list] | None = None

    @property
    def key(self) -> Key:
        return self.prompt, self.turn, self.side, self.repeat


ROUND = ("arm", "drafted", "accepted", "committed", "caught_up", *PHASES)  # the phases in milliseconds


class Runs:
    """The runs that are done, by key. With a folder, each is appended to its runs.jsonl at once, below the settings."""

    def __init__(self, folder: Path | None, settings: dict):
        """ValueError if the folder holds runs of other settings. What a kill left of a last line is dropped."""
        self.done: dict[Key, Run] = {}
        self.path = None if folder is None else folder / FILE
        if self.path is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        settings = json.loads(json.dumps(settings))  # as it reads back
        lines = self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []
        whole = [line for line in lines if line.endswith(b"\n")]
        if not whole:
            self.path.write_text(json.dumps({"settings": settings}) + "\n")
            return
        if whole != lines:
            self.path.write_bytes(b"".join(whole))
        _check_settings(self.path, json.loads(whole[0])["settings"], settings)
        for line in whole[1:]:
            run = Run(**json.loads(line))
            self.done[run.key] = run

    def add(self, run: Run) -> None:
        self.done[run.key] = run
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(asdict(run), separators=(",", ":")) + "\n")


def _check_settings(path: Path, before: dict, now: dict) -> None:
    different = [name for name in before.keys() | now.keys() if before.get(name) != now.get(name)]
    if different:
        told = "; ".join(f"{name}: {before.get(name)}, now {now.get(name)}" for name in sorted(different))
        raise ValueError(f"{path} holds runs of other settings ({told}): repeat its command, or give another --out")


def in_order(names: list[str], visit: int) -> list[str]:
    """The sides in the order of a visit: forth and back (A B C, C B A), then from the next side on (B C A, A C B), and so on."""
    start = visit // 2 % len(names)
    turned = names[start:] + names[:start]
    return turned if visit % 2 == 0 else turned[::-1]


def measure(
    decoder: WhiFlashDecoder,
    prompts: list[Prompt],
    sides: dict[str, Side],
    reference: str,
    new_tokens: int,
    template_kwargs: dict,
    repeats: int,
    runs: Runs,
    deadline: float,
    progress: Callable[[], None],
) -> None:
    """Run what is not done yet, until `deadline` (time.perf_counter). A turn is asked after the reference's answers."""
    for repeat in range(repeats):
        for number, prompt in enumerate(prompts):
            answers: list[str] = []
            for turn in range(len(prompt.turns)):
                ids = ask(decoder, prompt, answers, template_kwargs)
                for name in in_order(list(sides), repeat * len(prompts) + number):
                    if (prompt.id, turn, name, repeat) in runs.done:
                        continue
                    if time.perf_counter() > deadline:
                        return
                    seconds, text = timed(decoder, sides[name], ids, new_tokens)
                    runs.add(
                        Run(
                            prompt.id, turn, name, repeat, seconds, text.tokens, text.forwards, text.rounds and rows_of(text.rounds)
                        )
                    )
                    progress()
                answers.append(decoder._decode(runs.done[prompt.id, turn, reference, 0].tokens))


def timed(decoder: WhiFlashDecoder, side: Side, ids: list[int], new_tokens: int) -> tuple[float, Text]:
    """A side's tokens are on the host when it returns, so the clock needs no further wait at the end."""
    if decoder.target.device.type == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    text = side(ids, new_tokens)
    return time.perf_counter() - begin, text


def measure_replayed(
    decoder: WhiFlashDecoder,
    prompts: list[Prompt],
    arms: list[Arm],
    new_tokens: int,
    template_kwargs: dict,
    runs: Runs,
    deadline: float,
    progress: Callable[[], None],
) -> None:
    """Forwards of every arm along the plain target's text; no seconds."""
    for prompt in prompts:
        answers: list[str] = []
        for turn in range(len(prompt.turns)):
            todo = [arm for arm in arms if (prompt.id, turn, str(arm), 0) not in runs.done]
            if todo:
                if time.perf_counter() > deadline:
                    return
                ids = ask(decoder, prompt, answers, template_kwargs)
                decoder.use_router("static:ar")
                text = decoder.generate(ids, reuse_prefix=False, max_new_tokens=new_tokens).sequences[0].tolist()
                for name, forwards in replay(decoder, text, len(ids), todo, progress).items():
                    runs.add(Run(prompt.id, turn, name, 0, None, text[len(ids) :], forwards))
            answers.append(decoder._decode(runs.done[prompt.id, turn, str(arms[0]), 0].tokens))


def rows_of(rounds: list[Round]) -> list[list]:
    """Rounds as lists in the order of ROUND."""
    return [
        [str(r.arm), r.drafted, r.accepted, r.committed, r.caught_up, *(round(r.ms.get(phase, 0.0), 4) for phase in PHASES)]
        for r in rounds
    ]


def write_traces(path: Path, runs: Runs) -> None:
    """One JSON object a round, in the order of the runs: prompt, turn, side, repeat, number of the round, and what ROUND names."""
    with path.open("w") as file:
        for run in runs.done.values():
            for number, row in enumerate(run.rounds or []):
                where = {"prompt": run.prompt, "turn": run.turn, "side": run.side, "repeat": run.repeat, "round": number}
                values = dict(zip(ROUND, row, strict=True))
                phases = {phase: values.pop(phase) for phase in PHASES}
                file.write(json.dumps(where | values | {"ms": phases}) + "\n")
