"""Writes tables of benchmarks into pages of the documentation."""

from pathlib import Path


def write_between_markers(page: Path, name: str, table: str) -> None:
    """Replace the text between the markers of `name` in a page."""
    start, end = f"<!-- made by benchmarks: {name} -->", "<!-- end -->"
    text = page.read_text()
    if start not in text:
        raise SystemExit(f"{page} has no marker {start}")
    before, rest = text.split(start, 1)
    page.write_text(f"{before}{start}\n{table}{end}{rest.split(end, 1)[1]}")
