"""Models with quantized weights are read with plain ones, in which they are trained and copied.

By default transformers keeps them quantized on a GPU. On a CPU it reads plain ones, but quantizes them when it saves
the model, and leaves out of config.json that it did.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo.errors import InputError


def plain_weights(model: str) -> dict[str, Any]:
    """Options of `from_pretrained` by which transformers reads the weights of a model as plain ones, if they are not
    and it can. Raises InputError for a quantization that it does not know: it would ignore it."""
    from transformers import PreTrainedConfig
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AutoQuantizationConfig

    path = Path(model).expanduser()
    try:
        fields, _ = PreTrainedConfig.get_config_dict(str(path) if path.exists() else model)
        stored = fields.get("quantization_config") or fields.get("text_config", {}).get("quantization_config") or {}
        method = stored.get("quant_method")
        known = method is None or method in AUTO_QUANTIZATION_CONFIG_MAPPING
        settings = AutoQuantizationConfig.from_dict(stored) if stored and known else None
    except Exception:  # loading the model says in one line what is wrong with its folder
        return {}
    if not known:
        raise InputError(
            f"{model}: transformers cannot read its quantized weights (quant_method {str(method)[:60]!r}); give the "
            "folder of the model without quantization"
        )
    if settings is None or not hasattr(settings, "dequantize"):
        return {}
    settings.dequantize = True
    return {"quantization_config": settings}


def forget_quantization(model: Any) -> None:
    """Makes a model that was read with the options of `plain_weights` one that is saved as it is, in place."""
    model._weight_conversions = None  # they would quantize its weights again
    for plan in ("base_model_tp_plan", "base_model_ep_plan"):  # which name scales
        vars(model.config).pop(plan, None)


@contextmanager
def whole_blocks() -> Iterator[None]:
    """Context in which transformers reads FP8 weights whose last blocks are smaller than the others. It would divide a
    matrix into as many blocks of equal size, and scale most of it by the wrong ones."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    own = Fp8Dequantize._dequantize_one

    def in_whole_blocks(self: Any, quantized: Any, scales: Any, output_dtype: Any = None) -> Any:
        block = self.hf_quantizer.quantization_config.weight_block_size
        if block is None or quantized.dim() != 2 or not quantized.is_floating_point():
            return own(self, quantized, scales, output_dtype)
        size = [-(-length // side) * side for length, side in zip(quantized.shape, block, strict=True)]
        blocks = [length // side for length, side in zip(size, block, strict=True)]
        if [*scales.shape] != blocks or [*quantized.shape] == size:
            return own(self, quantized, scales, output_dtype)
        whole = quantized.new_zeros(size)
        whole[: quantized.shape[0], : quantized.shape[1]] = quantized
        read = own(self, whole, scales, output_dtype)
        return read[: quantized.shape[0], : quantized.shape[1]].contiguous()

    Fp8Dequantize._dequantize_one = in_whole_blocks  # type: ignore[method-assign]
    try:
        yield
    finally:
        Fp8Dequantize._dequantize_one = own  # type: ignore[method-assign]
