"""`python -m quire.models.write` writes the table of docs/models.md anew, of the registry and of what classes say.

Example checkpoints are those of tests/models/published.json: their configurations are tested.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from quire import registry
from quire.models import fields
from quire.models.fallback.construct import seeing
from quire.registry.listing import without_a_row
from quire.registry.pooling import ENCODERS

_ROOT = Path(__file__).parents[2]
PAGE = _ROOT / "docs" / "models.md"
_PUBLISHED = _ROOT / "tests" / "models" / "published.json"
_FAMILIES = "<!-- families without a row, made by quire.models.write -->"
_SEEING = "<!-- image-text models without a row, made by quire.models.write -->"
_POOLED = "<!-- models that make vectors, made by quire.models.write -->"
_BEGIN, _END = "<!-- made by quire.models.write -->", "<!-- end -->"
_MOST_EXAMPLES = 3


def models_page(text: str) -> str:
    """docs/models.md with its table as it is to be."""
    for begin, table in ((_BEGIN, _table()), (_FAMILIES, _families()), (_SEEING, _seeing()), (_POOLED, _pooled())):
        head, _, rest = text.partition(begin)
        text = f"{head}{begin}\n{table}\n{_END}{rest.partition(_END)[2]}"
    return text


def _families() -> str:
    """Transformers' causal families without a row: what is whose in those that run, and why others do not."""
    own = {row.architecture for row in registry.BUILT_IN}
    lines = ["| architecture | runs | torch's own sums | row by row |", "|---|---|---|---|"]
    for name, found in without_a_row().items():
        runs = found.get("runs")
        if name not in own and runs is not None:
            cells = [f"`{name}`", "yes", ", ".join(runs["torch"]), "functions" if runs["by_row"] else ""]
        elif name not in own:
            why = f"no: {found['refused']}" if "refused" in found else "not tried: its tiny configuration was not found"
            cells = [f"`{name}`", why.replace("|", "/"), "", ""]
        else:
            continue
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _pooled() -> str:
    """The families that generate nothing, and what their architectures are called."""
    lines = ["| family | architectures |", "|---|---|"]
    targets = {row.target: row for row in ENCODERS}
    for target, row in targets.items():
        names = [f"`{own.architecture}`" for own in ENCODERS if own.target == target]
        lines.append(f"| {_family(registry.load_class(row))} | {', '.join(names)} |")
    return "\n".join(lines)


def _seeing() -> str:
    """Transformers' classes that generate text of more than text, and have no row."""
    own = {row.architecture for row in registry.BUILT_IN}
    return ", ".join(f"`{name}`" for name in sorted(seeing() - own, key=str.lower)) + "."


def _table() -> str:
    published: dict[str, dict[str, Any]] = json.loads(_PUBLISHED.read_text(encoding="utf-8"))
    lines = ["| architecture | family | checkpoints | takes | refused |", "|---|---|---|---|---|"]
    for row in sorted(registry.BUILT_IN, key=lambda row: row.architecture.lower()):
        examples = {name: own for name, own in published.items() if own["architectures"][0] == row.architecture}
        kind = registry.load_class(row)
        cells = [
            f"`{row.architecture}`",
            _family(kind),
            ", ".join(f"`{name}`" for name in list(examples)[:_MOST_EXAMPLES]),
            ", ".join(_takes(row, kind)),
            ", ".join(f"`{name}`" for name in _refused(row, kind, next(iter(examples.values()), {}))),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _family(kind: type) -> str:
    """The first sentence of the class's docstring, or of its file's, as far as its first colon."""
    doc = vars(kind).get("__doc__") or sys.modules[kind.__module__].__doc__ or ""
    text = " ".join(doc.split()).partition(". ")[0]
    return text.partition(": ")[0].rstrip(".").replace("|", "/")


def _takes(row: registry.Row, kind: Any) -> list[str]:
    others = sorted(set(getattr(kind, "token_id_fields", ())) - {"image", *row.capabilities})
    takes = ["text alone" if row.text_alone else "text", *sorted(row.capabilities - {"text"}), *others, "LoRA"]
    bounds = {"windows": "sliding_window", "chunks": "attention_chunk_size", "states": "mamba_conv_bias"}
    return [*takes, *(name for name, field in bounds.items() if field in kind.supported_fields)]


def _refused(row: registry.Row, kind: Any, example: dict[str, Any]) -> list[str]:
    """Fields of the configuration's own class that change the arithmetic, and that the class does not implement."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    known = example.get("model_type") in CONFIG_MAPPING and row.config is None
    if not known:
        return []
    own = CONFIG_MAPPING[example["model_type"]]
    names = {name for base in own.__mro__[:-1] if base.__name__ == own.__name__ for name in vars(base)}
    names |= set(getattr(own, "__annotations__", {}))
    matter = names & (fields.OTHERS | set(fields.NEUTRAL_VALUES)) - fields.COMMON
    return sorted(matter - kind.supported_fields - kind.fixed_fields.keys())


def write() -> None:
    PAGE.write_text(models_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    write()
