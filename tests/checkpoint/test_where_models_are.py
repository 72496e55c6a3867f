"""Where a model is found: a directory, the hub, its cache."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from quire.errors import CheckpointError
from quire.models.loader import resolve_checkpoint

# Where a model is found


def test_a_directory_is_itself(tmp_path, monkeypatch):
    assert resolve_checkpoint(str(tmp_path)) == tmp_path
    with pytest.raises(CheckpointError, match="no revision 'main'"):
        resolve_checkpoint(tmp_path, "main")
    monkeypatch.chdir(tmp_path.parent)
    assert resolve_checkpoint(tmp_path.name).resolve() == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert resolve_checkpoint(f"~/{tmp_path.name}") == tmp_path


@pytest.mark.parametrize(
    "name",
    [
        "./absent",
        "../absent",
        "/absent/model",
        "~/absent",
        "a/b/c",
        "absent/",
        "a\\b",
        "",
        " ",
        "~nouserzz/x",
        "./" + "x" * 300,
    ],
)
def test_paths_never_reach_the_hub(monkeypatch, name):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *a, **k: pytest.fail("sent to the hub"))
    with pytest.raises(CheckpointError, match="no such directory"):
        resolve_checkpoint(name)


def test_a_file_is_no_checkpoint(tmp_path):
    (tmp_path / "model.bin").touch()
    with pytest.raises(CheckpointError, match=r"model\.bin.* is a file"):
        resolve_checkpoint(str(tmp_path / "model.bin"))


def test_a_revision_pins_the_one_snapshot_that_everything_comes_from(monkeypatch, tmp_path):
    asked = {}

    def download(repo_id, **options):
        asked.update(options, repo_id=repo_id)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_checkpoint("some/model", "abc123") == tmp_path
    assert (asked["repo_id"], asked["revision"]) == ("some/model", "abc123")
    assert not any(pattern.endswith((".bin", ".py", ".pt", "*")) for pattern in asked["allow_patterns"])


def test_what_the_hub_says_is_repeated(monkeypatch):
    def download(*args, **options):
        raise OSError("the cable is out")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(CheckpointError, match=r"some/model.*revision 'v1'.*OSError: the cable is out"):
        resolve_checkpoint("some/model", "v1")


@pytest.mark.parametrize("name", ["bad name", "a--b/c", "-x", "x" * 200, "x" * 300, "a\0b"])
def test_names_that_are_no_hub_ids(name):
    with pytest.raises(CheckpointError, match="HFValidationError"):
        resolve_checkpoint(name)


def test_offline_the_cache_serves(tmp_path):
    """With HF_HUB_OFFLINE, a cached model is found at its revision, and an absent one is refused."""
    revision = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "hub" / "models--some--model" / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (tmp_path / "hub" / "models--some--model" / "refs").mkdir()
    (tmp_path / "hub" / "models--some--model" / "refs" / "main").write_text(revision)
    code = """
from quire.errors import CheckpointError
from quire.checkpoint.files import resolve_checkpoint
print(resolve_checkpoint("some/model"))
print(resolve_checkpoint("some/model", "0123456789abcdef0123456789abcdef01234567"))
for name, revision in (("some/model", "other"), ("some/absent", None)):
    try:
        resolve_checkpoint(name, revision)
    except CheckpointError as error:
        print("refused", name, revision)
"""
    environment = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert out.stdout.splitlines() == [
        str(snapshot),
        str(snapshot),
        "refused some/model other",
        "refused some/absent None",
    ]
