"""How many pages of a table in a file does random access map, and how many blocks does it take?

    python -m benchmarks.mapped_pages --folder /some/local/disk

Each row of the output is a new process that touches random rows of a table, one per page. ``as is``
is a plain ``mmap`` with ``MADV_RANDOM``. ``in order`` means that the file was read from its begin
to its end before, as by a backup or a copy, and is in the page cache.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from pathlib import Path

CODE = """
import mmap, os, random, sys
path, how, access, count = sys.argv[1:4] + [int(sys.argv[4])]
size = os.path.getsize(path)
pages = random.Random(0).sample(range(1, size // 4096), count)
if how == "mapped":
    import torch, sparsestep
    table = sparsestep.storage.mapped(path, ((size - 4096) // 4096, 1024))
    rows = torch.tensor(pages) - 1
    if access == "read":
        table[rows].sum()
    else:
        with sparsestep.storage.writing(table, rows):
            table[rows] = 1.0
else:
    file = os.open(path, os.O_RDWR)
    memory = mmap.mmap(file, size)
    memory.madvise(mmap.MADV_RANDOM)
    for page in pages:
        if access == "read":
            memory[page * 4096]
        else:
            memory[page * 4096] = 1
resident, counts = 0, False
for line in open("/proc/self/smaps"):
    name = line.split()[0]
    if not name.endswith(":"):
        counts = line.rstrip().endswith(path)
    elif counts and name == "Rss:":
        resident += int(line.split()[1])
os.sync()
print(resident * 1024, os.stat(path).st_blocks * 512)
"""


def prepare(path: Path, size: int, *, written: bool, in_order: bool) -> None:
    """Create a table of pages, all or none of them written."""
    import sparsestep

    path.unlink(missing_ok=True)
    sparsestep.storage.mapped(path, (size // 4096, 1024))
    with open(path, "r+b", buffering=0) as file:
        if written:
            file.seek(4096)
            for _ in range(size >> 20):
                file.write(bytes([1]) * (1 << 20))
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if in_order:
            file.seek(0)
            while file.read(1 << 20):
                pass


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--rows", type=int, default=5000)
    options = parser.parse_args()
    size, path = int(options.gigabytes * 1024) << 20, options.folder.resolve() / "resident-pages"
    print(f"Linux {platform.release()}, {size >> 20} MB, {options.rows * 4096 >> 20} MB touched\n")
    print("| file | cached | access | as is: mapped, on disk | mapped(): mapped, on disk |")
    print("| --- | --- | --- | --- | --- |")
    for written in (False, True):
        for in_order in (False, True):
            for access in ("read", "write"):
                cells = []
                for how in ("as is", "mapped"):
                    prepare(path, size, written=written, in_order=in_order)
                    command = [sys.executable, "-W", "ignore", "-c", CODE, str(path), how, access]
                    done = subprocess.run(
                        [*command, str(options.rows)], check=True, capture_output=True, text=True
                    )
                    resident, disk = map(int, done.stdout.split())
                    cells.append(f"{resident >> 20} MB, {disk >> 20} MB")
                names = "written" if written else "sparse", "in order" if in_order else "no"
                print(
                    f"| {names[0]} | {names[1]} | {access} | {cells[0]} | {cells[1]} |", flush=True
                )
    path.unlink()


if __name__ == "__main__":
    main()
