"""Trains quire-demo, the model that quire bundles, from nothing, on text it generates itself.

    python training/train_demo.py

Writes ``quire/demo/model/``. The run is deterministic (every document follows from the seed and
the step's number) and saves a checkpoint now and then: started again, it goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import torch
from dialogues import Conversation, Drill, texts_of, training_document
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn.functional import cross_entropy
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

HERE = Path(__file__).resolve().parent
MODEL_FOLDER = HERE.parent / "quire" / "demo" / "model"
CHECKPOINT = HERE / ".checkpoint" / "quire-demo.pt"

LONG_ANSWER = 20  # tokens
PAD, BOS, END = "<|pad|>", "<|bos|>", "<|end|>"
ROLES = ("system", "user", "assistant")
SPECIAL_TOKENS = [PAD, BOS, END, *(f"<|{role}|>" for role in ROLES)]
CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('Unknown role: ' + message['role']) }}
    {%- endif %}
    {{- '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}
"""


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the result."""

    seed: int = 2026
    steps: int = 2300
    documents: int = 32  # per step
    parts: int = 4  # batches of similar length that a step's documents are split into
    learning_rate: float = 3e-3  # of the matrices
    small_rate: float = 0.5  # the same of norms and embeddings, as a share of it
    warmup: int = 50
    weight_decay: float = 0.05
    easy_steps: int = 600  # over which easy documents give way to the usual ones
    prompt_weight: float = 0.05  # of the loss on what the user says
    text_weight: float = 0.4  # of the loss on plain text and on long answers, such as stories
    vocabulary: int = 1024
    hidden: int = 192
    layers: int = 6
    heads: int = 6
    kv_heads: int = 2
    intermediate: int = 512


# --------------------------------------------------------------------------------------------
# The model and its tokenizer
# --------------------------------------------------------------------------------------------


def build_tokenizer(recipe: Recipe) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer fitted to the world's text, with the chat template."""
    rng = Random(f"tokenizer {recipe.seed}")
    documents = (training_document(rng, early=0.2) for _ in range(8000))
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocabulary,
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


def build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A small Llama with random weights that depend on the seed alone."""
    torch.manual_seed(recipe.seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden,
        intermediate_size=recipe.intermediate,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.hidden // recipe.heads,
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


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes the model in bf16 with its tokenizer, as Hugging Face lays them out."""
    folder.mkdir(parents=True, exist_ok=True)
    rounded = LlamaForCausalLM(model.config).to(torch.bfloat16)
    rounded.load_state_dict(model.state_dict())
    rounded.config.dtype = torch.bfloat16
    rounded.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    rounded.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(folder)
    _use_common_names(folder / "tokenizer_config.json")


def _use_common_names(path: Path) -> None:
    """Names the tokenizer's class and tokens as releases before transformers 5 know them too."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config["additional_special_tokens"] = config.pop("extra_special_tokens")
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# --------------------------------------------------------------------------------------------
# Data
# --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """Documents padded on the right; ``weights`` says how much each next token counts."""

    ids: torch.Tensor
    weights: torch.Tensor


def step_batches(recipe: Recipe, tokenizer: PreTrainedTokenizerFast, step: int) -> Iterator[Batch]:
    """The documents of one step, split into batches of similar length to waste no padding."""
    rng = Random(f"{recipe.seed} {step}")
    early = max(0.0, 1.0 - step / (recipe.easy_steps))
    documents = [training_document(rng, early) for _ in range(recipe.documents)]
    encoded = [encode(document, tokenizer, recipe) for document in documents]
    encoded.sort(key=lambda pair: len(pair[0]), reverse=True)
    size = math.ceil(len(encoded) / recipe.parts)
    for start in range(0, len(encoded), size):
        yield _padded(encoded[start : start + size], tokenizer.pad_token_id)


def encode(
    document: Conversation | str, tokenizer: PreTrainedTokenizerFast, recipe: Recipe
) -> tuple[list[int], list[float]]:
    """A document's tokens, exactly as they are served, and the weight of the loss on each."""
    end, assistant = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|assistant|>")
    if isinstance(document, str):
        ids = [*tokenizer(document)["input_ids"], end]
        weight = 1.0 if isinstance(document, Drill) else recipe.text_weight
        return ids, [weight] * len(ids)
    ids = tokenizer.apply_chat_template(document, tokenize=True, return_dict=False)
    weights = [recipe.prompt_weight] * len(ids)
    for start in (place + 1 for place, token in enumerate(ids) if token == assistant):
        stop = ids.index(end, start) + 1
        # A story has many tokens, most of them free to choose; they must not drown the answers.
        weight = 1.0 if stop - start <= LONG_ANSWER else recipe.text_weight
        weights[start:stop] = [weight] * (stop - start)
    return ids, weights


def _padded(encoded: list[tuple[list[int], list[float]]], pad: int) -> Batch:
    longest = max(len(ids) for ids, _ in encoded)
    ids = torch.full((len(encoded), longest), pad)
    weights = torch.zeros(len(encoded), longest)
    for row, (tokens, counts) in enumerate(encoded):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        weights[row, : len(counts)] = torch.tensor(counts)
    return Batch(ids, weights)


# --------------------------------------------------------------------------------------------
# Training
# --------------------------------------------------------------------------------------------


@dataclass
class Progress:
    """What a checkpoint holds besides the weights and the optimizers."""

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0


