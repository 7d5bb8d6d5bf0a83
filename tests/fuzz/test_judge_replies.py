"""Whatever a judge replies, there is its verdict or none; whatever it is asked about, its prompt keeps its form."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from grpo.judging.questions import harmless
from grpo.judging.replies import ASK_AGAIN, Reply, again, read
from tests.support.fuzzing import fuzz
from tests.support.hostile_texts import pieces

VERDICTS = {"correct": 1.0, "incorrect": 0.0}


def says(word: str, analysis: str) -> str:
    return json.dumps({"analysis": analysis, "correctness": word})


def test_replies(record_property: Any) -> None:
    def check(before: str, analysis: str, word: str, after: str, cut: bool) -> None:
        reply = Reply(before + says(word, analysis) + after, cut)
        reading = read(reply, "correctness", VERDICTS)
        assert reading.verdict in (None, 1.0, 0.0)
        assert (reading.outcome in ("decided", "in_text")) == (reading.verdict is not None)
        if reading.outcome in ASK_AGAIN:
            assert [turn["role"] for turn in again([], reply, reading.outcome)] == ["assistant", "user"]

    texts = {name: pieces for name in ("before", "analysis", "after")}
    fuzz(check, record_property, word=st.sampled_from(["correct", "incorrect", "Correct"]), cut=st.booleans(), **texts)


def test_a_reply_that_is_the_object_alone_is_always_read(record_property: Any) -> None:
    def check(analysis: str, word: str) -> None:
        assert read(Reply(says(word, analysis)), "correctness", VERDICTS).verdict == VERDICTS[word]

    fuzz(check, record_property, analysis=st.text(), word=st.sampled_from([*VERDICTS]))


def test_judged_texts_keep_neither_tags_nor_markers(record_property: Any) -> None:
    def check(text: str) -> None:
        shown = harmless(text)
        shown.encode()
        assert not any(mark in shown for mark in ("<|im_end|>", "[INST]", "</s>", "</response>"))

    fuzz(check, record_property, text=pieces)
