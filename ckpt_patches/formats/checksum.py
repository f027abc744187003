"""CRC-32, the checksum of a zip's records: by ISA-L where it is installed, which takes a twentieth of zlib's time."""

try:
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

__all__ = ["crc32"]
