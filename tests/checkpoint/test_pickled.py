"""torch's pytorch_model.bin: what is taken gives the same as safetensors, and what is hostile is refused by name."""

from __future__ import annotations

import io
import json
import os
import pickle
import platform
import shutil
import sys
import time
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quire import LLM, SamplingParams
from quire.checkpoint import confined, pickled
from quire.checkpoint.files import HUB_PICKLED, PICKLED, PICKLED_INDEX, SINGLE, Checkpoint, resolve_weights
from quire.errors import CheckpointError, QuireError
from quire.models.loader import load_model
from tests.models import run_model, tiny

LLAMA, QWEN2, OPT, GPT2 = tiny.TABLE


@pytest.fixture
def pickled_copy(checkpoint, tmp_path):
    """pickled_copy(architecture, variant) -> a directory of the test's own, its weights in pytorch_model.bin."""

    def copy(architecture: str = LLAMA, variant: str = "gqa", change=lambda tensors: tensors, **options) -> Path:
        path = Path(shutil.copytree(checkpoint(architecture, variant), tmp_path / f"{architecture}-{variant}"))
        torch.save(change(load_file(path / SINGLE)), path / PICKLED, **options)
        (path / SINGLE).unlink()
        return path

    return copy


def logits_of(path: Path, **options) -> torch.Tensor:
    return run_model.logits(load_model(path, **options), tiny.token_ids(12))


def tokens_of(path: Path) -> list[int]:
    llm = LLM(str(path), skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 22)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    return llm.generate([tiny.token_ids(12)], params, use_tqdm=False)[0].outputs[0].token_ids


# What is taken


def old_opt(tensors):
    """As facebook/opt-125m has them: no prefix, and no head, which is the embeddings."""
    return {name.removeprefix("model."): t for name, t in tensors.items() if name != "lm_head.weight"}


def old_opt_with_head(tensors):
    named = old_opt(tensors)
    return named | {"lm_head.weight": named["decoder.embed_tokens.weight"]}


