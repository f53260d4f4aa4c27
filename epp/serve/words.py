"""The words of the command line: names a misspelt command or option, and completes words in a shell."""

import argparse
import difflib
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

_COMPLETION = """\
_epp() {{
  local words="{commands}"
  if [ "$COMP_CWORD" -gt 1 ]; then case "${{COMP_WORDS[1]}}" in
{cases}
  esac; fi
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o bashdefault -o default -F _epp epp
"""


class WordsParser(argparse.ArgumentParser):
    """Refuses a word that is no command and no option, with the one that was probably meant. argparse alone
    says of `epp check --confg x` only that `--config` is missing.
    """

    commands: Mapping[str, Any] = {}
    """The commands of this parser, by name."""

    def option(self, usage: str, text: str = argparse.SUPPRESS, **how: Any) -> None:
        """Add an option or an argument, as the help shows it: `--policy FILE` is a path, `--json` a switch,
        `file FILE` an argument. Without a text the help leaves it out. how: as in `add_argument`.
        """
        name, _, shown = usage.partition(" ")
        kind = Path if shown in ("FILE", "DIR") else str
        usual = {"metavar": shown, "type": kind} if shown else {"action": "store_true"}
        self.add_argument(name, help=text, **usual | how)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        for word in args or ():
            is_option = re.match(r"--?[a-zA-Z]", word) is not None
            if not is_option and not self.commands:
                continue
            name = word.partition("=")[0]
            known = self._option_string_actions if is_option else self.commands
            if not any(each.startswith(name) if is_option else each == name for each in known):
                meant = difflib.get_close_matches(name, known, n=1)
                all_words = ", ".join({**self.commands, **known})
                what = f"did you mean {meant[0]}?" if meant else f"there are {all_words}"
                self.error(f"there is no {'option' if is_option else 'command'} {name}; {what}")
            if not is_option:
                break
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Say of `--window 5m` what to write, where argparse says `invalid int value`."""
        super().error(re.sub(r"invalid \w+ value: '(.*)'", r"\1: write a number, without a unit", message))

    def options(self) -> list[str]:
        """Return the options that the help names."""
        shown = [each for each in self._actions if each.help is not argparse.SUPPRESS]
        return [name for each in shown for name in each.option_strings if name.startswith("--")]


def completion(parser: WordsParser) -> str:
    """Return a script for bash, and for zsh after `bashcompinit`."""
    cases = [
        f"    {name}) words={shlex.quote(' '.join(each.options()))} ;;"
        for name, each in parser.commands.items()
    ]
    return _COMPLETION.format(
        commands=" ".join([*parser.commands, *parser.options()]), cases="\n".join(cases)
    )
