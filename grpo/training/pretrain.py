"""Trains a base model from scratch: a byte-level BPE tokenizer and a small Llama, on a text corpus."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from grpo.config.jobs import PretrainJob
from grpo.config.supervised import Pretrain
from grpo.data.examples import Example, Tokens, compact
from grpo.distributed.fsdp import compute_dtype, shard
from grpo.distributed.process_group import Parallel
from grpo.errors import InputError
from grpo.model.forward_ways import choose_way
from grpo.processes.metrics_log import write_result
from grpo.training.sft import cross_entropy
from grpo.training.supervised import closing_loss, fit

BOS, END, PAD = "<|bos|>", "<|end|>", "<|pad|>"
_TOGETHER = 1024
"""Documents tokenised at a time. Until they are packed, their tokens take nine times as much memory."""
_PIECES = Regex(r"\d{1,2}| ?[-+=] ?| ?\(|\)| ?\p{L}+ (?=\d)| ?\p{L}+|\s+|[^\p{L}\d\s]+")
"""Numbers, signs and brackets, words, space, and anything else. No token crosses their bounds."""
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
CHAT_TEMPLATE = (
    "{{ '" + BOS + "' }}{% for m in messages %}"
    "{% if m.role == 'assistant' %}{{ 'Assistant:' + m.content + '" + END + "' }}"
    "{% else %}{{ 'User: ' + m.content + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""Chat template. Roles are words, not special tokens, so that a small model can use in a chat what it learned from
dialogues in the corpus."""


def pretrain(job: PretrainJob) -> None:
    """Trains a tokenizer and a small Llama from scratch on a text file."""
    settings = job.settings
    documents = read_documents(job.corpus)
    tokenizer = train_tokenizer(documents, settings)
    blocks = pack(tokenizer, documents, settings.context // 2)
    torch.manual_seed(job.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=settings.hidden,
            intermediate_size=settings.feed_forward,
            num_hidden_layers=settings.layers,
            num_attention_heads=settings.heads,
            max_position_embeddings=settings.context,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            tie_word_embeddings=True,
        )
    )
    model.to(getattr(torch, settings.hardware.to_train().dtype))
    choose_way(model, "the new model", settings.hardware)
    parallel = Parallel.start(settings.hardware)
    parameters = sum(p.numel() for p in model.parameters())
    sharded = shard(model, parallel, dtype=compute_dtype(settings.hardware))
    # The first token of a block is context only.
    examples = [Example([block[:1]], [block[1:]], weight=len(block) - 1) for block in blocks]
    done = fit(job, sharded, examples, cross_entropy, settings, settings.steps)
    sharded.save(job.out)
    if parallel.is_main:
        tokenizer.save_pretrained(job.out)
        counts = {"documents": len(documents), "tokens": sum(map(len, blocks)), "parameters": parameters}
        write_result(job.result, done, settings.steps, counts=counts, metrics=closing_loss(job.metrics))
    parallel.close()


def read_documents(corpus: Path) -> list[str]:
    """Documents of a text file, separated by blank lines. Raises InputError if the file is unreadable or empty."""
    try:
        documents = [text for text in corpus.read_text().split("\n\n") if text.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{corpus}: cannot read the corpus: {error}") from None
    if not documents:
        raise InputError(f"{corpus}: no documents; a corpus is text with documents separated by blank lines")
    return documents


def train_tokenizer(documents: Iterable[str], settings: Pretrain) -> Any:
    """Trains a byte-level BPE tokenizer. A number of up to two digits is the same token wherever it stands: the space
    before it belongs to the word, sign or bracket there. Tags are tokens that decoding keeps."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(_PIECES, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocabulary,
        special_tokens=[PAD, BOS, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=END, pad_token=PAD, model_max_length=settings.context
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def pack(tokenizer: Any, documents: list[str], length: int) -> list[Tokens]:
    """Concatenates BOS document EOS BOS document EOS ... and cuts blocks of `length` tokens."""
    stream = compact([])
    for start in range(0, len(documents), _TOGETHER):
        for ids in tokenizer(documents[start : start + _TOGETHER], add_special_tokens=False)["input_ids"]:
            stream.extend([tokenizer.bos_token_id, *ids, tokenizer.eos_token_id])
    blocks: list[Tokens] = [stream[i : i + length] for i in range(0, len(stream) - length + 1, length)]
    if not blocks:
        raise InputError(f"the corpus has {len(stream)} tokens, less than one block of {length}; give more text")
    return blocks
