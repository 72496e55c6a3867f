"""An adapter's files -> what it changes in each layer, in the model's dtype, bound completely or refused.

The format is PEFT's (`files.py`), with Hugging Face's module names
(https://huggingface.co/docs/peft/developer_guides/checkpoint), or llama.cpp's (`gguf.py`).
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch

from quire.errors import AdapterError
from quire.layers.adapters import EmbeddingChange, LinearChange
from quire.layers.latent import LatentChange
from quire.lora.base import Base
from quire.lora.binding import Binding, Change, Kinds
from quire.lora.block import in_one_block
from quire.lora.files import (
    WEIGHTS_FILE,
    Parts,
    read_tensors,
    read_text,
    sorted_tensors,
    unused_tensors,
    weights_file,
)
from quire.lora.fused import fused_parameters, split_parts
from quire.lora.gguf import bound_pairs, described, gguf_adapter, is_gguf, own_names, pairs_of, read_numbers
from quire.lora.peft_config import CONFIG_FILE, MAX_CONFIG_BYTES, base_model_of, read_config, task_of
from quire.lora.targets import Naming, Targets, choose_naming, find_targets, namings
from quire.lora.tasks import check_head, check_task
from quire.models.base import CausalLM

_MOST_PLANS = 64


@dataclass(frozen=True)
class Bound:
    """What of an adapter's files was bound to what, for who wants to know.

    tensors: of its file. targets: the last part of a changed layer's published name -> how many such layers. alphas,
    scalings: of its LoRA. base_model: what its configuration says that it was trained on; nothing depends on that.
    """

    tensors: int = 0
    targets: Mapping[str, int] = field(default_factory=dict)
    alphas: tuple[float, ...] = ()
    scalings: tuple[float, ...] = ()
    base_model: str | None = None


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter's weights.

    digest: SHA-256 over both files. changes: by module of quire's layers. parameters: of other modules (a tower's), by
    name, in the place of theirs. visual: it changes what works on images. ranks: of its LoRA modules. elsewhere: names
    of both kinds, of what another stage of a pipeline computes, which has that.
    """

    digest: bytes
    nbytes: int
    changes: Mapping[str, Change]
    parameters: Mapping[str, torch.Tensor]
    visual: bool
    ranks: tuple[int, ...]
    bound: Bound
    elsewhere: tuple[str, ...] = ()

    @property
    def modules(self) -> int:
        """How many layers it changes."""
        return len(self.changes) + len(self.parameters) + len(self.elsewhere)

    @cached_property
    def mixable(self) -> bool:
        """Whether it is plain LoRA, whose shares can be weighted and added."""
        return not self.parameters and all(_is_plain(change) for change in self.changes.values())

    @cached_property
    def recordable(self) -> bool:
        """Whether the kernel does all of it; asked at each step."""
        return all(
            isinstance(change, LatentChange)
            or (isinstance(change, LinearChange) and change.weight is None and change.tokens is None)
            for change in self.changes.values()
        )


def _is_plain(change: Change) -> bool:
    if isinstance(change, LinearChange):
        lora = change.lora
        plain = change.weight is None and change.tokens is None
        return plain and lora is not None and lora.scale is None and lora.shift is None
    if isinstance(change, LatentChange):
        return change.is_plain
    if isinstance(change, EmbeddingChange):
        return change.weight is None and change.tokens is None and change.scale is None
    return False


class LoadedAdapter(Protocol):
    """What stands for an adapter's weights: an `Adapter`, or what is said of one that is in another process."""

    @property
    def digest(self) -> bytes: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def modules(self) -> int: ...
    @property
    def visual(self) -> bool: ...
    @property
    def ranks(self) -> tuple[int, ...]: ...
    @property
    def mixable(self) -> bool: ...
    @property
    def bound(self) -> Bound: ...


class Reader(Protocol):
    """Reads adapters where the weights of the model are. Any number of threads may do so at once."""

    def read(self, path: Path) -> LoadedAdapter:
        """Read the adapter in a folder, or in a GGUF file. Raises AdapterError."""
        ...


