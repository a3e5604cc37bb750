"""Build the documentation site: `make docs`, or `python docs/build_site.py`.

The pages are docs/*.md as they are, those of docs/site and of the repository's root, and the reference. They
are collected in build/site_source, where examples of docs/gallery are run; the site is build/site.
Warnings are errors. Nothing is loaded from the network.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
BUILD = ROOT / "build"
SOURCE, SITE = BUILD / "site_source", BUILD / "site"
RUN = BUILD / "example_run"

# sections of the site: title, one sentence, and the pages of docs/ in it
SECTIONS: dict[str, tuple[str, str, list[str]]] = {
    "guides": (
        "Guides",
        "One page per step: from raters' masks to a label, a loss, a trained network, a mask and a report.",
        [
            "first_hour",
            "labels",
            "losses",
            "training",
            "recipes",
            "cluster",
            "calibration",
            "decisions",
            "volumes",
            "metrics",
            "report",
            "systems",
        ],
    ),
    "frameworks": (
        "Frameworks",
        "semidice inside the tools that you already use.",
        ["peers", "nnunet"],
    ),
    "evidence": (
        "Theory and results",
        "What is proved, what was measured, and how to repeat it.",
        ["theory", "landing", "results", "guarantees", "reproduce", "performance"],
    ),
}
# pages that the landing page lists itself
FIRST_PAGES = ["start", "choose"]
# pages outside of docs/, by their place in the site
ROOT_PAGES = {
    "where": DOCS / "where.md",
    "architecture": ROOT / "ARCHITECTURE.md",
    "contributing": ROOT / "CONTRIBUTING.md",
    "security": ROOT / "SECURITY.md",
    "changelog": ROOT / "CHANGELOG.md",
    "benchmarks": ROOT / "benchmarks" / "README.md",
}
REPORT = "example_report/report.html"


def sections() -> dict[str, list[str]]:
    """The pages of docs/ in each section; a page that no section names is of a framework."""
    named = {*FIRST_PAGES, "where", *(page for _, _, pages in SECTIONS.values() for page in pages)}
    others = sorted(path.stem for path in DOCS.glob("*.md") if path.stem not in named)
    return {
        name: [*pages, *(others if name == "frameworks" else [])] for name, (_, _, pages) in SECTIONS.items()
    }


def site_path(path: Path) -> str | None:
    """Where a file of the repository is in the site, without its suffix; None if it is not a page there."""
    if path == ROOT / "README.md":
        return "index"
    for name, source in ROOT_PAGES.items():
        if path == source:
            return name
    return path.stem if path.parent == DOCS and path.suffix == ".md" else None


def with_site_links(text: str, page: Path) -> str:
    """The text of a page whose links to other pages are those of the site, where all pages lie in one folder.

    Links to other files of the repository become their plain text.
    """

    def replaced(match: re.Match[str]) -> str:
        words, target, anchor = match[1], match[2], match[3] or ""
        path = (page.parent / target).resolve()
        name = site_path(path)
        if name is not None:
            return f"[{words}]({name}.md{anchor})"
        return match[0] if path.is_relative_to(DOCS) and path.suffix == ".png" else words

    return re.sub(r"(?<!!)\[([^\]]*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)", replaced, text)


def section_page(name: str) -> str:
    """A page with the list of the pages of a section."""
    title, sentence, _ = SECTIONS[name]
    # the report of a small run is made while the site is built
    made = ["example_report"] if name == "evidence" else []
    return _list_page(title, sentence, [*sections()[name], *made])


def _list_page(title: str, sentence: str, pages: list[str]) -> str:
    lines = [f"# {title}", "", sentence, "", "```{toctree}", ":maxdepth: 1", "", *pages, "```", ""]
    return "\n".join(lines)


def pages() -> dict[str, str]:
    """All pages of the site but the examples, by their path in the source folder."""
    sys.path.insert(0, str(DOCS))
    import site_reference

    found = {path.name: with_site_links(path.read_text(), path) for path in DOCS.glob("*.md")}
    found |= {f"{name}.md": with_site_links(path.read_text(), path) for name, path in ROOT_PAGES.items()}
    found |= {f"{name}.md": section_page(name) for name in SECTIONS}
    project = "Where things are in the code, and what a change must pass."
    found["project.md"] = _list_page("Project", project, list(ROOT_PAGES))
    found |= {path.name: path.read_text() for path in (DOCS / "site").glob("*.md")}
    found |= {f"reference/{name}": text for name, text in site_reference.api_pages().items()}
    found["reference/commands.md"] = site_reference.command_page()
    return found


def collect() -> None:
    """Write the pages to the source folder; an unchanged page keeps its time, so that Sphinx skips it."""
    new = pages()
    for old in SOURCE.rglob("*.[mr][ds]*"):
        name = str(old.relative_to(SOURCE))
        if name not in new and not name.startswith("examples/"):
            old.unlink()
    for name, text in new.items():
        path = SOURCE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)
    shutil.copytree(DOCS / "figures", SOURCE / "figures", dirs_exist_ok=True)


def make_report() -> None:
    """The report page of a small run, by the commands that the site explains."""
    report = SOURCE / "extra" / REPORT
    if report.is_file():
        return
    report.parent.mkdir(parents=True, exist_ok=True)
    runs = RUN / "runs"
    _semidice("demo", "-o", str(RUN), "--cases", "30", "--epochs", "90")
    _semidice(
        "report", str(runs), "-o", str(report), "--title", "Four methods on phantoms", "--max-cases", "12"
    )


def _semidice(*arguments: str) -> None:
    print("semidice", *arguments, flush=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "110"}
    subprocess.run([sys.executable, "-m", "semidice", *arguments], check=True, env=environment)


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the documentation site in build/site.")
    parser.add_argument("--fresh", action="store_true", help="remove the last build first")
    if parser.parse_args().fresh:
        for folder in (SOURCE, SITE, RUN):
            shutil.rmtree(folder, ignore_errors=True)
    started = time.perf_counter()
    SOURCE.mkdir(parents=True, exist_ok=True)
    make_report()
    collect()
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-b", "html"]
    status = subprocess.run(
        [*command, "-c", str(DOCS), str(SOURCE), str(SITE)],
        check=False,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    ).returncode
    if status:
        sys.exit(f"the site has errors: see above (status {status})")
    print(f"wrote {SITE / 'index.html'} in {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
