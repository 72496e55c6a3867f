"""Random adapters made and saved by PEFT on tiny random models, and PEFT's own answers to compare with.

A `World` is one base model and one engine on it. `World.train` makes an adapter and returns its folder; `Expected`
runs the folder in PEFT, in float64, so that differences are the engine's; `World.agree` compares.
"""

from __future__ import annotations

import copy
import json
import random
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict

from quire import LLM, LoRARequest, SamplingParams
from tests.models import tiny
from tests.multimodal import tiny_vision
from tests.multimodal.clips import clip
from tests.multimodal.video_models import Request, VideoOracle

STEPS = 32
IMAGE = tiny_vision.IMAGE
# Ids with one marker for each image, and images; where there are videos, all of the request in their place.
Prompt = tuple[list[int], Any]


@dataclass
class World:
    """theirs: transformers' model, never changed. prompts: what all adapters are asked; plain: the base's answers."""

    theirs: Any
    path: Path
    llm: LLM
    prompts: list[Prompt]
    processor: Any
    plain: list[list[int]]
    folder: Path
    family: Any = None
    videos: VideoOracle | None = None
    made: int = 0

    def train(self, config: LoraConfig, seed: int = 0, **written: Any) -> Path:
        """Save an adapter whose every tensor is random. written: fields of adapter_config.json to overwrite."""
        self.made += 1
        path = self.folder / f"adapter{self.made}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = get_peft_model(copy.deepcopy(self.theirs), copy.deepcopy(config))
            randomise(model, seed)
            model.create_or_update_model_card = lambda folder: None
            model.save_pretrained(path)
        if written:
            edit(path, **written)
        return path

    def load(self, path: Path) -> LoRARequest:
        """Load an adapter under a name of its own."""
        request = LoRARequest(path.name)
        self.llm.load_lora_adapter(path.name, str(path))
        return request

    def agree(self, path: Path, expected: Path | None = None) -> bool:
        """Assert that the engine serves an adapter as PEFT does; return whether that differs from the base model.

        expected: the folder that PEFT reads, where it is another.
        """
        request = self.load(path)
        outputs = ask(self.llm, self.prompts, request)
        self.llm.unload_lora_adapter(path.name)
        oracle = Expected(self, expected or path)
        for (_, images), output in zip(self.prompts, outputs, strict=True):
            oracle.check(output, images)
        return any(o.outputs[0].token_ids != plain for o, plain in zip(outputs, self.plain, strict=True))


def edit(path: Path, **written: Any) -> None:
    """Overwrite fields of an adapter's configuration."""
    file = path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **written}))


def randomise(model: Any, seed: int) -> None:
    """Draw all that PEFT would save, so that no part of an adapter is neutral.

    Shares are of one size whatever their scaling: large ones saturate attention, and float32 is no longer exact enough.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in get_peft_model_state_dict(model).items():
        noise = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        layer = model.get_submodule(name.partition(".lora_")[0]) if ".lora_" in name else None
        scaling = next(iter(layer.scaling.values())) if layer is not None else 1.0
        with torch.no_grad():
            if name.endswith("base_layer.weight"):  # embeddings, saved beside their LoRA and not trained
                continue
            if "lora_A" in name:
                tensor.copy_(noise / tensor[0].numel() ** 0.5)
            elif "lora_embedding_A" in name:
                tensor.copy_(noise * 0.5)
            elif name.endswith("lora_B.bias"):
                tensor.copy_(noise * 0.2 / scaling)
            elif "lora_B" in name or "lora_embedding_B" in name:
                tensor.copy_(noise * 0.6 / tensor.shape[1] ** 0.5 / scaling)
            elif "lora_magnitude_vector" in name:
                tensor.mul_(1 + 0.3 * noise.clamp(-2, 2))
            else:  # biases, saved modules, trained tokens
                tensor.add_(noise * (0.4 * tensor.float().std() if tensor.numel() > 1 else 0.4).to(tensor.dtype))


def ask(llm: LLM, prompts: Sequence[Prompt], adapters: Any, each: Sequence[dict[str, Any]] | None = None) -> list[Any]:
    """Greedy answers with the prompts' logprobs. each: settings of single requests that are others."""
    given = [_given(ids, images) for ids, images in prompts]
    usual = {"temperature": 0, "max_tokens": STEPS, "ignore_eos": True, "prompt_logprobs": 1}
    params = [SamplingParams(**{**usual, **own}) for own in each or [{}] * len(prompts)]
    return llm.generate(given, params, lora_request=adapters, use_tqdm=False)


