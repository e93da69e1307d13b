"""The inner loop beside PyTorch's: the same Llama, batch, length and optimizer, in one process.

A case of scripts/benchmark.py, for the `parity` extra. PyTorch trains `transformers`'
LlamaForCausalLM with `torch.optim.AdamW`, fused, one model after the other; this engine runs the
inner steps that a round of a run has, its workers in turns or at once as a run would choose. Both
start from the same weights, a folder in Hugging Face layout (tests/parity_llama_test.py holds the
two networks equal). The machine's own rate is that of a matrix product in the same turns, the
better of the two libraries'.
"""

import dataclasses
import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch uses the same GPU

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree
from timing import interleave

import adloco_jax
from adloco_jax import hf
from adloco_jax.core.outer import inner_steps, start_round
from adloco_jax.models.llama import next_token_loss
from adloco_jax.run.build import (
    build_network,
    examples_per_pass,
    inner_transform,
    worker_parallelism,
)
from adloco_jax.run.config import Settings, default_config, validate
from adloco_jax.run.throughput import flops_per_token


@dataclasses.dataclass(frozen=True)
class Shape:
    """A network, and how much of it one timed call does."""

    model: dict
    sequence_length: int
    num_steps: int  # of each trainer in a call


_PRODUCT = 2048  # rows and columns of the matrices whose product is the machine's own rate
_COMMON = {"vocab_size": 257, "num_heads": 8, "num_kv_heads": 4}
SHAPES = {
    "small": Shape(_COMMON | {"width": 256, "num_layers": 4, "mlp_width": 704}, 128, 12),
    "large": Shape(_COMMON | {"width": 512, "num_layers": 8, "mlp_width": 1408}, 256, 4),
    "microllama": Shape(
        {"vocab_size": 32000, "width": 1024, "num_layers": 12, "num_heads": 16, "num_kv_heads": 4}
        | {"mlp_width": 5632, "dtype": "bfloat16", "loss_chunk": 1},
        1024,
        16,
    ),
}


def side_by_side(shapes: list[str], batches: list[int], trainers: list[int], repeats: int) -> dict:
    """Tokens per second, share of a matrix product's rate, and memory."""
    result: dict = {"case": "pytorch", "speed_over_eager": {}, "share_of_matmul": {}}
    for name in shapes:
        for batch in batches:
            for num_trainers in trainers:
                label = f"{name} b={batch} M={num_trainers}"
                measured = _measure(SHAPES[name], batch, num_trainers, repeats)
                ours, eager = measured["adloco_jax"], measured["eager"]
                result["speed_over_eager"][label] = round(eager["seconds"] / ours["seconds"], 3)
                result["share_of_matmul"][label] = ours["share"]
                print(label)
                for engine, figures in measured.items():
                    memory = _memory(name, batch, num_trainers, engine)
                    low, middle, high = figures["tokens_per_s"]
                    print(
                        f"  {engine:12} {middle:9,.0f} tokens/s ({low:,.0f} to {high:,.0f}),"
                        f" {figures['share']:.1%} of {figures['machine'] / 1e9:,.0f} GFLOP/s"
                        f"; {memory:,.0f} MiB to build it and train"
                    )
    return result


def _measure(shape: Shape, batch: int, num_trainers: int, repeats: int) -> dict[str, dict]:
    settings = _settings(shape)
    tokens = _tokens(shape, batch, num_trainers, shape.num_steps)
    with tempfile.TemporaryDirectory() as folder:
        params = _save_weights(settings, folder)
        calls = {
            "adloco_jax": _ours(settings, tokens, folder),
            "eager": _torch(settings, tokens, folder),
        }
        compiled = _torch(settings, tokens, folder, compiled=True)
    losses = {name: call() for name, call in calls.items()}  # compiles, too
    tolerance = 0.02 if settings.model.dtype == "bfloat16" else 1e-3
    np.testing.assert_allclose(losses["adloco_jax"], losses["eager"], rtol=tolerance)
    try:
        compiled()
        calls["compile"] = compiled
    except Exception as error:  # whatever its compiler lacks here
        print(f"  torch.compile does not work: {str(error).splitlines()[0]}")
    products = _products(settings.model.dtype)
    times = interleave(calls | products, repeats)
    machine = max(2 * _PRODUCT**3 / float(np.median(times[name])) for name in products)
    model, length = shape.model, shape.sequence_length
    # What a run's own figure leaves out: attention's two products, of the half that is not masked.
    attention = 6 * model["num_layers"] * length * model["width"]
    num_tokens = tokens[..., 1:].size
    flops = num_tokens * (flops_per_token(params) + attention)
    return {
        name: {
            "seconds": float(np.median(times[name])),
            "tokens_per_s": num_tokens / np.quantile(times[name], (0.75, 0.5, 0.25)),
            "share": round(flops / float(np.median(times[name])) / machine, 3),
            "machine": machine,
        }
        for name in calls
    }


def _settings(shape: Shape) -> Settings:
    config = default_config()
    config.model.update(shape.model | {"max_length": shape.sequence_length})
    config.data.sequence_length = shape.sequence_length
    config.batching.max_batch_size = 1
    config.batching.initial_batch_size = 1
    return validate(config)


def _tokens(shape: Shape, batch: int, num_trainers: int, steps: int) -> np.ndarray:
    size = (steps, num_trainers, batch, shape.sequence_length + 1)
    return np.random.default_rng(0).integers(0, shape.model["vocab_size"], size, dtype=np.int32)


