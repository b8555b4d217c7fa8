"""The kernel cache: whom it trusts, what it does with damage, and many processes that want the same entry."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from accel.kernels.runtime import cache

ROOT = Path(__file__).resolve().parents[2]
KEY, OTHER = "ab" * 20, "cd" * 20
CODE = b"\x7fELF" + bytes(range(256)) * 64


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A fresh cache folder (not made yet), a temporary folder of its own, and no memory of earlier tests."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setattr(cache, "_logged", set())
    monkeypatch.setattr(cache, "_private_store", None)
    yield tmp_path / "cache"


def writing(content: bytes = CODE) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(content) and None


def never(path: Path) -> None:
    pytest.fail("an entry that is there must not be built again")


def start(script: str, *arguments: object, cache_dir: Path, **options: object) -> subprocess.Popen[str]:
    """A process of its own that runs `script` with the cache imported."""
    body = "import os, sys, time\nfrom pathlib import Path\nfrom accel.kernels.runtime import cache\n"
    environ = {**os.environ, "ACCEL_CACHE_DIR": str(cache_dir), "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", body + textwrap.dedent(script), *map(str, arguments)],
        env=environ,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,  # type: ignore[call-overload]
    )


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out


# --- Storing and loading ---------------------------------------------------------------------------------------


def test_an_entry_is_built_once_and_found_again(home: Path) -> None:
    assert cache.load(KEY) is None
    path = cache.store(KEY, writing())
    assert path.read_bytes() == CODE
    assert path.suffix == ".o" and path.parent == home / "kernels"
    assert cache.load(KEY) == path
    assert cache.store(KEY, never) == path
    assert cache.load(OTHER) is None
    assert cache.load(KEY[:-2]) is None, "a key that is the beginning of another one is another key"


def test_everything_is_made_for_the_owner_alone(home: Path) -> None:
    before = os.umask(0)
    try:
        path = cache.store(KEY, writing())
    finally:
        os.umask(before)
    assert stat.S_IMODE(home.stat().st_mode) == stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in path.parent.iterdir() if p.stat().st_mode & 0o077] == []


def test_looking_creates_nothing(home: Path) -> None:
    assert cache.load(KEY) is None
    assert cache.entries() == [] and cache.clear() == 0 and cache.problem() is None
    assert not home.exists()


def test_entries_and_clear(home: Path) -> None:
    first, second = cache.store(KEY, writing()), cache.store(OTHER, writing(b"small"))
    os.utime(first, (1, 1))
    assert [(e.key, e.path, e.size) for e in cache.entries()] == [(KEY, first, len(CODE)), (OTHER, second, 5)]
    assert cache.clear() == len(CODE) + 5
    assert cache.entries() == [] and cache.load(KEY) is None
    assert list(first.parent.iterdir()) == []


def test_discard_makes_the_next_store_build(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.store(KEY, writing())
    cache.discard(KEY, "symbol not found")
    assert cache.load(KEY) is None
    assert "symbol not found" in caplog.text
    assert cache.store(KEY, writing(b"better")).read_bytes() == b"better"


@pytest.mark.parametrize("key", ["", "abc", "../" + KEY, KEY.upper(), KEY + ".o", "g" * 40, "a" * 129, 7])
def test_a_key_is_hex_digits(home: Path, key: str) -> None:
    for call in (cache.load, lambda k: cache.store(k, writing()), lambda k: cache.discard(k, "")):
        with pytest.raises(ValueError, match="hex digits"):
            call(key)


@pytest.mark.parametrize("error", [RuntimeError("ptxas said no"), KeyboardInterrupt()])
def test_what_the_build_raises_is_raised_and_leaves_nothing(home: Path, error: BaseException) -> None:
    def fail(path: Path) -> None:
        path.write_bytes(CODE[:100])
        raise error

    with pytest.raises(type(error)):
        cache.store(KEY, fail)
    assert cache.load(KEY) is None
    assert [p.suffix for p in (home / "kernels").iterdir()] == [".lock"]
    assert cache.store(KEY, writing()).read_bytes() == CODE


# --- Damage ----------------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(path, len(CODE) // 3)


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def empty(path: Path) -> None:
    os.truncate(path, 0)


def exchange(path: Path) -> None:
    """Good code, but somebody else's file may be behind the link by the time it is loaded."""
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def make_writable(path: Path) -> None:
    path.chmod(0o666)


