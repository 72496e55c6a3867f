"""Trains quire-demo, the model that quire bundles, from nothing, on text and pictures it generates itself.

    python training/train_demo.py

Writes ``quire/demo/model/``. A text model learns to read, a vision tower learns to see, and both are joined to a LLaVA
that learns to talk of what it sees. The run is deterministic (every document and picture follows from the seed and the
step's number) and saves checkpoints: started again, it goes on where it was. At its end it prints what the model knows.
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import replace
from pathlib import Path

import evaluate_demo
import eyes
import joint
import reading
import stage
import torch
from picture_chats import IMAGE
from transformers import GenerationConfig, LlavaForConditionalGeneration, LlavaProcessor, PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

HERE = Path(__file__).resolve().parent
MODEL_FOLDER = HERE.parent / "quire" / "demo" / "model"
CHECKPOINTS = HERE / ".checkpoint"


def train(folder: Path, checkpoints: Path, save_every: int, threads: int, share: float = 1.0) -> None:
    """All three stages, each from its checkpoint, if there is one; share: of the steps, for a quick trial."""
    reads, sees, joins = reading.Reading(), eyes.VisionConfig(), joint.Joint()
    reads, sees, joins = (
        replace(one, pace=replace(one.pace, steps=max(one.pace.warmup + 1, round(one.pace.steps * share))))
        for one in (reads, sees, joins)
    )
    text_stage, text, tokenizer = reading.lessons(reads)
    progress = [stage.run(text_stage, checkpoints, save_every, threads)]
    eye_stage, tower = eyes.lessons(sees)
    progress.append(stage.run(eye_stage, checkpoints, save_every, threads))
    joint.add_image_token(tokenizer)
    model = joint.join(text, tower, tokenizer, joins.seed)
    joint_stage = joint.lessons(joins, reads, sees, model, tokenizer)
    progress.append(stage.run(joint_stage, checkpoints, save_every, threads))
    save(model, tokenizer, folder)
    seconds, processor = (sum(getattr(one, name) for one in progress) for name in ("seconds", "processor"))
    print(f"done: {seconds:.0f} s, of processor time {processor:.0f} s", flush=True)


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
    _use_common_names(folder)


def _use_common_names(folder: Path) -> None:
    """Names classes and tokens as releases before transformers 5 know them too."""
    for name in ("tokenizer_config.json", "preprocessor_config.json", "processor_config.json"):
        path = folder / name
        config = json.loads(path.read_text(encoding="utf-8"))
        if name == "tokenizer_config.json":
            config["tokenizer_class"] = "PreTrainedTokenizerFast"
            config["additional_special_tokens"] = config.pop("extra_special_tokens")
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
    parser.add_argument("--fresh", action="store_true", help="ignore earlier checkpoints")
    options = parser.parse_args()
    if options.fresh:
        shutil.rmtree(options.checkpoints, ignore_errors=True)
    train(options.out, options.checkpoints, options.save_every, options.threads, options.share)
    evaluate_demo.main(["--model", str(options.out), "--backend", "transformers"])


if __name__ == "__main__":
    main()