class AdapterReader:
    """Reads adapters for one model. Any number of threads may do so at once.

    max_rank: the largest rank that is taken; max_bytes: of a weights file, and of an adapter in memory.
    """

    def __init__(self, model: CausalLM, max_rank: int | None, max_bytes: int) -> None:
        self._model = model
        self._max_rank = max_rank
        self._max_bytes = max_bytes
        self._namings = namings(model)
        # By what transformers' newer versions call the modules: the older ones have no such parameters.
        self._fused = {model.published_names(name)[-1]: own for name, own in fused_parameters(model).items()}
        self._base = Base(model)
        self._plans: dict[tuple[bytes, int], tuple[Any, Targets, str | None]] = {}

    @torch.inference_mode(False)
    @torch.no_grad()
    def read(self, path: Path) -> Adapter:
        """Read the adapter in a folder, or in a GGUF file. Raises AdapterError: it binds completely, or not at all."""
        plan = self._model.quantization
        if plan is not None and plan.no_adapters:
            raise AdapterError(f"{path}: {plan.no_adapters}.")
        return self._read_gguf(path) if is_gguf(path) else self._read_folder(path)

    def _read_gguf(self, path: Path) -> Adapter:
        naming = own_names(self._base)
        with gguf_adapter(path, 2 * self._max_bytes) as (file, said):
            parts, targets = bound_pairs(said, self._base, pairs_of(said, described(said)))
            self._check_rank(targets, said.where)
            Binding(self._base, Kinds(), targets, naming, parts, {}, said.where).check_sizes({})
            digest, tensors = read_numbers(file, said)
        parts, targets = bound_pairs(said, self._base, pairs_of(said, tensors))
        told = Bound(len(tensors))
        return self._made(Binding(self._base, Kinds(), targets, naming, parts, {}, said.where), digest, told)

    def _read_folder(self, directory: Path) -> Adapter:
        where = str(directory)
        config_data = read_text(directory / CONFIG_FILE, MAX_CONFIG_BYTES)
        with weights_file(directory / WEIGHTS_FILE, 2 * self._max_bytes) as (file, said):
            # What the header says is looked at first: nobody's file is read whole to be refused.
            parts, plain = self._sorted(said, where)
            naming = choose_naming(self._namings, parts, plain)
            config, targets, base_model = self._plan(config_data, naming, where)
            kinds = Kinds(config.use_dora, config.lora_bias)
            Binding(self._base, kinds, targets, naming, parts, plain, where).check_sizes(unused_tensors(said))
            digest, tensors = read_tensors(file, config_data, where)
        parts, plain = self._sorted(tensors, where)
        told = Bound(len(tensors), base_model=base_model)
        return self._made(Binding(self._base, kinds, targets, naming, parts, plain, where), digest, told)

    def _made(self, binding: Binding, digest: bytes, told: Bound) -> Adapter:
        check_head(binding.targets.saved, self._model, binding.where)
        changes, parameters = binding.run()
        changes, parameters, nbytes = in_one_block(changes, parameters, self._max_bytes, binding.where)
        others = [name if name in self._base.modules else name.rpartition(".")[0] for name in binding.elsewhere]
        names = [*changes, *(name.rpartition(".")[0] for name in parameters), *others]
        published = {own: name for name, own in binding.naming.modules.items()}
        layers = dict.fromkeys(names)
        lora = binding.targets.lora.values()
        return Adapter(
            digest=digest,
            nbytes=nbytes,
            changes=changes,
            parameters=parameters,
            visual=any(self._model.is_visual(name) for name in names),
            ranks=tuple(sorted({target.rank for target in lora})),
            bound=replace(
                told,
                targets=dict(sorted(Counter(published.get(name, name).rpartition(".")[2] for name in layers).items())),
                alphas=tuple(sorted({target.alpha for target in lora if target.alpha is not None})),
                scalings=tuple(sorted({target.scaling for target in lora})),
            ),
            elsewhere=tuple(binding.elsewhere),
        )

    def _sorted(
        self, tensors: Mapping[str, torch.Tensor], where: str
    ) -> tuple[dict[str, Parts], dict[str, torch.Tensor]]:
        parts, plain = sorted_tensors(tensors, where)
        for names in (parts, plain):  # of modules that the checkpoint may have, and that change nothing here
            for name in [
                name for name in names if any(re.fullmatch(one, name) for one in self._model.adapters_ignored)
            ]:
                del names[name]
        return split_parts(parts, self._fused, where), plain

    def _plan(self, data: bytes, naming: Naming, where: str) -> tuple[Any, Targets, str | None]:
        """The configuration and what it means; remembered, since many adapters have the same."""
        key = hashlib.sha256(data).digest(), self._namings.index(naming)
        plan = self._plans.get(key)
        if plan is None:
            config = read_config(data, f"{where}/{CONFIG_FILE}")
            task = task_of(data)
            check_task(task, self._model, where)
            plan = config, find_targets(config, naming, self._model, where, task), base_model_of(data)
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            self._plans[key] = plan
        self._check_rank(plan[1], where)
        return plan

    def _check_rank(self, targets: Targets, where: str) -> None:
        largest = max((target.rank for target in targets.lora.values()), default=0)
        if self._max_rank is not None and largest > self._max_rank:
            raise AdapterError(f"{where}: has rank {largest}, and max_lora_rank={self._max_rank}: raise it.")
