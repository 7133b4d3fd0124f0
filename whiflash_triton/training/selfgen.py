"""More training text from the target itself: it writes a user's question, then answers it.

The question is what the target puts between the opening of its own template's user turn and the turn's end (the idea of Magpie,
arXiv 2406.08464); a few first words steer it to a domain. Every row draws from generators of its own, seeded by seed and row
number, so the text does not hang on batch size or interruptions, but for the rounding of batched products.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ..loading import load_tokenizer, pick_device, resolve_source
from ..sampling import Sampling, warped
from .data import encode_chat

OPENINGS = {
    "mt_bench": (
        "", "Write a short", "Write an email", "Describe", "Imagine you are", "Pretend to be", "Compose", "Explain", "What is",
        "How do", "Suppose", "Give me", "Compare", "Draft", "Why", "Can you", "List", "Edit the following paragraph:\n\n",
        "Extract the following information from the text below:\n\n", "What are the differences between", "Discuss",
    ),
    "translation": (
        "Translate German to English:", "Translate the following sentence from French to English:",
        "Translate English to Spanish:", "Translate to German:", "Translate this paragraph to English:\n\n",
        "Translate Spanish to English:", "Translate from Italian:", "How do you say in French:",
    ),
    "summarization": (
        "Summarize:", "Summarize the following article:\n\n", "Summarize the text below in three sentences:\n\n",
        "Write a summary of:", "TL;DR of this news report:\n\n", "What are the main points of the following passage?\n\n",
        "Shorten this text:\n\n",
    ),
    "qa": (
        "Who", "Who was", "When did", "When was the", "Where is", "What is the name of", "How many", "Which", "What year",
        "Who wrote", "Who played", "What does", "Where did", "How old",
    ),
    "math_reasoning": (
        "A train", "Tom has", "Maria buys", "If a", "There are", "A farmer", "John works", "Solve:", "A store sells", "How much",
        "Sarah", "In a class of", "Each day", "Calculate", "A recipe needs", "Twice as many",
    ),
    "rag": (
        "Answer the question from the context.\n\nContext:",
        "Based on the following documents, answer the question.\n\nDocument 1:",
        "Read the passage and answer the question below it.\n\nPassage:", "Context information is below.\n\n",
        "Use the search results to answer.\n\n[1]",
    ),
    "code": (
        "Write a Python function", "Write a function that", "Fix the bug in this code:\n\n```python\n", "Explain this code:\n\n```",
        "Write a SQL query", "Implement", "Write a JavaScript", "How do I", "Write a program", "Write unit tests for",
        "Refactor:\n\n```",
    ),
}  # fmt: skip
QUESTION_TEMPERATURE, TOP_P = 0.9, 0.95
MARK = "THE-QUESTION"
GIVE_UP_AFTER = 20  # batches without a row that is new


class RowSampler:
    """A transformers logits processor that leaves every row one token: the likeliest at temperature 0, else one drawn from the
    row's own generator."""

    def __init__(self, temperatures: list[float], seeds: list[str], device: torch.device):
        self.temperatures = temperatures
        self.generators = [torch.Generator(device).manual_seed(random.Random(seed).getrandbits(63)) for seed in seeds]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        chosen = scores.argmax(-1)
        for i, temperature in enumerate(self.temperatures):
            if temperature:
                p = warped(scores[i : i + 1].float(), Sampling(temperature=temperature, top_p=TOP_P)).softmax(-1)
                chosen[i] = torch.multinomial(p, 1, generator=self.generators[i])[0, 0]
        return torch.full_like(scores, float("-inf")).scatter_(1, chosen[:, None], 0.0)


def user_turn(tokenizer) -> tuple[str, int]:
    """The template's text before a user's words, and the token that ends them. ValueError without a chat template."""
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("the target's tokenizer has no chat template: its user turn is what the questions are sampled from")
    turn = [{"role": "user", "content": MARK}]
    head, _, tail = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True).partition(MARK)
    return head, tokenizer(tail, add_special_tokens=False)["input_ids"][0]


