"""Warnings of the library, forwarded to the user as notices of the trainer."""

from __future__ import annotations

import logging

import pytest

from grpo.processes import notices
from grpo.processes.notices import warnings_as_notices

logger = logging.getLogger("grpo.rl.trainer")


def test_each_warning_is_one_notice_and_none_is_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings_as_notices():
        logger.info("quiet")
        for number in (1, 2, 1):
            logger.warning("step %d:\nKL is large", number)
    assert capsys.readouterr().err.splitlines() == [
        "notice: step 1: KL is large",
        "notice: step 2: KL is large",
        "step 1:",
        "KL is large",
    ]
    assert logging.getLogger("grpo").handlers == []


def test_endless_warnings_stay_in_the_log(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "MAX_WARNINGS", 2)
    with warnings_as_notices():
        for number in range(4):
            logger.warning("warning %d", number)
    assert capsys.readouterr().err.splitlines() == [
        "notice: warning 0",
        "notice: warning 1",
        "notice: 2 warnings so far; any further ones are only in the trainer's log",
        "warning 2",
        "warning 3",
    ]


@pytest.mark.parametrize(
    ("variables", "forwarded"),
    [
        ({}, True),
        ({"RANK": "0", "LOCAL_RANK": "0"}, True),
        ({"RANK": "1", "LOCAL_RANK": "1"}, False),
        # torchrun gives RANK 0 to the machine whose host name comes first.
        ({"RANK": "1", "LOCAL_RANK": "0", "PET_NODE_RANK": "0"}, True),
        ({"RANK": "0", "LOCAL_RANK": "0", "PET_NODE_RANK": "1"}, False),
    ],
)
def test_only_the_first_process_of_the_first_machine_forwards(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], forwarded: bool
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with warnings_as_notices():
        logger.warning("sampled by another engine")
    assert ("notice: " in capsys.readouterr().err) == forwarded
