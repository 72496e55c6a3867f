"""Tests the page of `quire serve` in a real Chromium: `make test-page`.

run.py [PYTEST ARGUMENTS ...], with the interpreter that quire is installed for

playwright (from PyPI) and axe-core (from npm) go into .page at the first time, and the driver of the system's Chromium
with them; nothing is added to quire's own environment. Where Chromium is missing, root gets Debian's; others are told.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
HOME = ROOT / ".page"
PACKAGES, AXE = HOME / "python", HOME / "node_modules" / "axe-core" / "axe.min.js"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def chromium() -> str | None:
    """The path of the browser: that of $CHROMIUM, or the first of the usual names."""
    wanted = os.environ.get("CHROMIUM")
    return shutil.which(wanted) if wanted else next(filter(None, map(shutil.which, NAMES)), None)


def missing() -> list[str]:
    """What the tests need and do not find, and where it comes from."""
    needed = {
        "Chromium: `apt-get install chromium`, or $CHROMIUM names it": chromium(),
        "playwright: `make test-page` installs it into .page": (PACKAGES / "playwright").is_dir(),
        "axe-core: `make test-page` installs it into .page, by npm": AXE.is_file(),
    }
    return [name for name, found in needed.items() if not found]


def set_up() -> None:
    """Install what is missing, or what requirements.txt and package.json have come to ask for."""
    HOME.mkdir(exist_ok=True)
    if chromium() is None and os.geteuid() == 0 and shutil.which("apt-get"):
        _run(["apt-get", "install", "--yes", "--no-install-recommends", "chromium"])
    for name in _changed("requirements.txt"):
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--target", str(PACKAGES)]
        _run([*pip, "-r", str(HERE / name)])
    for name in _changed("package.json"):
        if shutil.which("npm") is None:
            break  # `missing` says what that means
        shutil.copy(HERE / name, HOME)
        _run(["npm", "install", "--no-audit", "--no-fund", "--silent", "--prefix", HOME])


def _changed(name: str) -> Iterator[str]:
    """The name of a list of packages that is not installed as it is now; noted when its user is done."""
    stamp, digest = HOME / f"{name}.done", hashlib.sha256((HERE / name).read_bytes()).hexdigest()
    if not stamp.exists() or stamp.read_text() != digest:
        yield name
        stamp.write_text(digest)


def _run(command: Sequence[str | Path]) -> None:
    code = subprocess.run(command).returncode
    if code:
        raise SystemExit(f"{' '.join(map(str, command))}: failed with code {code}")


def main() -> int:
    set_up()
    if found := missing():
        print("\n".join(["The page's tests in a browser are left out. Missing:", *found]), file=sys.stderr)
        return 0
    command = [sys.executable, "-m", "pytest", "-m", "browser", str(HERE), *sys.argv[1:]]
    return subprocess.run(command, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
