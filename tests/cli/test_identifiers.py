from __future__ import annotations

import io
import keyword
import tokenize
from pathlib import Path

import pytest

from sparsestep.cli import identifiers as module
from sparsestep.cli.identifiers import identifiers, read, standard_library, vocabulary

CASES = {
    "comment": ("a = b  # c and d\ne", ["a", "b", "e"]),
    "quote in a comment": ("a  # don't\nb = 'c'", ["a", "b"]),
    "hash in a string": ("a = '# not a comment'; b", ["a", "b"]),
    "other quote in a string": ("""a("it's", 'say "b"', c)""", ["a", "c"]),
    "escaped quote": (r"a('it\'s b', c)", ["a", "c"]),
    "escaped backslash": (r"a('b\\', c)", ["a", "c"]),
    "line continued in a string": ("a = 'b\\\nc'; d", ["a", "d"]),
    "empty strings": ("a = '' + b + \"\" + c", ["a", "b", "c"]),
    "triple quotes": ('a\n"""b\n\'c\' "d" ""e"\n"""\nf', ["a", "f"]),
    "triple single quotes": ("a\n'''b\n\"c\" ''d'\n'''\nf", ["a", "f"]),
    "prefixes": ("""a = r'\\b' + B"c" + Rb'd' + u"e" + f'g'""", ["a"]),
    "name before a string": ("print('a'); rb = br", ["print", "rb", "br"]),
    "f-string": ("""a = f"{b} c {d!r:>{width}}" + e""", ["a", "e"]),
    "f-string with braces": ("""a = f"{{b}} {{" + c""", ["a", "c"]),
    "f-string with its own quote inside": ("""a = f"{b["c"]} d" + e""", ["a", "e"]),
    "f-string in triple quotes": ('a = f"""{b["c"]}\nd""" + e', ["a", "e"]),
    "keywords": ("async def a(): return None if b else True", ["a", "b"]),
    "soft keywords are names": ("match = type", ["match", "type"]),
    "numbers": ("a = 0x1F + 1e5 + 10j + 1_000", ["a"]),
    "digits and underscores": ("_a1 = __b__", ["_a1", "__b__"]),
    "other alphabets": ("größe = 名前", ["größe", "名前"]),
    "unfinished string": ("a = 'b\nc", ["a", "b", "c"]),
    "nothing": ("", []),
}


@pytest.mark.parametrize(("source", "expected"), CASES.values(), ids=CASES)
def test_identifiers(source: str, expected: list[str]) -> None:
    assert identifiers(source) == expected


@pytest.mark.parametrize("name", ["argparse.py", "tokenize.py", "textwrap.py", "enum.py"])
def test_the_tokenizer_of_the_standard_library_finds_the_same(name: str) -> None:
    source = (standard_library() / name).read_text(encoding="utf-8")
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    if any(tokenize.tok_name[token.type] == "FSTRING_START" for token in tokens):
        pytest.skip("from 3.12 on, the names in the fields of f-strings are tokens of their own")
    names = [token.string for token in tokens if token.type == tokenize.NAME]
    assert identifiers(source) == [name for name in names if not keyword.iskeyword(name)]


def test_an_unclosed_string_of_braces_takes_no_time() -> None:
    source = 'f"' + "{{x}}" * 2000
    assert identifiers(source)[:2] == ["f", "x"]


def test_read_takes_the_files_in_order_and_leaves_tests_and_packages_out(tmp_path: Path) -> None:
    for name in ("b.py", "a/c.py", "test/d.py", "a/tests/e.py", "site-packages/f.py", "g.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"name_of_{path.stem}", encoding="utf-8")
    assert read(tmp_path) == [["name_of_c"], ["name_of_b"]]


def test_a_directory_called_test_above_the_root_does_not_matter(tmp_path: Path) -> None:
    root = tmp_path / "test"
    root.mkdir()
    (root / "a.py").write_text("b")
    assert read(root) == [["b"]]


def test_read_survives_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes(b"b = '\xe9\xff'; c")
    assert read(tmp_path) == [["b", "c"]]


def test_the_standard_library_is_there() -> None:
    assert (module.standard_library() / "argparse.py").is_file()


def test_vocabulary_orders_by_frequency_then_by_first_sight() -> None:
    known = vocabulary([["b", "a", "c"], ["a", "d", "a", "c"]], size=3)
    assert known.words == ("a", "c", "b")
    assert known.counts == (3, 2, 1)
    assert known.index == {"a": 0, "c": 1, "b": 2}


def test_vocabulary_is_smaller_where_there_are_fewer_words() -> None:
    assert vocabulary([["a"], []], size=100).words == ("a",)
