"""Measure images: images.py [MODEL] [--family F] [--dtype D] [--requests N] [--rounds N] [--memory N] [--json]

24 requests (8 of Qwen2.5-VL), each with one image and 32 tokens of answer, next to transformers' `generate` on the same
requests as one padded batch, in the same process and in turns; then the same with every image repeated four times. Both
sides begin with PIL images and include their processing; how much of quire's goes on while a step is computed is
measured too. Without MODEL, one with random weights is made: a LLaVA of about 300 M parameters, or a Qwen2.5-VL of half
the sizes of the one with 3 B. `--memory 2000` sends so many different images through the engine instead, and prints its
resident memory every 200; `images.py quire/demo/model --memory 2000` is the quick way to see that.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from machine import processor
from PIL import Image

from quire.kernels import native

ANSWER, QUESTION = 32, 24  # tokens of each answer; of each question
REPEATS = 4
TURN, READING = 40, 200  # images at once while memory is watched; between two readings
SIZES = ((336, 336), (640, 480), (480, 640), (800, 600))
TARGETS = {"each its own": 2.0, "each four times": 3.0}  # times transformers' images a second
IMAGE = 31999


TEXT = {
    "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12,
    "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 4096,
}  # fmt: skip


def make_llava(folder: Path, dtype: torch.dtype) -> Path:
    """A CLIP tower of 12 layers and a Llama of 12, with random weights."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, image_size=224,
            patch_size=16,
        ),
        text_config=LlamaConfig(**TEXT),
        image_token_index=IMAGE,
    )  # fmt: skip
    return _save(LlavaForConditionalGeneration, config, CLIPImageProcessorPil(), folder, dtype)


