"""Words in columns, for a terminal."""

from collections.abc import Sequence


def columns(rows: Sequence[Sequence[str]], *, left: int = 1) -> list[str]:
    """A line a row; the first ``left`` columns start to the left, the others end to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
