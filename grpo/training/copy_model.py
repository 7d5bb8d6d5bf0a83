"""The job that copies a pretrained base model, so that a recipe's artifacts are complete."""

from __future__ import annotations

from grpo.config.jobs import CopyModelJob
from grpo.model.loading import load_tokenizer, save_tokenizer
from grpo.model.sharded.loading import load_to_copy
from grpo.model_folder import check_vocabulary
from grpo.processes.metrics_log import write_result


def copy_model(job: CopyModelJob) -> None:
    """Writes a pretrained model and its tokenizer to `job.out`."""
    tokenizer = load_tokenizer(job.model)
    model = load_to_copy(job.model, job.hardware)
    check_vocabulary(model, tokenizer, job.model)
    model.save_pretrained(job.out)
    save_tokenizer(tokenizer, job.model, job.out)
    write_result(job.result, 1, 1, counts={"parameters": sum(p.numel() for p in model.parameters())})
