"""What tells the files of two machines apart; Ray itself is not needed."""

from __future__ import annotations

from pathlib import Path

from quire.platform.execution.ray_worker import files_digest


def test_one_byte_anywhere_tells_files_apart(tmp_path: Path) -> None:
    for name in ("here", "there"):
        model = tmp_path / name / "model"
        (model / "1_Dense").mkdir(parents=True)
        (model / "model.safetensors").write_bytes(bytes(range(256)) * 20_000)
        (model / "1_Dense" / "model.safetensors").write_bytes(b"dense")
    here, there = tmp_path / "here" / "model", tmp_path / "there" / "model"
    assert files_digest(here) == files_digest(there) != ""
    weights = bytearray((there / "model.safetensors").read_bytes())
    weights[3_210_123] ^= 1
    (there / "model.safetensors").write_bytes(weights)
    assert files_digest(here) != files_digest(there)
    weights[3_210_123] ^= 1
    (there / "model.safetensors").write_bytes(weights)
    assert files_digest(here) == files_digest(there)
    (there / "1_Dense" / "model.safetensors").write_bytes(b"other")
    assert files_digest(here) != files_digest(there)
    assert files_digest(tmp_path / "nowhere") == ""
    assert files_digest(here / "model.safetensors") != files_digest(here / "1_Dense" / "model.safetensors")
