"""YAML that says everything once: a key given twice is refused, where PyYAML silently takes the last.

Files are read up to a bound, so that a wrong path, a device for instance, ends in an error and not in full memory.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import yaml

_MOST_BITS = 1024
MOST_FILE_BYTES = 4 << 20


class _UniqueKeys(yaml.SafeLoader):
    """SafeLoader that refuses duplicate keys. A key may still override what a merge (``<<``) brings."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue
            if key_node.value in seen:
                raise yaml.composer.ComposerError(
                    "while reading a mapping",
                    node.start_mark,
                    f"found {key_node.value!r} twice: keep one",
                    key_node.start_mark,
                )
            seen.add(key_node.value)
        return node

    def construct_yaml_int(self, node: Any) -> int:
        value = super().construct_yaml_int(node)
        if value.bit_length() > _MOST_BITS:  # nothing here is that large, and Python cannot even print all of them
            raise yaml.constructor.ConstructorError(
                None, None, f"found a whole number of {value.bit_length()} bits: put it in quotes", node.start_mark
            )
        return value


_UniqueKeys.add_constructor("tag:yaml.org,2002:int", _UniqueKeys.construct_yaml_int)


def read_text(path: Path) -> str:
    """The text of a file of at most 4 MiB in UTF-8. Raises OSError, also for a longer one, and UnicodeDecodeError."""
    with path.open("rb") as file:
        content = file.read(MOST_FILE_BYTES + 1)
    if len(content) > MOST_FILE_BYTES:
        raise OSError(errno.EFBIG, f"expected a file of at most {MOST_FILE_BYTES} bytes, this one has more", str(path))
    return content.decode("utf-8")


def load_yaml(text: str) -> Any:
    """The one document in ``text``. Raises yaml.YAMLError, also for a key that a mapping states twice."""
    return yaml.load(text, _UniqueKeys)