def _save_weights(settings: Settings, folder: str) -> PyTree:
    """Writes what all start from; its shapes."""
    network = build_network(settings)
    params = jax.jit(network.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    hf.save(params, f"{folder}/model", network=network)
    return jax.eval_shape(lambda: params)


def _ours(settings: Settings, tokens: np.ndarray, folder: str) -> Callable:
    loss_fn = next_token_loss(
        build_network(settings), sequences_per_chunk=settings.model.loss_chunk
    )
    inner_tx = inner_transform(settings)
    rates = np.full(tokens.shape[:2], settings.inner.learning_rate, np.float32)
    ensemble = adloco_jax.init(
        hf.load(f"{folder}/model").params,
        num_trainers=tokens.shape[1],
        num_workers=tokens.shape[1],
        inner_tx=inner_tx,
        outer_tx=inner_tx,
    )
    program = jax.jit(
        functools.partial(
            inner_steps,
            loss_fn=loss_fn,
            inner_tx=inner_tx,
            worker_parallelism=worker_parallelism(settings),
            examples_per_pass=examples_per_pass(settings),
        ),
        donate_argnums=0,
    )
    state = [jax.jit(start_round)(ensemble)]
    arguments = jax.device_put((tokens, rates))

    def call() -> list[float]:
        state[0], loss_TR, _ = program(state[0], arguments[0], learning_rate_TR=arguments[1])
        return jax.block_until_ready((loss_TR[-1].tolist(), state[0]))[0]

    return call


def _torch(
    settings: Settings, tokens: np.ndarray, folder: str, *, compiled: bool = False
) -> Callable:
    import torch
    import transformers
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    transformers.utils.logging.disable_progress_bar()
    # While it is compiled, transformers builds the mask of rows packed from several texts, with
    # which attention skips nothing; without one it is causal by its own means, as in eager.
    transformers.AttentionInterface.register("sdpa_unmasked", sdpa_attention_forward)
    transformers.AttentionMaskInterface.register("sdpa_unmasked", lambda *_, **__: None)
    torch.compiler.reset()  # lest a second shape be compiled for shapes of any size
    device = "cuda" if torch.cuda.is_available() else "cpu"
    inner, low_precision = settings.inner, settings.model.dtype == "bfloat16"
    networks = [
        transformers.LlamaForCausalLM.from_pretrained(
            f"{folder}/model", dtype=torch.float32, attn_implementation="sdpa_unmasked"
        )
        .to(device)
        .train()
        for _ in range(tokens.shape[1])
    ]
    forward = [torch.compile(network) if compiled else network for network in networks]
    optimizers = [
        torch.optim.AdamW(
            network.parameters(),
            lr=inner.learning_rate,
            weight_decay=inner.weight_decay,
            fused=True,  # as transformers' Trainer has it; the default is slower on a CPU
        )
        for network in networks
    ]
    tokens_TRBL = torch.from_numpy(tokens).long().to(device)

    def call() -> list[float]:
        for tokens_RBL in tokens_TRBL:
            losses = []
            for network, optimizer, tokens_BL in zip(forward, optimizers, tokens_RBL, strict=True):
                with torch.autocast(device, torch.bfloat16, enabled=low_precision):
                    logits = network(input_ids=tokens_BL[:, :-1], use_cache=False).logits
                loss = torch.nn.functional.cross_entropy(
                    logits.float().flatten(0, 1), tokens_BL[:, 1:].flatten()
                )
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
        return [loss.item() for loss in losses]  # waits for the device

    return call


def _products(dtype: str) -> dict[str, Callable]:
    """A product of square matrices in either library."""
    import torch

    ours = jnp.ones((_PRODUCT, _PRODUCT), dtype)
    theirs = torch.ones((_PRODUCT, _PRODUCT), dtype=getattr(torch, dtype))
    product = jax.jit(jnp.matmul)

    def torch_product():
        (theirs @ theirs)[0, 0].item()

    if torch.cuda.is_available():
        theirs = theirs.cuda()
    return {"jax": lambda: jax.block_until_ready(product(ours, ours)), "torch": torch_product}


def _memory(name: str, batch: int, num_trainers: int, engine: str) -> float:
    """MiB by which the peak of a process of its own grows that builds and trains two updates."""
    with tempfile.TemporaryDirectory() as folder:
        _save_weights(_settings(SHAPES[name]), folder)
        command = [sys.executable, __file__, name, str(batch), str(num_trainers), engine, folder]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout.splitlines()[-1])


def _print_memory(name: str, batch: str, num_trainers: str, engine: str, folder: str) -> None:
    import torch
    import transformers  # noqa: F401  its import is not what is measured

    shape = SHAPES[name]
    settings = _settings(shape)
    tokens = _tokens(shape, int(batch), int(num_trainers), 2)
    jax.block_until_ready(jnp.ones(8) + 1)
    before = _peak_bytes(engine)
    if engine == "adloco_jax":
        call = _ours(settings, tokens, folder)
    else:
        call = _torch(settings, tokens, folder, compiled=engine == "compile")
    call()
    del torch
    print((_peak_bytes(engine) - before) / 2**20)


def _peak_bytes(engine: str) -> int:
    """Of the device this engine counts itself, else of the process."""
    import torch

    if engine != "adloco_jax" and torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    counted = jax.local_devices()[0].memory_stats() if engine == "adloco_jax" else None
    if counted:
        return counted["peak_bytes_in_use"]
    # Not `getrusage`, whose peak a process inherits from the one that has started it.
    status = Path("/proc/self/status").read_text().splitlines()
    (peak,) = (line.split()[1] for line in status if line.startswith("VmHWM"))
    return int(peak) * 1024


if __name__ == "__main__":
    _print_memory(*sys.argv[1:])
