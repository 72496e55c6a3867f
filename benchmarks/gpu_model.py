"""Models of random weights without a checkpoint on the disk, adapters for them, and what their steps must do at least.

The weights are made once, where they are needed, and all engines of a process share them: 16 GB are neither written nor
read, and several engines fit beside each other.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from gpu_device import Roofs
from safetensors.torch import save_file
from torch import nn

from quire import LLM
from quire.checkpoint.weights import StoredWeight
from quire.layers import Linear
from quire.models import loader
from quire.models.base import CausalLM
from quire.models.llama import LlamaForCausalLM

LLAMA_3_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 500000.0,
}  # fmt: skip


class RandomModel:
    """A Llama of random weights: a folder with its config.json, and tensors that stand for the checkpoint's.

    tensors: by the names that Hugging Face has for them.
    """

    def __init__(
        self, folder: Path, settings: dict[str, Any], device: torch.device, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self.directory = folder
        self.device = device
        self.dtype = dtype
        config = {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
            "torch_dtype": str(dtype).removeprefix("torch."), **settings,
        }  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        draw = torch.Generator(device).manual_seed(0)
        self.tensors: dict[str, torch.Tensor] = {}
        for name, parameter in self._skeleton().named_parameters():
            tensor = torch.ones(parameter.shape, dtype=dtype, device=device)
            self.tensors[name] = tensor if tensor.dim() == 1 else tensor.normal_(std=0.02, generator=draw)

    def _skeleton(self) -> CausalLM:
        """The model without weights."""
        with torch.device("meta"):
            return LlamaForCausalLM(loader.load_config(self.directory))

    # What the loader asks of a Checkpoint.

    def names(self) -> Iterator[str]:
        return iter(self.tensors)

    def tensor(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def file_of(self, name: str) -> str:
        return "memory"

    def stamp(self) -> tuple[tuple[str, int, int, int], ...]:
        return ()

    def _read(
        self, checkpoint: object, wanted: Sequence[StoredWeight], dtype: torch.dtype, device: torch.device
    ) -> dict[str, nn.Parameter]:
        tensors = {w.name: self.tensors[w.stored].to(device, dtype) for w in wanted}  # the same, where they fit
        return {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in tensors.items()}

    def llm(self, **options: Any) -> LLM:
        """An engine on these weights; prompts are token ids."""
        with (
            mock.patch.object(loader, "open_checkpoint", return_value=self),
            mock.patch.object(loader, "read_weights", self._read),
        ):
            return LLM(
                str(self.directory),
                dtype=str(self.dtype).removeprefix("torch."),
                device=str(self.device),
                skip_tokenizer_init=True,
                **options,
            )

    @contextmanager
    def serving(self, **options: Any) -> Iterator[LLM]:
        """An engine whose memory is given back at the end, whoever still has a name for it."""
        llm = self.llm(**options)
        try:
            yield llm
        finally:
            release(llm)

    def transformers(self) -> Any:
        """transformers' model on the very same tensors."""
        from transformers import AutoConfig, LlamaForCausalLM

        config = AutoConfig.from_pretrained(self.directory)
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        model.load_state_dict(self.tensors, strict=True, assign=True)
        rotary = model.model.rotary_emb  # it computes buffers, which are no part of the state
        with self.device:
            model.model.rotary_emb = type(rotary)(config)
        return model.eval().requires_grad_(False)


def release(llm: LLM) -> None:
    """Give an engine's memory back."""
    engine = llm.llm_engine
    engine.close()
    for part in (engine.executor.runner, engine, llm):
        vars(part).clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class Work:
    """What a model must read and compute.

    weights: bytes that a step reads: all but the embedding table, of which it reads rows. layers: FLOPs of a token in
    the matrices of all layers; head: of one that is drawn; attention: of a token for each token that it looks at.
    kv: bytes of a token's keys and values.
    """

    weights: int
    layers: int
    head: int
    attention: int
    kv: int

    @classmethod
    def of(cls, model: CausalLM) -> Work:
        llama: Any = model.model
        table: torch.Tensor = llama.embed_tokens.weight
        weights = sum(weight.nbytes for weight in model.parameters()) - table.nbytes
        head = model.lm_head
        if head.weight.data_ptr() == table.data_ptr():  # tied: parameters() has named it once
            weights += table.nbytes
        matrices = [module for module in model.modules() if isinstance(module, Linear) and module is not head]
        spec, config = model.kv_spec, model.config
        return cls(
            weights,
            2 * sum(matrix.weight.numel() for matrix in matrices),
            2 * head.weight.numel(),
            4 * spec.num_layers * config.num_attention_heads * spec.head_dim,
            2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * table.element_size(),
        )

    def prompt(self, tokens: int) -> int:
        """FLOPs of a prompt, up to its first token."""
        return tokens * self.layers + self.head + self.attention * (tokens * (tokens + 1) // 2)

    def step(self, streams: int, context: int) -> tuple[int, int]:
        """(FLOPs, bytes) of a decode step of so many streams, each with `context` tokens, its own included."""
        flops = streams * (self.layers + self.head + self.attention * context)
        return flops, self.weights + streams * context * self.kv

    def phases(self, roofs: Roofs, streams: int, prompt: int, output: int) -> float:
        """Seconds of a batch at the roof: all prompts at the matrix peak (the weights read once at least), then each
        decode step at the slower of its operations and its bytes."""
        spent = roofs.seconds(streams * self.prompt(prompt), self.weights)
        return spent + sum(roofs.seconds(*self.step(streams, prompt + made)) for made in range(1, output))

    def overlapped(self, roofs: Roofs, streams: int, prompt: int, output: int) -> float:
        """The same, were all operations and all bytes of the run perfectly overlapped: no schedule beats this."""
        steps = [self.step(streams, prompt + made) for made in range(1, output)]
        flops = streams * self.prompt(prompt) + sum(one for one, _ in steps)
        return roofs.seconds(flops, self.weights + sum(size for _, size in steps))


def adapter_folders(llm: LLM, home: Path, count: int, rank: int) -> list[Path]:
    """PEFT adapters of random weights on all linear layers but the head. They share one file: only names differ."""
    model = llm.llm_engine.executor.runner.model
    matrices = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Linear) and module is not model.lm_head
    }
    tensors = {}
    for name, module in matrices.items():
        for part, shape in (("A", (rank, module.in_features)), ("B", (module.out_features, rank))):
            weight = torch.empty(shape, dtype=module.weight.dtype, device=module.weight.device).normal_(std=0.02)
            tensors[f"base_model.model.{name}.lora_{part}.weight"] = weight.cpu()
    targets = sorted({name.rpartition(".")[2] for name in matrices})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
    folders = [home / f"r{rank}-{number}" for number in range(count)]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text(json.dumps(config))
        file = folder / "adapter_model.safetensors"
        if folder is folders[0]:
            save_file(tensors, file)
            continue
        try:
            os.link(folders[0] / file.name, file)
        except OSError:  # a file system without links
            shutil.copy(folders[0] / file.name, file)
    return folders
