"""The tiny trio of the tests: a target that speaks a small predictable grammar, and both drafters distilled from it.

Most of a sentence follows from its beginning, some words do not: so drafts of every acceptance length occur.
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path

import torch

from ..weights import load_target
from .data import Row, read_rows, write_features
from .drafters import RECIPES, draft_vocabulary, train
from .packs import list_shards

_NUMBERS = [str(i) for i in range(40)]
_LETTERS = list("abcdefghijklmnopqrstuvwxyz")
_NAMES = ["fox", "owl", "cat", "dog", "bee", "ant", "hen", "cow"]
_COLOURS = ["red", "blue", "green", "grey", "white"]
_VERBS = ["sees", "likes", "finds", "feeds", "calls"]
_WORDS = ["count", "from", "by", "spell", "repeat", "tell", "about", "the", "and", "then", ".", ",", "old", "young", "a"]
SPECIAL = ["<end>", "<user>", "<assistant>", "<mask>"]
VOCABULARY = SPECIAL + _NUMBERS + _LETTERS + _NAMES + _COLOURS + _VERBS + [w for w in _WORDS if w not in _LETTERS]


def sentence(rng: random.Random) -> tuple[str, str]:
    """(prompt, response), words apart by spaces."""
    kind = rng.choice(["count", "spell", "repeat", "tell", "tell"])
    if kind == "count":
        first, step = rng.randrange(12), rng.choice([1, 2])
        return f"count from {first} by {step}", " ".join(_NUMBERS[first : first + 28 : step]) + " ."
    if kind == "spell":
        first = rng.randrange(12)
        return f"spell from {_LETTERS[first]}", " , ".join(_LETTERS[first : first + 14]) + " ."
    if kind == "repeat":
        words = rng.sample(_NAMES + _COLOURS, rng.choice([2, 3, 4]))
        return f"repeat {' '.join(words)}", " ".join(words * (24 // len(words))) + " ."
    hero = rng.choice(_NAMES)
    parts = []
    for _ in range(4):
        parts.append(
            f"the {rng.choice(['old', 'young'])} {hero} {rng.choice(_VERBS)} a {rng.choice(_COLOURS)} {rng.choice(_NAMES)} and then"
        )
    return f"tell about {hero}", " ".join(parts) + f" the {hero} calls a red {hero} ."


def tokenizer():
    """A word-level tokenizer of VOCABULARY with a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token="."))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="<end>",
        pad_token="<end>",
        additional_special_tokens=SPECIAL[1:],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = (
        "{% for m in messages %}{{ '<' + m['role'] + '> ' + m['content'] + ' ' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
    )
    return fast


def train_target(steps: int = 500, seed: int = 0):
    """A transformers LlamaForCausalLM of about 0.2M parameters, trained on fresh sentences for `steps` steps."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(VOCABULARY), hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=0, pad_token_id=0, initializer_range=0.05,
    )  # fmt: skip
    model, rng, encode = LlamaForCausalLM(config), random.Random(seed), tokenizer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.02)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * min(1.0, (step + 1) / 30) * (1 - step / steps) + 1e-5
        batch = [sentence(rng) for _ in range(24)]
        texts = [f"<user> {p} <assistant> {r} <end>" for p, r in batch]
        encoded = encode(texts, padding="max_length", max_length=72, truncation=True, return_tensors="pt")
        labels = encoded["input_ids"].masked_fill(encoded["attention_mask"] == 0, -100)
        loss = model(input_ids=encoded["input_ids"], attention_mask=encoded["attention_mask"], labels=labels).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval()


@torch.inference_mode()
def write_answers(target, encode, path: Path, count: int, seed: int) -> None:
    """Prompts of the grammar answered by the target itself, half greedy, half sampled at temperature 0.8."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    from ..tree import chain
    from .data import encode_chat

    cache = target.new_cache(128, 1)
    with path.open("w") as file:
        for number in range(count):
            prompt, _ = sentence(rng)
            cache.set_length(0)
            hidden, _ = target.prefill(torch.tensor([encode_chat(encode, prompt)]), cache)
            tokens = []
            while len(tokens) < 64:
                logits = target.logits(hidden)[0, -1]
                if number % 2:
                    token = torch.multinomial((logits / 0.8).softmax(-1), 1, generator=generator).view(1, 1)
                else:
                    token = logits.argmax().view(1, 1)
                tokens.append(int(token))
                if tokens[-1] == 0:
                    break
                hidden, _ = target.forward(chain(token), cache)
                cache.set_length(cache.length + 1)
            finished = tokens[-1] == 0
            response = encode.decode(tokens[: len(tokens) - finished])
            file.write(json.dumps({"prompt": prompt, "response": response, "finished": finished}) + "\n")


def make_tiny(out: Path, rows: int = 1600, drafter_steps: int = 400) -> None:
    """Train everything into out/target, out/dflash and out/eagle3: about two minutes on two CPU cores."""
    from .commands import _bar, drafter_config, save_drafter

    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty: give a new folder")
    encode = tokenizer()
    with _bar(5, "tiny trio", "part") as bar, tempfile.TemporaryDirectory() as scratch:
        model = train_target()
        bar.update()
        model.generation_config.eos_token_id = 0
        model.to(torch.bfloat16).save_pretrained(out / "target")
        encode.save_pretrained(out / "target")
        target, _ = load_target(str(out / "target"), torch.device("cpu"), torch.float32)
        text, features = Path(scratch) / "text.jsonl", Path(scratch) / "features"
        write_answers(target, encode, text, rows, seed=1)
        bar.update()
        every: list[Row] = read_rows(text, encode, 0, 128)
        vocab = target.config.vocab_size
        configs = {
            "dflash": drafter_config("dflash", target, vocab, layers=2, block_size=8, mask=VOCABULARY.index("<mask>")),
            "eagle3": drafter_config("eagle3", target, vocab - 2),
        }
        taps = tuple(sorted({t for c in configs.values() for t in c.taps}))
        write_features(target, every, features, taps, range((len(every) + 63) // 64))
        bar.update()
        for kind, config in configs.items():
            ids = draft_vocabulary(list_shards(features)[1:], config.draft_vocab_size, vocab)
            params = train(kind, target, config, ids, features, Path(scratch) / kind, drafter_steps, None, RECIPES[kind])
            save_drafter(kind, out / kind, config, params, ids, dtype=torch.bfloat16)
            bar.update()
