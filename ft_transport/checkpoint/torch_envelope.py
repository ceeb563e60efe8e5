"""The bytes that ``torch.save`` puts around a tensor, so that ``dcp.load`` finds each tensor of a file by itself.

DCP's reader (torch/distributed/checkpoint/filesystem.py, ``FileSystemReader.read_data``) gives each slice of a file to
``torch.load``. What ``torch.save`` writes depends on dtype and shape alone, but for the data in the middle, as long as
it computes no CRC-32 of it: so it is called once for each dtype and shape, on a tensor of zeros, and its result is cut
where the data belongs. The data is then written as it lies, at the speed of a bare write. With the checksum, which
nothing reads, torch writes 0.3 GB/s where the disk takes 1.7; the digests of the manifest cover every byte.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from ft_transport.errors import CheckpointError

_MAX_FRAMES: Final = 1 << 16
_CAPTURED_BYTES: Final = 1 << 20
"""Data of this length is written in a call of its own, which no other part of a frame comes near."""


@dataclass(frozen=True, slots=True)
class TorchEnvelope:
    """What stands before and behind the data of a tensor.

    Attributes:
        before: Up to the data, which it leaves aligned as torch wants it if the frame begins so.
        after: Behind it.
    """

    before: bytes
    after: bytes

    @property
    def num_bytes(self) -> int:
        """Length of both."""
        return len(self.before) + len(self.after)


class EnvelopeTable:
    """Frames by dtype and shape. Not thread-safe; turns torch's checksums off in this process."""

    def __init__(self) -> None:
        torch.serialization.set_crc32_options(False)
        self._frames: dict[tuple[torch.dtype, tuple[int, ...]], TorchEnvelope] = {}

    def frame_of(self, dtype: torch.dtype, shape: tuple[int, ...]) -> TorchEnvelope:
        """The frame of a row-major tensor.

        Raises:
            CheckpointError: This torch writes something else than was expected.
        """
        key = (dtype, shape)
        frame = self._frames.get(key)
        if frame is None:
            if len(self._frames) >= _MAX_FRAMES:
                self._frames.clear()
            frame = self._frames[key] = _envelope_of(dtype, shape)
        return frame


def saved(value: object) -> bytes:
    """What ``torch.save`` makes of a value that is no tensor, which DCP gives to ``torch.load``."""
    buffer = io.BytesIO()
    torch.save(value, buffer)  # noqa: TID251 # DCP's format; what we read ourselves is never unpickled
    return buffer.getvalue()


class _Capture:
    """A file that keeps what is written to it, but for what is as long as the data."""

    def __init__(self, data_bytes: int) -> None:
        self._data_bytes = data_bytes
        self.parts: list[bytes] = []
        self.num_data_writes = 0

    def write(self, data: memoryview) -> int:
        if len(data) == self._data_bytes:
            self.num_data_writes += 1
            self.parts.append(b"")
            self.data_at = len(self.parts)
        else:
            self.parts.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        """Nothing is held back."""


def _envelope_of(dtype: torch.dtype, shape: tuple[int, ...]) -> TorchEnvelope:
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    if num_bytes < _CAPTURED_BYTES:
        template = (
            torch.zeros(num_bytes, dtype=torch.uint8).view(dtype).view(shape)
            if num_bytes
            else torch.empty(shape, dtype=dtype)
        )
        whole = saved(template)
        reader: Any = torch._C.PyTorchFileReader(io.BytesIO(whole))
        start = reader.get_record_offset("data/0")
        return TorchEnvelope(whole[:start], whole[start + num_bytes :])
    # Memory that is never touched, and given back at once.
    template = torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
    capture = _Capture(num_bytes)
    torch.save(template, capture)  # type: ignore[arg-type] # noqa: TID251 # as above
    if capture.num_data_writes != 1:
        raise CheckpointError(f"expected torch.save to write the data of {dtype}{list(shape)} in one piece")
    return TorchEnvelope(b"".join(capture.parts[: capture.data_at]), b"".join(capture.parts[capture.data_at :]))
