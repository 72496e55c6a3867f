"""Worlds whose base model is quantized, and PEFT's answers on the model that its rows of bytes mean.

Checkpoints have rows of bytes under the parameters' own names, of kinds that config.json names: a method of the tests'.
Whole-number products round their inputs to 8 bits; so does the oracle, in float64, where the engine does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from peft.utils import ModulesToSaveWrapper
from safetensors.torch import load_file, save_file
from torch import nn

from quire import LLM
from quire.checkpoint.weights import StoredPart
from quire.kernels import QuantizedWeight, RowKind, RowLayout
from quire.kernels.quantized import quantize_rows
from quire.kernels.reference_quantized import is_integer, quantized_groups
from quire.models.quantization import QuantizationPlan, QuantizedLayer
from tests.kernels.quantized_cases import random_weight
from tests.lora.peft_world import _LAYERS, Expected, World, ask, text_prompts
from tests.models import tiny

METHOD = "rows of bytes"
# Of a layer's name, the first that is found in it: its kind.
Kinds = Mapping[str, str]
MIXED: Kinds = {
    "q_proj": "Q4_K", "k_proj": "Q8_0", "v_proj": "Q6_K", "o_proj": "Q4_0", "gate_proj": "AFFINE4", "up_proj": "Q4_K",
    "down_proj": "Q6_K", "embed_tokens": "Q6_K", "lm_head": "Q8_0",
}  # fmt: skip
_EXACT, _LOOSE = 1e-4, 1.0
_SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}


def uniform(kind: str) -> Kinds:
    """All layers, and both ends."""
    return {"proj.weight": kind, "embed_tokens": kind, "lm_head": kind}


def plan_of(model: Any, checkpoint: Any, settings: Mapping[str, Any]) -> QuantizationPlan:
    """What the tests' method does; `METHODS` has it while they run."""
    layers: dict[str, QuantizedLayer] = {}
    shapes = checkpoint.shapes()
    for path, (kind, features, group, zeros) in settings["layouts"].items():
        layout, name = RowLayout(RowKind[kind], features, group, zeros), f"{path}.weight"
        if name in shapes:
            part = StoredPart({name: torch.Size(shapes[name])}, lambda rows: rows, {name: (torch.uint8,)})
            layers[path] = QuantizedLayer(layout, part)
        else:
            layers[path] = QuantizedLayer(layout, None)
    return QuantizationPlan(layers)


def quantized(weight: torch.Tensor, kind: str, seed: int) -> QuantizedWeight:
    """Rows of about the same numbers; of kinds that nothing here makes, of numbers of the same size."""
    one, features = RowKind[kind], weight.shape[1]
    if one in (RowKind.Q8_0, RowKind.Q4_0):
        return QuantizedWeight(quantize_rows(weight, one), RowLayout(one, features))
    if one is RowKind.F16:
        return QuantizedWeight(weight.half().view(torch.uint8), RowLayout(one, features))
    if one is RowKind.AFFINE4:
        return _affine(weight)
    made = random_weight(RowLayout(one, features), len(weight), seed)
    size, places = {RowKind.Q4_K: (144, (0, 2)), RowKind.Q6_K: (210, (208,))}[one]
    blocks = made.data.view(-1, size)
    for scale in (1.0, None):
        numbers = (1.0 if scale else float(weight.std() / made.dequantize().std()), 7.5)
        for place, (at, factor) in enumerate(zip(places, numbers, strict=False)):
            number = factor * numbers[0] if place else factor
            blocks[:, at : at + 2] = torch.tensor([number]).half().view(torch.uint8)
    return made


def _affine(weight: torch.Tensor) -> QuantizedWeight:
    layout = RowLayout(RowKind.AFFINE4, weight.shape[1], 32, zeros=True)
    groups = weight.view(len(weight), -1, 32)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scales = (high - low) / 15
    zeros = (-low / scales).round()
    codes = (groups / scales + zeros).round().clamp(0, 15).to(torch.uint8).flatten(1)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    parts = [scales.flatten(1).contiguous().view(torch.uint8), zeros.flatten(1).contiguous().view(torch.uint8), packed]
    return QuantizedWeight(torch.cat(parts, 1).contiguous(), layout)


