"""A process of its own for files that nobody vouches for.

`run` starts it and waits, within a time and an amount of memory. The process imports what it needs, gives up what it
may with `confine`, and only then looks at the file. From there on it has bounded address space and processor time, can
write so many bytes into what was opened for it, and can start no program. On Linux (x86-64 and ARM64) the kernel
refuses it sockets, new processes, and every way of changing files; elsewhere Python's audit events do, for what goes
through Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil

_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TZ", "LANG")  # no secrets, and no switches of torch's
_MOST_ANSWER = 64 << 20  # bytes
_GLANCE = 0.05  # seconds between looks at how much memory is taken


class ConfinedError(Exception):
    """The process was ended, or ended without an answer."""


def run(target: str, job: dict[str, Any], descriptors: Sequence[int], seconds: float, resident: int) -> dict[str, Any]:
    """Call the function `target` ("module:name") with a JSON job in a new process; returns its JSON answer.

    descriptors: open files that the process gets, under their numbers. resident: bytes of memory above which it is
    killed; `confine` has the finer limit. Raises ConfinedError, also where the system has no such processes.
    """
    if os.name != "posix":
        raise ConfinedError("this system cannot confine a process")
    start = "import sys; sys.path[:] = sys.argv[2:]; from quire.checkpoint.confined import _serve; _serve(sys.argv[1])"
    package = str(Path(__file__).resolve().parents[2])
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", start, target, package, *filter(None, sys.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=descriptors,
        start_new_session=True,  # Ctrl-C is for the program, which ends this process
        env={"OMP_NUM_THREADS": "1", **{name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}},
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(job).encode())
            process.stdin.close()
        text = _answer(process, process.stdout.fileno(), seconds, resident)
        process.wait(max(1.0, _GLANCE))
    except subprocess.TimeoutExpired:
        pass  # it has answered
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    try:
        answer = json.loads(text)
    except ValueError:
        raise ConfinedError(f"the process that read it ended without an answer (status {process.returncode})") from None
    if not isinstance(answer, dict):
        raise ConfinedError("the process that read it answered nonsense")
    return answer


def _answer(process: subprocess.Popen[bytes], descriptor: int, seconds: float, resident: int) -> bytes:
    """What it writes until it closes its output."""
    deadline = time.monotonic() + seconds
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    parts: list[bytes] = []
    length = 0
    while True:
        if poll.poll(_GLANCE * 1000):
            part = os.read(descriptor, 1 << 20)
            if not part:
                return b"".join(parts)
            parts.append(part)
            length += len(part)
        if length > _MOST_ANSWER:
            raise ConfinedError(f"what it holds takes more than {_MOST_ANSWER} bytes to describe")
        if time.monotonic() > deadline:
            raise ConfinedError(f"reading it took more than {seconds:.0f} s")
        with contextlib.suppress(psutil.Error):  # it has just ended
            if psutil.Process(process.pid).memory_info().rss > resident:
                raise ConfinedError(f"reading it took more than {resident >> 20} MiB of memory")


def _serve(target: str) -> None:
    """In the process: one job, one answer."""
    module, _, name = target.partition(":")
    answer = getattr(import_module(module), name)(json.loads(sys.stdin.buffer.read()))
    sys.stdout.buffer.write(json.dumps(answer).encode())
    sys.stdout.buffer.flush()
    os._exit(0)  # the interpreter's own end would do what is forbidden by now


def confine(seconds: float, memory: int, written: int) -> None:
    """In the process: give up what it may, for good.

    seconds: of processor time, from its start. memory: bytes of address space beyond what it has. written: the largest
    size of a file that it may write.
    """
    import resource

    def limit(kind: int, value: int) -> None:
        with contextlib.suppress(ValueError, OSError):  # the system's own limit is lower, or it has none
            resource.setrlimit(kind, (value, value))

    limit(resource.RLIMIT_CPU, int(seconds) + 1)
    limit(resource.RLIMIT_FSIZE, written)
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_NPROC, 0)
    with contextlib.suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit(resource.RLIMIT_AS, pages * resource.getpagesize() + memory)
    _filter_calls()
    sys.addaudithook(_refuse)


_FORBIDDEN_EVENTS = (
    "socket.", "subprocess.", "ctypes.", "shutil.", "ftplib.", "smtplib.", "urllib.", "webbrowser.",
    "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.startfile", "os.kill", "os.remove",
    "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown", "os.chflags",
    "os.utime", "os.setxattr", "os.removexattr",
)  # fmt: skip
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES
    if writes or event.startswith(_FORBIDDEN_EVENTS):
        raise PermissionError(f"{event} is forbidden here")


# The system calls that are refused (sockets, processes, changes of files, ways round this filter): name, number on
# x86-64, number on ARM64.
_FORBIDDEN_CALLS = """
socket 41 198, socketpair 53 199, connect 42 203, bind 49 200, listen 50 201, accept 43 202, accept4 288 242,
sendto 44 206, sendmsg 46 211, sendmmsg 307 269,
clone 56 220, clone3 435 435, fork 57 -, vfork 58 -, execve 59 221, execveat 322 281, kill 62 129, tkill 200 130,
tgkill 234 131, ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, pidfd_open 434 434,
pidfd_getfd 438 438, pidfd_send_signal 424 424, setns 308 268, unshare 272 97,
truncate 76 45, creat 85 -, rename 82 -, renameat 264 38, renameat2 316 276, mkdir 83 -, mkdirat 258 34, rmdir 84 -,
link 86 -, linkat 265 37, symlink 88 -, symlinkat 266 36, unlink 87 -, unlinkat 263 35, chmod 90 -, fchmod 91 52,
fchmodat 268 53, fchmodat2 452 452, chown 92 -, fchown 93 55, lchown 94 -, fchownat 260 54, utime 132 -, utimes 235 -,
utimensat 280 88, futimesat 261 -, mknod 133 -, mknodat 259 33, setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7,
removexattr 197 14, lremovexattr 198 15, fremovexattr 199 16, mount 165 40, umount2 166 39, pivot_root 155 41,
chroot 161 51, memfd_create 319 279, shmget 29 194, msgget 68 186, semget 64 190, mq_open 240 180,
io_uring_setup 425 425, io_uring_enter 426 426, io_uring_register 427 427, openat2 437 437,
open_by_handle_at 304 265, bpf 321 280, userfaultfd 323 282, perf_event_open 298 241, keyctl 250 219, add_key 248 217,
request_key 249 218
"""
# Those that open files, and which of their arguments says how.
_OPENS = {"x86_64": {2: 1, 257: 2}, "aarch64": {56: 2}}
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_LOAD, _EQUAL, _AND_SET, _AT_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06  # of the kernel's packet filter
_ALLOWED, _REFUSED = 0x7FFF0000, 0x00050000 | 1  # with EPERM
_NO_NEW_PRIVILEGES, _SET_FILTER, _FILTER = 38, 22, 2  # prctl's


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction)))


def _filter_calls() -> bool:
    """Have the kernel refuse calls (seccomp); False where it does not offer that."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in _ARCHITECTURES or sys.maxsize < 1 << 32:
        return False
    column = 1 + list(_ARCHITECTURES).index(machine)
    calls = [call.split()[column] for call in _FORBIDDEN_CALLS.split(",")]
    lines: list[tuple[int, int, int, int]] = [
        (_LOAD, 0, 0, 4), (_EQUAL, 1, 0, _ARCHITECTURES[machine]), (_RETURN, 0, 0, _REFUSED),
        (_LOAD, 0, 0, 0), (_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _REFUSED),  # x32's numbers
    ]  # fmt: skip
    for number in (int(call) for call in calls if call != "-"):
        lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _REFUSED)]
    for number, argument in _OPENS[machine].items():
        lines += [(_EQUAL, 0, 4, number), (_LOAD, 0, 0, 16 + 8 * argument)]
        lines += [(_AND_SET, 0, 1, _WRITES), (_RETURN, 0, 0, _REFUSED), (_RETURN, 0, 0, _ALLOWED)]
    lines.append((_RETURN, 0, 0, _ALLOWED))
    instructions = (_Instruction * len(lines))(*(_Instruction(*line) for line in lines))
    program = _Program(len(lines), instructions)
    prctl = ctypes.CDLL(None).prctl
    prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    if prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0):
        return False
    return bool(prctl(_SET_FILTER, _FILTER, ctypes.addressof(program), 0, 0) == 0)
