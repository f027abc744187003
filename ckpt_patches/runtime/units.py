"""Sizes in binary units, for all tools."""

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def in_bytes(number: float) -> str:
    """Format a number of bytes, such as 1.2 GiB."""
    for unit in UNITS:
        if number < 1024 or unit == UNITS[-1]:
            break
        number /= 1024
    return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
