"""Trains the LoRA adapters that quire bundles: quire-demo answering in French, and in capitals.

    python training/train_adapters.py [french|shout] [--out DIR] [--round N]

Writes ``quire/demo/adapters/<name>/``, both adapters when none is named. The questions are the base model's own and no
prompt asks for the style: the adapter alone makes it. The first round learns the words, and may forget some of what the
base model sees; further ones, slower and with more pictures, see again. An adapter is written after each round, and
``--round 2`` goes on from there; ``--round last`` does the last one alone, as after changes to the base model. The run
is deterministic: every document and picture follows from the seed and the step's number.

``--minutes M`` replaces the rounds: from the bundled adapter on, for so long, with clips too, also with ``--device
cuda`` (``train_clips.py`` does that for all of them).
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random

import by_clock
import joint
import mixture
import stage
import torch
from dialogues import Conversation, chatter, describing_chat, scene_chat
from eyes import VisionConfig, pixels
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from picture_chats import IMAGE, _description, picture_chat, training_picture
from pictures import Picture
from reading import Batch, Encoded, Reading, by_length, encode, padded
from safetensors.torch import load_file, save_file
from stage import Pace, Stage
from styles import STYLES, in_style
from train_demo import MODEL_FOLDER
from transformers import AutoTokenizer, LlavaForConditionalGeneration, PreTrainedTokenizerBase

ADAPTERS = MODEL_FOLDER.parent / "adapters"
RATE = 5e-3  # the highest of a training by the clock


@dataclass(frozen=True)
class Round:
    """Steps of one kind."""

    pace: Pace
    pictures: int  # each with a conversation, per step
    described: int  # more pictures, which are only described, per step
    documents: int  # of text, per step


@dataclass(frozen=True)
class Voice:
    """Everything that decides an adapter, besides its style."""

    rounds: tuple[Round, ...]
    rank: int = 8
    # The text model's linear layers that are adapted. The last one has the vocabulary: it helps to change the words.
    layers: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "lm_head")
    seed: int = 2026


def _pace(steps: int, learning_rate: float) -> Pace:
    return Pace(steps=steps, learning_rate=learning_rate, warmup=20, weight_decay=0.0)


VOICES = {
    # Colours follow their nouns in French: to find them is more to learn than other words.
    "french": Voice(
        (
            Round(_pace(800, 1e-2), 14, 14, 4),
            Round(_pace(90, 5e-3), 8, 6, 3),
            Round(_pace(70, 3e-3), 10, 6, 1),
            Round(_pace(160, 5e-3), 10, 8, 2),
            Round(_pace(280, 3e-3), 16, 10, 1),
        )
    ),
    "shout": Voice(
        (
            Round(_pace(500, 1e-2), 12, 10, 4),
            Round(_pace(400, 4e-3), 24, 4, 2),
            Round(_pace(300, 3e-3), 24, 8, 1),
            Round(_pace(300, 2e-3), 20, 20, 1),
            Round(_pace(90, 5e-3), 8, 6, 3),
            Round(_pace(70, 3e-3), 10, 6, 1),
            Round(_pace(160, 5e-3), 10, 8, 2),
            Round(_pace(280, 3e-3), 16, 10, 1),
        )
    ),
}


def train(name: str, folder: Path, threads: int, first: int) -> None:
    """Trains the adapter of this name from round number ``first`` on, and writes it."""
    voice = VOICES[name]
    torch.manual_seed(voice.seed)  # LoRA's A starts at random
    tokenizer = AutoTokenizer.from_pretrained(MODEL_FOLDER)
    base = LlavaForConditionalGeneration.from_pretrained(MODEL_FOLDER, dtype=torch.float32)
    started = time.monotonic()
    for number, one in enumerate(voice.rounds[first:], first):
        # From what was written, rounded as that is: so a later round can be done by itself.
        if number:
            _fit(folder, len(tokenizer))
        model = (
            PeftModel.from_pretrained(base, folder, is_trainable=True)
            if number
            else get_peft_model(base, _config(voice))
        )
        done = sum(before.pace.steps for before in voice.rounds[:number])
        _run(lessons(name, voice, one, done, model, tokenizer), threads)
        save(model, folder)
        base = model.unload()
        print(f"{name}: round {number + 1} done, {time.monotonic() - started:.0f} s", flush=True)


def train_by_clock(name: str, options: argparse.Namespace) -> None:
    """Trains the adapter of this name from the bundled one on, for so many minutes, and writes it."""
    folder, voice, device = options.out / name, VOICES[name], torch.device(options.device)
    torch.manual_seed(voice.seed)
    mixed = mixture.VOICES[name].scaled(options.share) if options.share < 1 else mixture.VOICES[name]
    supply = mixture.Supply(mixed, options.model, options.workers, voice.seed, device)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    base = LlavaForConditionalGeneration.from_pretrained(options.model, dtype=torch.float32)
    if folder != ADAPTERS / name:
        shutil.copytree(ADAPTERS / name, folder, dirs_exist_ok=True)
    _fit(folder, len(tokenizer))
    model = PeftModel.from_pretrained(base, folder, is_trainable=True).to(device)
    media = [tokenizer.convert_tokens_to_ids(marker) for marker in mixture.MARKERS]
    by_clock.run(
        name,
        model,
        by_clock.Pace(options.minutes, RATE, weight_decay=0.0),
        supply,
        lambda batch: by_clock.losses_of(model.get_base_model(), batch, media),
        device,
        save=lambda: save(model, folder),
    )
    supply.close()


def _fit(folder: Path, vocabulary: int) -> None:
    """Gives an adapter that is older than some of the base model's tokens rows for these, which change nothing."""
    path, rows = folder / "adapter_model.safetensors", "base_model.model.lm_head.lora_B.weight"
    weights = load_file(path)
    missing = vocabulary - len(weights[rows])
    if missing > 0:
        weights[rows] = torch.nn.functional.pad(weights[rows], (0, 0, 0, missing))
        save_file(weights, path, metadata={"format": "pt"})
        path.chmod(0o644)


