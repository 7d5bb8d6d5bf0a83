"""The phrases of the miniature's sums, in each of its languages."""

from __future__ import annotations

from dataclasses import dataclass

LANGUAGES = ("en", "de")


@dataclass(frozen=True)
class Phrases:
    """The phrases of one language. `{}` marks where an expression goes."""

    leads: tuple[str, ...]
    links: tuple[str, ...]
    compute: str
    first: str
    then: str
    so: str


PHRASES = {
    "en": Phrases(
        leads=("exercise: {}", "compute {}", "{}", "what is {}", "we want {} today"),
        links=("\n", "\nsolution\n", "\nlet me see\n", " is asked\n", "\nwell "),
        compute="compute {}",
        first="first",
        then="then",
        so="so the result is",
    ),
    "de": Phrases(
        leads=("aufgabe: {}", "berechne {}", "{}", "was ist {}", "wir suchen {} heute"),
        links=("\n", "\nlösung\n", "\nmal sehen\n", " ist gefragt\n", "\nnun "),
        compute="berechne {}",
        first="zuerst",
        then="dann",
        so="also ist das ergebnis",
    ),
}