def make_qwen(folder: Path, dtype: torch.dtype) -> Path:
    """Qwen2.5-VL of 3 B parameters with half of its layers, widths and heads, which keeps the tower's share of the work
    (a feature costs the tower 0.9 times what its token costs the text model; 0.85 there), and a smaller vocabulary.

    Pictures keep their size up to 1,280 features, as the family's examples have it: 640 x 480 pixels are 391.
    """
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    config = Qwen2_5_VLConfig(
        vision_config={
            "depth": 16, "hidden_size": 640, "intermediate_size": 1710, "num_heads": 8, "out_hidden_size": 1024,
            "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112,
            "fullatt_block_indexes": [7, 15], "tokens_per_second": 2,
        },
        text_config={
            "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 5504, "num_hidden_layers": 18,
            "num_attention_heads": 8, "num_key_value_heads": 1, "max_position_embeddings": 8192,
            "bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        },
        image_token_id=IMAGE, video_token_id=IMAGE - 1, vision_start_token_id=IMAGE - 2, vision_end_token_id=IMAGE - 3,
        tie_word_embeddings=True,
    )  # fmt: skip
    processor = Qwen2VLImageProcessorPil(size={"shortest_edge": 56 * 56, "longest_edge": 1280 * 28 * 28})
    return _save(Qwen2_5_VLForConditionalGeneration, config, processor, folder, dtype)


FAMILIES = {"llava": (make_llava, 24), "qwen2.5-vl": (make_qwen, 8)}  # and how many requests


def _save(kind: Any, config: Any, processor: Any, folder: Path, dtype: torch.dtype) -> Path:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    torch.manual_seed(0)
    model = kind(config).to(dtype)
    name = kind.__name__.removesuffix("ForConditionalGeneration")
    print(f"a {name} of {model.num_parameters() / 1e6:.0f} M parameters, {str(dtype).removeprefix('torch.')}")
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    words = {"<unk>": 0, **{f"w{number}": number for number in range(1, IMAGE)}, "<image>": IMAGE}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>").save_pretrained(folder)
    return folder


def picture(seed: int) -> Image.Image:
    """Random blots: no two alike, and no cheaper to process than a photograph."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (24, 24, 3), dtype=np.uint8))
    return small.resize(SIZES[seed % len(SIZES)], Image.Resampling.BICUBIC)


def requests(marker: int, count: int, repeats: int, seed: int) -> list[tuple[list[int], Image.Image]]:
    """(ids with a marker, image) of `count` requests; every image is used `repeats` times."""
    rng = np.random.default_rng(seed)
    images = [picture(1000 * seed + number) for number in range(-(-count // repeats))]
    return [
        # A marker's id is above those of words.
        ([1, marker, *rng.integers(2, min(30000, marker), QUESTION).tolist()], images[number % len(images)])
        for number in range(count)
    ]


class Quire:
    name = "quire"

    def __init__(self, model: Path, dtype: str, most: int, cache_bytes: int | None = None) -> None:
        from quire import LLM

        self.llm = LLM(str(model), dtype=dtype, max_num_seqs=most, media_cache_bytes=cache_bytes)
        engine = self.llm.llm_engine
        self.marker = engine.executor.runner.model.image_token_id
        self.spans = Spans()
        self.spans.watch(engine.media.preprocessor, "_prepare", "images")
        self.spans.watch(engine.core, "execute", "steps")

    def run(self, batch: list[tuple[list[int], Image.Image]], answer: int = ANSWER) -> tuple[float, float]:
        """(seconds, median seconds to the first token)"""
        from quire import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
        prompts = [{"prompt_token_ids": ids, "multi_modal_data": {"image": image}} for ids, image in batch]
        begin = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        assert all(len(output.outputs[0].token_ids) == answer for output in outputs)
        waits = [output.metrics.first_token_time - output.metrics.arrival_time for output in outputs]
        return seconds, statistics.median(waits)


class Spans:
    """When images were processed, and when steps were computed."""

    def __init__(self) -> None:
        self.seen: dict[str, list[tuple[float, float]]] = {"images": [], "steps": []}

    def watch(self, owner: Any, method: str, kind: str) -> None:
        own = getattr(owner, method)

        def timed(*args: Any) -> Any:
            begin = time.perf_counter()
            try:
                return own(*args)
            finally:
                self.seen[kind].append((begin, time.perf_counter()))

        setattr(owner, method, timed)

    def take(self) -> tuple[float, float]:
        """(seconds in which some image was processed, those of them in which a step was computed too) since the last
        call."""
        images, steps = (_union(self.seen[kind]) for kind in ("images", "steps"))
        for spans in self.seen.values():
            spans.clear()
        shared = sum(max(0.0, min(end, last) - max(begin, first)) for begin, end in images for first, last in steps)
        return sum(end - begin for begin, end in images), shared


def _union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same seconds without overlaps, in their order."""
    result: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if result and begin <= result[-1][1]:
            result[-1] = result[-1][0], max(end, result[-1][1])
        else:
            result.append((begin, end))
    return result


class Transformers:
    name = "transformers"

    def __init__(self, model: Path, dtype: str) -> None:
        from transformers import AutoImageProcessor, AutoModelForImageTextToText

        self.model = AutoModelForImageTextToText.from_pretrained(model, dtype=dtype).eval()
        self.processor = AutoImageProcessor.from_pretrained(model, backend="pil")

    def _placeholders(self, inputs: dict[str, torch.Tensor], images: int) -> list[int]:
        """How many each image takes."""
        vision = self.model.config.vision_config
        if "image_grid_thw" in inputs:
            return (inputs["image_grid_thw"].prod(-1) // vision.spatial_merge_size**2).tolist()
        return [(vision.image_size // vision.patch_size) ** 2] * images

    @torch.inference_mode()
    def run(self, batch: list[tuple[list[int], Image.Image]]) -> tuple[float, float]:
        """One padded batch of all requests; every answer's first token comes at the same time."""
        begin = time.perf_counter()
        first: list[float] = []

        def note(ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
            first.append(time.perf_counter() - begin)
            return torch.zeros(len(ids), dtype=torch.bool)

        inputs = dict(self.processor([image for _, image in batch], return_tensors="pt"))
        inputs["pixel_values"] = inputs["pixel_values"].to(self.model.dtype)
        marker = self.model.config.image_token_id
        counts = self._placeholders(inputs, len(batch))
        rows = [
            [t for one in ids for t in ([marker] * count if one == marker else [one])]
            for (ids, _), count in zip(batch, counts, strict=True)
        ]
        longest = max(map(len, rows))
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
        if "image_grid_thw" in inputs:
            inputs["mm_token_type_ids"] = (ids == marker).int()
        out = self.model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=ANSWER, min_new_tokens=ANSWER, do_sample=False,
            eos_token_id=None, pad_token_id=0, stopping_criteria=[note], **inputs,
        )  # fmt: skip
        assert out.shape[1] == ids.shape[1] + ANSWER
        return time.perf_counter() - begin, first[0]


def compare(model: Path, dtype: str, count: int, rounds: int) -> list[dict[str, Any]]:
    """Both engines by turns; medians. Every round has images of its own, so that no cache serves an earlier round's."""
    quire = Quire(model, dtype, count)
    engines = (quire, Transformers(model, dtype))
    report = []
    for number, (case, target) in enumerate(TARGETS.items()):
        repeats = 1 if number == 0 else REPEATS
        taken: dict[str, list[tuple[float, float]]] = {engine.name: [] for engine in engines}
        processing: list[tuple[float, float]] = []
        for turn in range(rounds + 1):  # the first, of two requests, warms up
            batch = requests(quire.marker, count, repeats, 100 * number + turn + 1)
            for engine in engines:
                taken[engine.name].append(engine.run(batch if turn else batch[:2]))
                seconds = taken[engine.name][-1][0]
                print(f"{case}, round {turn}: {engine.name} {seconds:.2f} s", file=sys.stderr, flush=True)
            processing.append(quire.spans.take())
        row: dict[str, Any] = {"case": case, "target": target, "requests": count}
        for name, runs in taken.items():
            seconds = statistics.median(one for one, _ in runs[1:])
            row[name] = {"images_per_s": count / seconds, "first_token_s": statistics.median(w for _, w in runs[1:])}
        pairs = zip(*taken.values(), strict=True)
        row["ratios"] = [theirs / ours for (ours, _), (theirs, _) in pairs][1:]
        row["ratio"] = statistics.median(row["ratios"])
        wall = [seconds for seconds, _ in taken[quire.name]][1:]
        shares = zip(processing[1:], wall, strict=True)
        row["processing"] = statistics.median(busy / seconds for (busy, _), seconds in shares)
        row["overlapped"] = statistics.median(shared / busy for busy, shared in processing[1:])
        report.append(row)
    return report


def watch_memory(model: Path, dtype: str, images: int) -> list[tuple[int, float]]:
    """(images so far, resident MB) now and then, of different images with one token each; they soon fill the budget."""
    engine, process, readings = Quire(model, dtype, TURN, cache_bytes=16 << 20), psutil.Process(), []
    for first in range(0, images, TURN):
        ids = [1, engine.marker, 5, 6, first // TURN + 7]
        engine.run([(ids, picture(10**6 + first + number)) for number in range(TURN)], answer=1)
        if (first + TURN) % READING == 0:
            gc.collect()
            readings.append((first + TURN, process.memory_info().rss / 1e6))
            print(f"{first + TURN:6d} images {readings[-1][1]:8.0f} MB resident", flush=True)
    return readings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--family", default="llava", choices=FAMILIES, help="what is made without MODEL")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--requests", type=int, help="8 of Qwen2.5-VL, else 24")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", type=int, default=0, metavar="N", help="watch memory over N images instead")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make, count = FAMILIES[options.family]
        model = options.model or make(Path(folder), getattr(torch, options.dtype))
        if options.memory:
            watch_memory(model, options.dtype, options.memory)
            return
        report = compare(model, options.dtype, options.requests or count, options.rounds)
    if options.json:
        print(json.dumps(report, indent=2))
    print(f"{processor()}, {torch.get_num_threads()} threads, kernels for {native.isa()}")
    for row in report:
        print(f"{row['requests']} requests with one image, {row['case']}:")
        for name in ("quire", "transformers"):
            print(f"  {name:13s} {row[name]['images_per_s']:6.2f} images/s, first token after "
                  f"{row[name]['first_token_s']:6.2f} s")  # fmt: skip
        low, high = min(row["ratios"]), max(row["ratios"])
        print(f"  {row['ratio']:.2f} x ({low:.2f} - {high:.2f}; target {row['target']:g})")
        print(f"  images were processed in {row['processing']:.1%} of quire's time, {row['overlapped']:.0%} of that "
              "while a step was computed")  # fmt: skip
    sys.exit(any(row["ratio"] < row["target"] for row in report))


if __name__ == "__main__":
    main()