def load_model(target: str, device: torch.device):
    """transformers' own model of the target, float32 on a CPU and bfloat16 on CUDA, with its tokenizer."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    source, _ = resolve_source(target)
    path, gguf = Path(source), {}
    if path.suffix == ".gguf":
        path, gguf = path.parent, {"gguf_file": path.name}
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **gguf).to(device).eval(), load_tokenizer(source)


@torch.inference_mode()
def complete(model, prompts: list[list[int]], sampler: RowSampler, count: int, stops: list[int]) -> list[tuple[list[int], bool]]:
    """(new tokens without the stop token, whether one came) of every prompt, at most `count` tokens."""
    from transformers import GenerationConfig, LogitsProcessorList

    width, device = max(map(len, prompts)), model.device
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    config = GenerationConfig(do_sample=False, max_new_tokens=count, eos_token_id=stops, pad_token_id=stops[0])
    out = model.generate(
        ids, attention_mask=mask, generation_config=config, logits_processor=LogitsProcessorList([sampler])
    )[:, width:]  # fmt: skip
    texts = []
    for row in out.tolist():
        end = next((i for i, token in enumerate(row) if token in stops), None)
        texts.append((row[:end], end is not None))
    return texts


def write_batch(
    model, tokenizer, seed: int, numbers: range, domains: list[str], temperatures: list[float], question: int, answer: int
) -> list[dict]:
    """The rows of these numbers whose question came to an end and whose answer is not empty."""
    head, turn_end = user_turn(tokenizer)
    plans = []
    for number in numbers:
        rng, domain = random.Random(f"{seed}-{number}"), domains[number % len(domains)]
        plans.append((number, domain, rng.choice(OPENINGS[domain]), rng.choice(temperatures)))
    sampler = RowSampler([QUESTION_TEMPERATURE] * len(plans), [f"question-{seed}-{n}" for n in numbers], model.device)
    heads = [tokenizer(head + opening, add_special_tokens=False)["input_ids"] for _, _, opening, _ in plans]
    rows, asked = [], []
    for (number, domain, opening, temperature), (tokens, ended) in zip(
        plans, complete(model, heads, sampler, question, [turn_end]), strict=True
    ):
        first = tokenizer(opening, add_special_tokens=False)["input_ids"]
        prompt = tokenizer.decode(first + tokens, skip_special_tokens=True).strip()
        if ended and len(prompt.split()) > max(2, len(opening.split())):
            rows.append({"prompt": prompt, "response": "", "domain": domain, "temperature": temperature, "finished": False,
                         "seed": seed, "row": number})  # fmt: skip
            asked.append(encode_chat(tokenizer, prompt))
    if not rows:
        return []
    stops = model.generation_config.eos_token_id
    stops = stops if isinstance(stops, list) else [stops]
    sampler = RowSampler([r["temperature"] for r in rows], [f"answer-{seed}-{r['row']}" for r in rows], model.device)
    for row, (tokens, ended) in zip(rows, complete(model, asked, sampler, answer, stops), strict=True):
        row["response"], row["finished"] = tokenizer.decode(tokens, skip_special_tokens=True), ended
    return [row for row in rows if row["response"].strip()]


def read_written(path: Path, seed: int) -> tuple[set[str], int, int]:
    """(questions of the whole file, rows of this seed, the first row number of this seed not tried); a line cut short goes."""
    if not path.exists():
        return set(), 0, 0
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):  # a write was interrupted
        with path.open("r+b") as file:
            file.truncate(len(whole))
    try:
        rows = [json.loads(line) for line in whole.decode().splitlines()]
        numbers = [row["row"] for row in rows if row.get("seed") == seed]
        return {_key(row["prompt"]) for row in rows}, len(numbers), max(numbers, default=-1) + 1
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} holds lines that `whiflash train data` did not write ({error}): give a new file") from error


def _key(prompt: str) -> str:
    return " ".join(prompt.casefold().split())


def write_text(
    out: Path, rows: int, until: float, seed: int, batch: int, make: Callable[[range], list[dict]], progress=lambda new: None
) -> int:
    """Append rows until the file holds `rows` of this seed, or the clock passes `until`; returns how many it holds of this seed.

    make: row numbers -> rows. Questions that the file holds already are left out.
    """
    seen, held, number = read_written(out, seed)
    progress(held)
    idle = 0
    with out.open("a") as file:
        while held < rows and time.monotonic() < until:
            fresh = []
            for row in make(range(number, number + batch)):
                if _key(row["prompt"]) not in seen and held + len(fresh) < rows:
                    seen.add(_key(row["prompt"]))
                    fresh.append(row)
            file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in fresh))
            file.flush()
            held, number, idle = held + len(fresh), number + batch, 0 if fresh else idle + 1
            progress(len(fresh))
            if idle == GIVE_UP_AFTER:
                raise RuntimeError(
                    f"{idle * batch} tries gave no question that is new and comes to its end: raise --question-tokens, "
                    "or name more --domains"
                )
    return held


def add_parser(commands) -> None:
    p = commands.add_parser("data", help="write training text: the target asks itself questions and answers them")
    p.add_argument("--target", default="smollm2-135m", help="hub id, folder or .gguf file, with a chat template")
    p.add_argument("--out", type=Path, required=True, help="JSON lines to append to; an interrupted run goes on from it")
    p.add_argument("--rows", type=int, required=True, help="stop when the file holds so many rows of this seed")
    p.add_argument("--minutes", type=float, default=float("inf"), help="stop after the batch in which they are over")
    p.add_argument("--domains", default=",".join(OPENINGS), help="comma separated, taken in turn (default: all, %(default)s)")
    p.add_argument("--temperature", default="0,0,0.8", help="of answers, drawn evenly; 0 is greedy (default: %(default)s)")
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--question-tokens", type=int, default=256, help="a longer question is thrown away")
    p.add_argument("--max-new-tokens", type=int, default=256, help="of an answer")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--device")
    p.add_argument("--threads", type=int)
    p.set_defaults(run=run)


def run(args) -> int:
    from tqdm import tqdm

    domains = [name for name in args.domains.split(",") if name]
    unknown = sorted(set(domains) - set(OPENINGS))
    if unknown or not domains:
        raise ValueError(f"--domains {args.domains}: choose from {', '.join(OPENINGS)}")
    try:
        temperatures = [float(text) for text in args.temperature.split(",")]
    except ValueError:
        temperatures = [-1.0]
    if not all(0 <= t < float("inf") for t in temperatures):
        raise ValueError(f"--temperature {args.temperature}: numbers from 0 up, separated by commas")
    if min(args.rows, args.batch, args.question_tokens, args.max_new_tokens) < 1 or not args.minutes > 0:
        raise ValueError("--rows, --minutes, --batch, --question-tokens and --max-new-tokens must be positive")
    if args.threads:
        torch.set_num_threads(args.threads)
    until = time.monotonic() + 60 * args.minutes
    model, tokenizer = load_model(args.target, pick_device(args.device))
    if model.generation_config.eos_token_id is None:
        raise ValueError(f"{args.target} names no eos_token_id: set it in its config.json")
    user_turn(tokenizer)  # an error before the file is touched

    def make(numbers: range) -> list[dict]:
        return write_batch(
            model, tokenizer, args.seed, numbers, domains, temperatures, args.question_tokens, args.max_new_tokens
        )  # fmt: skip

    with tqdm(total=args.rows, desc="data", unit="row", dynamic_ncols=True) as bar:
        held = write_text(args.out, args.rows, until, args.seed, args.batch, make, bar.update)
    print(f"{args.out} holds {held} rows of seed {args.seed}")
    return 0
