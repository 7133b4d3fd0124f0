"""Prompts of a bench: read, split into those that tune and those held out, put in order, and asked turn by turn."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
PARTS = ("tune", "held-out")
# name -> hub id, configuration, split
DATASETS = {
    "mt-bench": ("HuggingFaceH4/mt_bench_prompts", None, "train"),
    "gsm8k": ("openai/gsm8k", "main", "test"),
    "math500": ("HuggingFaceH4/MATH-500", None, "test"),
    "mbpp": ("google-research-datasets/mbpp", "sanitized", "test"),
    "alpaca": ("tatsu-lab/alpaca", None, "train"),
}
FIELDS = ("turns", "prompt", "question", "problem", "instruction")  # where a row may hold what is asked


@dataclass(frozen=True)
class Prompt:
    """part: one of PARTS."""

    id: str
    category: str
    turns: tuple[str, ...]
    part: str = ""

    @property
    def group(self) -> str:
        """Spec-Bench's six groups: its eight MT-bench categories are one."""
        return "mt_bench" if self.category in MT_BENCH else self.category


def read_file(path: Path) -> list[Prompt]:
    """JSON lines as in Spec-Bench (`question_id`, `category`, `turns`), or with `prompt`. ValueError names the line that is not."""
    prompts = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.strip():
            try:
                row = json.loads(line)
                prompts.append(_prompt(row, str(number), row.get("domain", "prompt")))
            except (ValueError, AttributeError) as error:
                raise ValueError(f"{path}, line {number}: not a JSON object with turns or a prompt ({error})") from error
    return _with_parts(prompts, str(path))


def read_dataset(spec: str) -> list[Prompt]:
    """spec: a name of DATASETS or a hub id, with `:split` or `:config:split` (without: that of DATASETS, else train).

    ImportError without the `datasets` package; RuntimeError where the set cannot be fetched; ValueError if it holds no prompts.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError("--dataset needs the datasets package: pip install datasets, or give a file with --prompts") from error
    name, *rest = spec.split(":")
    if len(rest) > 2:
        raise ValueError(f"--dataset {spec}: give name, name:split or name:config:split")
    hub, config, split = DATASETS.get(name, (name, None, "train"))
    config, split = rest if len(rest) == 2 else (config, rest[0] if rest else split)
    try:
        rows = load_dataset(hub, config, split=split)
    except Exception as error:  # its failures have no common class: no network, no such set, a configuration to choose
        raise RuntimeError(
            f"--dataset {spec}: {hub} could not be loaded ({type(error).__name__}: {error}). Check name, split and network, "
            f"or save its rows as JSON lines with `turns` and give them with --prompts; known names: {', '.join(DATASETS)}"
        ) from error
    return _with_parts([_prompt(dict(row), str(i), name) for i, row in enumerate(rows)], f"--dataset {spec}")


def _prompt(row: dict, number: str, category: str) -> Prompt:
    found = next((row[field] for field in FIELDS if row.get(field)), None)
    turns = [found] if isinstance(found, str) else found
    if not isinstance(turns, (list, tuple)) or not all(isinstance(turn, str) and turn for turn in turns):
        raise ValueError(f"one of {', '.join(FIELDS)} must hold text, or a list of texts; the row has {', '.join(map(str, row))}")
    if isinstance(row.get("input"), str) and row["input"]:  # Alpaca's: what the instruction is about
        turns = [f"{turns[0]}\n\n{row['input']}", *turns[1:]]
    return Prompt(str(row.get("question_id", number)), str(row.get("category", category)), tuple(turns))


def _with_parts(prompts: list[Prompt], source: str) -> list[Prompt]:
    """A third of each category is held out; which prompts these are hangs on their text alone."""
    if not prompts:
        raise ValueError(f"{source} holds no prompt: one JSON object a line with turns or a prompt")
    name, count = Counter(p.id for p in prompts).most_common(1)[0]
    if count > 1:
        raise ValueError(f"{source}: question_id {name} occurs {count} times; every prompt needs its own")
    held_out = set()
    for rows in grouped(prompts, lambda p: p.category).values():
        rows.sort(key=lambda p: hashlib.sha256("\n".join(p.turns).encode()).digest())
        held_out |= {p.id for p in rows[: round(len(rows) / 3)]}
    return [replace(p, part=PARTS[p.id in held_out]) for p in prompts]


def grouped(prompts: list[Prompt], key: Callable[[Prompt], Hashable]) -> dict[Hashable, list[Prompt]]:
    """Prompts by key, keys and prompts in their order of appearance."""
    groups: dict[Hashable, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(key(prompt), []).append(prompt)
    return groups


def round_robin(prompts: list[Prompt]) -> list[Prompt]:
    """One prompt of every group in turn, within a group one of every category: wherever a run is cut, it covers all alike."""

    def in_turn(lists) -> list[Prompt]:
        return [prompt for row in zip_longest(*lists) for prompt in row if prompt is not None]

    groups = grouped(prompts, lambda p: p.group).values()
    return in_turn([in_turn(grouped(rows, lambda p: p.category).values()) for rows in groups])


def ask(decoder, prompt: Prompt, answers: list[str], template_kwargs: dict) -> list[int]:
    """Input ids of the turn after `answers`: the conversation through the target's chat template, or plain where it has none."""
    said = [text for pair in zip_longest(prompt.turns[: len(answers) + 1], answers) for text in pair if text is not None]
    if not decoder._has_template():
        return decoder._encode("\n\n".join(said), template_kwargs)
    return decoder._encode(
        [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)], template_kwargs
    )


def check_room(decoder, prompts: list[Prompt], new_tokens: int, template_kwargs: dict) -> None:
    """ValueError, before anything runs, for the first prompt whose turns and answers the cache would not hold."""
    for prompt in prompts:
        whole = ask(decoder, prompt, [""] * (len(prompt.turns) - 1), template_kwargs)
        rows = len(whole) + len(prompt.turns) * new_tokens - 1  # the newest token needs no row
        if rows > decoder.max_cache_len:
            raise ValueError(
                f"prompt {prompt.id} and its answers may take {rows} tokens, more than --max-cache-len {decoder.max_cache_len}: "
                "raise it, lower --max-new-tokens, or leave the prompt out"
            )
