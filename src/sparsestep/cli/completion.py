"""Print a script that lets your shell complete commands and options.

Add the line for your shell to its startup file:

  bash   eval "$(sparsestep completion bash)"
  zsh    eval "$(sparsestep completion zsh)"
  fish   sparsestep completion fish | source

Example:
  sparsestep completion bash
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping

SHELLS = ("bash", "zsh", "fish")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``sparsestep completion``."""
    parser.add_argument("shell", choices=SHELLS, help="your shell")


def run(options: argparse.Namespace) -> int:
    """Print the script; returns the exit code."""
    known = {name: words(parser) for name, parser in options.commands.items()}
    if options.shell == "fish":
        print(fish(known))
    else:
        prefix = "autoload -U +X bashcompinit && bashcompinit\n" if options.shell == "zsh" else ""
        print(prefix + bash(known))
    return 0


def words(parser: argparse.ArgumentParser) -> list[str]:
    """What may follow a command: its options, and what it lets one choose from.

    Example:
        >>> parser = argparse.ArgumentParser()
        >>> parser.add_argument("--steps", type=int) and None
        >>> parser.add_argument("shell", choices=["bash", "zsh"]) and None
        >>> words(parser)
        ['--help', '--steps', 'bash', 'zsh']
    """
    usage = parser.format_usage()
    options = re.findall(r"(?<=\[)--[\w-]+", usage)
    choices = [choice for group in re.findall(r"\{([^}]+)\}", usage) for choice in group.split(",")]
    return ["--help", *options, *choices]


def bash(known: Mapping[str, list[str]]) -> str:
    """A completion function; where no word fits, files are completed.

    Example:
        >>> print(bash({"demo": ["--help", "--steps"]}))
        _sparsestep() {
            local words="demo --help --version"
            if [ "$COMP_CWORD" -gt 1 ]; then
                case "${COMP_WORDS[1]}" in
                    demo) words="--help --steps" ;;
                    *) words="" ;;
                esac
            fi
            COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))
        }
        complete -o default -F _sparsestep sparsestep
    """
    cases = [f'            {name}) words="{" ".join(found)}" ;;' for name, found in known.items()]
    return "\n".join(
        [
            "_sparsestep() {",
            f'    local words="{" ".join(known)} --help --version"',
            '    if [ "$COMP_CWORD" -gt 1 ]; then',
            '        case "${COMP_WORDS[1]}" in',
            *cases,
            '            *) words="" ;;',
            "        esac",
            "    fi",
            '    COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))',
            "}",
            "complete -o default -F _sparsestep sparsestep",
        ]
    )


def fish(known: Mapping[str, list[str]]) -> str:
    """The same for fish.

    Example:
        >>> print(fish({"demo": ["--help", "--steps"]}))
        complete -c sparsestep -n __fish_use_subcommand -f -a 'demo --help --version'
        complete -c sparsestep -n '__fish_seen_subcommand_from demo' -a '--help --steps'
    """
    first = f"complete -c sparsestep -n __fish_use_subcommand -f -a '{' '.join(known)} "
    return "\n".join(
        [
            f"{first}--help --version'",
            *(
                f"complete -c sparsestep -n '__fish_seen_subcommand_from {name}' "
                f"-a '{' '.join(found)}'"
                for name, found in known.items()
            ),
        ]
    )
