"""The content of a version on one rank: tensors by the names that engines use, and other files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from torch import nn

from ft_transport.checkpoint.plan import MAX_FILE_BYTES, shown_names
from ft_transport.errors import ConfigurationError, PublishError
from ft_transport.publish.adapter import CONFIG_NAME, LoRAAdapter, is_adapter, unwrapped
from ft_transport.publish.engines.engine import Kind
from ft_transport.settings import check_number
from ft_transport.state.blocks import CASTABLE
from ft_transport.wire.chunks import digest

Weights: TypeAlias = LoRAAdapter | Mapping[str, torch.Tensor]
_OF_PEFT: Final = re.compile(r"^base_model\.model\.|(?:^|\.)(?:base_layer|lora_(?:embedding_)?[AB])(?:\.|$)")
"""Matches names that PEFT gives to wrapped modules and their tensors."""
Names: TypeAlias = Callable[[str], str | None] | Mapping[str, str | None]
Files: TypeAlias = Mapping[str, Path | bytes | str | Mapping[str, Any]]
_MAX_BYTES: Final = 256 << 20
"""Maximum size of all files besides the tensors, which rank 0 reads into memory. A tokenizer has about 30 MB."""
_WEIGHT_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ckpt")
_INDEX_SUFFIX: Final = ".index.json"
Renamed: TypeAlias = dict[str, str | None]
"""The engines' names of tensors, by the trainer's names; ``None`` for a tensor that is not published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """The format in which engines get the trainer's tensors. All ranks must pass the same format.

    Attributes:
        names: Maps the trainer's tensor names to the names that engines use: a function of the name, or a table of the
            names that differ. The trainer's names lack attributes of wrappers, such as ``_orig_mod``. A tensor whose
            new name is ``None``, such as a value head, is not published.
        dtype: Dtype to which all floating-point tensors are cast: float64, float32, float16 or bfloat16. The tensors
            are cast one by one, during the copy. Integer tensors do not change. Weights with float8 tensors are
            refused, because their scales would be cast as well. With ``None``, every tensor keeps its dtype.
        max_shard_bytes: Maximum size of a file with weights. A larger tensor has a file of its own. An adapter is
            always one file.

    Raises:
        ConfigurationError: A setting is invalid.
    """

    names: Names | None = None
    dtype: torch.dtype | None = None
    max_shard_bytes: int = MAX_FILE_BYTES

    def __post_init__(self) -> None:
        names: object = self.names
        if isinstance(names, Mapping):
            for name, new in names.items():
                if not isinstance(name, str) or not (new is None or isinstance(new, str)):
                    raise ConfigurationError(
                        f"expected names to map each tensor name to a new name or None, got {name!r}: {new!r}"
                    )
            # Ranks compare the table only once, so later changes of the caller's table must not count.
            object.__setattr__(self, "names", dict(names))
        elif names is not None and not callable(names):
            raise ConfigurationError(f"expected names to be a function or a mapping, got {type(names).__name__}")
        if self.dtype is not None and self.dtype not in CASTABLE:
            allowed = ", ".join(str(dtype) for dtype in CASTABLE)
            raise ConfigurationError(f"expected one of {allowed} as dtype, got {self.dtype!r}")
        number = check_number("max_shard_bytes", self.max_shard_bytes, at_least=1)
        object.__setattr__(self, "max_shard_bytes", number)

    def stated(self) -> dict[str, object]:
        """Return the settings that ranks compare, by name. If ``names`` is a function, its code is not compared."""
        names: object = self.names
        if isinstance(names, Mapping):
            names = f"a table with the digest {digest(repr(sorted(names.items())).encode()):x}"
        elif names is not None:
            names = "a function"
        return {"names": names, "dtype": self.dtype, "max_shard_bytes": self.max_shard_bytes}


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """The content of a version on this rank.

    Attributes:
        kind: Whether the version is an adapter or weights.
        tensors: Whole tensors, or DTensors of which each rank has a part, by the engines' names.
        files: Content of the files that belong to this kind of version, such as ``adapter_config.json``, by file name.
            All ranks have the same files.
        renamed: The name that engines use for each of the trainer's tensors, by the trainer's name. Empty if
            ``WeightFormat.names`` is ``None``.
    """

    kind: Kind
    tensors: Mapping[str, object]
    files: Mapping[str, bytes] = field(default_factory=dict)
    renamed: Renamed = field(default_factory=dict)


def content_of(weights: Weights | Callable[[], Weights], weight_format: WeightFormat) -> Content:
    """Check the caller's weights, and return the content that this rank publishes.

    Raises:
        PublishError: The weights contain nothing that an engine can use, or do not fit the format.
        ConfigurationError: The adapter cannot be converted into a plain adapter.
    """
    # A module is also callable.
    value: object = weights() if callable(weights) and not isinstance(weights, nn.Module) else weights
    if isinstance(value, LoRAAdapter):
        value = value.plain(weight_format.dtype)
        tensors, renamed = _formatted(value.tensors, weight_format)
        if renamed and not is_adapter(tensors):
            other = next(name for name in tensors if not is_adapter([name]))
            raise PublishError("expected the name of a LoRA matrix for an adapter's tensor, got another", path=other)
        files = {CONFIG_NAME: value.encoded_config()}
        return Content(kind="adapter", tensors=tensors, files=files, renamed=renamed)
    if isinstance(value, nn.Module):
        raise PublishError(
            f"expected a LoRAAdapter or weights by name, got a module, {type(value).__name__}; pass its state_dict(), "
            "or LoRAAdapter.of(module, config)"
        )
    if not isinstance(value, Mapping):
        raise PublishError(f"expected a LoRAAdapter or weights by name, got {type(value).__name__}")
    if not value:
        raise PublishError("expected a LoRAAdapter or weights by name, got no weights")
    if is_adapter(value):
        raise PublishError(
            "expected all weights of a model, or a LoRAAdapter, got only LoRA's matrices, which are not a whole model; "
            "pass LoRAAdapter(tensors, config), or LoRAAdapter.of(module, config)",
            path=next(iter(value)),
        )
    tensors, renamed = _formatted(unwrapped(value), weight_format)
    for name in tensors:
        if _OF_PEFT.search(name):
            raise PublishError(
                "expected the tensor names of a model that engines know, got those of a PEFT model, whose adapter "
                "engines would ignore; pass LoRAAdapter.of(model, config), or the state_dict() of a copy with the "
                "adapter merged (merge_and_unload), or rename all tensors with WeightFormat(names=...)",
                path=name,
            )
    return Content(kind="weights", tensors=tensors, renamed=renamed)


def _formatted(tensors: Mapping[Any, object], weight_format: WeightFormat) -> tuple[Mapping[str, object], Renamed]:
    renamed: Renamed = {}
    if weight_format.names is not None:
        renamed = engine_names(list(tensors), weight_format.names)
        tensors = {new: tensors[name] for name, new in renamed.items() if new is not None}
        if not tensors:
            raise PublishError(f"expected a new name for at least one of {len(renamed)} tensors, got None for all")
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not name or not _is_text(name):
            raise PublishError(
                f"expected the name of each tensor to be a non-empty str without lone surrogates, got {name!r}"
            )
        dtype = getattr(tensor, "dtype", None)
        is_cast = weight_format.dtype is not None and isinstance(dtype, torch.dtype) and dtype.is_floating_point
        if is_cast and dtype not in CASTABLE:
            raise PublishError(
                f"expected tensors that can be cast to {weight_format.dtype}, got {dtype}, whose scales would be cast "
                "as well; publish quantized weights with dtype=None",
                path=name,
            )
    return tensors, renamed


def engine_names(trained: Sequence[str], names: Names) -> Renamed:
    """Return the names that engines use for this rank's tensors.

    Args:
        trained: The names that the trainer uses for the tensors.
        names: Function or table, as in `WeightFormat`.

    Raises:
        PublishError: Two tensors have the same new name, or a new name is not a str.
    """
    renamed: Renamed = {}
    for name in trained:
        new: object = names.get(name, name) if isinstance(names, Mapping) else names(name)
        if new is not None and (not isinstance(new, str) or not new):
            raise PublishError(f"expected a name, or None to leave the tensor out, got {new!r}", path=name)
        renamed[name] = new
    _check_distinct(renamed)
    return renamed


def check_engine_names(by_rank: Sequence[Renamed], names: Names) -> None:
    """Check the engines' names of all ranks together, because ranks may have different tensors.

    Args:
        by_rank: The results of `engine_names`, by rank.
        names: Function or table, as in `WeightFormat`.

    Raises:
        PublishError: The new name of a tensor differs between ranks, two tensors have the same new name, or the table
            has a tensor that no rank has.
    """
    merged: Renamed = {}
    for rank, renamed in enumerate(by_rank):
        for name, new in renamed.items():
            if merged.setdefault(name, new) != new:
                raise PublishError(
                    f"expected the same name on all ranks, got {new!r} on rank {rank} and {merged[name]!r} on another",
                    path=name,
                )
    _check_distinct(merged)
    unknown = sorted(names.keys() - merged.keys()) if isinstance(names, Mapping) else []
    if unknown:
        raise PublishError(
            f"expected only tensors of the trainer in the table of names, but no rank has {shown_names(unknown)}",
            path=unknown[0],
        )


def _check_distinct(renamed: Renamed) -> None:
    taken: dict[str, str] = {}
    for name, new in renamed.items():
        if new is not None and taken.setdefault(new, name) != name:
            raise PublishError(f"expected one tensor with the new name {new}, got {taken[new]} and {name}", path=name)


def model_files(directory: str | os.PathLike[str]) -> dict[str, Path]:
    """Return the files in a model's directory except the weights, for the argument ``files`` of ``Publisher.publish``.

    These are the configuration, the tokenizer and code. Subdirectories and hidden files are left out.

    Args:
        directory: Directory of a model that was downloaded, or that ``save_pretrained`` wrote.

    Raises:
        PublishError: The directory has no ``config.json``, so it is not a model's directory.
    """
    root = Path(directory)
    if not (root / "config.json").is_file():
        raise PublishError("expected the directory of a model, got one without config.json", path=str(root))
    return {
        path.name: path
        for path in sorted(root.iterdir())
        if path.is_file()
        and not path.name.startswith(".")
        and not path.name.endswith((*_WEIGHT_SUFFIXES, _INDEX_SUFFIX))
        and path.name != CONFIG_NAME
    }


def read_files(files: Files) -> dict[str, bytes]:
    """Return the bytes of each of the caller's files, by name.

    Raises:
        PublishError: The name or the content of a file is invalid; ``path`` names the file.
    """
    given: object = files
    if not isinstance(given, Mapping):
        raise PublishError(f"expected a mapping from names to files, got {type(given).__name__}")
    read: dict[str, bytes] = {}
    num_bytes = 0
    for name, content in given.items():
        _check_file_name(name)
        size = content.stat().st_size if isinstance(content, Path) and content.is_file() else 0
        _check_size(num_bytes + size)
        read[name] = _read(name, content)
        num_bytes += len(read[name])
        _check_size(num_bytes)
    return read


def _check_file_name(name: object) -> None:
    if (
        not isinstance(name, str)
        or not name
        or name.startswith(".")
        or any(character in name for character in "/\\\0")
        or len(name.encode(errors="replace")) > 255
        or not _is_text(name)
    ):
        raise PublishError(
            "expected the name of a file in the version's directory, without separators and not beginning with a dot, "
            f"got {name!r}"
        )
    if name == CONFIG_NAME or name.endswith((".safetensors", f".safetensors{_INDEX_SUFFIX}")):
        raise PublishError("expected another file name, this one is reserved for tensors and adapters", path=name)


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
                raise PublishError(f"expected a file to copy, found none at {content}", path=name)
            return content.read_bytes()
        case str():
            if os.path.isfile(content):
                raise PublishError(
                    f"expected the text of the file, got the path of a file; pass Path({content!r})", path=name
                )
            if not _is_text(content):
                raise PublishError("expected text, got characters that UTF-8 cannot encode; pass bytes", path=name)
            return content.encode()
        case Mapping():
            try:
                return json.dumps(dict(content), indent=2).encode()
            except (TypeError, ValueError) as error:
                raise PublishError(f"expected a mapping that JSON can represent: {error}", path=name) from error
        case _:
            raise PublishError(f"expected a Path, bytes, a str or a mapping, got {type(content).__name__}", path=name)
