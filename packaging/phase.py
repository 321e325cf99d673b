"""Run a command quietly and show how far it is; print all of its output only if it fails.

A terminal gets one line that is redrawn every second, anything else a line per change. What pip
downloads and how many files ninja has compiled is read from their output.

Example:
    python packaging/phase.py "[1/3] torch" pip install torch
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
import time

PATTERNS = {
    r"^ *\[(\d+)/(\d+)\] (?:Building|Linking|Creating)": "file {0} of {1}",
    r"^ *Downloading (?:\S*/)?([A-Za-z0-9_.]+)-\S+ \((.+)\)": "downloading {0}, {1}",
    r"^ *Installing collected packages": "installing packages",
}


def describe(line: str) -> str | None:
    """What a line of pip's or ninja's output says about progress, if anything."""
    for pattern, text in PATTERNS.items():
        if found := re.match(pattern, line):
            return text.format(*found.groups())
    return None


def main(title: str, *command: str) -> int:
    """Run the command and return its exit code."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    assert process.stdout is not None
    began, is_done, state = time.monotonic(), threading.Event(), ""
    is_terminal = sys.stdout.isatty()

    def show(end: str = "") -> None:
        text = ": ".join(filter(None, (title, state)))
        if is_terminal:  # a line that wraps could not be redrawn
            elapsed = f" ({time.monotonic() - began:.0f} s)"
            room = shutil.get_terminal_size().columns - 1 - len(elapsed)
            text = f"\r\033[K{text[:room]}{elapsed}"
        print(text, end=end, flush=True)

    def tick() -> None:
        show()
        while not is_done.wait(1.0):
            show()

    ticker = threading.Thread(target=tick)
    if is_terminal:
        ticker.start()
    else:
        show("\n")
    output = []
    for line in process.stdout:
        output.append(line)
        if (described := describe(line)) and described != state:
            state = described
            if not is_terminal:
                show("\n")
    code = process.wait()
    is_done.set()
    if is_terminal:
        ticker.join()
    state = f"failed with exit code {code}" if code else "done"
    show("\n")
    if code:
        print("".join(output), end="", file=sys.stderr)
    return code


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