def old_gpt2(tensors):
    """As gpt2 has them: the bare model's names, and the masks among the weights."""
    named = {name.removeprefix("transformer."): t for name, t in tensors.items() if name != "lm_head.weight"}
    for layer in range(3):
        named[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 128, 128, dtype=torch.uint8).tril()
        named[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    return named


def views(tensors):
    """Not contiguous, and parts of one storage."""
    turned = {name: t.t().contiguous().t() if t.dim() == 2 else t for name, t in tensors.items()}
    norms = [name for name in tensors if "norm" in name]
    joined = torch.stack([tensors[name] for name in norms], dim=1)
    return OrderedDict(turned | {name: joined[:, place] for place, name in enumerate(norms)})


@pytest.mark.parametrize(
    ("architecture", "variant", "change", "options"),
    [
        (OPT, "pre_norm", old_opt, {}),
        (OPT, "projected", old_opt_with_head, {}),
        (GPT2, "gelu_new", old_gpt2, {"_use_new_zipfile_serialization": False}),
        (LLAMA, "gqa", views, {}),
        (LLAMA, "tied", views, {"_use_new_zipfile_serialization": False}),
    ],
    ids=["opt", "opt_head", "gpt2", "views", "legacy_views"],
)
def test_the_same_as_safetensors(pickled_copy, checkpoint, architecture, variant, change, options):
    path = pickled_copy(architecture, variant, change, **options)
    assert torch.equal(logits_of(path), logits_of(checkpoint(architecture, variant)))
    assert sorted(os.listdir(path)) == ["config.json", "generation_config.json", PICKLED]


def test_shards_and_the_engine(pickled_copy, checkpoint):
    path = pickled_copy(OPT, "pre_norm", old_opt)
    tensors = torch.load(path / PICKLED, weights_only=True)
    (path / PICKLED).unlink()
    files = {name: f"pytorch_model-0000{1 + place % 2}-of-00002.bin" for place, name in enumerate(tensors)}
    for number, file in enumerate(sorted(set(files.values()))):
        shard = {name: tensors[name] for name in tensors if files[name] == file}
        torch.save(shard, path / file, _use_new_zipfile_serialization=bool(number))
    (path / PICKLED_INDEX).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": files}))
    assert tokens_of(path) == tokens_of(checkpoint(OPT, "pre_norm"))
    files["decoder.extra"] = files["decoder.embed_tokens.weight"]
    (path / PICKLED_INDEX).write_text(json.dumps({"weight_map": files}))
    with pytest.raises(CheckpointError, match=r"decoder\.extra in pytorch_model-0000\d-of-00002\.bin.*not found"):
        load_model(path)
    (path / PICKLED_INDEX).write_text(json.dumps({"weight_map": {"decoder.embed_tokens.weight": "../evil.bin"}}))
    with pytest.raises(CheckpointError, match=r"\.\./evil\.bin' is not the name of a \.bin file beside it"):
        load_model(path)


def test_which_format_is_read(pickled_copy, checkpoint, tmp_path):
    path = pickled_copy()
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: load_format='safetensors' does not read that"):
        load_model(path, load_format="safetensors")
    shutil.copy(checkpoint(LLAMA, "gqa") / SINGLE, path)
    (path / PICKLED).write_bytes(b"no pickle at all")
    assert torch.equal(logits_of(path), logits_of(checkpoint(LLAMA, "gqa")))  # safetensors first
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: is damaged or no file of torch\.save"):
        load_model(path, load_format="pt")
    (path / PICKLED).unlink()
    os.mkfifo(path / PICKLED)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: cannot be read: it is no plain file"):
        load_model(path, load_format="pt")
    (path / PICKLED).unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: load_format='pt' does not read that"):
        load_model(path, load_format="pt")
    with pytest.raises(QuireError, match="load_format='bitsandbytes': is one of auto, safetensors, pt"):
        LLM(str(path), load_format="bitsandbytes")


@pytest.mark.parametrize(
    ("load_format", "has_safetensors", "fetched"),
    [("auto", True, [False]), ("auto", False, [False, True]), ("safetensors", False, [False]), ("pt", True, [True])],
)
def test_the_hub_is_asked_for_bin_files_only_where_they_are_wanted(
    monkeypatch, tmp_path, load_format, has_safetensors, fetched
):
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot, asked = tmp_path / commit, []
    snapshot.mkdir()

    def download(repo_id, **options):
        asked.append(options)
        if has_safetensors:
            (snapshot / SINGLE).touch()
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_weights("facebook/opt-125m", "main", load_format) == snapshot
    assert [PICKLED in options["allow_patterns"] for options in asked] == fetched
    # A second question is about the same commit, should the branch have moved on.
    assert [options["revision"] for options in asked] == ["main", commit][: len(asked)]
    assert not any("*.bin" in options["allow_patterns"] for options in asked)
    assert not set(HUB_PICKLED) & {"*.bin", "*.pt", "*.py"}


# What is refused


class Code:
    def __reduce__(self):
        return os.system, ("touch pwned",)


@pytest.mark.parametrize("options", [{}, {"_use_new_zipfile_serialization": False}], ids=["zip", "legacy"])
def test_code_does_not_run(pickled_copy, monkeypatch, tmp_path, options):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    path = pickled_copy(change=lambda tensors: tensors | {"model.norm.weight": Code()}, **options)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: is refused: .* asks for '(posix|nt)\.system'"):
        load_model(path)
    assert not (tmp_path / "pwned").exists()


def saved(value, **options) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def repacked(compression: int = zipfile.ZIP_STORED, **replaced: bytes) -> bytes:
    """A file of torch.save whose archive was written anew."""
    buffer = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(saved({"a": torch.zeros(1 << 20)}))) as source,
        zipfile.ZipFile(buffer, "w", compression) as target,
    ):
        for entry in source.infolist():
            target.writestr(entry.filename, replaced.get(os.path.basename(entry.filename), source.read(entry)))
    return buffer.getvalue()


