"""Where uploaded adapters lie: a folder of this server's own, gone with it.

The folder is locked for as long as the server lives. So the next server that uses the same place sees which folders
were left by one that could not clean up, and takes these away; and what empties /tmp of old files (systemd) leaves it
alone.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from quire.config import ServerConfig
from quire.errors import OverloadedError, QuireError
from quire.lora.priority import lower_priority
from quire.server.responses.errors import ApiError
from quire.server.uploads.form import AdapterForm
from quire.server.uploads.multipart import MultipartError, MultipartReader

_PREFIX = "quire-adapters-"
_AT_ONCE = 4  # uploads
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_T = TypeVar("_T")


class AdapterStore:
    """A folder for each adapter. One thread touches the disk: whatever is written or removed has its turn."""

    def __init__(self, parent: str | None, upload_bytes: int, total_bytes: int) -> None:
        """parent: the folder in which this one's is; None: the system's for temporary files. upload_bytes: most of one
        upload, packed and unpacked; total_bytes: of all. Raises QuireError for a parent that is no such folder.
        """
        place = Path(parent).expanduser() if parent is not None else Path(tempfile.gettempdir())
        if parent is not None and not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
            raise QuireError(f"adapter_store_dir={parent!r}: is no folder that this process may write to.")
        self.folder = place.resolve() / f"{_PREFIX}{secrets.token_hex(8)}"
        self.upload_bytes = upload_bytes
        self.total_bytes = total_bytes
        self._lock: int | None = None  # the folder's descriptor, once it is there
        self._sizes: dict[Path, int] = {}  # changed by the worker alone
        self._under_way = self._count = 0
        self._worker = ThreadPoolExecutor(1, "quire-uploads", lower_priority)

    @property
    def bytes(self) -> int:
        """What lies here."""
        return sum(list(self._sizes.values()))

    def has(self, path: str) -> bool:
        """Whether an adapter's path is here."""
        return Path(path).parent == self.folder

    def hide(self, message: str) -> str:
        """A message without this folder's path, which is nobody's business."""
        return re.sub(re.escape(str(self.folder)) + r"(?:/\d+)?", "the upload", message)

    async def open(self) -> None:
        """Take away what servers that were killed have left."""
        await self.on_worker(self._sweep)

    async def close(self) -> None:
        """Take everything away."""
        await self.on_worker(self._close)
        self._worker.shutdown(wait=False)

    @asynccontextmanager
    async def upload(self, content_type: str) -> AsyncIterator[Upload]:
        """A place for one more; it is empty again at the end, unless the upload was handed over.

        Raises OverloadedError, and ApiError for what is no form.
        """
        if self._under_way >= _AT_ONCE:
            raise OverloadedError(f"{_AT_ONCE} adapters are being uploaded: try again later", 5)
        self._count += 1
        upload = Upload(self, self.folder / str(self._count), content_type)
        self._under_way += 1
        try:
            await self.on_worker(upload.make)
            yield upload
        finally:
            self._under_way -= 1
            if not upload.handed_over:
                await asyncio.wrap_future(upload.remove())

    async def on_worker(self, function: Callable[..., _T], *given: Any) -> _T:
        """Who stops waiting does not stop it, and what comes later waits for it."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, function, *given)

    async def idle(self) -> None:
        """Wait until what was to be removed is gone."""
        await self.on_worker(lambda: None)

    def remove(self, folder: Path, before: Callable[[], None]) -> Future[None]:
        """Take a folder away, when it is its turn. Any thread may call this."""
        try:
            return self._worker.submit(self._remove, folder, before)
        except RuntimeError:  # closed: all is gone
            done: Future[None] = Future()
            done.set_result(None)
            return done

    # -- the worker's ---------------------------------------------------------------------------------------------

    def account(self, folder: Path, size: int) -> None:
        """So many bytes are about to be written. Raises ApiError where there is no room for them."""
        if self.bytes + size > self.total_bytes:
            raise ApiError(
                413,
                f"files: uploaded adapters have {self.bytes:,} bytes, and {self.total_bytes:,} is the limit "
                "(--adapter-store-bytes): unload some.",
                "files",
            )
        self._sizes[folder] += size

    def settle(self, folder: Path, size: int) -> None:
        """What an upload has come to."""
        self._sizes[folder] = size

    def make(self, folder: Path) -> None:
        """An empty folder, in this one, which is made when it is first needed. Raises OSError."""
        if self._lock is not None and not self.folder.exists():  # what empties /tmp may not look at locks
            os.close(self._lock)
            self._lock = None
        while self._lock is None:
            os.mkdir(self.folder, 0o700)
            lock = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self.folder.exists():
                self._lock = lock
            else:  # another server took it for one that was left, before it was locked
                os.close(lock)
        os.mkdir(folder, 0o700)
        self._sizes[folder] = 0

    def _remove(self, folder: Path, before: Callable[[], None]) -> None:
        before()
        shutil.rmtree(folder, ignore_errors=True)
        self._sizes.pop(folder, None)

    def _sweep(self) -> None:
        for path in self.folder.parent.glob(f"{_PREFIX}*"):
            try:
                lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            except OSError:
                continue
            try:
                if os.fstat(lock).st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            except OSError:  # its server lives
                continue
            finally:
                os.close(lock)

    def _close(self) -> None:
        if self._lock is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self._lock)
            self._lock = None
        self._sizes.clear()


class Upload:
    """One of them: a form on its way to a folder."""

    def __init__(self, store: AdapterStore, folder: Path, content_type: str) -> None:
        """Raises ApiError for what is no form."""
        self.folder = folder
        self.handed_over = False
        self.form = AdapterForm(folder, lambda size: store.account(folder, size), store.upload_bytes)
        self._store = store
        with _as_api_errors():
            self._reader = MultipartReader(content_type, self.form)

    def make(self) -> None:
        """Make the folder: on the store's worker. Raises ApiError."""
        with _as_api_errors():
            self._store.make(self.folder)

    async def feed(self, data: bytes) -> None:
        """Take a part of the body. Raises ApiError."""
        await self._store.on_worker(self._feed, data)

    async def finish(self) -> None:
        """That was all of it. Raises ApiError."""
        await self._store.on_worker(self._finish)

    def hand_over(self) -> None:
        """From now on somebody else sees to it that the folder is removed."""
        self.handed_over = True

    def remove(self) -> Future[None]:
        """Take the folder away. Any thread may call this."""
        return self._store.remove(self.folder, self.form.abandon)

    def _feed(self, data: bytes) -> None:
        with _as_api_errors():
            self._reader.feed(data)

    def _finish(self) -> None:
        with _as_api_errors():
            self._reader.finish()
            self._store.settle(self.folder, self.form.finish())


def adapter_store(config: ServerConfig) -> AdapterStore | None:
    """As the settings have it; None: adapters are not changed over HTTP. Raises QuireError."""
    if not config.allow_runtime_lora:
        return None
    return AdapterStore(config.adapter_store_dir, config.max_adapter_upload_bytes, config.adapter_store_bytes)


@contextmanager
def _as_api_errors() -> Iterator[None]:
    try:
        yield
    except MultipartError as error:
        raise ApiError(400, f"files: {error}", "files") from None
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise ApiError(503, "the server's disk has no room for this (--adapter-store-dir).", "files") from None
