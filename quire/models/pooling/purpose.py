"""What a checkpoint is loaded for: to generate, or to make vectors and classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire import registry
from quire.errors import UnsupportedModelError
from quire.models.pooling.sentence_transformers import is_there
from quire.registry.pooling import PoolingRow, find_pooling, is_pooling_alone


@dataclass(frozen=True)
class Purpose:
    """The settings `runner`, `convert` and `pooler_config`. adapters: whether heads may come with adapters."""

    runner: str = "auto"
    convert: str = "auto"
    pooler: Mapping[str, Any] = field(default_factory=dict)
    adapters: bool = False

    def of(self, path: Path, raw: Mapping[str, Any]) -> PoolingRow | None:
        """What a checkpoint runs on where it makes vectors or classes; None: it generates.

        raw: of config.json. Raises UnsupportedModelError.
        """
        architectures = [str(one) for one in raw.get("architectures") or ()]
        rows = registry.rows()
        pools = self.runner == "pooling" or (
            self.runner == "auto" and (is_there(path) or is_pooling_alone(architectures, rows) or self._converts)
        )
        if not pools:
            if self.runner == "generate" and self._converts:
                raise UnsupportedModelError(
                    f"convert={self.convert!r}: a model that generates is not converted; take runner='pooling'."
                )
            return None
        found = find_pooling(architectures, rows, self.convert)
        if found is None and self.runner == "pooling":
            raise UnsupportedModelError(
                f"runner='pooling': architecture {architectures[:1]} is none whose hidden states are served; see "
                "docs/embeddings.md."
            )
        return found

    @property
    def _converts(self) -> bool:
        return self.convert not in ("auto", "none")


GENERATE = Purpose(runner="generate")
