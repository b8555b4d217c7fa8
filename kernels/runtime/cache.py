"""Compiled kernels on disk: a content store in a folder that only its owner can write.

Cached kernels are code that gets loaded, so nothing is taken from a folder that somebody else could have filled, and
every entry is checked against its sha256 before its path is handed out. Layout of `<cache folder>/kernels/`:

    <key>.<sha256 of the content>.o     an entry; the name holds its hash, so one atomic rename publishes both
    <key>.<process>-<random>.tmp.o      being written; swept after an hour if its writer died
    <key>.lock                          taken while building, so that one process builds and the others wait

The lock only saves work. An entry under a given name never changes its content, so processes that build the same key
without it (a file system without locks, a writer that takes longer than the timeout) still both end with a good entry.

Where the folder cannot be used (somebody else can write it, read-only, full), kernels go to a private temporary folder
of this process, which is logged once. Nothing here is bounded: `entries()` shows what is kept, `clear()` removes it.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import hashlib
import logging
import os
import re
import secrets
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from accel import settings

LOCK_TIMEOUT = 120.0  #: seconds; the slowest kernel of the suite compiles in well under a minute on one core
STALE_AFTER = 3600.0  #: seconds after which a half-written file has no living writer

_KEY = re.compile(r"[0-9a-f]{8,128}")
_ENTRY = re.compile(r"([0-9a-f]{8,128})\.([0-9a-f]{64})\.o")
_HOW_TO_MOVE = "or set ACCEL_CACHE_DIR to a folder of your own"

_log = logging.getLogger(__name__)
_logged: set[object] = set()
_guard = threading.Lock()


class CacheRefusedError(Exception):
    """The folder must not be used: somebody else could put code there. The message says which, why, and what to do."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One compiled kernel on disk."""

    key: str
    path: Path
    size: int  #: bytes
    written: float  #: seconds since the epoch


# --- The public functions: the user's folder, else the private one -------------------------------------------------


def load(key: str) -> Path | None:
    """Path of the verified object file stored under `key` (hex digits), or None if there is none.

    A damaged entry is removed, logged once, and counts as none. Never raises for the state of the disk.
    """
    _check_key(key)
    try:
        found = _shared().find(key)
        if found is not None:
            return found
    except (CacheRefusedError, OSError) as problem:
        _say_once_unusable(problem)
    private = _private_store
    return private.find(key) if private is not None and private.pid == os.getpid() else None


def store(key: str, write: Callable[[Path], None]) -> Path:
    """Build the entry `key` with `write(path)`, and return the path of the finished object file.

    `write` gets a fresh path ending in ".o" and may take its time: other processes that want the same key wait for it
    and take its result instead of calling theirs. What `write` raises is raised. Raises OSError if not even a private
    temporary folder can be written; the compiled object in memory is then all there is.
    """
    _check_key(key)
    try:
        return _shared().build(key, write)
    except (CacheRefusedError, OSError) as problem:
        _say_once_unusable(problem)
    return _private().build(key, write)


def discard(key: str, reason: str) -> None:
    """Remove what is stored under `key`: it passed its hash, but could not be loaded. Logged once per key."""
    _check_key(key)
    for where in (_shared(), _private_store):
        if where is not None:
            with suppress(CacheRefusedError, OSError):
                where.discard(key, reason)


def entries() -> list[Entry]:
    """What the user's folder holds, unverified, oldest first. Raises CacheRefusedError if it must not be used."""
    return _shared().entries()


def clear() -> int:
    """Remove everything from the user's folder and return the number of bytes freed. Raises like `entries`."""
    return _shared().clear()


def folder() -> Path:
    """The user's folder of compiled kernels; it need not exist. Raises ValueError for a bad ACCEL_CACHE_DIR."""
    return settings.read().cache_dir / "kernels"


def fallback() -> Path | None:
    """The private temporary folder that this process had to use for a kernel; None if it did not."""
    return _private_store.root if _private_store is not None and _private_store.pid == os.getpid() else None


def problem() -> str | None:
    """Why the user's folder is not used, in one line; None if nothing speaks against it. Creates nothing."""
    try:
        _shared().check()
    except CacheRefusedError as refused:
        return str(refused)
    except OSError as error:
        return f"accel's cache folder cannot be read: {error}"
    return None


# --- One folder ----------------------------------------------------------------------------------------------------


