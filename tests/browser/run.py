"""Tests the page of `quire serve` in a real Chromium: `make test-page`.

run.py [PYTEST ARGUMENTS ...], with the interpreter that quire is installed for

playwright (from PyPI) and axe-core (from npm) go into .page at the first time, and the driver of the system's Chromium
with them; nothing is added to quire's own environment. Where Chromium is missing, root gets Debian's; others are told.
What cannot be had leaves the tests out, with the reason, and code 0. What takes too long is ended, and so are its
children: a set-up leaves the tests out then, and tests fail.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
HOME = ROOT / ".page"
PACKAGES, AXE = HOME / "python", HOME / "node_modules" / "axe-core" / "axe.min.js"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SET_UP_LIMIT, LIMIT = 600.0, 2400.0  # seconds, of each step of the set-up and of all tests, which take some minutes


class _NotHadError(Exception):
    """What the tests need cannot be installed."""


def chromium() -> str | None:
    """The path of the browser: that of $CHROMIUM, or the first of the usual names that starts."""
    wanted = os.environ.get("CHROMIUM")
    return next(filter(_starts, filter(None, map(shutil.which, [wanted] if wanted else NAMES))), None)


@cache
def _starts(browser: str) -> bool:
    """Ubuntu's package has a script of this name that only says where a browser could be had."""
    try:
        return finish([browser, "--version"], 120, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def missing() -> list[str]:
    """What the tests need and do not find, and where it comes from."""
    needed = {
        "Chromium: `apt-get install chromium`, or $CHROMIUM names it": chromium(),
        "playwright: `make test-page` installs it into .page": (PACKAGES / "playwright").is_dir(),
        "axe-core: `make test-page` installs it into .page, by npm": AXE.is_file(),
    }
    return [name for name, found in needed.items() if not found]


def set_up() -> list[str]:
    """Install what is missing, or what requirements.txt and package.json have come to ask for; what cannot be had."""
    try:
        _install()
    except _NotHadError as error:
        return [str(error)]
    return missing()


def _install() -> None:
    HOME.mkdir(exist_ok=True)
    if chromium() is None and os.geteuid() == 0 and shutil.which("apt-get"):
        os.environ["DEBIAN_FRONTEND"] = "noninteractive"
        _run(["apt-get", "update", "--quiet"])
        _run(["apt-get", "install", "--yes", "--quiet", "--no-install-recommends", "chromium"])
        _starts.cache_clear()
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
    said = " ".join(map(str, command))
    try:
        code = finish(command, SET_UP_LIMIT)
    except subprocess.TimeoutExpired:
        raise _NotHadError(f"{said}: not done after {SET_UP_LIMIT:.0f} s") from None
    if code:
        raise _NotHadError(f"{said}: failed with code {code}")


def finish(command: Sequence[str | Path], limit: float, **options: Any) -> int:
    """The code with which it ends. After so many seconds it is killed with all that it has started, and TimeoutExpired
    raised; also where this is interrupted, nothing of it is left."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, **options)
    try:
        return process.wait(limit)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise


def main() -> int:
    if found := set_up():
        print("\n".join(["The page's tests in a browser are left out. Missing:", *found]), file=sys.stderr)
        return 0
    # Whoever waits longer for what comes at last is wrong more rarely: other tests may run beside these.
    os.environ.setdefault("QUIRE_PATIENCE", "120")
    command = [sys.executable, "-m", "pytest", "-m", "browser", str(HERE), *sys.argv[1:]]
    try:
        return finish(command, LIMIT, cwd=ROOT)
    except subprocess.TimeoutExpired:
        print(f"The page's tests in a browser were not done after {LIMIT:.0f} s, and are ended.", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
