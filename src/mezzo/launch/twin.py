"""The twin of a run: resume the run's first snapshot in another process, for a few updates, on copies of all files and without a network.

Called as ``python -m mezzo.launch.twin REQUEST``. It writes digests of its state into a file that is open already, and ends.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import shutil
import socket
import struct
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from mezzo.children.guard import die_with_parent
from mezzo.launch.request import Request

_NICE = 5
"""The training that it runs beside comes first."""
_OFFLINE = {"WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
"""Without these, libraries would wait for the network."""


def main(argv: list[str]) -> int:
    """Run the twin of the request in ``argv``, and return its exit code."""
    die_with_parent()
    os.nice(_NICE)
    request = Request.unpacked(argv[0])
    assert request.snapshots is not None
    try:
        write_to_copies(os.path.dirname(request.snapshots.folder))  # the folder itself is made below
    except OSError as error:
        why = error.strerror or error
        print(f"mezzo: this system gives no process a file system of its own: {why}", file=sys.stderr)
        return 1
    _copy_snapshot(request)
    os.environ.update(_OFFLINE)
    from mezzo.launch.child import main as run

    return run([request.packed()])


def _copy_snapshot(request: Request) -> None:
    """Fill the twin's folder with the one snapshot and the journals of its files; the run goes on writing to its own."""
    assert request.snapshots is not None
    assert request.snapshots.twin is not None
    saved, folder = Path(request.snapshots.twin.snapshot), Path(request.snapshots.folder)
    folder.mkdir()
    (folder / saved.name).symlink_to(saved)
    for journal in saved.parent.glob("files-*"):
        shutil.copytree(journal, folder / journal.name)


# The process gets mounts of its own, with an overlay over every folder. What it writes goes into memory and ends with it. Code in C is
# covered too, which a patch of Python's functions would miss. What no overlay covers becomes read-only.
#
# The copy of a file needs copies of the folders above it, up to the overlay, and a user who is not root can make none of another user or
# group. So the current folder, the home, temporary files and results get overlays of their own, which begin below such folders.
#
# Limits: Linux only; many containers forbid it; a user who is not root cannot change files below others' folders elsewhere; each file that
# changes is copied into memory, at most half of the machine's; devices, pipes and signals are the real ones.

_SYSTEM = ("/proc", "/sys", "/dev")
_MEMORY = "/dev/shm"
"""Gets a file system in memory for what is written, and for what the processes of this one share."""
_NEW_MOUNTS, _NEW_USER, _NEW_NETWORK = 0x20000, 0x10000000, 0x40000000  # of Linux's unshare
_READ_ONLY, _REMOUNT, _BIND, _RECURSIVE, _PRIVATE = 0x1, 0x20, 0x1000, 0x4000, 0x40000  # of its mount
_SAME_FLAGS, _RELATIVE_TIMES = os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC | os.ST_NOATIME | os.ST_NODIRATIME, 1 << 21
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 0x1  # of a network interface


def write_to_copies(*places: str) -> None:
    """Let all that this process writes from now on go to copies. It must have a single thread.

    Args:
        places: folders that are written to, beside the current one, the user's own and the one for temporary files.

    Raises:
        OSError: the system does not allow it; nothing may be written then.
    """
    if sys.platform != "linux":
        raise OSError("only Linux gives a process a file system of its own")
    here = os.getcwd()
    unprivileged = _unshare()
    _mount("none", "/", "", _RECURSIVE | _PRIVATE)
    _mount("tmpfs", _MEMORY, "tmpfs")
    changes, covered = tempfile.mkdtemp(dir=_MEMORY), set[str]()
    points = _mount_points()
    tops = list(points)
    if unprivileged:
        wanted = (here, os.path.expanduser("~"), os.environ.get("TMPDIR", "/tmp"), *places)
        tops += [_own_folder(os.path.realpath(place), points) for place in wanted if os.path.isdir(place)]
    folders = sorted(
        {folder for top in tops for folder in _folders(top, points)}
    )  # an outer overlay would hide an inner one
    # Opened before any overlay is mounted: two of them may lie on each other, but not on a third, which a container's root is already.
    opened = {folder: os.open(folder, os.O_PATH | os.O_DIRECTORY) for folder in folders}
    for number, (folder, lower) in enumerate(opened.items()):
        with suppress(OSError):  # of a kind that takes no overlay: it is read-only below
            _cover(folder, lower, f"{changes}/{number}", unprivileged=unprivileged)
            covered.add(folder)
        os.close(lower)
    for point in points:
        if point not in covered:
            _make_read_only(point)
    os.chdir(here)


