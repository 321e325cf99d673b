"""Seeded bugs: does the suite notice them?

``mutants.toml`` lists bugs, each a string in one file that is replaced by another. This script
plants them one by one in a copy of the checkout and runs the tests listed with each. A mutant is
caught if a test fails, crashes or hangs. ``baseline.toml`` names a test that has caught it before:
this test runs first next time, and a mutant listed there must not survive.

    make mutants                            Python; ONLY=p-crc-dropped runs one
    make mutants-native                     C++, compiled without optimization
    python -m tests.mutants.run --check     each string must occur exactly once; part of make lint
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
MUTANTS = ROOT / "tests/mutants/mutants.toml"
BASELINE = ROOT / "tests/mutants/baseline.toml"
BUILD = ROOT / "build/mutants"
FUZZ = "tests/fuzz"
CORE = "core:"  # a group of the core's own tests
_LEFT_OUT = (".git", ".venv*", "build", "dist", "__pycache__", ".*_cache", "_build")
_TEST = re.compile(r"^(\S+::.+?)(?: (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b.*)?$", re.MULTILINE)
_ERROR = re.compile(r"^ERROR (\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Mutant:
    """A bug: ``find`` in ``file`` becomes ``replace``."""

    name: str  # begins with ``p-`` in Python and ``n-`` in C++
    file: str
    find: str
    replace: str
    why: str  # what a user would suffer
    run: str  # test files, groups of the core's tests, and the fuzzer

    @property
    def is_native(self) -> bool:
        return self.file.startswith("native/")

    def problems(self, root: Path) -> Iterator[str]:
        path = root / self.file
        found = path.read_text().count(self.find) if path.is_file() else 0
        if found != 1:
            yield f"{self.name}: {self.file} must have this string once, got {found}: {self.find!r}"
        for each in self.run.split():
            if not each.startswith(CORE) and not (root / each).exists():
                yield f"{self.name}: run must name files, got {each!r}"


class Copy:
    """A copy of the checkout in which one mutant at a time is planted and tested."""

    def __init__(self, folder: Path, *, is_native: bool, timeout: float) -> None:
        self.path = folder / "checkout"
        self._log = folder / "log.txt"
        self._native = folder / "native"
        self._is_native = is_native
        self._timeout = timeout
        shutil.rmtree(self.path, ignore_errors=True)
        # With new modification times, so that no object of an earlier run is taken for current.
        ignore = shutil.ignore_patterns(*_LEFT_OUT)
        shutil.copytree(ROOT, self.path, ignore=ignore, copy_function=shutil.copy)
        torch = importlib.util.find_spec("torch")
        assert torch is not None
        assert torch.origin is not None
        site = Path(torch.origin).parents[1]
        for built in site.glob("sparsestep/**/*.so"):  # of an editable install
            shutil.copy(built, self.path / "src" / built.relative_to(site))
        # The interpreter itself, without the virtual environment: an editable install's .pth file
        # would lead to the sources of the checkout.
        self._python = getattr(sys, "_base_executable", sys.executable)
        self._environment = {
            **os.environ,
            "PYTHONPATH": f"{self.path / 'src'}{os.pathsep}{site}",
            "SPARSESTEP_HYPOTHESIS": "mutants",
        }
        self._environment.pop("VIRTUAL_ENV", None)
        if is_native:
            self._configure()
            self._build()
        where = "import sparsestep._native as c; assert c.ext; print(c.__file__)"
        status = self._call([self._python, "-c", where])
        assert (status, str(self.path) in self._log.read_text()) == (0, True), self._log.read_text()

    def _call(self, command: list[str]) -> int | None:
        """Run a command; its exit status, or ``None`` if it took too long."""
        with open(self._log, "w") as log:
            process = subprocess.Popen(
                command,
                cwd=self.path,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                return process.wait(self._timeout)
            except subprocess.TimeoutExpired:
                return None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()

    def _configure(self) -> None:
        nanobind = importlib.util.find_spec("nanobind")
        assert nanobind is not None
        assert nanobind.origin is not None
        options = (
            "CMAKE_BUILD_TYPE=Release",
            "SPARSESTEP_MUTANTS=ON",
            "SPARSESTEP_CORE_TESTS=ON",
            "SPARSESTEP_MODULE=ON",
            f"Python_EXECUTABLE={sys.executable}",
            f"nanobind_DIR={Path(nanobind.origin).parent / 'cmake'}",
        )
        if shutil.which("ccache"):
            options = (*options, "CMAKE_CXX_COMPILER_LAUNCHER=ccache")
        defined = [f"-D{option}" for option in options]
        command = ["cmake", "-G", "Ninja", "-S", str(self.path), "-B", str(self._native), *defined]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    def _build(self) -> bool:
        """Compile what has changed, and put the extension into the copy."""
        targets = ["test_core", "_C"]
        command = ["cmake", "--build", str(self._native), "--target", *targets, "--parallel", "2"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(done.stdout[-4000:], done.stderr[-1000:])
            return False
        for built in self._native.glob("_C*.so"):
            shutil.copy(built, self.path / "src/sparsestep")
        return True

    @contextmanager
    def planted(self, mutant: Mutant) -> Iterator[None]:
        file = self.path / mutant.file
        compiled = Path(importlib.util.cache_from_source(str(file)))
        text = file.read_text()
        file.write_text(text.replace(mutant.find, mutant.replace))
        compiled.unlink(missing_ok=True)
        try:
            yield
        finally:
            file.write_text(text)
            compiled.unlink(missing_ok=True)

    def first_failure(self, mutant: Mutant, known: str | None) -> str | None:
        """Which test catches a mutant; ``None`` if it survives."""
        with self.planted(mutant):
            if self._is_native and not self._build():
                raise SystemExit(f"{mutant.name} does not compile")
            runs = mutant.run.split()
            for each in runs:
                group = [str(self._native / "test_core"), each.removeprefix(CORE)]
                if each.startswith(CORE) and self._call(group) != 0:
                    return each
            if known is not None and (self.path / known.split("::")[0]).is_file():
                found = self.pytest([known])
                if found is not None:
                    return found
            tests = [each for each in runs if each != FUZZ and not each.startswith(CORE)]
            found = self.pytest(tests) if tests else None
            if found is None and FUZZ in runs and self._fuzz():
                found = FUZZ
        return found

    def pytest(self, tests: list[str], *extra: str) -> str | None:
        """Run tests; the first that fails, or ``None``."""
        options = ["-vv", "--tb=no", "-rfE", "-p", "no:cacheprovider", *(extra or ["-x"])]
        status = self._call([self._python, "-m", "pytest", *options, *tests])
        text = self._log.read_text(errors="replace")
        if status in (0, 5) or (status == 4 and "not found" in text):
            return None
        found = _TEST.findall(text)
        failed = [test for test, how in found if how in ("FAILED", "ERROR")]
        if failed:
            return str(failed[0])
        if status is None or status < 0:
            return str(found[-1][0]) if found else tests[0]
        error = _ERROR.search(text)
        return error.group(1) if error else tests[0]

    def _fuzz(self) -> bool:
        options = ["--cases", "2000", "--first", "0", "--workers", "1"]
        return self._call([self._python, "-m", "tests.fuzz", *options]) != 0

    def failures(self, tests: list[str]) -> set[str]:
        """Which of some tests fail without any mutant."""
        if self._is_native:
            self._build()
        if not tests or self.pytest(tests, "--maxfail=1000") is None:
            return set()
        text = self._log.read_text(errors="replace")
        return {test for test, how in _TEST.findall(text) if how not in ("PASSED", "SKIPPED")}


def check(mutants: list[Mutant]) -> int:
    problems = [each for mutant in mutants for each in mutant.problems(ROOT)]
    print("\n".join(problems) or f"{len(mutants)} mutants")
    return 1 if problems else 0


def record(caught: dict[str, str]) -> None:
    """Add to the baseline, which only grows."""
    known = tomllib.loads(BASELINE.read_text()) if BASELINE.exists() else {}
    lines = [f"{name} = {_quoted(test)}\n" for name, test in sorted({**known, **caught}.items())]
    head = "# A test that catches each mutant; written by run.py --record.\n"
    BASELINE.write_text(head + "".join(lines))


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def run(mutants: list[Mutant], options: argparse.Namespace) -> int:
    baseline = tomllib.loads(BASELINE.read_text()) if BASELINE.exists() else {}
    copies: SimpleQueue[Copy] = SimpleQueue()
    for number in range(options.workers):
        folder = BUILD / f"{'native' if options.native else 'python'}-{number}"
        folder.mkdir(parents=True, exist_ok=True)
        copies.put(Copy(folder, is_native=options.native, timeout=options.timeout))
    caught: dict[str, str] = {}

    def test(mutant: Mutant) -> None:
        copy, begin = copies.get(), time.monotonic()
        found = copy.first_failure(mutant, baseline.get(mutant.name))
        copies.put(copy)
        if found is None:
            print(f"SURVIVED  {mutant.name:24} {mutant.why}", flush=True)
        else:
            seconds = time.monotonic() - begin
            print(f"caught    {mutant.name:24} {found}  {seconds:.1f} s", flush=True)
            caught[mutant.name] = found

    with ThreadPoolExecutor(options.workers) as pool:
        list(pool.map(test, mutants))
    tests = {test for test in caught.values() if "::" in test}
    for test_id in copies.get().failures(sorted(tests)):
        print(f"FAILS WITHOUT A MUTANT  {test_id}")
        caught = {name: test for name, test in caught.items() if test != test_id}
    if options.record:
        record(caught)
    lost = [each.name for each in mutants if each.name in baseline and each.name not in caught]
    survived = len(mutants) - len(caught)
    print(f"{len(mutants)} mutants, {len(caught)} caught, {survived} survived")
    if lost:
        print(f"No longer caught: {', '.join(lost)}")
    return 1 if lost else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.run", description=__doc__)
    parser.add_argument("--check", action="store_true", help="check the list, and run nothing")
    parser.add_argument("--native", action="store_true", help="those in C++")
    parser.add_argument("--only", nargs="*", help="names")
    parser.add_argument("--record", action="store_true", help="add to the baseline")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=300.0, help="of one run, in seconds")
    options = parser.parse_args()
    listed = tomllib.loads(MUTANTS.read_text())
    mutants = [Mutant(name, **about) for name, about in listed.items()]
    status = check(mutants)
    if options.check or status:
        return status
    mutants = [each for each in mutants if each.is_native == options.native]
    if options.only:
        mutants = [each for each in mutants if each.name in options.only]
    return run(mutants, options)


if __name__ == "__main__":
    sys.exit(main())
