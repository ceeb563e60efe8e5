"""Files of records, written according to ``TransportSettings.records``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from ft_transport.cli.contents import NothingThereError
from ft_transport.errors import RecordError
from ft_transport.runtime.regular_files import read_regular
from ft_transport.telemetry.record import Record, decode_record

_MAX_BYTES: Final = 256 << 20


def read_records(paths: Sequence[Path], *, on_missing: Callable[[str], None]) -> list[Record]:
    """Return the records of all files, the oldest first.

    Args:
        paths: The files. A replica that never recovered has no file.
        on_missing: Called for each unreadable file if another one is readable.

    Raises:
        NothingThereError: No file is readable.
        RecordError: A line is not a record. An unfinished last line after others is left out: its process may have been
            killed during the write.
    """
    records, missing = list[Record](), list[str]()
    for path in paths:
        try:
            content = read_regular(path, max_bytes=_MAX_BYTES)
        except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
            missing.append(f"expected a file of records at {path}: {getattr(error, 'strerror', None) or error}")
        else:
            records += _decode(path, content)
    if len(missing) == len(paths):
        raise NothingThereError(f"{'; '.join(missing)}; they are written where FT_TRANSPORT_RECORDS says")
    for each in missing:
        on_missing(each)
    return sorted(records, key=lambda record: record.begun_unix_s)


def _decode(path: Path, content: bytes) -> list[Record]:
    records = list[Record]()
    *lines, unended = content.split(b"\n")
    for number, line in enumerate([*lines, unended] if unended else lines, 1):
        try:
            records.append(decode_record(line))
        except RecordError as error:
            if records and number > len(lines):
                break
            raise RecordError(f"{path}, line {number}: {error}") from error
    return records