class Lying(pickle.Pickler):
    """A file of the old form whose storage has other sizes than it says."""

    def persistent_id(self, value):
        return ("storage", torch.FloatStorage, "0", "cpu", 10**11, None) if value is Huge else None


class Huge:
    def __reduce__(self):
        return torch._utils._rebuild_tensor_v2, (Huge, 0, (4,), (1,), False, OrderedDict())


def lying() -> bytes:
    buffer = io.BytesIO()
    for value in (0x1950A86A20F9469CFC6C, 1001, {"protocol_version": 1001, "little_endian": True, "type_sizes": {}}):
        pickle.dump(value, buffer, protocol=2)
    Lying(buffer, protocol=2).dump({"a": Huge()})
    pickle.dump(["0"], buffer, protocol=2)
    return buffer.getvalue() + (10**11).to_bytes(8, "little") + bytes(64)


@pytest.mark.parametrize(
    ("data", "told"),
    {
        "nested": (lambda: saved({"state_dict": {"a": torch.zeros(1)}, "epoch": 3}), "'state_dict' in it is a dict"),
        "not tensors": (lambda: saved({"a": torch.zeros(1), "epoch": 3}), "'epoch' in it is of type int"),
        "list": (lambda: saved([torch.zeros(1)]), "it holds a list"),
        "numbered": (lambda: saved({3: torch.zeros(1)}), "the name 3 in it is no text"),
        "complex": (lambda: saved({"a": torch.zeros(1, dtype=torch.complex64)}), "a tensor of complex64 numbers"),
        "sparse": (lambda: saved({"a": torch.eye(3).to_sparse()}), "a tensor of sparse_coo numbers"),
        "negative": (lambda: saved({"a": torch.zeros(1, dtype=torch.complex64).conj().imag}), "negative view"),
        "compressed": (lambda: repacked(zipfile.ZIP_DEFLATED), "compressed"),
        "byte order": (lambda: repacked(byteorder=b"big"), "the other byte order"),
        "empty": (lambda: b"", "EOFError"),
        "text": (lambda: b"<html>not found</html>", "no file of torch.save"),
        "cut": (lambda: saved({"a": torch.zeros(1000)})[:2000], "no file of torch.save"),
        "cut legacy": (lambda: saved({"a": torch.zeros(99)}, _use_new_zipfile_serialization=False)[:-50], "no file"),
    }.values(),
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_is_no_file_of_weights(tmp_path, data, told):
    assert told in refusal(tmp_path / "a.bin", data())


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, about the protocol
def test_no_advice_to_load_it_without_a_look(tmp_path):
    """torch gives that, in the first line of what it says of any pickle that its own reader does not take."""
    for data in (pickle.dumps({"a": os.system}, 4), pickle.dumps(os.system, 0)):
        told = refusal(tmp_path / "a.bin", data)
        assert told.startswith("is ") and "weights_only" not in told and "Re-running" not in told


def refusal(path: Path, data: bytes) -> str:
    """In this process: what the other one says of such a file, without its limits."""
    path.write_bytes(data)
    with path.open("rb") as file, path.with_suffix(".copy").open("wb") as copy, pytest.raises(Exception) as caught:
        pickled.describe(file.fileno(), pickled.Copy(copy.fileno()))
    return pickled.explain(caught.value)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, about types of its own
def test_quantized_tensors_are_refused(tmp_path):
    tensor = torch._empty_affine_quantized([4], scale=0.1, zero_point=0, dtype=torch.qint8)
    assert "a tensor of qint8 numbers" in refusal(tmp_path / "a.bin", saved({"a": tensor}))


@pytest.mark.skipif(sys.platform != "linux", reason="where a file is mapped, Linux alone says")
@pytest.mark.parametrize("regions", [lambda found: [], lambda found: [(a, b, offset + 4096) for a, b, offset in found]])
def test_where_the_system_does_not_say_where_numbers_are(tmp_path, monkeypatch, regions):
    """Nothing is taken from a wrong place: they are copied."""
    tensors = {"a": torch.arange(5000.0), "b": torch.arange(3000).view(30, 100).t(), "c": torch.empty(0)}
    (tmp_path / "a.bin").write_bytes(saved(tensors))
    found = pickled._regions

    def described() -> tuple[dict, bytes]:
        with (tmp_path / "a.bin").open("rb") as file, (tmp_path / "copy").open("wb") as copy:
            return pickled.describe(file.fileno(), pickled.Copy(copy.fileno())), (tmp_path / "copy").read_bytes()

    answer, data = described()
    assert not answer["copied"] and not data
    monkeypatch.setattr(pickled, "_regions", lambda *arguments: regions(found(*arguments)))
    answer, data = described()
    assert answer["copied"]
    dtype, shape, stride, start = answer["tensors"]["b"]
    assert (dtype, shape, stride) == ("int64", [100, 30], [1, 100])
    copied = torch.frombuffer(bytearray(data), dtype=torch.int64, count=3000, offset=start)
    assert torch.equal(copied, torch.arange(3000))


def test_sizes_that_lie_take_no_memory(pickled_copy):
    """400 GB in a file of 700 bytes; and a view that would be as large, were it made real."""
    path = pickled_copy()
    (path / PICKLED).write_bytes(lying())
    with pytest.raises(CheckpointError, match="takes more memory than its size and 512 MiB"):
        load_model(path)
    torch.save({"model.norm.weight": torch.zeros(1).expand(10**6, 10**5)}, path / PICKLED)
    tensor = Checkpoint(path).tensor("model.norm.weight")
    assert tensor.shape == (10**6, 10**5) and tensor.untyped_storage().nbytes() == 4


def test_what_the_process_says_is_not_believed(tmp_path, monkeypatch):
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(100))
    for described in (
        ["float32", [26], [1], 0],
        ["float32", [2, 2], [1, 24], 0],
        ["float32", [1], [1], 98],
        ["float32", [1], [1], -4],
        ["float32", [-1], [1], 0],
        ["float32", [2], [-1], 4],
        ["float32", [1, 1], [1], 0],
        ["complex64", [1], [1], 0],
        ["float32", [1.0], [1], 0],
        ["float32", [True], [1], 0],
    ):
        answer = {"files": [{"copied": False, "tensors": {"a": described}}]}
        monkeypatch.setattr(confined, "run", lambda *arguments, answer=answer: answer)
        with pytest.raises(CheckpointError, match="'a'"), path.open("rb") as file:
            pickled.open_pickles([path], [file])


