"""Trains quire-demo, the model that quire bundles, from nothing, on text and pictures it generates itself.

    python training/train_demo.py

Writes ``quire/demo/model/``. A text model learns to read, a vision tower learns to see, both are joined to a LLaVA that
learns to talk of what it sees, and that one learns to answer as JSON and to call tools. ``--from FOLDER`` begins with
the last stage, from a model as the one before leaves it. The run is deterministic (every document and picture follows
from the seed and the step's number) and saves checkpoints: started again, it goes on where it was. At its end it prints
what the model knows.
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import calling
import evaluate_demo
import eyes
import joint
import reading
import stage
import torch
from clip_chats import VIDEO
from picture_chats import IMAGE
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

HERE = Path(__file__).resolve().parent
MODEL_FOLDER = HERE.parent / "quire" / "demo" / "model"
CHECKPOINTS = HERE / ".checkpoint"


def train(folder: Path, checkpoints: Path, save_every: int, threads: int, share: float = 1.0) -> list[stage.Progress]:
    """The first three stages, each from its checkpoint, if there is one; share: of the steps, for a quick trial."""
    reads, sees, joins = (_shortened(one, share) for one in (reading.Reading(), eyes.VisionConfig(), joint.Joint()))
    text_stage, text, tokenizer = reading.lessons(reads)
    progress = [stage.run(text_stage, checkpoints, save_every, threads)]
    eye_stage, tower = eyes.lessons(sees)
    progress.append(stage.run(eye_stage, checkpoints, save_every, threads))
    joint.add_image_token(tokenizer)
    model = joint.join(text, tower, tokenizer, joins.seed)
    joint_stage = joint.lessons(joins, reads, sees, model, tokenizer)
    progress.append(stage.run(joint_stage, checkpoints, save_every, threads))
    save(model, tokenizer, folder)
    return progress


def train_calling(
    start: Path, folder: Path, checkpoints: Path, save_every: int, threads: int, share: float = 1.0
) -> list[stage.Progress]:
    """The last stage, from the model in ``start``: what the third stage wrote, in bf16."""
    tokenizer = AutoTokenizer.from_pretrained(start)
    calling.add_tokens(tokenizer, reading.CHAT_TEMPLATE)
    model = LlavaForConditionalGeneration.from_pretrained(start, dtype=torch.float32)
    calling.add_rows(model, tokenizer)
    progress = []
    for number, one in enumerate(calling.ROUNDS, 1):
        before = {name: weight.clone() for name, weight in model.state_dict().items()}
        lessons = calling.lessons(
            number, _shortened(one, share), reading.Reading(), eyes.VisionConfig(), model, tokenizer
        )
        progress.append(stage.run(lessons, checkpoints, save_every, threads))
    # The last round knows stories better, the one before it calls: their mean knows both.
    model.load_state_dict({name: (weight + before[name]) / 2 for name, weight in model.state_dict().items()})
    save(model, tokenizer, folder)
    return progress


def _shortened(lessons: Any, share: float) -> Any:
    """The same with so many of its steps."""
    pace = lessons.pace
    return replace(lessons, pace=replace(pace, steps=max(pace.warmup + 1, round(pace.steps * share))))


def save(model: LlavaForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes the model in bf16 with its tokenizer and processor, as Hugging Face lays them out."""
    folder.mkdir(parents=True, exist_ok=True)
    rounded = LlavaForConditionalGeneration(model.config).to(torch.bfloat16)
    rounded.load_state_dict(model.state_dict())
    for config in (rounded.config, rounded.config.text_config, rounded.config.vision_config):
        config.dtype = torch.bfloat16
    rounded.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    rounded.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    size = model.config.vision_config.image_size
    images = CLIPImageProcessorPil(
        size={"height": size, "width": size},
        crop_size={"height": size, "width": size},
        do_center_crop=False,
        image_mean=[eyes.MEAN] * 3,
        image_std=[eyes.STD] * 3,
    )
    processor = LlavaProcessor(
        images,
        tokenizer,
        patch_size=model.config.vision_config.patch_size,
        vision_feature_select_strategy=model.config.vision_feature_select_strategy,
        image_token=IMAGE,
        num_additional_image_tokens=1,
        chat_template=tokenizer.chat_template,
    )
    processor.save_pretrained(folder)
    images.save_pretrained(folder)
    if (video := getattr(model.config, "video_token_index", None)) is not None:
        _save_video_processor(folder, size)
        assert video == tokenizer.convert_tokens_to_ids(VIDEO)
    _use_common_names(folder)


def _save_video_processor(folder: Path, side: int) -> None:
    """How quire prepares frames: as pictures, four of a file's. transformers has no class for videos of a LLaVA's."""
    settings = {
        "video_processor_type": "LlavaVideoProcessor",
        "do_sample_frames": True, "fps": 4, "min_frames": 4, "max_frames": 4,
        "do_resize": True, "size": {"height": side, "width": side}, "resample": 3,
        "do_rescale": True, "rescale_factor": 1 / 255,
        "do_normalize": True, "image_mean": [eyes.MEAN] * 3, "image_std": [eyes.STD] * 3,
    }  # fmt: skip
    text = json.dumps(settings, indent=2) + "\n"
    (folder / "video_preprocessor_config.json").write_text(text, encoding="utf-8")


def _use_common_names(folder: Path) -> None:
    """Names classes and tokens as releases before transformers 5 know them too."""
    for name in ("tokenizer_config.json", "preprocessor_config.json", "processor_config.json"):
        path = folder / name
        config = json.loads(path.read_text(encoding="utf-8"))
        if name == "tokenizer_config.json":
            config["tokenizer_class"] = "PreTrainedTokenizerFast"
            config["additional_special_tokens"] = config.pop("extra_special_tokens")
            for own in ("is_local", "local_files_only"):  # how the tokenizer was loaded here
                config.pop(own, None)
        for part in (config, config.get("image_processor", {})):
            if "image_processor_type" in part:
                part["image_processor_type"] = part["image_processor_type"].removesuffix("Pil")
        path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    """Reads the command line and trains."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=MODEL_FOLDER, help="where the model goes")
    parser.add_argument("--checkpoints", type=Path, default=CHECKPOINTS)
    parser.add_argument("--save-every", type=int, default=200, help="steps between checkpoints")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--share", type=float, default=1.0, help="of the steps; less makes a quick trial")
    parser.add_argument("--from", type=Path, dest="start", help="only the last stage, from the third one's model here")
    parser.add_argument("--fresh", action="store_true", help="ignore earlier checkpoints")
    options = parser.parse_args()
    if options.fresh:
        shutil.rmtree(options.checkpoints, ignore_errors=True)
    rest = options.checkpoints, options.save_every, options.threads, options.share
    start = options.start or options.checkpoints / "joined"
    progress = [] if options.start else train(start, *rest)
    progress += train_calling(start, options.out, *rest)
    seconds, processor = (sum(getattr(one, name) for one in progress) for name in ("seconds", "processor"))
    print(f"done: {seconds:.0f} s, of processor time {processor:.0f} s", flush=True)
    evaluate_demo.main(["--model", str(options.out), "--backend", "transformers"])


if __name__ == "__main__":
    main()