def _unshare() -> bool:
    """Leave the mounts and the network of the other processes; return whether a user namespace was needed for it."""
    if os.geteuid() == 0:
        with suppress(OSError):
            _call("unshare", _NEW_MOUNTS | _NEW_NETWORK)
            _begin_loopback()
            return False
    user, group = os.getuid(), os.getgid()
    _call("unshare", _NEW_USER | _NEW_MOUNTS | _NEW_NETWORK)
    Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1", encoding="ascii")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1", encoding="ascii")
    _begin_loopback()
    return True


def _begin_loopback() -> None:
    """Let the process reach itself: gloo and data loaders may use sockets."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        flags = struct.unpack("16xH", fcntl.ioctl(any_socket, _GET_FLAGS, struct.pack("16sH14x", b"lo", 0))[:18])[0]
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sH14x", b"lo", flags | _UP))


def _mount_points() -> list[str]:
    """Return the folders at which something is mounted that can be written to, the outermost first."""
    rows = [line.split(" ") for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()]
    points = {_unescaped(row[4]) for row in rows if "ro" not in row[5].split(",")}
    return sorted(point for point in points if not _is_system(point) and os.path.isdir(point))


def _unescaped(path: str) -> str:
    return re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), path)


def _is_system(path: str) -> bool:
    return any(path == one or path.startswith(f"{one}/") for one in _SYSTEM)


def _folders(folder: str, points: Sequence[str]) -> Iterator[str]:
    """Yield the largest folders of a mount that have no other mount below them, which an overlay would hide."""
    below = folder.rstrip("/") + "/"
    if not any(one.startswith(below) for one in [*points, *_SYSTEM]):
        yield folder
        return
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False) and entry.path not in points and not _is_system(entry.path):
                yield from _folders(entry.path, points)


def _own_folder(place: str, points: Sequence[str]) -> str:
    """Return the outermost folder that this user can write to, with nothing of another user or group between it and ``place``."""
    outermost = place
    for folder in (Path(place), *Path(place).parents):
        if not os.access(folder, os.W_OK):
            break
        outermost, owner = str(folder), os.stat(folder)
        if outermost in points or (owner.st_uid, owner.st_gid) != (os.getuid(), os.getgid()):
            break
    return outermost


def _cover(folder: str, lower: int, changes: str, *, unprivileged: bool) -> None:
    os.chdir(folder)  # its name, which may have commas, is not among the options
    os.makedirs(f"{changes}/new")
    os.makedirs(f"{changes}/work")
    kept = ",userxattr" if unprivileged else ""
    _mount(
        "overlay",
        ".",
        "overlay",
        options=f"lowerdir=/proc/self/fd/{lower},upperdir={changes}/new,workdir={changes}/work{kept}",
    )


def _make_read_only(point: str) -> None:
    flags = os.statvfs(point).f_flag
    kept = (flags & _SAME_FLAGS) | (_RELATIVE_TIMES if flags & os.ST_RELATIME else 0)
    _mount("none", point, "", _REMOUNT | _BIND | _READ_ONLY | kept)


def _mount(source: str, target: str, kind: str, flags: int = 0, *, options: str = "") -> None:
    _call("mount", os.fsencode(source), os.fsencode(target), kind.encode() or None, flags, options.encode() or None)


def _call(function: str, *args: object) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, function)(*args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), function)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