def test_what_a_confined_process_may_do(tmp_path):
    path = tmp_path / "file"
    path.write_text("here")
    done = confined.run("confinement_probe:attempts", {"path": str(path)}, [], 60, 2 << 30)
    if sys.platform != "linux":
        done["python"].pop("memory")
    assert all(done["python"].values()), done
    if sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64"):
        assert all(done["kernel"].values()), done
    assert done["read"] == "here" and path.exists() and not Path(f"{path}.new").exists()
    assert set(done["environment"]) <= {"OMP_NUM_THREADS", "LC_CTYPE", *confined._ENVIRONMENT}


def test_a_confined_process_ends(monkeypatch):
    begun = time.monotonic()
    with pytest.raises(confined.ConfinedError, match="more than 1 s"):
        confined.run("confinement_probe:sleep", {}, [], 1, 2 << 30)
    with pytest.raises(confined.ConfinedError, match="MiB of memory"):
        confined.run("confinement_probe:sleep", {}, [], 30, 1 << 20)
    with pytest.raises(confined.ConfinedError, match="without an answer"):
        confined.run("confinement_probe:nothing", {}, [], 30, 2 << 30)
    monkeypatch.setattr(confined, "_MOST_ANSWER", 1000)
    with pytest.raises(confined.ConfinedError, match="1000 bytes"):
        confined.run("confinement_probe:talk", {"length": 5000}, [], 30, 2 << 30)
    assert time.monotonic() - begun < 60
