"""The folder in shared memory that outlives a node's workers: `open_place` names it and makes it
private; a `Slot` in it holds one copy after another, which `read_copy` reads again."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
from collections.abc import Sequence

import torch
from torch import Tensor

from parallel2d.base.files import private_folders
from parallel2d.base.files.folder import LocalFolder
from parallel2d.base.memory import free_memory
from parallel2d.base.topology import MEMORY_DIR, SHARED_MEMORY
from parallel2d.training.checkpoint.local_state import STATE, as_bytes, digest
from parallel2d.training.checkpoint.manifest import MANIFEST, Manifest, StoredFile


def open_place() -> str:
    """The folder of this node, made if it does not exist. Raises OSError when it is not ours
    alone."""
    path = os.environ.get(MEMORY_DIR)
    if path:
        with contextlib.suppress(FileNotFoundError):
            mode = os.lstat(path).st_mode
            # /tmp, /dev/shm: making it private would close it for others
            if stat.S_ISDIR(mode) and mode & 0o022:
                raise PermissionError(
                    errno.EPERM, "others may write to it; name a folder inside it", path
                )
        private_folders.make_private(path)
        return os.path.abspath(path)
    if not os.path.isdir(SHARED_MEMORY):
        raise FileNotFoundError(
            errno.ENOENT, f"no shared memory folder; set {MEMORY_DIR} to one", SHARED_MEMORY
        )
    return private_folders.open_folder(os.getppid(), SHARED_MEMORY)


def free_bytes(place: str) -> int:
    """Bytes that may be put into ``place`` now: a tenth of the memory that this machine or
    container has left stays free."""
    system = os.statvfs(place)
    return min(system.f_bavail * system.f_frsize, int(0.9 * free_memory()))


def used(path: str) -> int:
    """Bytes that the files below ``path`` occupy, which other ranks may rename meanwhile."""
    blocks = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                blocks += os.lstat(os.path.join(folder, name)).st_blocks
    return 512 * blocks


def read_copy(folder: str) -> list[Tensor]:
    """The bytes of the manifest and of the state of a copy, mapped."""
    opened = LocalFolder(folder)
    found = [opened.source(name) for name in (MANIFEST, STATE)]
    return [torch.frombuffer(each.buffer(0, each.size), dtype=torch.uint8) for each in found]


class Slot:
    """A folder for copies, one after the other. Its file is mapped once."""

    def __init__(self, folder: str, name: str) -> None:
        self._draft = self._path = os.path.join(folder, name)
        self._pinned = False
        self.data = torch.empty(0, dtype=torch.uint8)

    def reserve(self, size: int) -> None:
        """Makes ``data`` of ``size`` bytes; what was in here is no copy any more."""
        os.makedirs(self._path, mode=0o700, exist_ok=True)
        os.rename(self._path, self._draft)
        self._path = self._draft
        if self.data.numel() != size:
            self.release()
            self.data = _map_new_file(os.path.join(self._draft, STATE), size)

    def fill(self, blocks: Sequence[Tensor]) -> None:
        """Copies the bytes ``blocks`` from any device. Raises OSError when memory is full."""
        before = self.data
        self.reserve(sum(block.numel() for block in blocks))
        on_device = any(block.is_cuda for block in blocks)
        if on_device and self.data is not before:
            # Copies from a GPU are asynchronous only into page-locked memory. Where it cannot be
            # locked, they are slower and nothing else.
            size = self.data.numel()
            status = torch.cuda.cudart().cudaHostRegister(self.data.data_ptr(), size, 0)
            self._pinned = int(status) == 0
        pieces = self.data.split([block.numel() for block in blocks])
        for block, piece in zip(blocks, pieces, strict=True):
            piece.copy_(block, non_blocking=self._pinned)
        # Training goes on after this, and changes what is being copied.
        if on_device:
            torch.cuda.synchronize()

    def publish(self, name: str, manifest: Manifest) -> None:
        """Makes what is in here a copy, under ``name``."""
        total = digest(memoryview(self.data.numpy().data))
        manifest.files = {STATE: StoredFile(self.data.numel(), total)}
        text = as_bytes(manifest.encode())
        _map_new_file(os.path.join(self._draft, MANIFEST), text.numel()).copy_(text)
        self._path = os.path.join(os.path.dirname(self._draft), name)
        os.rename(self._draft, self._path)

    def release(self) -> None:
        """Lets go of the mapping; the file stays where it is."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self.data.data_ptr())
        self._pinned, self.data = False, torch.empty(0, dtype=torch.uint8)


def _map_new_file(path: str, size: int) -> Tensor:
    """A new file of ``size`` bytes, in place of any that was there, as a tensor of bytes. Its
    memory is taken now: a full file system is an OSError here, instead of a signal that ends the
    process at the first write."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
        return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)
