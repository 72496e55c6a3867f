"""Trains quire-demo's last stage, in which it learns to see what changes in a clip, and the adapters anew.

    python training/train_clips.py --device cuda --minutes 5 --adapter-minutes 1.5 --out FOLDER

Begins with the bundled model (or ``--from FOLDER``) and goes on with all that it knows, and clips, for so many minutes;
then trains both adapters at once, which begin with the bundled ones, and examines what came of it. Writes
``FOLDER/model`` and ``FOLDER/adapters``; ``--out quire/demo`` replaces what is bundled. Stopped, it goes on from
``--checkpoints`` when started again.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import by_clock
import evaluate_demo
import mixture
import torch
from clip_chats import VIDEO
from reading import CHAT_TEMPLATE
from styles import STYLES
from tokenizers import AddedToken
from train_demo import CHECKPOINTS, MODEL_FOLDER, save
from transformers import AutoTokenizer, LlavaForConditionalGeneration, PreTrainedTokenizerBase

SEED = 2032
RATE = 2e-3


def load(start: Path) -> tuple[LlavaForConditionalGeneration, PreTrainedTokenizerBase]:
    """The model with a token for clips behind all others; features stand in its place, whatever its embedding is."""
    tokenizer = AutoTokenizer.from_pretrained(start)
    tokenizer.chat_template = CHAT_TEMPLATE
    model = LlavaForConditionalGeneration.from_pretrained(start, dtype=torch.float32)
    if VIDEO not in tokenizer.get_vocab():
        tokenizer.add_tokens([AddedToken(VIDEO, special=True, normalized=False)], special_tokens=True)
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        table = model.get_input_embeddings().weight
        with torch.no_grad():
            table[-1] = table[tokenizer.convert_tokens_to_ids(mixture.IMAGE)]
    model.config.video_token_index = tokenizer.convert_tokens_to_ids(VIDEO)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "post_layernorm" not in name
    return model, tokenizer


def train(options: argparse.Namespace) -> Path:
    """The stage; returns where its model is."""
    folder, device = options.out / "model", torch.device(options.device)
    model, tokenizer = load(options.start)
    save(model, tokenizer, folder)  # whose tokenizer the workers load
    mixed = mixture.BASE if options.share == 1 else mixture.BASE.scaled(options.share)
    supply = mixture.Supply(mixed, folder, options.workers, SEED, device)
    media = [tokenizer.convert_tokens_to_ids(marker) for marker in mixture.MARKERS]
    model.to(device).train()
    pace = by_clock.Pace(options.minutes, options.rate)
    by_clock.run(
        "clips",
        model,
        pace,
        supply,
        lambda batch: by_clock.losses_of(model, batch, media),
        device,
        options.checkpoints / "clips.pt",
        lambda: save(model, tokenizer, folder),
        options.save_every,
    )
    supply.close()
    return folder


def train_adapters(options: argparse.Namespace, model: Path) -> bool:
    """All of them side by side, each in a process of its own; returns whether all went well."""
    script = Path(__file__).resolve().parent / "train_adapters.py"
    settings = {
        "--device": options.device, "--minutes": options.adapter_minutes, "--model": model,
        "--out": options.out / "adapters", "--workers": max(1, options.workers // len(STYLES)),
        "--share": options.share,
    }  # fmt: skip
    flags = [str(part) for pair in settings.items() for part in pair]
    running = [subprocess.Popen([sys.executable, str(script), name, *flags]) for name in STYLES]
    return not any([one.wait() for one in running])


def examine(options: argparse.Namespace, model: Path) -> None:
    """Quick exams by transformers; what tools and schemas hold an answer to is for quire's."""
    asked = argparse.Namespace(exam="all", seed=1, questions=options.questions, wrong=False)
    for failed in evaluate_demo.examine(evaluate_demo._transformers(model, options.device), asked):
        print(failed)
    items = evaluate_demo.picture_items(77, options.questions)
    for name, style in STYLES.items() if options.adapter_minutes else ():
        print(f"\n{name}", flush=True)
        expected = [evaluate_demo.in_voice(item, style) for item in items]
        answerer = evaluate_demo._transformers(model, options.device, options.out / "adapters" / name)
        evaluate_demo._report(expected, answerer(expected))


def main() -> None:
    """Reads the command line, trains and examines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--from", type=Path, dest="start", default=MODEL_FOLDER, help="a model (default: the bundled)")
    parser.add_argument("--out", type=Path, default=MODEL_FOLDER.parent, help="where model/ and adapters/ go")
    parser.add_argument("--checkpoints", type=Path, default=CHECKPOINTS)
    parser.add_argument("--fresh", action="store_true", help="ignore earlier checkpoints")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--minutes", type=float, default=5.0, help="of the model's training; 0: the adapters alone")
    parser.add_argument("--adapter-minutes", type=float, default=1.5, help="of each adapter's; 0: none is trained")
    parser.add_argument("--rate", type=float, default=RATE, help="the highest learning rate")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="that make examples")
    parser.add_argument("--save-every", type=float, default=60.0, help="seconds between checkpoints")
    parser.add_argument("--share", type=float, default=1.0, help="of a step's examples; less makes a quick trial")
    parser.add_argument("--questions", type=int, default=400, help="of each exam")
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if options.fresh:
        shutil.rmtree(options.checkpoints, ignore_errors=True)
    started = time.monotonic()
    model = train(options) if options.minutes else options.start
    well = not options.adapter_minutes or train_adapters(options, model)
    print(f"trained: {time.monotonic() - started:.0f} s", flush=True)
    if options.questions:
        examine(options, model)
    print(f"done: {time.monotonic() - started:.0f} s", flush=True)
    if not well:
        sys.exit("an adapter's training has failed")


if __name__ == "__main__":
    main()
