"""A real Chromium for tests of pages: find it on this machine, or install it by running this file.

Without Chromium, the tests that need it are skipped, and the reason says how to install it.
"""

import os
import shutil
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

HOW_TO_INSTALL = "apt-get install chromium (as root), or .venv/bin/playwright install chromium-headless-shell"
_NAMES = (
    "chromium-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
)


def find_chromium() -> Path | None:
    """The browser on the PATH, or the one in Playwright's own folder."""
    for name in _NAMES:
        path = shutil.which(name)
        if path:
            return Path(path)
    cache = os.environ.get("PLAYWRIGHT_BROWSERS_PATH")
    folders = (
        [cache]
        if cache
        else [Path.home() / ".cache/ms-playwright", Path.home() / "Library/Caches/ms-playwright"]
    )
    downloaded = [
        path
        for folder in folders
        for name in ("headless_shell", "chrome-headless-shell", "chrome")
        for path in sorted(Path(folder).glob(f"chromium*/*/{name}"))
    ]
    return downloaded[-1] if downloaded else None


@contextmanager
def open_browser():
    """Playwright's browser; the test is skipped if there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    chromium = find_chromium()
    if chromium is None:
        pytest.skip(f"needs a Chromium: {HOW_TO_INSTALL}")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=str(chromium))
        yield browser
        browser.close()


class Watched:
    """A page in its own context, with its messages and requests recorded."""

    def __init__(self, browser, *, width=1280, height=900, color_scheme="light"):
        viewport = {"width": width, "height": height}
        self.context = browser.new_context(viewport=viewport, color_scheme=color_scheme)
        self.page = self.context.new_page()
        self.messages: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.messages.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("dialog", self._refuse)
        self.page.on("request", self._record)

    def _refuse(self, dialog):
        self.messages.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _record(self, request):
        # pictures inside the page are requests too, but load nothing
        if not request.url.startswith(("data:", "blob:")):
            self.requests.append(request.url)

    def close(self):
        self.context.close()


def open_page(chromium, path, **options):
    watched = Watched(chromium, **options)
    watched.page.goto(path.as_uri())
    return watched


def axe_violations(page, impacts=("minor", "moderate", "serious", "critical")):
    """Rules of axe that the page violates, each with the first elements; axe comes from its package."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python")
    found = axe.Axe().run(page).response["violations"]
    return [
        (rule["id"], [node["html"][:120] for node in rule["nodes"][:3]])
        for rule in found
        if rule["impact"] in impacts
    ]


def install_chromium() -> None:
    """Install a browser if that is possible without a password, or say how."""
    if find_chromium() is not None:
        return
    print("installing a Chromium for the tests of the report page", flush=True)
    root = [] if os.geteuid() == 0 else ["sudo", "-n"]
    apt = [*root, "apt-get", "install", "-y", "--no-install-recommends"]
    commands = (
        [*apt, "chromium-headless-shell"],
        # a new machine has no package lists
        [*root, "apt-get", "update"],
        [*apt, "chromium-headless-shell"],
        [*apt, "chromium"],
        [sys.executable, "-m", "playwright", "install", "chromium-headless-shell"],
    )
    for command in commands:
        with suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(command, capture_output=True, timeout=100, check=False)
        if find_chromium() is not None:
            return
    print(f"no Chromium here, so the tests of pages are skipped; to run them: {HOW_TO_INSTALL}")


if __name__ == "__main__":
    install_chromium()
