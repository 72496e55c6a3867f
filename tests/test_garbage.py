"""When the collector of cycles waits. In a process of its own: other tests may have frozen something in this one."""

from __future__ import annotations

import subprocess
import sys

import pytest

CASES = {
    "it waits within, and goes on behind, also after an error": """
try:
    with collector_waits():
        assert not gc.isenabled()
        raise KeyError
except KeyError:
    assert gc.isenabled() and not gc.get_freeze_count()
""",
    "who has switched it off finds it off": """
gc.disable()
with collector_waits():
    pass
assert not gc.isenabled()
""",
    "what was made is old at once, and still collected": """
with collector_waits():
    made = [[] for _ in range(5000)]
assert any(one is made for one in gc.get_objects(generation=2)) and not gc.get_freeze_count()
""",
    "what somebody has frozen stays so": """
gc.freeze()
with collector_waits():
    pass
assert gc.get_freeze_count()
""",
}


@pytest.mark.parametrize("case", CASES)
def test_the_collector(case: str) -> None:
    code = f"import gc\nfrom quire.garbage import collector_waits\n{CASES[case]}"
    subprocess.run([sys.executable, "-c", code], check=True)