def make_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("spoil", [flip, truncate, append, empty, exchange, make_writable, make_fifo])
def test_a_damaged_entry_is_removed_and_built_again(
    home: Path, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], None]
) -> None:
    path = cache.store(KEY, writing())
    untouched = cache.store(OTHER, writing())
    for _ in range(2):
        spoil(path)
        assert cache.load(KEY) is None
        assert not path.is_symlink() and not path.exists()
        assert cache.store(KEY, writing()) == path and cache.load(KEY) == path
    spoil(path)
    assert cache.store(KEY, writing()) == path, "store alone repairs as well"
    assert path.read_bytes() == CODE and cache.load(OTHER) == untouched
    assert [r.levelno for r in caplog.records] == [logging.WARNING], "logged once"
    assert str(path) in caplog.text and "built again" in caplog.text


def test_an_entry_of_another_user_is_not_loaded(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = cache.store(KEY, writing(b"planted"))
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345)
    else:
        real = os.fstat
        monkeypatch.setattr(os, "fstat", lambda f: os.stat_result((*real(f)[:4], os.geteuid() + 1, *real(f)[5:])))
    assert cache.load(KEY) is None and not path.exists()


def test_a_good_entry_beside_a_damaged_one_is_used(home: Path) -> None:
    good = cache.store(KEY, writing())
    bad = good.with_name(f"{KEY}.{'0' * 64}.o")
    bad.write_bytes(CODE)
    bad.chmod(0o600)
    assert cache.load(KEY) == good


def test_a_damaged_entry_that_was_replaced_meanwhile_is_kept(home: Path) -> None:
    path = cache.store(KEY, writing())
    flip(path)
    store = cache.Store(path.parent)
    found: list[Path | None] = []
    with store._lock(KEY):
        reader = threading.Thread(target=lambda: found.append(store.find(KEY)))
        reader.start()
        time.sleep(0.2)  # the reader has seen the damage and waits for the lock, or has not looked yet
        path.write_bytes(CODE)
    reader.join(30)
    assert found == [path] and path.exists()


def test_an_empty_result_is_no_kernel(home: Path) -> None:
    with pytest.raises(OSError, match="empty"):
        cache.store(KEY, lambda path: path.touch())
    assert cache.load(KEY) is None


# --- Trust -----------------------------------------------------------------------------------------------------


def give_away(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `place` another user's: really, where we may, else by being another user to the cache."""
    if os.geteuid() == 0:
        os.chown(place, 12345, 12345)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: place.stat().st_uid + 1)


