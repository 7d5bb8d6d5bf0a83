"""The progress of a stage that a test builds by itself, on a page that nobody keeps."""

from __future__ import annotations

from flows.progress import Progress
from flows.stage_contract.run_page import RunPage
from flows.stage_contract.stage_progress import StageProgress


def progress_of(stage: str) -> StageProgress:
    return StageProgress(stage, Progress(), RunPage(stage))
