"""The judge of a comparison: transformers' eager model, and what it says of token ids.

In: a checkpoint and the engines' quantisation. Out: fp32 modules, with the weights that the
engines' INT4 decodes to or with the checkpoint's own, on the CPU or a GPU, and their logits, texts
and hidden states, on the CPU wherever they were computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from seekforge.compile.calibration_file import CALIBRATION_NAME, load_calibration
from seekforge.compile.reference import load_dequantised
from seekforge.compile.weights import Source
from seekforge.kernels.errors import InputError
from seekforge.models.checkpoint import open_checkpoint
from seekforge.models.module import load_eager
from seekforge.runtime.manifest import Manifest

JUDGES = ("reference", "checkpoint")
FP64_BYTES = 8
ROOM = 2 << 30  # of GPU memory beside the judge's weights: activations, libraries


def judge_device(manifests: Sequence[Manifest], parameters: int) -> torch.device:
    """Where eager runs: on the GPU where an engine runs there, so that both round in the same
    libraries and minutes become seconds; on the CPU where the GPU has no room for eager in fp64."""
    if torch.cuda.is_available() and any(manifest.device == "cuda" for manifest in manifests):
        device = torch.device("cuda", torch.cuda.current_device())
        if FP64_BYTES * parameters + ROOM <= torch.cuda.mem_get_info(device)[0]:
            return device
    return torch.device("cpu")


@contextmanager
def whole_fp32() -> Iterator[None]:
    """Products in fp32 are fp32: a GPU's TF32 keeps 10 bits of each factor, and a judge that rounds
    so would let everything pass."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def load_judge(
    source: Path,
    manifests: Sequence[Manifest],
    directories: Sequence[Path],
    judge: str,
    device: torch.device,
) -> nn.Module:
    """fp32 eager on `device`. judge "reference": for INT4 engines with the weights that theirs
    decode to, which must be those of all of them; "checkpoint": as the checkpoint has them."""
    recipes = [(manifest.quantization, manifest.dtype) for manifest in manifests]
    plain = all(quantization is None for quantization, _ in recipes)
    if judge == "checkpoint" or plain:
        return load_checkpoint(source).to(device)
    quantization, dtype = recipes[0]
    if quantization is None or any(recipe != recipes[0] for recipe in recipes):
        raise InputError(
            "engines of different quantisation or dtype have different references: "
            f"{[(q and q['method'], dtype) for q, dtype in recipes]}; compare them one by one, or "
            "all with the checkpoint's own weights: --judge checkpoint"
        )
    checkpoint = open_checkpoint(source)
    weights: Source = checkpoint
    if quantization["method"] == "awq-int4":
        # Temporary directories of a build lie in the bundle too.
        folder = directories[0].resolve().parent / CALIBRATION_NAME
        found = load_calibration(checkpoint, folder, quantization["calibration"]["key"])
        if found is None:
            raise InputError(
                f"{folder} has no calibration of this engine, or {source} is another checkpoint: "
                f"{source}: build the engine again, or give its checkpoint with --checkpoint"
            )
        weights = found
    module = load_dequantised(checkpoint, weights, quantization, getattr(torch, dtype))
    return module.to(device)


def load_checkpoint(source: Path) -> nn.Module:
    """The checkpoint's own weights, in fp32. One that is stored in INT4 is decoded by our code:
    transformers' needs libraries that are made for GPUs."""
    checkpoint = open_checkpoint(source)
    if checkpoint.quant is None:
        return load_eager(source, torch.float32)
    return load_dequantised(checkpoint, checkpoint, {"tensors": {}}, torch.float32)


@whole_fp32()
@torch.inference_mode()
def eager_texts(
    model: nn.Module, prompts: Sequence[Sequence[int]], count: int, eos: Sequence[int],
    unknown: Sequence[int],
) -> list[list[int]]:  # fmt: skip
    """transformers' own generate, one prompt at a time; like engines never an unknown id."""
    texts = []
    for prompt in prompts:
        ids = _ids(model, prompt)
        out = model.generate(  # type: ignore[operator]
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False,
            eos_token_id=list(eos) or None, pad_token_id=eos[0] if eos else None,
            suppress_tokens=list(unknown) or None,
        )  # fmt: skip
        texts.append(out[0, len(prompt) :].tolist())
    return texts


@whole_fp32()
@torch.inference_mode()
def eager_logits(model: nn.Module, tokens: Sequence[int]) -> Tensor:
    """[tokens, vocab] in float32."""
    logits: Tensor = model(_ids(model, tokens), use_cache=False).logits[0].float()
    return logits.cpu()


@whole_fp32()
@torch.inference_mode()
def eager_layers(model: nn.Module, tokens: Sequence[int]) -> list[Tensor]:
    """The hidden state behind each decoder layer, [tokens, hidden] in float32."""
    found: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        state = output[0] if isinstance(output, tuple) else output
        found.append(state[0].float().cpu().clone())

    layers: Any = model.model.layers  # type: ignore[union-attr]
    with ExitStack() as hooks:
        for layer in layers:
            hooks.callback(layer.register_forward_hook(keep).remove)
        model(_ids(model, tokens), use_cache=False)
    return found


def _ids(model: nn.Module, tokens: Sequence[int]) -> Tensor:
    """[1, tokens], where the model is."""
    return torch.tensor([list(tokens)], device=next(model.parameters()).device)


def in_fp64(model: nn.Module) -> nn.Module:
    """The same module in fp64, in place."""
    exact: Any = model.double()
    if hasattr(exact, "set_experts_implementation"):
        exact.set_experts_implementation("eager")  # the grouped products have no fp64
    return exact  # type: ignore[no-any-return]
