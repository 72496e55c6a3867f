"""What published checkpoints have in their config.json, at reduced sizes (`published.json`): all of them load.

A line has the values that the file has, but for sizes and the ids of tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quire import registry
from quire.models.loader import load_config, load_model
from tests.models import run_model, tiny
from tests.models.rows import all_rows
from tests.multimodal.families import FAMILIES

PUBLISHED: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "published.json").read_text())
# Those of which transformers has no class are compared with `oracles.py`, by their rows.
WITH_AN_ORACLE = {row.architecture for row in all_rows().values() if row.oracle} | {
    alias for row in all_rows().values() for alias in row.aliases if not hasattr(transformers, alias)
}
WITH_AN_ORACLE |= {name for name, family in FAMILIES.items() if family.reference}


# Rows of whose published files we do not know every value for certain.
UNKNOWN = {"ExaoneMoeForCausalLM", "GraniteMoeSharedForCausalLM", "MiniMaxM2ForCausalLM", "Ministral3ForCausalLM"}


def config_of(name: str, folder: Path) -> Any:
    (folder / "config.json").write_text(json.dumps(PUBLISHED[name]))
    return load_config(folder)


def test_there_are_sixty_and_more_and_some_of_every_row() -> None:
    assert len(PUBLISHED) >= 60
    published = {fields["architectures"][0] for fields in PUBLISHED.values()}
    assert {name for name, row in all_rows().items() if published.isdisjoint((name, *row.aliases))} <= UNKNOWN


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_configuration_is_taken(name: str, tmp_path: Path) -> None:
    config = config_of(name, tmp_path)
    with torch.device("meta"):
        model = registry.resolve(PUBLISHED[name]["architectures"])(config)
    spec, layers = model.kv_spec, getattr(config, "text_config", config).num_hidden_layers
    assert model.max_model_len > 0 and spec.num_layers + spec.num_states in (layers, 2 * layers)
    assert spec.num_states or spec.num_layers == layers


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", [one for one in PUBLISHED if PUBLISHED[one]["architectures"][0] not in WITH_AN_ORACLE])
def test_scores_are_transformers(name: str, tmp_path: Path) -> None:
    config_of(name, tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path, trust_remote_code=False)
    torch.manual_seed(3)
    kind = getattr(transformers, PUBLISHED[name]["architectures"][0])
    row = all_rows().get(PUBLISHED[name]["architectures"][0])  # None: an alias
    eager = {"attn_implementation": row.attention if row else "eager", "experts_implementation": "eager"}
    theirs = kind._from_config(config, **eager).float().eval()
    whole = theirs.model if hasattr(theirs, "model") else theirs
    text = getattr(theirs, "language_model", None) or getattr(whole, "language_model", None)
    tiny.randomise(text or theirs)  # beside what sees
    theirs.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    ids = tiny.token_ids(vocab=96)
    with torch.inference_mode():
        expected = theirs.double()(torch.tensor([ids])).logits[0]
    ours = run_model.logits(load_model(tmp_path, torch.float32), ids).double()
    assert (ours - expected).abs().max() < 2e-4 * expected.abs().max()