def quantized_checkpoint(
    folder: Path, architecture: str, kinds: Kinds, variant: str = "", **settings: Any
) -> tuple[Any, Path]:
    """(transformers' model of the numbers, the folder of the rows). settings: of the configuration."""
    sizes = {**_SIZES, **_LAYERS.get(architecture, {}), **settings}
    model = tiny.make(architecture, variant or "gqa", **sizes)
    tiny.save(model, folder / "floats")
    tensors = load_file(folder / "floats" / "model.safetensors")
    rows, layouts = dict(tensors), {}
    for seed, name in enumerate(sorted(tensors)):
        kind = next((kinds[part] for part in kinds if re.search(part, name)), None)
        if kind is None or not name.endswith(".weight") or tensors[name].dim() != 2:
            continue
        made = quantized(tensors[name], kind, seed)
        rows[name], tensors[name] = made.data.clone(), made.dequantize()
        layouts[name.removesuffix(".weight")] = (kind, made.layout.features, made.layout.group, made.layout.zeros)
    if model.config.tie_word_embeddings:
        layouts["lm_head"] = layouts["model.embed_tokens"]
    save_file(tensors, folder / "floats" / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "floats" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": METHOD, "layouts": layouts}
    (folder / "rows").mkdir()
    (folder / "rows" / "config.json").write_text(json.dumps(config))
    save_file(rows, folder / "rows" / "model.safetensors", {"format": "pt"})
    theirs = getattr(transformers, architecture).from_pretrained(
        folder / "floats", dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    for path, (kind, *_) in layouts.items():
        if not is_integer(RowKind[kind]) or ".experts." in path or path.endswith("kv_b_proj"):
            continue  # transformers' experts are no layers; latents' keys and values are made floats at load
        found = theirs.get_submodule(path)
        if isinstance(found, nn.Linear):
            found.__class__ = RoundedLinear
    theirs.name_or_path = theirs.config._name_or_path = str(folder / "floats")
    return theirs.eval(), folder / "rows"


class RoundedLinear(nn.Linear):
    """With inputs as whole-number products take them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.rounded(x).to(self.weight.dtype), self.weight, self.bias)

    @staticmethod
    def rounded(x: torch.Tensor) -> torch.Tensor:
        return quantized_groups(x.flatten(0, -2)).view(x.shape).to(x.dtype)


class QuantizedWorld(World):
    """Whose answers agree but where a number that lies between two of 8 bits was rounded to the other one."""

    def agree(self, path: Path, expected: Path | None = None) -> bool:
        request = self.load(path)
        outputs = ask(self.llm, self.prompts, request)
        self.llm.unload_lora_adapter(path.name)
        self.check(outputs, QuantizedExpected(self, expected or path))
        return any(o.outputs[0].token_ids != plain for o, plain in zip(outputs, self.plain, strict=True))

    def check(self, outputs: Sequence[Any], oracle: QuantizedExpected) -> None:
        """Rounding otherwise, which the eighth digit of a number may do, shows in what follows of its own prompt; so a
        third of all logprobs are those of PEFT as closely as float32 has them, and none is far from it."""
        asked = zip(outputs, self.prompts, strict=True)
        errors = sorted(error for output, (_, images) in asked for error in oracle.errors(output, images))
        assert errors[len(errors) // 3] < _EXACT, errors[:: len(errors) // 9]
        assert errors[-1] < _LOOSE, errors[:: len(errors) // 9]


class QuantizedExpected(Expected):
    """What is saved in the place of quantized weights is multiplied by as floats are."""

    def __init__(self, world: World, *paths: Path | None, weights: Sequence[float] = ()) -> None:
        super().__init__(world, *paths, weights=weights)
        for module in self.model.modules():
            if isinstance(module, ModulesToSaveWrapper):
                for part in module.modules_to_save.modules():
                    if isinstance(part, RoundedLinear):
                        part.__class__ = nn.Linear

    def errors(self, output: Any, images: Any = ()) -> list[float]:
        """How far each of the prompt's logprobs is from its own, and each chosen token's from the likeliest's."""
        prompt, answer = output.prompt_token_ids, output.outputs[0].token_ids
        scores = self.scores(prompt, answer[:-1], images)
        tail = scores[len(prompt) - 1 :]
        gaps = tail.amax(-1) - tail[torch.arange(len(answer)), torch.tensor(answer)]
        known = enumerate(output.prompt_logprobs or [])
        return [
            *gaps.tolist(),
            *(abs(one[prompt[at]].logprob - float(scores[at - 1, prompt[at]])) for at, one in known if at),
        ]


def quantized_world(
    folder: Path, architecture: str, kinds: Kinds, variant: str = "", **settings: Any
) -> QuantizedWorld:
    return world_of(*quantized_checkpoint(folder, architecture, kinds, variant, **settings), folder)


def world_of(theirs: Any, path: Path, folder: Path) -> QuantizedWorld:
    """theirs: transformers' model of the numbers of path's weights."""
    prompts = text_prompts(theirs.config.vocab_size)
    llm = LLM(str(path), enable_lora=True, block_size=4, num_gpu_blocks_override=1024, skip_tokenizer_init=True)
    outputs = ask(llm, prompts, None)
    plain = [output.outputs[0].token_ids for output in outputs]
    world = QuantizedWorld(theirs, path, llm, prompts, None, plain, folder)
    world.check(outputs, QuantizedExpected(world, None))
    return world


__all__ = [
    "METHOD",
    "MIXED",
    "QuantizedExpected",
    "QuantizedWorld",
    "plan_of",
    "quantized_checkpoint",
    "quantized_world",
    "uniform",
    "world_of",
]