class Store:
    """The content store in one folder; `root.parent` is checked like `root` itself."""

    def __init__(self, root: Path, lock_timeout: float = LOCK_TIMEOUT) -> None:
        self.root = root
        self.lock_timeout = lock_timeout
        self.pid = os.getpid()

    def check(self) -> bool:
        """True if the folder is there and safe to use, False if it is not there yet; else CacheRefusedError."""
        return check_folder(self.root)

    def find(self, key: str) -> Path | None:
        """A verified entry, or None. Damaged ones are removed."""
        if not self.check():
            return None
        damaged = False
        for path in self._paths(key):
            if _damage(path) is None:
                return path
            damaged = True
        if not damaged:
            return None
        with self._lock(key):  # a writer may just have replaced the damaged one by a good one of the same name
            return self._find_and_sweep(key)

    def build(self, key: str, write: Callable[[Path], None]) -> Path:
        """A verified entry: the one that is there, else what `write` makes."""
        prepare_folder(self.root)
        with self._lock(key):
            found = self._find_and_sweep(key)
            if found is not None:
                return found
            temporary = self.root / f"{key}.{os.getpid()}-{secrets.token_hex(8)}.tmp.o"
            try:
                write(temporary)
                final = self.root / f"{key}.{_seal(temporary)}.o"
                os.replace(temporary, final)
            finally:
                with suppress(OSError):
                    temporary.unlink()
            _sync_folder(self.root)
            return final

    def discard(self, key: str, reason: str) -> None:
        """Remove every entry of `key`."""
        if not self.check():
            return
        with self._lock(key):
            for path in self._paths(key):
                path.unlink(missing_ok=True)
                _say_once(("discard", key), "cached kernel %s was removed and is built again: %s", path, reason)

    def entries(self) -> list[Entry]:
        """All entries, unverified, oldest first."""
        if not self.check():
            return []
        found = []
        for path in self.root.iterdir():
            match = _ENTRY.fullmatch(path.name)
            if match is not None:
                with suppress(FileNotFoundError):
                    status = path.lstat()
                    found.append(Entry(match[1], path, status.st_size, status.st_mtime))
        return sorted(found, key=lambda entry: (entry.written, entry.path.name))

    def clear(self) -> int:
        """Remove every file; returns the bytes freed. Processes that loaded an entry keep it."""
        if not self.check():
            return 0
        freed = 0
        for path in self.root.iterdir():
            with suppress(FileNotFoundError):
                size = path.lstat().st_size
                path.unlink()
                freed += size
        return freed

    def _paths(self, key: str) -> list[Path]:
        names = sorted(name for name in os.listdir(self.root) if name.startswith(key + ".") and _ENTRY.fullmatch(name))
        return [self.root / name for name in names]

    def _find_and_sweep(self, key: str) -> Path | None:
        """Under the lock: the first good entry; damaged and abandoned files of this key are removed."""
        good = None
        for path in self._paths(key):
            damage = _damage(path)
            if damage is None:
                good = good or path
                continue
            with suppress(FileNotFoundError):
                path.unlink()
            _say_once(("damaged", path), "cached kernel %s %s: it was removed and is built again", path, damage)
        for name in os.listdir(self.root):
            if name.startswith(key + ".") and name.endswith(".tmp.o"):
                with suppress(OSError):
                    if time.time() - (self.root / name).lstat().st_mtime > STALE_AFTER:
                        (self.root / name).unlink()
        return good

    @contextmanager
    def _lock(self, key: str) -> Iterator[None]:
        """Keep other builders of `key` waiting; goes on without the lock where it cannot be had."""
        try:
            held = os.open(self.root / f"{key}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError:
            held = None  # a read-only or full disk: what is done under the lock says so itself
        try:
            if held is not None:
                self._wait_for(held, key)
            yield
        finally:
            if held is not None:
                with suppress(OSError):
                    fcntl.flock(held, fcntl.LOCK_UN)  # closing alone would leave it to children forked meanwhile
                os.close(held)

    def _wait_for(self, held: int, key: str) -> None:
        deadline = time.monotonic() + self.lock_timeout
        while True:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    _log.info("another process holds %s.lock for over %g s: going on without", key, self.lock_timeout)
                    return
                time.sleep(0.02)
            except OSError:  # a file system without locks
                return


# --- Folders (also of certificates) --------------------------------------------------------------------------------


def check_folder(root: Path) -> bool:
    """True if `root` and its parent are folders that only we can write, False if one is missing.

    Raises CacheRefusedError, saying what to do, if somebody else could have put files there.
    """
    above = Path(os.path.realpath(root.parent.parent))
    for ancestor in (*above.parents, above):
        _refuse_open_to_all(ancestor)
    return _refuse_unless_own(root.parent) and _refuse_unless_own(root)


def prepare_folder(root: Path) -> None:
    """Create `root`, and what is missing above it, for the owner alone. Raises CacheRefusedError or OSError."""
    if check_folder(root):
        return
    for place in (*reversed(root.parents), root):
        if not os.path.isdir(place):
            with suppress(FileExistsError):
                os.mkdir(place, 0o700)
    check_folder(root)  # somebody may have been quicker


def _check_key(key: str) -> None:
    if not isinstance(key, str) or _KEY.fullmatch(key) is None:
        raise ValueError(f"a cache key is 8 to 128 lower-case hex digits, got {key!r}")


def _refuse_open_to_all(ancestor: Path) -> None:
    """Whoever may write a folder may replace what is in it, unless it is sticky like /tmp.

    Owners and groups of the folders above are the administrator's arrangement and are not judged.
    """
    try:
        mode = os.stat(ancestor).st_mode
    except FileNotFoundError:
        return
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise CacheRefusedError(
            f"accel's cache folder is not used: everybody can replace what is in {ancestor} "
            f"(mode {stat.S_IMODE(mode):04o}); run `chmod o-w {ancestor}`, {_HOW_TO_MOVE}"
        )


def _refuse_unless_own(place: Path) -> bool:
    """True if `place` is a folder that only we can write; False if it is missing; else CacheRefusedError."""
    try:
        status = os.lstat(place)
    except FileNotFoundError:
        return False
    except NotADirectoryError:
        raise CacheRefusedError(
            f"accel's cache folder is not used: a folder above {place} is a file; remove it, {_HOW_TO_MOVE}"
        ) from None
    mode = stat.S_IMODE(status.st_mode)
    if stat.S_ISLNK(status.st_mode):
        trouble = f"{place} is a symbolic link; replace it by a folder, or set ACCEL_CACHE_DIR to where it leads"
    elif not stat.S_ISDIR(status.st_mode):
        trouble = f"{place} is not a folder; remove it, {_HOW_TO_MOVE}"
    elif status.st_uid != os.geteuid():
        trouble = (
            f"{place} belongs to user {status.st_uid}, and this process runs as user {os.geteuid()}; "
            f"remove it, {_HOW_TO_MOVE}"
        )
    elif mode & 0o022:
        trouble = (
            f"others than its owner can write {place} (mode {mode:04o}), and the kernels in it are code that gets "
            f"loaded; empty it and run `chmod 700 {place}`, {_HOW_TO_MOVE}"
        )
    else:
        return True
    raise CacheRefusedError(f"accel's cache folder is not used: {trouble}")


def _damage(path: Path) -> str | None:
    """Why the file must not be loaded; None if it is ours and its content has the hash its name states."""
    match = _ENTRY.fullmatch(path.name)
    assert match is not None
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return "is gone"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    with open(opened, "rb") as file:
        status = os.fstat(opened)
        if not stat.S_ISREG(status.st_mode):
            return "is not a file"
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            return f"could have been written by somebody else (mode {stat.S_IMODE(status.st_mode):04o})"
        try:
            digest = _digest(file.fileno())
        except OSError as error:
            return f"cannot be read ({error.strerror})"
    return None if digest == match[2] else "is damaged (its sha256 is not the one it was stored with)"


def _seal(path: Path) -> str:
    """Put a finished file on the disk, for its owner alone, and return the sha256 of its content."""
    opened = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if os.fstat(opened).st_size == 0:
            raise OSError(errno.EIO, "the compiled kernel is empty", str(path))
        os.fchmod(opened, 0o600)
        digest = _digest(opened)
        os.fsync(opened)
    finally:
        os.close(opened)
    return digest


def _digest(opened: int) -> str:
    digest = hashlib.sha256()
    while block := os.read(opened, 1 << 20):
        digest.update(block)
    return digest.hexdigest()


def _sync_folder(place: Path) -> None:
    with suppress(OSError):  # some network file systems cannot sync a folder; the entry is checked when it is loaded
        opened = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


# --- Which folder --------------------------------------------------------------------------------------------------

_private_store: Store | None = None


def _shared() -> Store:
    try:
        return Store(folder())
    except ValueError as error:  # a bad variable; enabling accel reports it as an error, serving goes on
        _say_once("settings", "%s", error)
        return Store(settings.default_cache_dir() / "kernels")


def _private() -> Store:
    """The temporary folder of this process alone; a forked child makes its own, since its parent removes this one."""
    global _private_store
    with _guard:
        if _private_store is None or _private_store.pid != os.getpid():
            place = Path(os.path.realpath(tempfile.mkdtemp(prefix="accel-")))
            _private_store = Store(place / "kernels")
            atexit.register(_remove_private, place, os.getpid())
        return _private_store


def _remove_private(place: Path, pid: int) -> None:
    if os.getpid() == pid:
        shutil.rmtree(place, ignore_errors=True)


def _say_once_unusable(problem: CacheRefusedError | OSError) -> None:
    if isinstance(problem, OSError):
        where = problem.filename or settings.default_cache_dir()
        text = (
            f"the kernel cache is not used: {where}: {problem.strerror or problem}; free or unlock it, {_HOW_TO_MOVE}"
        )
    else:
        text = str(problem)
    _say_once(("unusable", type(problem)), "%s. Kernels of this process are kept in a private temporary folder.", text)


def _say_once(what: object, message: str, *arguments: object) -> None:
    with _guard:
        if what in _logged:
            return
        _logged.add(what)
    _log.warning(message, *arguments)


def _after_fork() -> None:
    global _guard
    _guard = threading.Lock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_after_fork)
