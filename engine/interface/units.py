"""Formats sizes and counts as readable text. Imports nothing; never torch."""

GIB, MIB = 1024**3, 1024**2
_UNITS = (("GiB", GIB), ("MiB", MIB), ("KiB", 1024))


def format_size(num_bytes: int) -> str:
    """Return a size with its unit: "1.5 KiB", "16 MiB", "1000 bytes"."""
    for unit, size in _UNITS:
        if num_bytes >= size:
            return f"{num_bytes / size:.1f}".removesuffix(".0") + f" {unit}"
    return f"{max(num_bytes, 0)} bytes"


def format_count(num_parameters: int) -> str:
    """Return a number of parameters with its unit: "8.0 B", "596 M"."""
    return f"{num_parameters / 1e9:.1f} B" if num_parameters >= 1e9 else f"{max(num_parameters // 10**6, 1)} M"