def _given(ids: list[int], images: Any) -> dict[str, Any]:
    if isinstance(images, Request):
        return images.prompt
    return {"prompt_token_ids": ids, **({"multi_modal_data": {"image": images}} if images else {})}


class Expected:
    """An adapter's answers by PEFT, from its saved folder; several with weights are PEFT's mixture of them."""

    def __init__(self, world: World, *paths: Path | None, weights: Sequence[float] = ()) -> None:
        self.processor = world.processor
        self.family = world.family
        self.videos = world.videos
        self.mrope = any(hasattr(module, "rope_deltas") for module in world.theirs.modules())
        model = copy.deepcopy(world.theirs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if paths and paths[0] is not None:
                model = PeftModel.from_pretrained(model, paths[0], adapter_name="0")
                for number, path in enumerate(paths[1:], 1):
                    model.load_adapter(path, adapter_name=str(number))
                if weights:
                    names = [str(number) for number in range(len(paths))]
                    model.add_weighted_adapter(names, list(weights), "mixture", combination_type="cat")
                    model.set_adapter("mixture")
        self.model = model.double().eval()

    @torch.inference_mode()
    def scores(self, prompt: list[int], answer: list[int], images: Sequence[Any] = ()) -> torch.Tensor:
        """Log-probabilities [tokens, vocabulary] of what follows each token of both."""
        mask = torch.ones(1, len(prompt) + len(answer), dtype=torch.int64)
        if self.processor is None:
            logits = self.model(input_ids=torch.tensor([prompt + answer]), attention_mask=mask).logits[0]
            return logits.double().log_softmax(-1)
        # In two parts: an image token in the answer is a token like any other.
        inputs = self._inputs(prompt, images)
        first = self.model(
            input_ids=torch.tensor([prompt]), attention_mask=mask[:, : len(prompt)], use_cache=True, **inputs
        )
        follow: dict[str, Any] = {"attention_mask": mask, "past_key_values": first.past_key_values}
        if self.mrope:
            places = torch.arange(len(prompt), len(prompt) + len(answer)).expand(3, 1, -1)
            deltas = next(m.rope_deltas for m in self.model.modules() if hasattr(m, "rope_deltas")) if images else 0
            follow["position_ids"] = places + deltas
        second = self.model(input_ids=torch.tensor([answer]), **follow)
        return torch.cat([first.logits[0], second.logits[0]]).double().log_softmax(-1)

    def _inputs(self, prompt: list[int], images: Any) -> dict[str, torch.Tensor]:
        """What the model takes beside the prompt's ids."""
        if isinstance(images, Request):
            assert self.videos is not None
            found: dict[str, Any] = self.videos.expanded(images)[1]
        else:
            found = dict(self.processor(list(images), return_tensors="pt")) if images else {}
            found = {name: one for name, one in found.items() if name not in self.family.unused}
            found |= self.family.types(prompt)
            if self.mrope:
                found["mm_token_type_ids"] = torch.tensor([[int(token == IMAGE) for token in prompt]])
        inputs = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
        return {name: one.to(self.model.dtype) if "pixel_values" in name else one for name, one in inputs.items()}

    def check(self, output: Any, images: Sequence[Any] = (), tolerance: float = 1e-4) -> None:
        """Greedy tokens are the likeliest (float32 may choose another only where two are as likely), and the prompt's
        logprobs are those of PEFT within 1e-4."""
        prompt, answer = output.prompt_token_ids, output.outputs[0].token_ids
        assert len(answer) == STEPS
        scores = self.scores(prompt, answer[:-1], images)
        tail = scores[len(prompt) - 1 :]
        chosen = tail[torch.arange(STEPS), torch.tensor(answer)]
        assert (tail.amax(-1) - chosen).max() <= tolerance / 10, f"{answer} != {tail.argmax(-1).tolist()}"
        for place, known in enumerate(output.prompt_logprobs or []):
            if place:
                truth = float(scores[place - 1, prompt[place]])
                # Random weights make logprobs of -50, of which float32 has no fifth decimal (PEFT's own run in float32
                # is off by 2e-4 at times).
                assert abs(known[prompt[place]].logprob - truth) < tolerance + 2e-5 * abs(truth), place


def text_prompts(vocab: int, count: int = 3, seed: int = 5) -> list[Prompt]:
    rng = random.Random(seed)
    return [([rng.randrange(3, vocab) for _ in range(rng.randint(3, 24))], []) for _ in range(count)]


def text_world(folder: Path, architecture: str, variant: str, model_impl: str = "auto", **settings: Any) -> World:
    """A text model of `tests.models.tiny`, with an engine."""
    theirs = tiny.make(architecture, variant, **{**_LAYERS.get(architecture, {}), **settings})
    path = tiny.save(theirs, folder / "base")
    theirs.name_or_path = theirs.config._name_or_path = str(path)
    prompts = text_prompts(theirs.config.vocab_size)
    return _world(theirs, path, prompts, None, folder, skip_tokenizer_init=True, model_impl=model_impl)


_LAYERS = {
    "LlamaForCausalLM": {"num_hidden_layers": 2},
    "Qwen2ForCausalLM": {"num_hidden_layers": 2},
    "OPTForCausalLM": {"num_hidden_layers": 2},
    "GPT2LMHeadModel": {"n_layer": 2},
}


def vision_prompts(architecture: str) -> list[Prompt]:
    """Two with images and one without; or all with images, where all of a prompt sees itself."""
    rng = random.Random(3)
    words = [[rng.randrange(3, 300) for _ in range(6)] for _ in range(5)]
    images = [tiny_vision.picture(number, size) for number, size in enumerate([(30, 100), (53, 47), (64, 33)])]
    prompts = [
        ([*words[0], IMAGE, *words[1]], images[:1]),
        ([IMAGE, *words[2], IMAGE], images[1:]),
        (words[3] + words[4], []),
    ]
    if tiny_vision.FAMILIES[architecture].whole:
        prompts[2] = ([*words[3], IMAGE, *words[4]], images[2:])
    return prompts


def vision_world(folder: Path, architecture: str, variant: str) -> World:
    """A vision-language model of `tests.multimodal.tiny_vision`, with an engine; two or all prompts have images."""
    theirs = tiny_vision.make(architecture, variant)
    path = tiny_vision.build(architecture, variant, folder / "base", theirs)
    theirs.name_or_path = theirs.config._name_or_path = str(path)
    prompts, family = vision_prompts(architecture), tiny_vision.FAMILIES[architecture]
    return _world(theirs, path, prompts, tiny_vision.image_processor(architecture, variant), folder, family)


def video_world(folder: Path, architecture: str, variant: str) -> World:
    """The same with videos in two of its prompts, and an image in one."""
    oracle = VideoOracle(architecture, variant, folder / "base")
    oracle.model.name_or_path = oracle.model.config._name_or_path = oracle.path
    video, rng = oracle.family.marker, random.Random(3)
    words = [[rng.randrange(3, 300) for _ in range(6)] for _ in range(5)]
    image = tiny_vision.picture(1, (30, 40))
    requests = [
        Request([*words[0], video, *words[1]], [(clip(1, 3), 2.0)]),
        Request([video, *words[2], video], [clip(2, 2, 24, 24), clip(3, 2, 30, 40)]),
    ]
    prompts: list[Prompt] = [(one.ids, one) for one in requests]
    prompts += [([IMAGE, *words[3]], [image]), (words[4], [])]
    family, processor = tiny_vision.FAMILIES[architecture], oracle.images.processor
    return _world(oracle.model, Path(oracle.path), prompts, processor, folder, family, oracle)


def _world(
    theirs: Any,
    path: Path,
    prompts: list[Prompt],
    processor: Any,
    folder: Path,
    family: Any = None,
    videos: VideoOracle | None = None,
    **settings: Any,
) -> World:
    llm = LLM(str(path), enable_lora=True, block_size=4, num_gpu_blocks_override=1024, **settings)
    outputs = ask(llm, prompts, None)
    plain = [output.outputs[0].token_ids for output in outputs]
    world = World(theirs, path, llm, prompts, processor, plain, folder, family, videos)
    oracle = Expected(world, None)
    for (_, images), output in zip(prompts, outputs, strict=True):
        oracle.check(output, images)
    return world
