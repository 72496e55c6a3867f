"""The command line of `quire serve` as people write it who know vLLM."""

from __future__ import annotations

import pytest

import quire
from quire.server import launch as serve
from tests.cli.commands import Served

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_model_by_its_place_or_by_its_flag(served: Served) -> None:
    assert "model" not in served().settings
    assert served("A").settings["model"] == served("--model", "A").settings["model"] == "A"
    assert served("A", "--model", "A").settings["model"] == "A"
    assert "give one of them" in served.complaint("A", "--model", "B")
    # Both are flags, which come first.
    assert served("A", yaml="model: B").settings["model"] == "A"
    assert served("A", QUIRE_MODEL="B").settings["model"] == "A"
    assert served(yaml="model: B", QUIRE_MODEL="C").settings["model"] == "C"


@pytest.mark.parametrize(
    "args",
    [
        ("--lora-modules", "a=x", "b=y", "MODEL"),
        ("--lora-modules", "a=x", "b=y", "--port", "1", "MODEL"),
        ("MODEL", "--lora-modules", "a=x", "b=y"),
        ("--lora-modules", "a=x", "--lora-modules", "b=y", "MODEL"),
        ("--lora-modules", '{"name": "a", "path": "x"}', '{"name": "b", "path": "y"}', "MODEL"),
        ("--lora-modules", '{"name": "a", "path": "x"}', "b=y", "MODEL"),
    ],
)
def test_lora_modules_as_vllm_takes_them(served: Served, args: tuple[str, ...]) -> None:
    task = served(*args)
    assert task.settings["model"] == "MODEL"
    assert [serve.Module.parse(text) for text in task.settings["lora_modules"]] == [
        serve.Module("a", "x"),
        serve.Module("b", "y"),
    ]


def test_a_module_and_what_it_belongs_to() -> None:
    text = '{"name": "a", "path": "x", "base_model_name": "m"}'
    assert serve.Module.parse(text) == serve.Module("a", "x", "m")
    assert serve.Module.parse("a=x=y") == serve.Module("a", "x=y")
    for wrong in ("a", "a=", "=x", "{", '{"name": "a"}', '{"name": "a", "path": "x", "rank": 5}', "{}"):
        with pytest.raises(quire.QuireError, match="--lora-modules"):
            serve.Module.parse(wrong)


@pytest.mark.parametrize("text", [".=x", "..=x", "a/..=x", " =x", '{"name": "a\\nb", "path": "x"}'])
def test_a_module_is_called_as_adapters_may_be(text: str) -> None:
    with pytest.raises(quire.QuireError, match=r"--lora-modules: the name .*give it another name"):
        serve.Module.parse(text)


def test_lists_in_variables_and_as_json(served: Served) -> None:
    assert served(QUIRE_API_KEY="one two").settings["api_key"] == ["one", "two"]
    assert served("--api-key", '["one", "two"]', "--api-key", "three").settings["api_key"] == ["one", "two", "three"]
    assert served(QUIRE_LORA_MODULES="a=x b=y").settings["lora_modules"] == ["a=x", "b=y"]
    said = served.complaint("--api-key", "[secret")
    assert "--api-key" in said and "secret" not in said


def test_underscores_for_hyphens(served: Served) -> None:
    task = served("--max_num_seqs", "3", "--no_enable_prefix_caching", "--max_model_len=64")
    assert (task.settings["max_num_seqs"], task.settings["enable_prefix_caching"]) == (3, False)
    assert task.settings["max_model_len"] == 64
    # Values stay as they are, also those that look like options.
    assert served("--api_key", "--a_b").settings["api_key"] == ["--a_b"]


@pytest.mark.parametrize(
    "args",
    [
        ("MODEL", "--served-model-name", "a", "b", "c"),
        ("--served-model-name", "a", "b", "c", "--port", "1", "MODEL"),
        ("--served-model-name", "a", "b", "c", "--model", "MODEL"),
        ("--served_model_name", "a", "b", "--served-model-name=c", "--", "MODEL"),
    ],
)
def test_several_names_after_one_option(served: Served, args: tuple[str, ...]) -> None:
    task = served(*args)
    assert (task.settings["model"], task.settings["served_model_name"]) == ("MODEL", ["a", "b", "c"])


def test_the_model_behind_one_value(served: Served) -> None:
    task = served("--served-model-name", "a", "MODEL")
    assert (task.settings["model"], task.settings["served_model_name"]) == ("MODEL", ["a"])
    assert served("--served-model-name", "a").settings["served_model_name"] == ["a"]


def test_what_could_be_a_name_or_the_model(served: Served) -> None:
    assert "put the model first" in served.complaint("--served-model-name", "a", "b", "c")
    assert "repeat the option" in served.complaint("--served-model-name", "a", "b", "c")
    assert "put the model first" in served.complaint("--served-model-name", "a", "b", yaml="model: M")
    assert "put the model first" in served.complaint("--served-model-name", "a", "b", QUIRE_MODEL="M")
    assert "put the model first" in served.complaint("--served-model-name", "a", "b", "--api-key", "c", "d")


def test_switches_with_a_value(served: Served) -> None:
    assert served("--enable-prefix-caching=False").settings["enable_prefix_caching"] is False
    assert served("--enable-lora", "true", "MODEL").settings == {"enable_lora": True, "model": "MODEL"}
    assert served("--no-enable-lora=false").settings["enable_lora"] is True
    assert served("--disable-access-log=true").settings["disable_access_log"] is True
    assert served("--disable-uvicorn-access-log").settings["disable_access_log"] is True
    assert "disable_access_log" not in served("--disable-access-log=false").settings
    assert "neither true nor false" in served.complaint("--enable-lora=perhaps")


def test_limits_and_objects_in_vllms_forms(served: Served) -> None:
    for args in (("--limit-mm-per-prompt", "image=4"), ("--limit-mm-per-prompt", '{"image": 4}'),
                 ("--limit_mm_per_prompt.image", "4"), ("--limit-mm-per-prompt.image=4",)):  # fmt: skip
        assert served(*args).settings["limit_mm_per_prompt"] == {"image": 4}
    assert served(yaml="limit-mm-per-prompt: image=4").settings["limit_mm_per_prompt"] == {"image": 4}
    task = served("--mm-processor-kwargs.size.shortest_edge", "32", "--mm-processor-kwargs.do_resize", "true")
    assert task.settings["mm_processor_kwargs"] == {"size": {"shortest_edge": 32}, "do_resize": True}
    assert "give one of them" in served.complaint(
        "--limit-mm-per-prompt", "image=3", "--limit-mm-per-prompt.image", "4"
    )
    assert "image=3,image=4" in served.complaint("--limit-mm-per-prompt", "image=3,image=4")
    assert "image=few" in served.complaint("--limit-mm-per-prompt", "image=few")
