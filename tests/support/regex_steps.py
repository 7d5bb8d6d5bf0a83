"""Counts the steps of a backtracking search for a pattern, so that a test of its growth needs no clock.

A small matcher for Python's own parse of a pattern. It has none of the shortcuts of `re`: the steps are an upper bound.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from re import _constants as c  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

_CATEGORIES = {
    c.CATEGORY_DIGIT: str.isdigit,
    c.CATEGORY_SPACE: str.isspace,
    c.CATEGORY_WORD: lambda x: x.isalnum() or x == "_",
    c.CATEGORY_NOT_DIGIT: lambda x: not x.isdigit(),
    c.CATEGORY_NOT_SPACE: lambda x: not x.isspace(),
    c.CATEGORY_NOT_WORD: lambda x: not (x.isalnum() or x == "_"),
}
_ONE = {c.LITERAL, c.NOT_LITERAL, c.ANY, c.IN}


class Search:
    """`steps` after `all()`: how many single decisions a search for every match of the pattern in the text took."""

    def __init__(self, pattern: str, flags: int, text: str):
        self.tree = _parser.parse(pattern, flags)
        self.flags, self.text, self.steps = self.tree.state.flags, text, 0
        self.groups: dict[int, str] = {}

    def all(self) -> list[tuple[int, int]]:
        found, place = [], 0
        while place <= len(self.text):
            end = next(self.sequence(self.tree, 0, place), None)
            if end is not None:
                found.append((place, end))
            place = end if end is not None and end > place else place + 1
        return found

    def sequence(self, nodes: Sequence[Any], index: int, at: int) -> Iterator[int]:
        if index == len(nodes):
            yield at
            return
        for end in self.node(*nodes[index], at):
            yield from self.sequence(nodes, index + 1, end)

    def node(self, op: Any, argument: Any, at: int) -> Iterator[int]:
        self.steps += 1
        if op in _ONE:
            if at < len(self.text) and self.fits(op, argument, self.text[at], self.flags):
                yield at + 1
        elif op is c.BRANCH:
            for branch in argument[1]:
                yield from self.sequence(branch, 0, at)
        elif op is c.SUBPATTERN:
            group, added, removed, nodes = argument
            before, self.flags = self.flags, (self.flags | added) & ~removed
            for end in self.sequence(nodes, 0, at):
                if group is not None:
                    self.groups[group] = self.text[at:end]
                inside, self.flags = self.flags, before
                yield end
                self.flags = inside
            self.flags = before
        elif op is c.ATOMIC_GROUP:
            yield from self.first(argument, at)
        elif op is c.POSSESSIVE_REPEAT:
            yield from self.possessive(*argument, at)
        elif op in (c.MAX_REPEAT, c.MIN_REPEAT):
            yield from self.repeat(*argument, at, op is c.MAX_REPEAT)
        elif op in (c.ASSERT, c.ASSERT_NOT):
            direction, nodes = argument
            start = at if direction > 0 else at - nodes.getwidth()[0]
            holds = start >= 0 and next(self.sequence(nodes, 0, start), None) is not None
            if holds is (op is c.ASSERT):
                yield at
        elif op is c.AT:
            if self.stands(argument, at):
                yield at
        elif op is c.GROUPREF:
            if self.text.startswith(said := self.groups.get(argument, ""), at):
                yield at + len(said)
        else:
            raise NotImplementedError(str(op))

    def first(self, nodes: Sequence[Any], at: int) -> Iterator[int]:
        end = next(self.sequence(nodes, 0, at), None)
        if end is not None:
            yield end

    def possessive(self, least: int, most: int, nodes: Sequence[Any], at: int) -> Iterator[int]:
        count = 0
        while count < most and (end := next(self.sequence(nodes, 0, at), None)) is not None and end > at:
            at, count = end, count + 1
        if count >= least:
            yield at

    def repeat(self, least: int, most: int, nodes: Sequence[Any], at: int, greedy: bool) -> Iterator[int]:
        if len(nodes) == 1 and nodes[0][0] in _ONE:  # no recursion for runs of one character
            ends = [at]
            while greedy and len(ends) <= most and (end := next(self.node(*nodes[0], ends[-1]), None)) is not None:
                ends.append(end)
            for end in reversed(ends[least:]) if greedy else ():
                self.steps += 1
                yield end
            if not greedy:
                yield from self.lazy(least, most, nodes, at)
            return
        yield from self.groups_repeated(least, most, nodes, at, greedy, 0)

    def lazy(self, least: int, most: int, nodes: Sequence[Any], at: int) -> Iterator[int]:
        for count in range(most + 1):
            if count >= least:
                yield at
            end = next(self.sequence(nodes, 0, at), None)
            if end is None:
                return
            at = end

    def groups_repeated(
        self, least: int, most: int, nodes: Sequence[Any], at: int, greedy: bool, count: int
    ) -> Iterator[int]:
        if not greedy and count >= least:
            yield at
        if count < most:
            for end in self.sequence(nodes, 0, at):
                if end > at:
                    yield from self.groups_repeated(least, most, nodes, end, greedy, count + 1)
        if greedy and count >= least:
            yield at

    def fits(self, op: Any, argument: Any, character: str, flags: int) -> bool:
        if op is c.ANY:
            return bool(flags & re.DOTALL) or character != "\n"
        forms = {character, character.lower(), character.upper()} if flags & re.IGNORECASE else {character}
        if op is c.LITERAL:
            return any(form == chr(argument) for form in forms)
        if op is c.NOT_LITERAL:
            return all(form != chr(argument) for form in forms)
        negated = argument[0][0] is c.NEGATE
        return any(self.member(item, form) for item in argument[negated:] for form in forms) is not negated

    @staticmethod
    def member(item: tuple[Any, Any], character: str) -> bool:
        op, argument = item
        if op is c.LITERAL:
            return character == chr(argument)
        if op is c.RANGE:
            return argument[0] <= ord(character) <= argument[1]
        return bool(_CATEGORIES[argument](character))

    def stands(self, where: Any, at: int) -> bool:
        text, lines = self.text, self.flags & re.MULTILINE
        if where is c.AT_BEGINNING_STRING or (where is c.AT_BEGINNING and not lines):
            return at == 0
        if where is c.AT_BEGINNING:
            return at == 0 or text[at - 1] == "\n"
        if where is c.AT_END_STRING:
            return at == len(text)
        if where is c.AT_END:
            return at == len(text) or (text[at] == "\n" and (bool(lines) or at == len(text) - 1))
        word = [0 <= place < len(text) and _CATEGORIES[c.CATEGORY_WORD](text[place]) for place in (at - 1, at)]
        return (word[0] is not word[1]) is (where is c.AT_BOUNDARY)