def train(recipe: Recipe, folder: Path, checkpoint: Path, save_every: int, threads: int) -> None:
    """Trains from the checkpoint, if there is one of this recipe, to the last step."""
    # Each worker takes whole batches and computes in one thread: threads that share a batch wait
    # for each other at every step of it, which is slow when something else uses a core.
    torch.set_num_threads(1)
    workers = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
    tokenizer = build_tokenizer(recipe)
    model = build_model(recipe, tokenizer)
    optimizers = _optimizers(model, recipe)
    progress = _resume(recipe, model, optimizers, checkpoint)
    print(f"{model.num_parameters():,} parameters, from step {progress.step}", flush=True)
    started, before, running = time.monotonic(), progress.seconds, 0.0
    while progress.step < recipe.steps:
        for optimizer, share in zip(optimizers, (1.0, recipe.small_rate), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = share * learning_rate(recipe, progress.step)
        batches = list(step_batches(recipe, tokenizer, progress.step))
        loss, tokens = _step(model, optimizers, batches, workers)
        progress.step += 1
        progress.tokens += tokens
        progress.seconds = before + time.monotonic() - started
        running = loss if running == 0.0 else 0.95 * running + 0.05 * loss
        if progress.step % 50 == 0:
            rate = progress.tokens / progress.seconds
            print(f"step {progress.step} loss {running:.4f} tokens {progress.tokens:,} "
                  f"{progress.seconds:.0f} s {rate:.0f} tokens/s", flush=True)  # fmt: skip
        if progress.step % save_every == 0:
            _save_checkpoint(recipe, model, optimizers, progress, checkpoint)
    save(model, tokenizer, folder)
    print(f"done: {progress.seconds:.0f} s, {progress.tokens:,} tokens", flush=True)


def learning_rate(recipe: Recipe, step: int) -> float:
    """A linear warm-up, then a cosine down to nothing."""
    if step < recipe.warmup:
        return recipe.learning_rate * (step + 1) / recipe.warmup
    done = (step - recipe.warmup) / (recipe.steps - recipe.warmup)
    return recipe.learning_rate * 0.5 * (1 + math.cos(math.pi * done))


def _optimizers(model: LlamaForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for norms and embeddings; the latter do not decay, lest the
    embeddings of rare tokens vanish."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        (others if parameter.dim() < 2 or "embed" in name else matrices).append(parameter)
    return [
        torch.optim.Muon(
            matrices, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, weight_decay=0.0, betas=(0.9, 0.98), fused=True),
    ]


def _step(
    model: LlamaForCausalLM,
    optimizers: list[torch.optim.Optimizer],
    batches: list[Batch],
    workers: Executor,
) -> tuple[float, int]:
    """One update from all the batches together; their mean loss and the tokens read."""
    total = sum(float(batch.weights[:, 1:].sum()) for batch in batches)
    results = list(workers.map(lambda batch: _loss_and_gradients(model, batch, total), batches))
    # Summed in the batches' order, so that the workers' timing does not change the result.
    for parameter, *gradients in zip(model.parameters(), *(g for _, g in results), strict=True):
        parameter.grad = sum(gradients[1:], start=gradients[0])
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    tokens = sum(int((batch.weights > 0).sum()) for batch in batches)
    return sum(loss for loss, _ in results), tokens


def _loss_and_gradients(
    model: LlamaForCausalLM, batch: Batch, total: float
) -> tuple[float, tuple[torch.Tensor, ...]]:
    with torch.autocast("cpu", torch.bfloat16):
        loss = _weighted_loss(model, batch) / total
    return loss.item(), torch.autograd.grad(loss, list(model.parameters()))


def _weighted_loss(model: LlamaForCausalLM, batch: Batch) -> torch.Tensor:
    """The summed loss; padding needs no mask, as it comes after all that it could disturb."""
    hidden = model.model(input_ids=batch.ids, use_cache=False).last_hidden_state[:, :-1]
    targets, weights = batch.ids[:, 1:], batch.weights[:, 1:]
    counted = weights > 0
    logits = model.lm_head(hidden[counted])
    return (cross_entropy(logits, targets[counted], reduction="none") * weights[counted]).sum()


def _resume(
    recipe: Recipe, model: LlamaForCausalLM, optimizers: list[torch.optim.Optimizer], path: Path
) -> Progress:
    if not path.exists():
        return Progress()
    state = torch.load(path, weights_only=True)
    if state["recipe"] != asdict(recipe):
        print(f"the checkpoint {path.name} is of another recipe: starting anew")
        return Progress()
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return Progress(**state["progress"])


def _save_checkpoint(
    recipe: Recipe,
    model: LlamaForCausalLM,
    optimizers: list[torch.optim.Optimizer],
    progress: Progress,
    path: Path,
) -> None:
    """Replaces the checkpoint in one move, so that a stop half-way leaves the last one whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {
        "recipe": asdict(recipe),
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "progress": asdict(progress),
    }
    fresh = path.with_suffix(".new")
    torch.save(state, fresh)
    fresh.replace(path)


def main() -> None:
    """Reads the command line and trains."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=MODEL_FOLDER, help="where the model goes")
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--save-every", type=int, default=200, help="steps between checkpoints")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--fresh", action="store_true", help="ignore an earlier checkpoint")
    for name, default in asdict(Recipe()).items():
        kind = type(default) if not isinstance(default, bool) else lambda text: text == "1"
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default)
    options = vars(parser.parse_args())
    recipe = Recipe(**{name: options[name] for name in asdict(Recipe())})
    if options["fresh"]:
        options["checkpoint"].unlink(missing_ok=True)
    train(recipe, options["out"], options["checkpoint"], options["save_every"], options["threads"])


if __name__ == "__main__":
    main()
