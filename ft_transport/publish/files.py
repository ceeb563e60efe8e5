"""The files beside the weights in a model's directory, such as configuration and tokenizer."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

from ft_transport.errors import PublishError
from ft_transport.publish.peft_config import CONFIG_NAME

Files: TypeAlias = Mapping[str, Path | bytes | str | Mapping[str, Any]]

_MAX_BYTES: Final = 256 << 20
"""Limit of all files together; a tokenizer has some 30 MB, and rank 0 holds them in memory."""
_MAX_NAME_BYTES: Final = 255
_WEIGHT_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ckpt")
_INDEX_SUFFIX: Final = ".index.json"


def model_files(directory: str | os.PathLike[str]) -> dict[str, Path]:
    """Return the files beside the weights in a model's directory, for ``Publisher.publish``.

    They are the configuration, the tokenizer and code.

    Args:
        directory: The output of ``save_pretrained``, or a downloaded model. Subdirectories are left out.

    Raises:
        PublishError: The directory has no ``config.json``, so it is not a model's directory.
    """
    root = Path(directory)
    if not (root / "config.json").is_file():
        raise PublishError("expected the directory of a model, with a config.json, found none", path=str(root))
    return {
        path.name: path
        for path in sorted(root.iterdir())
        if path.is_file()
        and not path.name.startswith(".")
        and not path.name.endswith((*_WEIGHT_SUFFIXES, _INDEX_SUFFIX))
        and path.name != CONFIG_NAME
    }


def read_files(files: Files) -> dict[str, bytes]:
    """Return the content of each file, by name.

    Raises:
        PublishError: A name or a content is invalid; names the file.
    """
    given: object = files
    if not isinstance(given, Mapping):
        raise PublishError(f"expected files by name, got {type(given).__name__}")
    read: dict[str, bytes] = {}
    num_bytes = 0
    for name, content in given.items():
        _check_name(name)
        size = content.stat().st_size if isinstance(content, Path) and content.is_file() else 0
        _check_size(num_bytes + size)
        read[name] = _read(name, content)
        num_bytes += len(read[name])
        _check_size(num_bytes)
    return read


def _check_name(name: object) -> None:
    if (
        not isinstance(name, str)
        or not name
        or name.startswith(".")
        or any(character in name for character in "/\\\0")
        or len(name.encode(errors="replace")) > _MAX_NAME_BYTES
        or not _is_text(name)
    ):
        raise PublishError(
            "expected the name of a file in the version's directory, without separators and not beginning with a dot, "
            f"got {name!r}"
        )
    if name == CONFIG_NAME or name.endswith((".safetensors", f".safetensors{_INDEX_SUFFIX}")):
        raise PublishError("expected a name that the version does not use for its tensors", path=name)


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_size(num_bytes: int) -> None:
    if num_bytes > _MAX_BYTES:
        raise PublishError(f"expected files of at most {_MAX_BYTES} bytes beside the weights, got at least {num_bytes}")


def _read(name: str, content: object) -> bytes:
    match content:
        case bytes():
            return content
        case Path():
            if not content.is_file():
                raise PublishError(f"expected a file to copy, there is none at {content}", path=name)
            return content.read_bytes()
        case str():
            if os.path.isfile(content):
                raise PublishError(
                    f"expected the text of the file, got the path of one, {content}; pass Path({content!r})", path=name
                )
            if not _is_text(content):
                raise PublishError("expected text, got characters that UTF-8 has not; pass bytes", path=name)
            return content.encode()
        case Mapping():
            try:
                return json.dumps(dict(content), indent=2).encode()
            except (TypeError, ValueError) as error:
                raise PublishError(f"expected a mapping that JSON can say: {error}", path=name) from error
        case _:
            raise PublishError(f"expected a Path, bytes, a str or a mapping, got {type(content).__name__}", path=name)
