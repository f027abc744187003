"""The dtypes that torch can save, by torch's names: item sizes and storage classes.

A newer dtype is unknown: its tensors can be listed, but not divided into elements.
"""

from ckpt_patches.errors import UserError

# Bytes per element. https://pytorch.org/docs/stable/tensor_attributes.html#torch-dtype
ITEM_SIZE = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,  # an element is two numbers
    "complex128": 16,
    "complex64": 8,
    "complex32": 4,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
    "bits16": 2,
    "bits8": 1,
    "bits4x2": 1,
    "bits2x4": 1,
    "bits1x8": 1,
    "qint32": 4,
    "qint8": 1,
    "quint8": 1,
    "quint4x2": 1,
    "quint2x4": 1,
}
FLOATS = ("float32", "bfloat16", "float16")  # which Adam's states and trained weights mostly are
# Elements per byte of packed dtypes. Their storages count bytes.
PACKED = {"quint4x2": 2, "quint2x4": 4}

# torch's storage classes and their dtypes. Other dtypes have untyped storages.
STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "QInt32Storage": "qint32",
    "QInt8Storage": "qint8",
    "QUInt8Storage": "quint8",
    "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
}
UNTYPED = "uint8"  # an untyped storage counts bytes


class UnknownDtypeError(UserError):
    """A dtype that is not on the list."""


def item_size(dtype: str) -> int:
    """Bytes per element; for a packed dtype, the bytes that elements share.

    Raises:
        UnknownDtypeError: the dtype is not known.
    """
    if dtype not in ITEM_SIZE:
        raise UnknownDtypeError(f"expected a type of elements that is known here, found torch.{dtype}")
    return ITEM_SIZE[dtype]


def nbytes(dtype: str, numel: int) -> int:
    """Bytes of `numel` consecutive elements.

    Raises:
        UnknownDtypeError: the dtype is not known.
    """
    return -(-numel * item_size(dtype) // PACKED.get(dtype, 1))
