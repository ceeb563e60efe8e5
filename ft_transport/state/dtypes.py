"""Torch dtypes and their safetensors names."""

from __future__ import annotations

from typing import Final

import torch

SAFETENSORS_NAMES: Final[dict[torch.dtype, str]] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""The dtypes that every safetensors reader supports. Other dtypes are stored as ``U8``; the tree has their name."""

DTYPES_BY_SAFETENSORS_NAME: Final = {name: dtype for dtype, name in SAFETENSORS_NAMES.items()}

DTYPES_BY_NAME: Final[dict[str, torch.dtype]] = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
"""Every dtype of the installed torch by its canonical name (``float32``, never ``float``)."""

SAFETENSORS_FILE_NAMES: Final = SAFETENSORS_NAMES | {
    DTYPES_BY_NAME[name]: file_name
    for name, file_name in {
        "float8_e8m0fnu": "F8_E8M0",
        "float8_e4m3fnuz": "F8_E4M3FNUZ",
        "float8_e5m2fnuz": "F8_E5M2FNUZ",
        "float4_e2m1fn_x2": "F4",
    }.items()
    if name in DTYPES_BY_NAME
}
"""The dtypes that safetensors 0.8 has names for. Shapes in its files count ``F4`` in half bytes."""

QUANTIZED: Final = {
    torch.qint8: torch.int8,
    torch.quint8: torch.uint8,
    torch.qint32: torch.int32,
}
"""The integer dtype that ``int_repr`` returns for each quantized dtype."""

WHOLE_BYTE_DTYPES_BY_NAME: Final = {
    name: dtype for name, dtype in DTYPES_BY_NAME.items() if not name.startswith(("qint", "quint"))
}
"""All dtypes except quantized ones, whose elements need a scale in addition to their bytes."""

_CARRIERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def name_of(dtype: torch.dtype) -> str:
    """Return the canonical name of a dtype, such as ``float32``."""
    return str(dtype).removeprefix("torch.")


def torch_name_of(safetensors_name: str) -> str:
    """Return torch's name of a safetensors dtype; the safetensors name if this torch lacks the dtype."""
    dtype = DTYPES_BY_SAFETENSORS_NAME.get(safetensors_name)
    return name_of(dtype) if dtype is not None else safetensors_name


def carrier_of(dtype: torch.dtype) -> torch.dtype:
    """Return a dtype of the same item size that torch can copy bit for bit. Many small dtypes have no copy kernel."""
    return _CARRIERS[dtype.itemsize]


def overlaps_itself(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return whether two elements of a tensor may share memory, as in an expanded dimension."""
    reach = 0
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size > 1):
        if step <= reach:
            return 0 not in shape
        reach += (size - 1) * step
    return False


def is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return whether the elements fill one block of memory without holes, in any order of the dimensions.

    Expanded dimensions (stride 0) count as one element. A receiver accepts only dense layouts: so a tensor never needs
    more memory than the bytes that were sent for it.
    """
    expected = 1
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size != 1 and step != 0):
        if step != expected:
            return False
        expected *= size
    return True
