"""Files of records, as ``TransportSettings.records`` has them written."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ft_transport.errors import RecordError
from ft_transport.runtime.regular_files import read_regular
from ft_transport.telemetry.record import Record, decode_record

_MAX_BYTES: Final = 256 << 20


def read_records(paths: Sequence[Path]) -> list[Record]:
    """The records of all files, the oldest first.

    Raises:
        RecordError: A file cannot be read, or a line of it is no record. A last line without an end is left out: its
            process may have been killed while it wrote.
    """
    return sorted(itertools.chain.from_iterable(map(_read, paths)), key=lambda record: record.begun_unix_s)


def _read(path: Path) -> list[Record]:
    try:
        content = read_regular(path, max_bytes=_MAX_BYTES)
    except OSError as error:
        raise RecordError(
            f"expected a file of records at {path}: {error}; they are written where FT_TRANSPORT_RECORDS says"
        ) from error
    records = []
    *lines, _unended = content.split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            records.append(decode_record(line))
        except RecordError as error:
            raise RecordError(f"{path}, line {number}: {error}") from error
    return records