def _config(voice: Voice) -> LoraConfig:
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=voice.rank,
        lora_alpha=2 * voice.rank,
        # Not those of the vision tower, some of which bear the same names.
        target_modules=rf"(.*language_model.*\.)?({'|'.join(voice.layers)})",
    )


def lessons(
    name: str, voice: Voice, one: Round, done: int, model: PeftModel, tokenizer: PreTrainedTokenizerBase
) -> Stage:
    """A round, after ``done`` steps: conversations about pictures, and some about text, answered in the style."""
    reading = Reading(prompt_weight=0.0, text_weight=1.0)  # what is said counts, all of it
    eyes, style, image = VisionConfig(), STYLES[name], tokenizer.convert_tokens_to_ids(IMAGE)
    whole = joint.lessons(joint.Joint(), reading, eyes, model.get_base_model(), tokenizer)

    def shown(picture: Picture, chat: Conversation) -> tuple[Encoded, torch.Tensor]:
        """A conversation about a picture, with a placeholder for every patch, and the picture."""
        ids, weights = encode(in_style(chat, style), tokenizer, reading)
        at = ids.index(image)
        ids[at : at + 1] = [image] * eyes.tokens
        weights[at : at + 1] = [0.0] * eyes.tokens
        return (ids, weights), pixels(picture.image, eyes)

    def batches(step: int) -> list[Batch | joint.Shown]:
        rng = Random(f"adapter {name} {voice.seed} {done + step}")
        chats = [shown(*picture_chat(rng)) for _ in range(one.pictures)]
        chats.sort(key=lambda pair: len(pair[0][0]), reverse=True)
        half = one.pictures // 2
        groups = [chats[:half], chats[half:], [shown(*_described(rng)) for _ in range(one.described)]]
        pictures = [
            joint.Shown(padded([text for text, _ in group], tokenizer.pad_token_id), torch.stack([v for _, v in group]))
            for group in groups
        ]
        texts = [encode(in_style(_text_chat(rng), style), tokenizer, reading) for _ in range(one.documents)]
        return [*pictures, *by_length(texts, 1, tokenizer)]

    return replace(whole, name=name, recipe=asdict(voice), pace=one.pace, model=model, batches=batches)


def _described(rng: Random) -> tuple[Picture, Conversation]:
    """A picture, and at once the question what is in it."""
    picture = training_picture(rng)
    question = _description(picture, rng)
    chat = [{"role": "user", "content": f"{IMAGE}{question.text}"}, {"role": "assistant", "content": question.answer}]
    return picture, chat


def _text_chat(rng: Random) -> Conversation:
    return rng.choices((scene_chat, describing_chat, chatter), weights=(6, 2, 2))[0](rng)


def _run(lesson: Stage, threads: int) -> None:
    """Every step of the stage. All that is trained are matrices, so all of it is Muon's."""
    torch.set_num_threads(1)  # each worker takes whole batches, see ``stage.run``
    parameters = [p for p in lesson.model.parameters() if p.requires_grad]
    print(f"{lesson.name}: {sum(p.numel() for p in parameters):,} parameters", flush=True)
    optimizer = torch.optim.Muon(parameters, weight_decay=lesson.pace.weight_decay, adjust_lr_fn="match_rms_adamw")
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as workers:
        for step in range(lesson.pace.steps):
            for group in optimizer.param_groups:
                group["lr"] = lesson.pace.rate(step)
            loss = stage._step(lesson, parameters, [optimizer], lesson.batches(step), workers)
            if (step + 1) % 50 == 0:
                print(f"{lesson.name}: step {step + 1} loss {loss:.4f}", flush=True)


def save(model: PeftModel, folder: Path) -> None:
    """Writes the adapter in bf16, as PEFT lays it out."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model.peft_config["default"]
    config.base_model_name_or_path, config.inference_mode = "quire-demo", True
    config.save_pretrained(folder)
    trained = get_peft_model_state_dict(model, save_embedding_layers=False)  # the table itself is the base model's
    weights = {name: tensor.bfloat16().cpu().contiguous() for name, tensor in trained.items()}
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    for path in folder.iterdir():
        path.chmod(0o644)


def main() -> None:
    """Reads the command line and trains."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", choices=sorted(STYLES), help="which adapter (default: all)")
    parser.add_argument("--out", type=Path, default=ADAPTERS, help="the folder in which each adapter gets its own")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--round", default="1", choices=(*"12345678", "last"), help="the first to do")
    parser.add_argument("--minutes", type=float, help="train by the clock, instead of rounds")
    parser.add_argument("--model", type=Path, default=MODEL_FOLDER, help="by the clock: the base model")
    parser.add_argument("--device", default="cpu", help="by the clock: cpu or cuda")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="that make examples")
    parser.add_argument("--share", type=float, default=1.0, help="by the clock: of a step's examples")
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for name in [options.name] if options.name else sorted(STYLES):
        if options.minutes:
            train_by_clock(name, options)
            continue
        first = len(VOICES[name].rounds) if options.round == "last" else int(options.round)
        train(name, options.out / name, options.threads, first - 1)


if __name__ == "__main__":
    main()
