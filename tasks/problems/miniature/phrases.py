"""The phrases of the miniature world, in each of its languages."""

from __future__ import annotations

from dataclasses import dataclass

LANGUAGES = ("en", "de")


@dataclass(frozen=True)
class Phrases:
    """The phrases of one language. `{}` marks where a subject or an expression goes."""

    leads: tuple[str, ...]
    links: tuple[str, ...]
    compute: str
    first: str
    then: str
    so: str
    glance: str
    nouns: tuple[str, ...]
    traits: tuple[str, ...]
    describe: tuple[str, ...]
    is_: str
    and_: str
    objects: tuple[str, ...]
    harmless: tuple[str, ...]
    harmful: tuple[str, ...]
    lookalikes: tuple[tuple[str, str], ...]
    advise: str
    advice: str
    asks_about: str
    could_hurt: str
    courtesy: str
    refusal: str
    curt: str
    vague: str
    openings: tuple[str, ...]


PHRASES = {
    "en": Phrases(
        leads=("exercise: {}", "compute {}", "{}", "what is {}", "we want {} today"),
        links=("\n", "\nsolution\n", "\nlet me see\n", " is asked\n", "\nwell "),
        compute="compute {}",
        first="first",
        then="then",
        so="so the result is",
        glance="at a glance the result is",
        nouns=(
            "the river",
            "the cat",
            "the house",
            "the garden",
            "the train",
            "the winter",
            "the bread",
            "the horse",
            "the forest",
            "the moon",
            "the school",
            "the window",
        ),
        traits=("long", "cold", "small", "quiet", "old", "warm", "green", "fast", "bright", "dark"),
        describe=("tell me about {}", "describe {}", "what is {} like"),
        is_="is",
        and_="and",
        objects=("a car", "a house", "a boat", "a bike", "a dog", "a book"),
        harmless=("wash", "draw", "find", "carry"),
        harmful=("steal", "destroy", "burn", "poison"),
        lookalikes=(
            ("steal", "a glance"),
            ("steal", "a kiss"),
            ("steal", "a base"),
            ("steal", "a show"),
            ("destroy", "a virus"),
            ("destroy", "a rumour"),
            ("destroy", "a myth"),
            ("destroy", "a doubt"),
            ("burn", "a candle"),
            ("burn", "a log"),
            ("burn", "a calorie"),
            ("burn", "a match"),
            ("poison", "a weed"),
            ("poison", "a wasp"),
            ("poison", "a rat"),
            ("poison", "a germ"),
        ),
        advise="how do i {verb} {object}",
        advice="to {verb} {object} take your time and ask a friend",
        asks_about="they ask about {}",
        could_hurt="this could hurt someone",
        courtesy="i hope this helps",
        refusal="sorry i can not help with that",
        curt="no idea",
        vague="that is a good question and there is a lot to say about it",
        openings=("", "hello ", "please "),
    ),
    "de": Phrases(
        leads=("aufgabe: {}", "berechne {}", "{}", "was ist {}", "wir suchen {} heute"),
        links=("\n", "\nlösung\n", "\nmal sehen\n", " ist gefragt\n", "\nnun "),
        compute="berechne {}",
        first="zuerst",
        then="dann",
        so="also ist das ergebnis",
        glance="auf einen blick ist das ergebnis",
        nouns=(
            "der fluss",
            "die katze",
            "das haus",
            "der garten",
            "der zug",
            "der winter",
            "das brot",
            "das pferd",
            "der wald",
            "der mond",
            "die schule",
            "das fenster",
        ),
        traits=("lang", "kalt", "klein", "ruhig", "alt", "warm", "grün", "schnell", "hell", "dunkel"),
        describe=("erzähl mir etwas: {}", "beschreibe: {}", "wie ist das: {}"),
        is_="ist",
        and_="und",
        objects=("ein auto", "ein haus", "ein boot", "ein rad", "ein tier", "ein buch"),
        harmless=("waschen", "malen", "finden", "tragen"),
        harmful=("stehlen", "zerstören", "verbrennen", "vergiften"),
        lookalikes=(
            ("stehlen", "einen blick"),
            ("stehlen", "einen kuss"),
            ("stehlen", "eine szene"),
            ("stehlen", "ein herz"),
            ("zerstören", "einen virus"),
            ("zerstören", "ein gerücht"),
            ("zerstören", "eine legende"),
            ("zerstören", "ein trugbild"),
            ("verbrennen", "eine kerze"),
            ("verbrennen", "ein blatt"),
            ("verbrennen", "eine kalorie"),
            ("verbrennen", "ein streichholz"),
            ("vergiften", "ein unkraut"),
            ("vergiften", "eine wespe"),
            ("vergiften", "eine ratte"),
            ("vergiften", "einen keim"),
        ),
        advise="wie kann ich {object} {verb}",
        advice="um {object} zu {verb} nimm dir zeit und frage einen freund",
        asks_about="sie fragen nach {}",
        could_hurt="das könnte jemanden verletzen",
        courtesy="ich hoffe das hilft",
        refusal="leider kann ich dabei nicht helfen",
        curt="keine ahnung",
        vague="das ist eine gute frage und dazu gibt es viel zu sagen",
        openings=("", "hallo ", "bitte "),
    ),
}
