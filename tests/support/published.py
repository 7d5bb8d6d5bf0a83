"""Artifacts of the tests' own in the store of R1FLOW_HOME."""

from __future__ import annotations

import shutil
from pathlib import Path

from flows.home import store
from tasks.store.manifest import InputRef, Manifest, artifact_key


def publish(stage: str, config: dict, inputs: dict[str, InputRef], files: dict[str, str] | Path, **more) -> Manifest:
    key = artifact_key(stage, 1, config, {name: ref.digest for name, ref in inputs.items()})
    with store().attempt(stage, key) as attempt:
        if isinstance(files, Path):
            shutil.copytree(files, attempt.out, dirs_exist_ok=True)
        else:
            for name, text in files.items():
                (attempt.out / name).write_text(text)
        return attempt.publish(stage_version=1, config=config, inputs=inputs, **more)
