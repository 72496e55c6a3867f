"""Reading a YAML file as strictly as JSON: nothing in it stands for two things, and nothing has no end."""

from __future__ import annotations

from typing import Any

_MOST, _DEEPEST = 100_000, 100  # values; mappings and lists within each other


def read_yaml(path: str) -> Any:
    """What is in a YAML file; an empty one is {}. Raises OSError, and ValueError for what is no YAML, for a name that
    is there twice in a mapping, of which YAML's own reader takes the last without a word, and for what lies in itself.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            names = set()
            for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
                if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in names:
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is there twice", key.start_mark)
                names.add((key.tag, str(key.value)))
            return super().construct_mapping(node, deep)

    try:
        with open(path, encoding="utf-8") as file:
            given = yaml.load(file, Loader)
        _check_size(given)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return {} if given is None else given


def _check_size(given: Any) -> None:
    """Aliases make much of little, or something that has no end. Raises ValueError."""
    held, count = [(given, 0)], 0
    while held:
        value, depth = held.pop()
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        count += len(inner)
        if count > _MOST or depth > _DEEPEST:
            raise ValueError("it holds too much, is nested too deeply, or lies in itself")
        held += [(one, depth + 1) for one in inner]
