"""A headless Chromium, for tests that look at pages where there is one."""

import shutil
import subprocess

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1200,2000",
)
needs_browser = pytest.mark.skipif(not any(map(shutil.which, BROWSERS)), reason="no Chromium on the PATH")


def browse(page, folder, *flags):
    """What the browser prints of an address, once the page's scripts have run; `folder` is where it may write."""
    browser = next(filter(None, map(shutil.which, BROWSERS)))
    command = [browser, *QUIET, f"--user-data-dir={folder / 'browser'}", *flags, page]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout
