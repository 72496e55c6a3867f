"""The package of docs/logits-processors.md: installed with pip, found by its name, compared with transformers."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import NoRepeatNGramLogitsProcessor

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[2]
ROOT = TESTS.parent
PACKAGE = TESTS / "logits_package"
PAGE = (ROOT / "docs" / "logits-processors.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(?:python|toml)\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as the page shows it, built and installed by pip without a network."""
    source = tmp_path_factory.mktemp("source") / "package"
    shutil.copytree(PACKAGE, source, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    target = tmp_path_factory.mktemp("site")
    options = ["--quiet", "--no-index", "--no-build-isolation", "--no-deps", "--target", str(target)]
    command = [sys.executable, "-m", "pip", "install", *options, str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target


def run(code: str, *paths: Path) -> str:
    """What a fresh interpreter prints, with `paths` in front of its own."""
    search = os.pathsep.join([*map(str, paths), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": search, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=TESTS)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_page_shows_the_very_package() -> None:
    assert (PACKAGE / "pyproject.toml").read_text() in BLOCKS
    assert (PACKAGE / "src" / "quire_no_repeat" / "__init__.py").read_text() in BLOCKS


def test_the_page_works_as_it_stands(installed: Path) -> None:
    """Its use, and its second example; each block as it was copied."""
    (use,) = (block for block in BLOCKS if block.startswith("from quire import LLM, SamplingParams"))
    (mask,) = (block for block in BLOCKS if block.startswith("from quire import TokenMask"))
    more = (
        "print('----')\n"
        "llm = LLM(logits_processors=[OnlyThese, 'quire_no_repeat:NoRepeat'])\n"
        "given = {'only': ' the', 'no_repeat_ngram_size': 40}\n"
        "params = SamplingParams(temperature=0, max_tokens=8, extra_args=given)\n"
        "print(llm.generate('Once', params, use_tqdm=False)[0].outputs[0].text)\n"
        "print([*__import__('sys').modules].count('quire_no_repeat'))"
    )
    text, other = run(use + mask + more, installed).split("----\n")
    assert len(text.split()) > 10
    words, loaded = other.rsplit("\n", 1)
    assert set(words.split()) <= {"the"} and words.split() and loaded == "1"


def test_what_is_not_named_is_not_imported(installed: Path) -> None:
    code = (
        "import sys; from quire import LLM, RequestError, SamplingParams\n"
        "llm = LLM()\n"
        "try:\n"
        "    llm.generate('Once', SamplingParams(extra_args={'no_repeat_ngram_size': 2}), use_tqdm=False)\n"
        "except RequestError as error:\n"
        "    print(error)\n"
        "print('quire_no_repeat' in sys.modules)"
    )
    error, loaded = run(code, installed).rsplit("\n", 1)
    assert "no logits processor takes 'no_repeat_ngram_size'" in error and "installed: no-repeat" in error
    assert loaded == "False"


def test_its_tokens_are_those_of_transformers(installed: Path, tiny_path: Path) -> None:
    code = (
        "import json; from quire import LLM, SamplingParams\n"
        f"llm = LLM({str(tiny_path)!r}, num_gpu_blocks_override=64, debug=True, logits_processors=['no-repeat'])\n"
        "prompts = [{'prompt_token_ids': ids} for ids in ([5, 9, 5, 11, 9, 5], [7], [300, 300])]\n"
        "def ask(size):\n"
        "    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True,\n"
        "                            extra_args={'no_repeat_ngram_size': size} if size else None)\n"
        "    return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]\n"
        "print(json.dumps([ask(size) for size in (0, 1, 2, 3)]))"
    )
    answers: Any = json.loads(run(code, installed).splitlines()[-1])
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(tiny_path).eval()
    changed = 0
    for size, found in enumerate(answers):
        for prompt, ours in zip(([5, 9, 5, 11, 9, 5], [7], [300, 300]), found, strict=True):
            ids = torch.tensor([prompt])
            for _ in range(40):
                with torch.inference_mode():
                    scores = model(ids).logits[:, -1].float()
                if size:
                    scores = NoRepeatNGramLogitsProcessor(size)(ids, scores)
                ids = torch.cat([ids, scores.argmax(-1, keepdim=True)], dim=1)
            assert ours == ids[0, len(prompt) :].tolist()
        changed += found != answers[0]
    assert changed >= 1
