"""The demo's tiny tokenizer, model and data, made on this machine: nothing is downloaded.

The task is two-term addition from reasoning-gym's `chain_sum` (one or two digits a term). A question and its
mirror image (`a + b`, `b + a`) count as one; supervised training, RL, validation and test share no question.
The same options always give the same bytes, and a folder that is up to date is left alone.

Files: `tokenizer and model` in `qwen3-demo/`; `sft.json`, `rl.json`, `validation.json`, `test.json` (alpaca rows);
`dataset_info.json`, which names them `demo_sft`, `demo_rl`, `demo_validation` and `demo_test`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MODEL_FOLDER = "qwen3-demo"
SPLITS = ("sft", "rl", "validation", "test")
_STAMP = ".up-to-date"
_QUESTION = re.compile(r": (\d+) \+ (\d+) =$")
_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class AssetOptions:
    """Sizes in rows. `sft_share` is the part of the training pairs that supervised training gets, RL gets the rest;
    `one_digit_share` the part of the supervised rows with one-digit terms."""

    seed: int = 0
    sft_rows: int = 16000
    rl_rows: int = 14000
    validation_rows: int = 500
    test_rows: int = 1000
    sft_share: float = 0.5
    one_digit_share: float = 0.1
    vocab_size: int = 448


@dataclass(frozen=True)
class Question:
    """One drawn question with its answer; `pair` is the same for a question and its mirror image."""

    text: str
    answer: str
    pair: tuple[int, int]


def prepare(out: Path, options: AssetOptions = AssetOptions()) -> bool:
    """Make the assets in `out` unless they are up to date; True when they were made.

    Everything is written to a folder aside and renamed at the end, so an interrupted run leaves no half-made assets.
    """
    key = _key(options)
    if (out / _STAMP).is_file() and (out / _STAMP).read_text() == key:
        return False
    aside = out.with_name(out.name + ".partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    splits = make_splits(options)
    for name, rows in splits.items():
        _write_json(aside / f"{name}.json", [_row(name, q) for q in rows])
    _write_json(aside / "dataset_info.json", {f"demo_{name}": {"file_name": f"{name}.json"} for name in SPLITS})
    tokenizer = make_tokenizer(splits["sft"], options)
    make_model(aside / MODEL_FOLDER, tokenizer, options)
    (aside / _STAMP).write_text(key)
    shutil.rmtree(out, ignore_errors=True)
    aside.rename(out)
    return True


def make_splits(options: AssetOptions) -> dict[str, list[Question]]:
    """Questions of each split. The pairs are dealt out first, then the splits are filled from seeded draws.

    Validation and test hold every question once; training rows are kept as drawn, so questions repeat. There are few
    one-digit questions, and half of what is drawn are such: supervised rows have a fixed share of them, RL rows none.
    """
    pairs = [(a, b) for low, high in ((0, 10), (10, 100)) for a in range(low, high) for b in range(a, high)]
    random.Random(f"pairs-{options.seed}").shuffle(pairs)
    # A pair gives up to two questions, so half as many pairs as rows, and a few more for mirror images never drawn.
    num_test, num_validation = (int(0.6 * rows) + 1 for rows in (options.test_rows, options.validation_rows))
    held, training = num_test + num_validation, len(pairs) - num_test - num_validation
    num_sft = int(options.sft_share * training)
    if num_sft < 1 or num_sft >= training:
        raise ValueError(f"{options}: {len(pairs)} pairs are too few for these held-out rows and this sft_share")
    deal = {
        "test": set(pairs[:num_test]),
        "validation": set(pairs[num_test:held]),
        "sft": set(pairs[held : held + num_sft]),
        "rl": set(pairs[held + num_sft :]),
    }
    out: dict[str, list[Question]] = {}
    for number, name in enumerate(SPLITS):
        want: int = getattr(options, f"{name}_rows")
        once = name in ("validation", "test")
        rows: list[Question] = []
        seen: set[str] = set()
        one_digit = 0
        for question in _draw(seed=1000 * options.seed + number, min_digits=2 if name == "rl" else 1):
            if question.pair not in deal[name] or (once and question.text in seen):
                continue
            if name == "sft" and question.pair[1] < 10:
                if one_digit >= options.one_digit_share * (len(rows) + 1):
                    continue
                one_digit += 1
            seen.add(question.text)
            rows.append(question)
            if len(rows) == want:
                break
        else:
            raise ValueError(f"only {len(rows)} of {want} {name} rows were drawn: ask for fewer {name}_rows")
        out[name] = rows
    return out


def _draw(seed: int, min_digits: int, size: int = 250_000) -> Iterator[Question]:
    """Additions out of `size` seeded reasoning-gym draws (about half of them are subtractions)."""
    import reasoning_gym

    data = reasoning_gym.create_dataset(
        "chain_sum", size=size, seed=seed, min_terms=2, max_terms=2, min_digits=min_digits, max_digits=2, allow_negation=False
    )
    for index in range(size):
        item = data[index]
        if match := _QUESTION.search(item["question"]):
            a, b = int(match[1]), int(match[2])
            yield Question(item["question"], str(item["answer"]), (min(a, b), max(a, b)))


def _row(split: str, question: Question) -> dict[str, str]:
    """An alpaca row; RL rows have no reply to imitate, and what is scored carries its `answer`."""
    row = {"instruction": question.text, "input": "", "output": "" if split == "rl" else question.answer}
    return row if split == "sft" else {**row, "answer": question.answer}


def make_tokenizer(rows: Sequence[Question], options: AssetOptions) -> PreTrainedTokenizerFast:
    """Byte-level BPE with single digits and a ChatML template, trained on the supervised questions."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE(unk_token=None))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=options.vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
        min_frequency=2,
    )
    corpus = [f"{q.text} {q.answer}" for q in rows[:5000]]
    corpus += ["system\nYou are a helpful assistant.", "user\n", "assistant\n"] * 500
    core.train_from_iterator(corpus, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        padding_side="left",
        model_max_length=512,
    )
    tokenizer.chat_template = _CHATML
    return tokenizer


def make_model(folder: Path, tokenizer: PreTrainedTokenizerFast, options: AssetOptions) -> None:
    """A randomly initialised Qwen3 of 1.17M parameters with its tokenizer, as a Hugging Face folder."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=options.vocab_size,
        hidden_size=192,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=768,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _key(options: AssetOptions) -> str:
    """Changes with the options, this file and the libraries that draw the questions and write the model."""
    parts: Mapping[str, object] = {
        "options": asdict(options),
        "maker": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
        "versions": {name: version(name) for name in ("reasoning-gym", "tokenizers", "torch", "transformers")},
    }
    return json.dumps(parts, sort_keys=True)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    """`python -m rlmca.bench.demo_assets OUT`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    out: Path = parser.parse_args(argv).out
    print(f"demo model and data: {'made in' if prepare(out) else 'up to date in'} {out}")


if __name__ == "__main__":
    main()
