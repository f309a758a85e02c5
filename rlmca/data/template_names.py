"""`template:` names: what a tokenizer's own chat template must look like for the name to fit it, and plain templates
for tokenizers that come without one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token or '' }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token or '' }}{% set system = messages[0]['content'] + '\n\n' if messages[0]['role'] == 'system' else '' %}"
    "{% set turns = messages[1:] if system else messages %}"
    "{% for message in turns %}{% if message['role'] == 'user' %}"
    "[INST] {{ (system if loop.first else '') + message['content'] }}[/INST]"
    "{% elif message['role'] == 'assistant' %} {{ message['content'] }}{{ eos_token }}"
    "{% else %}{{ raise_exception('only system, user and assistant turns') }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{% endif %}"
)
DEFAULT = (
    "{{ bos_token or '' }}{% for message in messages %}{% if message['role'] == 'system' %}{{ message['content'] }}\n"
    "{% elif message['role'] == 'user' %}Human: {{ message['content'] }}\n"
    "{% elif message['role'] == 'assistant' %}Assistant:{{ message['content'] }}{{ eos_token }}\n"
    "{% else %}{{ raise_exception('only system, user and assistant turns') }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
VICUNA = (
    "{{ bos_token or '' }}{% for message in messages %}{% if message['role'] == 'system' %}{{ message['content'] }} "
    "{% elif message['role'] == 'user' %}USER: {{ message['content'] }} "
    "{% elif message['role'] == 'assistant' %}ASSISTANT:{{ message['content'] }}{{ eos_token }}"
    "{% else %}{{ raise_exception('only system, user and assistant turns') }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
LLAMA3_TOKENS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


@dataclass(frozen=True)
class TemplateName:
    """One name: `markers` must all stand in the tokenizer's own template; `own` is used when it has none.

    `tokens` must be single tokens of the tokenizer when `own` is used. `thinking` overrides `enable_thinking`.
    """

    markers: tuple[str, ...] = ()
    own: str | None = None
    tokens: tuple[str, ...] = ()
    thinking: bool | None = None


_CHATML = TemplateName(("<|im_start|>",), CHATML, CHATML_TOKENS)

TEMPLATE_NAMES: Mapping[str, TemplateName] = MappingProxyType(
    {
        "default": TemplateName((), DEFAULT),
        "chatml": _CHATML,
        "qwen": _CHATML,
        "qwen2": _CHATML,
        "qwen3": _CHATML,
        "qwen3_nothink": TemplateName(("<|im_start|>",), CHATML, CHATML_TOKENS, thinking=False),
        "minimind": _CHATML,
        "llama2": TemplateName(("[INST]",), MISTRAL),
        "llama3": TemplateName(("<|start_header_id|>", "<|eot_id|>"), LLAMA3, LLAMA3_TOKENS),
        "mistral": TemplateName(("[INST]",), MISTRAL),
        "deepseek3": TemplateName(("<｜Assistant｜>",)),
        "deepseekr1": TemplateName(("<｜Assistant｜>",)),
        "vicuna": TemplateName(("USER:",), VICUNA),
    }
)
LATER_TEMPLATES = ("qwen2_vl", "qwen3_vl", "qwen3_vl_nothink", "qwen2_omni", "llava", "mllama")
