"""Write a page for each optimizer from its docstring, so that there is one place to keep right.

The docstring gives the words, the formula, the arguments, the example and the references. The class
itself gives the signature, the state and whether torch's own kernel runs.

Example:
    python docs/build.py            # writes docs/optimizers/*.md
    python docs/build.py --check    # writes nothing; exits 1 if a page is stale
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import torch

import sparsestep
from sparsestep.contract import options
from sparsestep.contract.rule import State
from sparsestep.optimizer.base import RuleOptimizer
from sparsestep.rules import OPTIMIZERS

PAGES = Path(__file__).parent / "optimizers"
WIDTH = 105

Class = type[RuleOptimizer]

# Options that make an optimizer keep more, a value that does it, and how a table says so.
ADDING_STATE = {
    "amsgrad": (True, "`amsgrad=True`"),
    "momentum": (0.9, "`momentum` is not 0"),
    "centered": (True, "`centered=True`"),
    "bias_correction": ("per_row", '`bias_correction="per_row"`'),
}

TORCH_PAGE = "https://docs.pytorch.org/docs/stable/generated/torch.optim.{}.html"

IN_FULL = (
    """
    **`engine`**: who computes. `"auto"` takes the C++ core where it can, `"native"` insists on it,
    and `"reference"` is written in torch operations.
    """,
    """
    **`semantics`**: what an entry means that a gradient does not hold. `"masked"`: it is not
    updated. `"dense"`: its gradient is zero, so momentum and decoupled decay go on; the work is
    done when the row is next needed, see [masked or dense](../masked-or-dense.md).
    """,
    """
    **`mask`**: a bool tensor with one value per row or (unless state is kept per row) one per
    element. What it does not select keeps its bits, whatever gradient, decay or momentum say. For
    several parameters a list, with `None` for those that are free. Mostly a key of a param group.
    """,
    """
    **`state_dtype`**: the dtype of the state. By default that of the parameter, but float32 for a
    half-precision one. Complex parameters take no other than their own.
    """,
    """
    **`stochastic_rounding`**: round half-precision parameters and state up or down at random, so
    that small updates are not lost, see [precision](../precision.md). The random numbers follow
    `torch.manual_seed` as it was when the param group was made, which keeps it as `rounding_seed`.
    """,
    "**`rounding_seed`**: another seed for it.",
    """
    **`bias_correction`** (Adam's family): `"global"`, by the number of the parameter's steps, or
    `"per_row"`, by the number of updates that the row itself has had.
    """,
    """
    **`decoupled_weight_decay`** (where there is weight decay): shrink the parameter by
    `lr * weight_decay` instead of adding `weight_decay` times the parameter to the gradient.
    """,
)

TORCHS_BITS = """
    Dense gradients: torch's own kernel runs, so the bits are torch's. Ours runs instead where the
    state has another dtype than the parameter (that of a half-precision one is float32 unless
    `state_dtype` says otherwise), under a mask, and with options that torch does not have.
"""

NEARLY_TORCHS_BITS = """
    The numbers agree to the last place or two, not to the bit: torch's square root is not always
    correctly rounded.
"""


def main(arguments: Sequence[str] | None = None, folder: Path = PAGES) -> int:
    """Write the pages, or compare them with what is there; returns the exit code."""
    parser = argparse.ArgumentParser(description="Write docs/optimizers/*.md from the docstrings.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if stale")
    check = parser.parse_args(arguments).check
    wanted = {f"{page_name(cls)}.md": page(cls) for cls in OPTIMIZERS}
    wanted["README.md"] = index()
    found = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.md")}
    changed = sorted(name for name in wanted | found if wanted.get(name) != found.get(name))
    for name in changed:
        if check:
            print(f"{folder / name} is stale. Run: python docs/build.py", file=sys.stderr)
        elif name in wanted:
            (folder / name).write_text(wanted[name], encoding="utf-8")
            print(f"wrote {folder / name}")
        else:  # the page of an optimizer that is no longer there
            (folder / name).unlink()
            print(f"removed {folder / name}")
    return 1 if check and changed else 0


def page_name(cls: Class) -> str:
    """The file's name without its ending: ``sparse_adam``, ``adamw``, ``rmsprop``."""
    return re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", "_", cls.__name__).lower()


def page(cls: Class) -> str:
    """The whole page."""
    text = Docstring.of(cls)
    parts = [
        f"<!-- Made by docs/build.py from the docstring of sparsestep.{cls.__name__}. -->",
        f"# {cls.__name__}",
        markdown(text.summary),
        "## Formula",
        *text.body,
        "## Signature",
        signature(cls),
        "## Arguments",
        "\n".join(arguments_of(cls, text, extra=False)),
        "Extras, by keyword only ([in full](README.md#what-all-of-them-take)):",
        "\n".join(arguments_of(cls, text, extra=True)),
        "## State",
        *text.state,
        table(("name", "shape", "dtype", "starts at", "kept"), state_rows(cls)),
        "`state_dtype` chooses another dtype: see [precision](../precision.md).",
        "## What it reproduces",
        "\n".join(reproduced(cls, text)),
        "## Example",
        text.example,
        "## References",
        "\n".join(f"- {flowing(citation, 2)}" for citation in text.citations),
    ]
    return "\n\n".join(parts) + "\n"


def index() -> str:
    """The page that lists the others."""
    rows = [
        (
            f"[{cls.__name__}]({page_name(cls)}.md)",
            markdown(Docstring.of(cls).summary),
            ", ".join(f"`{kept.name}`" + " per row" * kept.per_row for kept in base_state(cls))
            or "nothing",
        )
        for cls in OPTIMIZERS
    ]
    parts = [
        "<!-- Made by docs/build.py. -->",
        "# The optimizers",
        "One page each, made from the docstrings. See also [which one](../which-optimizer.md).",
        table(("optimizer", "in one line", "keeps by default"), rows),
        "## What all of them take",
        "By keyword only. Each but `engine` and `semantics` can also be set for a param group.",
        "\n".join(f"- {flowing(words, 2)}" for words in IN_FULL),
    ]
    return "\n\n".join(parts) + "\n"


# What a docstring says


@dataclass
class Docstring:
    """A docstring of the shape that all optimizers have, taken apart.

    Attributes:
        summary: its first line.
        body: the paragraphs of the formula's section, in Markdown.
        state: what is said of the state, in Markdown.
        torch: sentences on how it relates to torch's class, in Markdown.
        elsewhere: sentences on how it relates to other libraries, in Markdown.
        arguments: what is said of each argument, in Markdown.
        example: in Markdown, with its code.
        citations: in Markdown.
    """

    summary: str
    body: list[str]
    state: list[str]
    torch: list[str]
    elsewhere: list[str]
    arguments: dict[str, str]
    example: str
    citations: list[str]

    @classmethod
    def of(cls, documented: type) -> Docstring:
        """Take the docstring of a class apart."""
        summary, rest = (inspect.getdoc(documented) or "").split("\n", 1)
        before, *sections = re.split(r"^(Args|Example|References):\n", rest, flags=re.MULTILINE)
        named = {
            name: textwrap.dedent(text).strip("\n")
            for name, text in zip(sections[::2], sections[1::2], strict=True)
        }
        return cls(
            summary,
            *sorted_out(before),
            {name: markdown(words) for name, words in entries(named["Args"])},
            example(named["Example"]),
            re.split(r"(?<=\d{4}\.) ", markdown(named["References"])),
        )


def sorted_out(text: str) -> tuple[list[str], list[str], list[str], list[str]]:
    """The body's paragraphs, then sentences on the state, on torch's class, on other libraries.

    A sentence on torch's bits is left out: the class knows whether torch's kernel runs.
    """
    body, state, torchs, elsewhere = list[str](), list[str](), list[str](), list[str]()
    for paragraph in re.split(r"\n\s*\n", text.strip("\n")):
        if paragraph.startswith(".. math::"):
            body.append(formula(paragraph))
            continue
        staying = []
        for sentence in re.split(r"(?<=[.])\s+(?=[A-Z$`])", markdown(paragraph)):
            if sentence.startswith("The state is"):
                state.append(flowing(sentence))
            elif "FBGEMM" in sentence:
                elsewhere.append(sentence)
            elif "torch's class" in sentence:
                torchs.append(sentence)
            elif "bit for bit" not in sentence:
                staying.append(sentence)
        if staying:
            body.append(flowing(" ".join(staying)))
    return body, state, torchs, elsewhere


def formula(block: str) -> str:
    r"""A ``.. math::`` block as GitHub wants it; it minds every ``\\`` that does not end a line."""
    lines = textwrap.dedent(block.split("\n", 1)[1]).rstrip()
    return f"$$\n\\begin{{aligned}}\n{lines}\n\\end{{aligned}}\n$$"


def example(section: str) -> str:
    """Prose, then code that doctest can run."""
    prose, arrows, code = section.partition(">>>")
    block = f"```python\n{arrows}{code.rstrip()}\n```"
    return f"{flowing(markdown(prose))}\n\n{block}" if prose.strip() else block


def entries(section: str) -> Iterator[tuple[str, str]]:
    """Names and descriptions of an ``Args`` or ``Attributes`` section."""
    for entry in re.split(r"\n(?=\S)", section):
        name, words = entry.split(":", 1)
        yield name, " ".join(words.split())


def markdown(text: str) -> str:
    """Restructured text, on one line, as Markdown."""
    text = " ".join(text.split())
    text = re.sub(r":math:`([^`]+)`", r"$\1$", text)
    text = re.sub(r":class:`(\w+)`", lambda found: linked(found[1]), text)
    text = re.sub(r"(?<!`)`([^`<]+?)\s*<([^>]+)>`_", r"[\1](\2)", text)
    return text.replace("``", "`")


def linked(name: str) -> str:
    """A class's name, with a link to its page."""
    return f"[{name}]({page_name(getattr(sparsestep, name))}.md)"


# What a class says


def signature(cls: Class) -> str:
    """How the class is called: torch's arguments, where it has them, and what comes on top."""
    extra = [p for p in parameters(cls) if is_extra(cls, p.name)]
    words = []
    before = None
    for after in (p for p in parameters(cls) if p not in extra):
        if after.kind is after.KEYWORD_ONLY and before and before.kind is not after.kind:
            words.append("*")
        words.append(assigned(after))
        before = after
    star = [] if "*" in words else ["*"]
    above = [f"    # as torch.optim.{cls.__name__} has them"] if torchs(cls) else []
    lines = [*above, *wrapped(words), "    # extras", *wrapped([*star, *map(assigned, extra)])]
    return "\n".join(["```text", f"sparsestep.{cls.__name__}(", *lines, ")", "```"])


def parameters(cls: Class) -> list[inspect.Parameter]:
    """The arguments of the constructor."""
    return list(inspect.signature(cls).parameters.values())


def is_extra(cls: Class, name: str) -> bool:
    """Whether an argument is one that torch does not have."""
    theirs = torchs(cls)
    known = inspect.signature(theirs).parameters if theirs else ()
    return name in {**options.WHOLE, **options.DEFAULTS} and name not in known


def wrapped(words: Iterable[str]) -> list[str]:
    """Arguments as lines of a call."""
    kept = " ".join(f"{word.replace(' ', chr(0))}," for word in words)
    lines = textwrap.wrap(kept, 96, initial_indent="    ", subsequent_indent="    ")
    return [line.replace(chr(0), " ") for line in lines]


def assigned(argument: inspect.Parameter) -> str:
    """An argument with its default."""
    name, default = argument.name, argument.default
    return name if default is argument.empty else f"{name}={shown(default)}"


def shown(value: object) -> str:
    """A value as a Python programmer writes it: 1e-8 rather than 1e-08."""
    text = f'"{value}"' if isinstance(value, str) else repr(value)
    return re.sub(r"e-0(\d)", r"e-\1", text)


def torchs(cls: Class) -> type | None:
    """Torch's class of the same name."""
    return getattr(torch.optim, cls.__name__, None)


def arguments_of(cls: Class, text: Docstring, *, extra: bool) -> Iterator[str]:
    """A line for each argument that is an extra, or for each that is none."""
    known = {p.name: p for p in parameters(cls)}
    differing = known.keys() ^ text.arguments.keys()
    assert not differing, f"{cls.__name__}: docstring and signature differ in {differing}"
    kinds = get_type_hints(cls.__init__)
    for name, words in text.arguments.items():
        if is_extra(cls, name) is extra:
            kind = "" if name == "params" else written(kinds[name])
            yield item(name, kind, known[name].default, words)


def written(kind: Any) -> str:
    """A type as an annotation has it."""
    text = kind.__name__ if type(kind) is type else str(kind)
    text = re.sub(r"Literal\[([^]]*)\]", alternatives, text)
    return text.replace("torch.", "").replace("typing.", "").replace("collections.abc.", "")


def alternatives(literal: re.Match[str]) -> str:
    """The values of a ``Literal``."""
    return literal[1].replace("'", '"').replace(", ", " | ")


def item(name: str, kind: str, default: object, words: str) -> str:
    """A line of a list of arguments."""
    notes = [f"`{kind}`"] if kind else []
    if default is not inspect.Parameter.empty:
        notes.append(f"default `{shown(default)}`")
    about = f" ({', '.join(notes)})" if notes else ""
    return f"- {flowing(f'**`{name}`**{about}: {words}', 2)}"


# State


def base_state(cls: Class) -> tuple[State, ...]:
    """What it keeps when no option asks for more."""
    return cls._rule_for(group_of(cls)).state


def group_of(cls: Any) -> dict[str, Any]:
    """A param group with the defaults."""
    group: dict[str, Any] = cls([torch.zeros(1)]).param_groups[0]
    return group


def state_rows(cls: Class) -> list[tuple[str, ...]]:
    """The rows of the table of state."""
    group = group_of(cls)
    counted = "always" if cls._rule_for(group).counts else "where `stochastic_rounding=True`"
    number = "float32 tensor" if cls._counts_in_tensor else "Python number"
    rows: list[tuple[str, ...]] = [("`step`", "one number", number, "0", counted)]
    for kept, when in all_state(cls, group):
        shape = "per row: `[param.shape[0]]`" if kept.per_row else "per element: the parameter's"
        dtype = written(kept.dtype) if kept.dtype else "the parameter's, at least float32"
        start = f"`{kept.initial}`" if isinstance(kept.initial, str) else f"{kept.initial:g}"
        rows.append((f"`{kept.name}`", shape, dtype, start, when))
    return rows


def all_state(cls: Class, group: dict[str, Any]) -> Iterator[tuple[State, str]]:
    """Each tensor that it may keep, and when."""
    always = cls._rule_for(group).state
    yield from ((kept, "always") for kept in always)
    for name, (value, words) in ADDING_STATE.items():
        if name in group or name in cls._extras:
            for kept in cls._rule_for({**group, name: value}).state:
                if kept not in always:
                    yield kept, f"where {words}"


# What it reproduces


def reproduced(cls: Class, text: Docstring) -> Iterator[str]:
    """Whose numbers it gives, a line for each."""
    facts = []
    if torchs(cls):
        name = f"[`torch.optim.{cls.__name__}`]({TORCH_PAGE.format(cls.__name__)})"
        facts.append(f"{name}: the same arguments, state and checkpoints.")
        runs = cls._uses_torch(group_of(cls))
        facts.append(TORCHS_BITS if runs else NEARLY_TORCHS_BITS)
    facts += text.torch + text.elsewhere
    if not facts:
        facts.append(f"The formula of {text.citations[0]}")
    if "weight_decay" in text.arguments:
        facts.append("For weight decay, see [which framework has which](../weight-decay.md).")
    for fact in facts:
        yield f"- {flowing(fact, 2)}"


# Layout


def flowing(text: str, indent: int = 0) -> str:
    """Text broken into lines, but never inside of code or mathematics."""
    text = " ".join(text.split())
    text = re.sub(r"\$[^$]+\$|`[^`]+`", lambda found: found[0].replace(" ", chr(0)), text)
    lines = textwrap.wrap(text, WIDTH - indent, break_long_words=False, break_on_hyphens=False)
    return ("\n" + " " * indent).join(lines).replace(chr(0), " ")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines: list[Sequence[str]] = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
