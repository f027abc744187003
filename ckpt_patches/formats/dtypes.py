"""The dtypes that torch can save, by torch's names: item sizes and storage classes.

A newer dtype is unknown: its tensors can be listed, but not divided into elements.
https://pytorch.org/docs/stable/tensor_attributes.html#torch-dtype
"""

from ckpt_patches.errors import UserError

_BY_SIZE = {  # names by bytes per element; an element of float4_e2m1fn_x2 is two numbers
    16: "complex128",
    8: "float64 complex64 int64 uint64",
    4: "float32 complex32 int32 uint32 qint32",
    2: "float16 bfloat16 int16 uint16 bits16",
    1: "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2 int8 uint8 bool "
    "bits8 bits4x2 bits2x4 bits1x8 qint8 quint8 quint4x2 quint2x4",
}
ITEM_SIZE = {name: size for size, names in _BY_SIZE.items() for name in names.split()}
FLOATS = ("float32", "bfloat16", "float16")  # which Adam's states and trained weights mostly are

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
    """Bytes per element.

    Raises:
        UnknownDtypeError: the dtype is not known.
    """
    if dtype not in ITEM_SIZE:
        raise UnknownDtypeError(f"expected a type of elements that is known here, found torch.{dtype}")
    return ITEM_SIZE[dtype]