def let_group_write(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place.chmod(0o770)


def let_all_write(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place.chmod(0o702)


def make_link(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place.rename(place.with_name("real"))
    place.symlink_to("real")


def make_file(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(place)
    place.write_text("in the way")


@pytest.mark.parametrize("which", ["cache", "cache/kernels"])
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (give_away, "belongs to user"),
        (let_group_write, "mode 0770"),
        (let_all_write, "mode 0702"),
        (make_link, "symbolic link"),
        (make_file, "not a folder"),
    ],
)
def test_a_folder_that_others_could_fill_is_refused(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    which: str,
    spoil: Callable[[Path, pytest.MonkeyPatch], None],
    words: str,
) -> None:
    cache.store(KEY, writing(b"planted"))
    place = home.parent / which
    spoil(place, monkeypatch)
    refusal = cache.problem()
    assert refusal is not None and words in refusal and str(place) in refusal
    assert "ACCEL_CACHE_DIR" in refusal, "it says what to do"
    with pytest.raises(cache.CacheRefusedError, match=words):
        cache.entries()
    with pytest.raises(cache.CacheRefusedError, match=words):
        cache.clear()
    assert cache.load(KEY) is None, "the planted kernel is not loaded"
    assert [words in r.getMessage() and r.levelno == logging.WARNING for r in caplog.records] == [True]


@pytest.mark.parametrize("spoil", [let_group_write, make_link, make_file])
def test_serving_goes_on_in_a_private_folder(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    spoil: Callable[[Path, pytest.MonkeyPatch], None],
) -> None:
    cache.store(KEY, writing(b"planted"))
    spoil(home, monkeypatch)
    path = cache.store(KEY, writing())
    assert path.read_bytes() == CODE and home not in path.parents
    assert stat.S_IMODE(path.parent.stat().st_mode) == stat.S_IMODE(path.parent.parent.stat().st_mode) == 0o700
    assert cache.load(KEY) == path and cache.store(KEY, never) == path
    assert cache.store(OTHER, writing()).parent == path.parent
    assert len(caplog.records) == 1


def test_a_folder_anybody_can_replace_is_refused(home: Path) -> None:
    home.parent.chmod(0o777)
    refusal = cache.problem()
    assert refusal is not None and f"chmod o-w {home.parent}" in refusal
    home.parent.chmod(0o1777)
    assert cache.problem() is None, "in a sticky folder such as /tmp only the owner can replace it"


def test_a_bad_variable_does_not_stop_serving(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("ACCEL_CACHE_DIR", "relative/path")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.store(KEY, writing()).parent == tmp_path / "xdg" / "accel" / "kernels"
    assert cache.load(KEY) is not None
    assert [("ACCEL_CACHE_DIR='relative/path'" in r.getMessage()) for r in caplog.records] == [True]


# --- Disks that say no -----------------------------------------------------------------------------------------


def test_a_full_disk_is_logged_once(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    def write(path: Path) -> None:
        if home in path.parents:
            path.write_bytes(CODE[:10])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        path.write_bytes(CODE)

    path, other = cache.store(KEY, write), cache.store(OTHER, write)
    assert path.read_bytes() == other.read_bytes() == CODE and home not in path.parents
    assert cache.load(KEY) == path and cache.load(OTHER) == other
    assert [p.suffix for p in (home / "kernels").iterdir()] == [".lock", ".lock"]
    assert len(caplog.records) == 1 and "No space left" in caplog.text and "ACCEL_CACHE_DIR" in caplog.text


def test_no_folder_at_all_raises_oserror(home: Path) -> None:
    """Every file is limited to 100 bytes: neither the cache nor the private folder can hold the kernel."""
    script = """
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        try:
            cache.store("ab" * 20, lambda path: path.write_bytes(b"x" * 1000))
        except OSError as error:
            print(error.strerror)
        print(cache.load("ab" * 20), [p.name for p in Path(sys.argv[1]).rglob("*.o")])
    """
    assert finish(start(script, home, cache_dir=home)).splitlines() == ["File too large", "None []"]


def test_a_read_only_folder_serves_what_it_holds() -> None:
    """As a user whom permissions bind: kernels that are there are used, new ones go to the private folder."""
    place = Path(tempfile.mkdtemp(prefix="accel-test-"))  # pytest's own folders are closed to other users
    nobody = 65534
    try:
        if os.geteuid() == 0:
            os.chown(place, nobody, nobody)
        script = f"""
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid({nobody})
                os.setuid({nobody})
            where = Path(sys.argv[1])
            stored = cache.store("ab" * 20, lambda path: path.write_bytes(b"kept"))
            (where / "cache" / "kernels").chmod(0o500)
            assert cache.load("ab" * 20) == stored
            private = cache.store("cd" * 20, lambda path: path.write_bytes(b"new"))
            assert private.read_bytes() == b"new" and where not in private.parents, private
            assert cache.load("cd" * 20) == private
            print(private.parent.parent)
            (where / "cache" / "kernels").chmod(0o700)
        """
        process = start(script, place, cache_dir=place / "cache")
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert err.count("Permission denied") == 1 and "private temporary folder" in err
        assert not Path(out.strip()).exists(), "the private folder goes with its process"
    finally:
        shutil.rmtree(place)


def test_a_forked_child_does_not_use_or_remove_its_parents_private_folder(home: Path) -> None:
    home.write_text("a file in place of the folder")
    script = """
        key = "ab" * 20
        mine = cache.store(key, lambda path: path.write_bytes(b"parent"))
        child = os.fork()
        if child == 0:
            assert cache.load(key) is None
            theirs = cache.store(key, lambda path: path.write_bytes(b"child"))
            assert theirs.parent != mine.parent
            print(theirs.parent.parent, flush=True)
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert cache.load(key) == mine and mine.read_bytes() == b"parent"
        print(mine.parent.parent, flush=True)
    """
    folders = finish(start(script, cache_dir=home)).split()
    assert len(folders) == 2 and not any(Path(folder).exists() for folder in folders)


# --- Many processes --------------------------------------------------------------------------------------------

SLOW_BUILD = """
    def build(path):
        with open(sys.argv[1], "a") as log:
            log.write("built\\n")
        with open(path, "wb") as file:
            for _ in range(20):
                file.write(bytes(str(os.getpid()), "ascii") * 500)
                file.flush()
                time.sleep(0.01)
    print("ready", flush=True)
    sys.stdin.readline()
    path = store("ab" * 20, build)
    assert load("ab" * 20) is not None
    print(path.name, len(path.read_bytes()))
"""


def race(script: str, log: Path, home: Path, count: int) -> list[list[str]]:
    processes = [start(script, log, cache_dir=home, stdin=subprocess.PIPE) for _ in range(count)]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    return [finish(process).split() for process in processes]


def test_one_process_builds_and_the_others_take_its_entry(home: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    ends = race("    load, store = cache.load, cache.store\n" + SLOW_BUILD, log, home, 4)
    assert len({name for name, _ in ends}) == 1 and all(int(size) > 0 for _, size in ends)
    assert log.read_text() == "built\n"
    assert len(cache.entries()) == 1 and cache.load(KEY) is not None


def test_without_locks_every_process_ends_with_a_good_entry(home: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    own = "    mine = cache.Store(cache.folder(), lock_timeout=0)\n    load, store = mine.find, mine.build\n"
    ends = race(own + SLOW_BUILD, log, home, 3)
    assert len(ends) == 3
    assert len(cache.entries()) == log.read_text().count("built") >= 2, "they did build side by side"
    assert cache.load(KEY) is not None
    assert [p for p in (home / "kernels").iterdir() if p.name.endswith(".tmp.o")] == []


def test_a_writer_killed_halfway_leaves_no_entry_and_no_lock(home: Path) -> None:
    script = """
        def build(path):
            path.write_bytes(b"half of it")
            print("half", flush=True)
            time.sleep(600)
        cache.store("ab" * 20, build)
    """
    writer = start(script, cache_dir=home)
    assert writer.stdout is not None and writer.stdout.readline() == "half\n"
    assert cache.load(KEY) is None
    taken: list[Path] = []
    waiting = threading.Thread(target=lambda: taken.append(cache.store(KEY, writing())))
    waiting.start()
    time.sleep(0.2)
    assert waiting.is_alive(), "the second builder waits for the first"
    writer.send_signal(signal.SIGKILL)
    writer.communicate(timeout=60)
    waiting.join(30)
    assert taken == [cache.load(KEY)] and taken[0].read_bytes() == CODE

    (left,) = [p for p in taken[0].parent.iterdir() if p.name.endswith(".tmp.o")]
    cache.store(KEY, never)
    assert left.exists(), "it could still be somebody's"
    os.utime(left, (time.time() - 2 * cache.STALE_AFTER,) * 2)
    cache.store(KEY, never)
    assert not left.exists() and cache.load(KEY) == taken[0]


def test_a_child_forked_while_building_does_not_keep_the_lock(home: Path) -> None:
    script = """
        def build(path):
            path.write_bytes(b"code")
            if os.fork() == 0:
                time.sleep(30)
                os._exit(0)
        cache.store("ab" * 20, build)
        begin = time.monotonic()
        cache.Store(cache.folder(), lock_timeout=20).discard("ab" * 20, "test")
        print(time.monotonic() - begin < 10, flush=True)
        os.killpg(0, 9)
    """
    process = start(script, cache_dir=home, start_new_session=True)
    out, err = process.communicate(timeout=60)
    assert out == "True\n", err
