"""The demo's text model: a small Llama that learns to read, from nothing, and its tokenizer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from random import Random

import torch
from dialogues import Conversation, Drill, texts_of, training_document
from stage import Pace, Stage
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

LONG_ANSWER = 20  # tokens
PAD, BOS, END = "<|pad|>", "<|bos|>", "<|end|>"
ROLES = ("system", "user", "assistant")
SPECIAL_TOKENS = [PAD, BOS, END, *(f"<|{role}|>" for role in ROLES)]
Encoded = tuple[list[int], list[float]]  # token ids, and the weight of the loss on each
# Tools are told as ``draw(shape, color)``, one a line: a parameter's default says its type, "?" that it may be left
# out. Calls are written as Hermes models write them.
CHAT_TEMPLATE = """\
{%- macro signature(tool) %}
    {%- set function = tool['function'] if tool['function'] is mapping else tool %}
    {%- set schema = function['parameters'] if function['parameters'] is mapping else {} %}
    {%- set properties = schema['properties'] if schema['properties'] is mapping else {} %}
    {{- '\\n' + function['name'] + '(' }}
    {%- for name, one in properties.items() %}
        {{- (', ' if not loop.first else '') + name + ('' if name in (schema['required'] or []) else '?') }}
        {%- if one['enum'] is defined and one['enum'] | join('|') | length <= 40 %}
            {{- '=' + one['enum'] | join('|') }}
        {%- elif one['type'] is string and one['type'] != 'string' %}
            {{- {'integer': '=0', 'number': '=0', 'boolean': '=true', 'array': '=[]', 'object': '={}'}[one['type']] }}
        {%- endif %}
    {%- endfor %}
    {{- ')' }}
{%- endmacro %}
{%- macro told() %}
    {{- 'Tools:' }}
    {%- for tool in tools %}
        {{- signature(tool) }}
    {%- endfor %}
{%- endmacro %}
{%- set roles = {'system': 'system', 'developer': 'system', 'user': 'user', 'assistant': 'assistant', 'tool': 'tool',
    'function': 'tool'} %}
{{- bos_token }}
{%- if tools and (not messages or roles[messages[0]['role']] != 'system') %}
    {{- '<|system|>' + told() + '<|end|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message['role'] not in roles %}
        {{- raise_exception('Unknown role: ' + message['role']) }}
    {%- endif %}
    {{- '<|' + roles[message['role']] + '|>' }}
    {%- if message['content'] is string %}
        {{- message['content'] | trim }}
    {%- elif message['content'] is not none %}
        {%- for part in message['content'] %}
            {{- {'image': '<|image|>', 'video': '<|video|>'}[part['type']] or part['text'] | trim }}
        {%- endfor %}
    {%- endif %}
    {%- if tools and loop.first and roles[message['role']] == 'system' %}
        {{- ('\\n' if message['content'] else '') + told() }}
    {%- endif %}
    {%- for call in message['tool_calls'] or [] %}
        {%- set function = call['function'] if call['function'] is mapping else call %}
        {%- set arguments = function['arguments'] %}
        {{- '\\n' if not loop.first or message['content'] }}
        {{- '<tool_call>\\n{"name": "' + function['name'] + '", "arguments": ' }}
        {{- arguments if arguments is string else arguments | tojson }}
        {{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}
"""


@dataclass(frozen=True)
class Reading:
    """Everything that decides the text model."""

    seed: int = 2026
    pace: Pace = Pace(steps=2300, learning_rate=3e-3)  # noqa: RUF009 (it is frozen)
    documents: int = 32  # per step
    parts: int = 4  # batches of similar length that a step's documents are split into
    easy_steps: int = 600  # over which easy documents give way to the usual ones
    prompt_weight: float = 0.05  # of the loss on what the user says
    text_weight: float = 0.4  # of the loss on plain text and on long answers, such as stories
    vocabulary: int = 1024
    hidden: int = 192
    layers: int = 6
    heads: int = 6
    kv_heads: int = 2
    intermediate: int = 512


def lessons(reading: Reading) -> tuple[Stage, LlamaForCausalLM, PreTrainedTokenizerFast]:
    """The text stage, and the model and the tokenizer that come of it."""
    tokenizer = build_tokenizer(reading)
    model = build_model(reading, tokenizer)

    def batches(step: int) -> list[Batch]:
        rng = Random(f"{reading.seed} {step}")
        early = max(0.0, 1.0 - step / (reading.easy_steps))
        documents = [training_document(rng, early) for _ in range(reading.documents)]
        return by_length([encode(document, tokenizer, reading) for document in documents], reading.parts, tokenizer)

    def loss(batch: Batch) -> torch.Tensor:
        # Padding needs no mask, as it comes after all that it could disturb.
        hidden = model.model(input_ids=batch.ids, use_cache=False).last_hidden_state
        return weighted_loss(model.lm_head, hidden, batch)

    return Stage("reading", asdict(reading), reading.pace, model, batches, loss, Batch.weight), model, tokenizer


def build_tokenizer(reading: Reading) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer fitted to the world's text, with the chat template."""
    rng = Random(f"tokenizer {reading.seed}")
    documents = (training_document(rng, early=0.2) for _ in range(8000))
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=reading.vocabulary,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator((text for doc in documents for text in texts_of(doc)), trainer)
    core.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, core.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens=[f"<|{role}|>" for role in ROLES],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
        padding_side="left",
    )


def build_model(reading: Reading, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A small Llama with random weights that depend on the seed alone."""
    torch.manual_seed(reading.seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=reading.hidden,
        intermediate_size=reading.intermediate,
        num_hidden_layers=reading.layers,
        num_attention_heads=reading.heads,
        num_key_value_heads=reading.kv_heads,
        head_dim=reading.hidden // reading.heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    _start_ready_to_look_up(model)
    # Three times as fast here, backwards, as the fused attention on a CPU.
    model.set_attn_implementation("eager")
    return model


@torch.no_grad()
def _start_ready_to_look_up(model: LlamaForCausalLM) -> None:
    """Replaces the usual random start by one that finds things in the context far sooner.

    Every question here is answered by a look-up: find a word's earlier place, then the word beside
    it. From the usual start that takes many thousand steps to appear. So the embeddings are large
    enough not to be drowned by the first layer, every layer begins by adding nothing, one head in
    each group attends to what resembles its own token, and the first group of the first two layers
    attends to the tokens just before: to the subject of a sentence from its end. All of it is then
    trained freely.
    """
    config = model.config
    scale = config.hidden_size**-0.5
    embeddings = model.model.embed_tokens.weight
    torch.nn.init.normal_(embeddings, std=scale)
    embeddings[:, 0] = 4 * scale  # a part that all tokens share, for attention by place alone
    group = config.num_attention_heads // config.num_key_value_heads
    for layer in model.model.layers:
        attention = layer.self_attn
        keys, queries = attention.k_proj.weight, attention.q_proj.weight
        for weights in (keys, queries):
            torch.nn.init.normal_(weights, std=2 * config.head_dim**-0.25 * scale)
        torch.nn.init.normal_(attention.v_proj.weight, std=scale)
        by_head = queries.view(-1, group, config.head_dim, config.hidden_size)
        by_head[:, 0] = keys.view(-1, config.head_dim, config.hidden_size)
        attention.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    _attend_to_tokens_before(model, 0, range(1, group + 1))
    _attend_to_tokens_before(model, 1, range(group + 1, 2 * group + 1))


def _attend_to_tokens_before(model: LlamaForCausalLM, layer: int, distances: range) -> None:
    """Makes the heads of the layer's first group attend so many tokens back, one distance each."""
    config, attention = model.config, model.model.layers[layer].self_attn
    fast = torch.zeros(1, 1, config.head_dim)
    for half in (0, config.head_dim // 2):
        fast[..., half : half + 6] = 1.0  # the rotations that tell near places apart
    attention.k_proj.weight[: config.head_dim] = 0.0
    attention.k_proj.weight[: config.head_dim, 0] = fast[0, 0]
    for head, distance in enumerate(distances):
        cos, sin = model.model.rotary_emb(fast, torch.tensor([[-distance]]))
        turned, _ = apply_rotary_pos_emb(fast[None], fast[None], cos, sin)
        rows = slice(head * config.head_dim, (head + 1) * config.head_dim)
        attention.q_proj.weight[rows] = 0.0
        attention.q_proj.weight[rows, 0] = turned[0, 0, 0]


@dataclass(frozen=True)
class Batch:
    """Documents padded on the right; ``weights`` says how much each next token counts."""

    ids: torch.Tensor
    weights: torch.Tensor

    def weight(self) -> float:
        return float(self.weights[:, 1:].sum())


def by_length(encoded: list[Encoded], parts: int, tokenizer: PreTrainedTokenizerFast) -> list[Batch]:
    """So many batches of documents of similar length, to waste no padding."""
    encoded = sorted(encoded, key=lambda pair: len(pair[0]), reverse=True)
    size = math.ceil(len(encoded) / parts)
    return [padded(encoded[start : start + size], tokenizer.pad_token_id) for start in range(0, len(encoded), size)]


def encode(document: Conversation | str, tokenizer: PreTrainedTokenizerFast, reading: Reading) -> Encoded:
    """A document's tokens, exactly as they are served, and the weight of the loss on each."""
    end, assistant = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|assistant|>")
    if isinstance(document, str):
        ids = [*tokenizer(document)["input_ids"], end]
        weight = 1.0 if isinstance(document, Drill) else reading.text_weight
        return ids, [weight] * len(ids)
    ids = tokenizer.apply_chat_template(document, tokenize=True, return_dict=False)
    weights = [reading.prompt_weight] * len(ids)
    for start in (place + 1 for place, token in enumerate(ids) if token == assistant):
        stop = ids.index(end, start) + 1
        # A story has many tokens, most of them free to choose; they must not drown the answers.
        weight = 1.0 if stop - start <= LONG_ANSWER else reading.text_weight
        weights[start:stop] = [weight] * (stop - start)
    return ids, weights


def padded(encoded: Sequence[Encoded], pad: int) -> Batch:
    longest = max(len(ids) for ids, _ in encoded)
    ids = torch.full((len(encoded), longest), pad)
    weights = torch.zeros(len(encoded), longest)
    for row, (tokens, counts) in enumerate(encoded):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        weights[row, : len(counts)] = torch.tensor(counts)
    return Batch(ids, weights)


def weighted_loss(head: torch.nn.Module, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The summed loss of hidden states [N, L, C] that foretell the batch's next tokens."""
    targets, weights = batch.ids[:, 1:], batch.weights[:, 1:]
    counted = weights > 0
    logits = head(hidden[:, :-1][counted])
    return (cross_entropy(logits, targets[counted], reduction="none") * weights[counted]).sum()
