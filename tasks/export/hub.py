"""Uploads an exported folder to the Hugging Face hub, or to another server with the same API (HF_ENDPOINT)."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, Literal

from grpo.errors import InputError
from grpo.secret_values import masked

Kind = Literal["model", "dataset"]


def check_name(repo: str) -> None:
    """Raises InputError unless this is a valid repository name on the hub."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise InputError(f"--push {repo}: {_one_line(error)}") from None
    if "/" not in repo:
        raise InputError(f"--push {repo}: write OWNER/NAME; your own name is the owner of your repositories")


def push(folder: Path, repo: str, kind: Kind, revision: str | None = None, public: bool = False) -> str:
    """Uploads a folder. Creates the repository and the branch `revision` if they do not exist, then sends what is
    missing. After an interruption, the same call continues: files and parts of files that were uploaded are not sent
    again.

    An existing repository keeps its visibility, and keeps files that are only in it.

    Returns:
        URL of the branch.

    Raises:
        InputError: there is no token or no network, or the hub refuses the upload.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled

    api = HfApi(library_name="r1flow")
    if get_token() is None:
        raise InputError(f"--push {repo}: no token for {api.endpoint}; run `hf auth login`, or set HF_TOKEN")
    try:
        url = api.create_repo(repo, repo_type=kind, private=not public, exist_ok=True)
        if revision is not None:
            api.create_branch(repo, branch=revision, repo_type=kind, exist_ok=True)
        api.upload_folder(
            repo_id=repo, folder_path=folder, repo_type=kind, revision=revision, commit_message="Upload by r1flow"
        )
    except OfflineModeIsEnabled:
        raise InputError(f"--push {repo}: HF_HUB_OFFLINE is set; unset it to upload") from None
    except HfHubHTTPError as error:
        raise InputError(f"--push {repo}: {_refused(error)}") from None
    except (HTTPError, OSError) as error:
        said = f"no answer from {api.endpoint} ({_one_line(error)}); the same command continues"
        raise InputError(f"--push {repo}: {said}") from None
    except ValueError as error:  # a reply that is not from the hub, or a header that it does not accept
        raise InputError(f"--push {repo}: {api.endpoint}: {_one_line(error)}") from None
    return f"{url}/tree/{revision}" if revision else str(url)


def _refused(error: Any) -> str:
    """The error message in the hub's reply, with the HTTP status."""
    said = error.server_message
    with contextlib.suppress(ValueError, AttributeError):
        said = said or error.response.json()["error"]
    return f"the hub refused it ({error.response.status_code}): {_one_line(said or error)}"


def _one_line(text: object) -> str:
    """A server's reply as part of one line: printable, short, without secrets."""
    words = " ".join(str(text).split())
    return masked("".join(c for c in words if c.isprintable()))[:300]
