"""What Linux tells about the machine in its files."""

from __future__ import annotations

from pathlib import Path


def field(source: Path, name: str) -> str | None:
    """The first value of a field in a file of ``name : value`` lines; ``None`` if there is none.

    Example:
        >>> field(Path("/nowhere"), "model name") is None
        True
    """
    try:
        described = source.read_text()
    except OSError:
        return None
    for line in described.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None
