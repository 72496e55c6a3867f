"""A conversation, a template for it, and a tokenizer that has both's special tokens."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from quire.platform.inputs.chat import render_text

TEMPLATE = """{{ bos_token }}{% if tools %}
{% for tool in tools %}
[tool]{{ tool | tojson }}
{% endfor %}
{% endif %}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('unknown role ' + message.role) }}
    {%- endif %}
    {{- '<|' + message.role + '|>' }}
    {%- if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}
    {%- else %}{{- message.content | trim }}{% endif %}
    {{- '<|end|>' }}
    {%- if loop.index > 50 %}{% break %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
{%- set ns = namespace(count=0) %}{% for m in messages %}{% set ns.count = ns.count + 1 %}{% endfor %}
{%- if mood is defined %}{{ mood }} {{ ns.count }}{{ dict(a=1)['a'] }}{% endif %}
"""
CHAT = [
    {"role": "system", "content": " Be kind. "},
    {"role": "user", "content": "Hello <b>é 👍</b>!"},
    {"role": "assistant", "content": "Well met"},
]


@cache
def tokenizer() -> Any:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    names = ["<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=names, show_progress=False)
    inner.train_from_iterator(["Hello well met the the"], trainer)
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
    made.chat_template = TEMPLATE
    return made


def render(template: str, **kwargs: Any) -> str:
    return render_text(tokenizer(), CHAT, chat_template=template, **kwargs)
