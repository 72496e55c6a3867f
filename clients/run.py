"""Calls a `quire serve` of the bundled model by the packages that people call such servers with: `make test-clients`.

run.py [--home DIR] [--without-npm] [PYTEST ARGUMENTS ...], with the interpreter that quire is installed for

The packages come from PyPI and npm, into an environment of their own under --home (some minutes, the first time); then
nothing leaves this machine. docs/clients.md says what is shown here.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import threading
import venv
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


def set_up(home: Path, with_npm: bool) -> None:
    """Install what is missing, or what requirements.txt and package.json have come to ask for."""
    python = home / "venv" / "bin" / "python"
    if not python.exists():
        venv.create(home / "venv", with_pip=True)
    if _changed(home, "requirements.txt"):
        # pip goes through years of releases where two packages' ranges do not meet at once; uv takes seconds.
        run([python, "-m", "pip", "install", "--quiet", "uv"])
        run([python, "-m", "uv", "pip", "install", "--quiet", "--python", python, "-r", HERE / "requirements.txt"])
        _note(home, "requirements.txt")
    if not with_npm:
        return
    if shutil.which("npm") is None:
        raise SystemExit("npm is not here: install Node.js, or leave its clients out with --without-npm.")
    if _changed(home, "package.json"):
        shutil.copy(HERE / "package.json", home)
        run(["npm", "install", "--no-audit", "--no-fund", "--silent", "--prefix", home])
        _note(home, "package.json")
    # Node looks for packages beside the script, and above.
    shutil.copytree(HERE / "npm", home / "npm", dirs_exist_ok=True)


def _changed(home: Path, name: str) -> bool:
    stamp = home / f"{name}.done"
    return not stamp.exists() or stamp.read_text() != _digest(name)


def _note(home: Path, name: str) -> None:
    (home / f"{name}.done").write_text(_digest(name))


def _digest(name: str) -> str:
    return hashlib.sha256((HERE / name).read_bytes()).hexdigest()


def run(command: list[str | Path]) -> None:
    code = subprocess.run(command).returncode
    if code:
        raise SystemExit(f"{' '.join(map(str, command))}: failed with code {code}")


# The bundled model and its adapters, to which further ones may be loaded; and the same model as an embedder.
ADAPTERS = ROOT / "quire" / "demo" / "adapters"
GENERATES = ["--enable-lora", "--allow-runtime-lora", "--lora-root", str(ADAPTERS)]
GENERATES += ["--response-store-bytes", "10000000"]
EMBEDS = ["--runner", "pooling", "--convert", "embed", "--pooler-config", '{"pooling_type": "MEAN"}']


@contextmanager
def serving(log: Path, flags: list[str]) -> Iterator[str]:
    """A server of the bundled model; its URL."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "quire.server", "--port", "0", *flags, "--served-model-name", "quire-demo"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    try:
        with open(log, "w") as file:
            url = _address(process.stderr, file)
            drain = threading.Thread(target=lambda: file.writelines(process.stderr or ()))
            drain.start()
            yield url
            process.terminate()
            process.wait(60)
            drain.join()
    finally:
        process.kill()
        process.wait()


def _address(lines: IO[str], log: IO[str]) -> str:
    for line in lines:
        log.write(line)
        if found := re.search(r"listening on (http://\S+)", line):
            return found[1]
    log.flush()
    raise SystemExit(f"the server did not start; see {log.name}")


def table(report: Path) -> None:
    """What worked, by client."""
    found: dict[str, dict[str, list[str]]] = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        client = case.get("classname", "").rpartition(".")[2].removeprefix("test_")
        verdict = "FAILED" if {child.tag for child in case} & {"failure", "error"} else "ok"
        verdict = "left out" if case.find("skipped") is not None else verdict
        name = case.get("name", "").removeprefix("test_").replace("_", " ")
        found.setdefault(client, {}).setdefault(verdict, []).append(name)
    print(f"\n{'client':14} {'ok':>4} {'FAILED':>7}")
    for client, verdicts in sorted(found.items()):
        failed = verdicts.get("FAILED", [])
        print(f"{client:14} {len(verdicts.get('ok', [])):4} {len(failed):7}  {', '.join(failed)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--home", type=Path, default=ROOT / ".clients", help="where the packages are kept")
    parser.add_argument("--without-npm", action="store_true", help="leave the clients for JavaScript out")
    args, further = parser.parse_known_args()
    home = args.home.expanduser().resolve()
    home.mkdir(parents=True, exist_ok=True)
    set_up(home, not args.without_npm)
    report = home / "report.xml"
    report.unlink(missing_ok=True)
    left_out = ["--ignore", HERE / "test_npm.py"] if args.without_npm else []
    command = [home / "venv" / "bin" / "python", "-m", "pytest", "-c", HERE / "pytest.ini", "--junitxml", report]
    with serving(home / "server.log", GENERATES) as url, serving(home / "embedder.log", EMBEDS) as embedder:
        offline = {"HF_HUB_OFFLINE": "1", "QUIRE_URL": url, "QUIRE_CLIENTS": str(home), "QUIRE_PYTHON": sys.executable}
        offline["QUIRE_EMBEDDER_URL"] = embedder
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | offline
        code = subprocess.run([*command, *left_out, *(further or [HERE])], env=environment, cwd=HERE).returncode
    if report.exists():
        table(report)
    return code


if __name__ == "__main__":
    sys.exit(main())
