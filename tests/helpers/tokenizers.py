"""Tiny tokenizers and chat templates made in-process; nothing is downloaded."""

from __future__ import annotations

from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GENERATION = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML whose author marks what is the assistant's: Transformers' own mask of it is an independent oracle."""

STRICT = (
    "{% set users = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{% if not users %}{{ raise_exception('No user query found in messages.') }}{% endif %}"
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Raises without a user turn and puts a default system message in front when there is none."""

STRIPPING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = (
    "{%- set last = namespace(user=-1) -%}"
    "{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set last.user = loop.index0 -%}{%- endif -%}{%- endfor -%}"
    "{%- if tools -%}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{%- endif -%}"
    "{%- for m in messages -%}"
    "{%- if m.role == 'assistant' -%}"
    "{%- set answer = m.content -%}{%- set thought = '' -%}"
    "{%- if '</think>' in answer -%}"
    "{%- set thought = answer.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') -%}"
    "{%- set answer = answer.split('</think>')[-1].lstrip('\n') -%}"
    "{%- endif -%}"
    "{%- if loop.index0 > last.user and (loop.last or thought) -%}"
    "{{- '<|im_start|>assistant\n<think>\n' + thought.strip('\n') + '\n</think>\n\n' + answer.lstrip('\n') -}}"
    "{%- else -%}{{- '<|im_start|>assistant\n' + answer -}}{%- endif -%}"
    "{%- for call in m.tool_calls or [] -%}"
    "{{- '\n<call>\n{\"name\": \"' + call.function.name + '\", \"arguments\": ' + (call.function.arguments | tojson) + '}\n</call>' -}}"
    "{%- endfor -%}"
    "{{- '<|im_end|>\n' -}}"
    "{%- else -%}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}"
    "{%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}{%- endif -%}"
)
"""As hybrid thinking models do it: thoughts of old turns are dropped, the last turn always has one, tools are written out."""


@cache
def _bpe() -> str:
    bpe = Tokenizer(models.BPE(unk_token=None))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(
        ["system\nYou are a helpful assistant.", "user\nWhat is 3 + 4 = ?", "assistant\nThe answer is 7."] * 50, trainer
    )
    return str(bpe.to_str())


def tiny_tokenizer(
    chat_template: str | None = CHATML, *, pad_token: str | None = "<|endoftext|>", trim_offsets: bool = False
) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most 400 tokens; `<|im_end|>` is its eos. `trim_offsets` as some byte-level models have it."""
    bpe = Tokenizer.from_str(_bpe())
    if trim_offsets:
        bpe.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token=pad_token, additional_special_tokens=["<|im_start|>"], model_max_length=4096
    )
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer
