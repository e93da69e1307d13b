"""Compare the inner loop with PyTorch's: same Llama, batch, length and optimizer, in one process.

This is a case of scripts/benchmark.py, for the `parity` extra. PyTorch trains the LlamaForCausalLM
of `transformers` with fused `torch.optim.AdamW`, one model after another. adloco_jax runs the inner
steps of a round, its workers one after another or at once, as a run would choose. Both start from
the same weights, a folder in Hugging Face layout (tests/parity_models_test.py checks that the two
models are equal). The machine's rate is that of a matrix product, timed alternately with the rest,
in the faster of the two libraries.
"""

import dataclasses
import importlib.util
import itertools
import os
import tempfile
from collections.abc import Callable

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch uses the same GPU

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree
from ml_collections import ConfigDict
from timing import interleave, per_second

import adloco_jax
from adloco_jax.config import Settings, default_config, validate
from adloco_jax.core.outer import inner_steps, start_round
from adloco_jax.core.types import LossFn
from adloco_jax.engine.memory import Mode
from adloco_jax.engine.model import configured_model, examples_per_pass
from adloco_jax.engine.optimizers import inner_transform, labeller
from adloco_jax.engine.programs import needed_bytes
from adloco_jax.engine.spec import this_machine
from adloco_jax.models import hf
from adloco_jax.models.configured import InitFn, build_network


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model, and the updates of one timed call."""

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
    "growing_pool": Shape(
        {"vocab_size": 32000, "width": 384, "num_layers": 6, "num_heads": 3, "num_kv_heads": 3}
        | {"mlp_width": 1024, "dtype": "bfloat16"},
        512,
        32,
    ),
}


def functions_of(settings: Settings) -> tuple[InitFn, LossFn]:
    """The model's `init_fn` and loss as a run on this device has them."""
    model, mode = configured_model(settings, this_machine()), Mode(True, bool(settings.model.remat))
    return model.init_fn, model.loss_of(mode, model.attention(1))


class InnerSteps:
    """Compiled inner steps of trainers with one worker each; a call continues the last one."""

    def __init__(
        self,
        settings: Settings,
        tokens_SRBL: np.ndarray,
        params: PyTree | None = None,
        *,
        sequential: bool | None = None,
    ):
        """Compile the inner steps.

        Args:
          settings: The model, the optimizer and the learning rate.
          tokens_SRBL: The tokens that each call trains on, int32 [S, R, B, L + 1].
          params: One model's parameters to start from; None draws them from key 0.
          sequential: Whether workers run one after another; None: as in a run on this device.
        """
        init_fn, loss_fn = functions_of(settings)
        label_params, num_workers = labeller(settings.model.arch), tokens_SRBL.shape[1]
        inner_tx = inner_transform(settings.inner, label_params)
        ensemble = adloco_jax.init(
            init_fn(jax.random.key(0)) if params is None else params,
            num_trainers=num_workers,
            num_workers=num_workers,
            inner_tx=inner_tx,
            outer_tx=inner_tx,
        )
        rates_SR = np.full(tokens_SRBL.shape[:2], settings.inner.learning_rate, np.float32)
        self.num_tokens = tokens_SRBL[..., 1:].size  # that a call trains on
        self._inputs = jax.device_put((tokens_SRBL, rates_SR))
        self._workers = jax.jit(start_round)(ensemble)

        def steps(workers, tokens_SRBL, rates_SR):
            return inner_steps(
                workers,
                tokens_SRBL,
                loss_fn,
                inner_tx=inner_tx,
                learning_rate_TR=rates_SR,
                sequential=this_machine().platform == "cpu" if sequential is None else sequential,
                examples_per_pass=examples_per_pass(
                    settings.data.sequence_length * settings.model.width, this_machine()
                ),
            )

        jitted = jax.jit(steps, donate_argnums=0)
        self._program = jitted.lower(self._workers, *self._inputs).compile()

    @property
    def needed_bytes(self) -> int:
        """Device memory that the program holds while it runs, arguments included."""
        return needed_bytes(self._program)

    def __call__(self) -> list[float]:
        """Run the steps and wait for them; return the last loss of each worker, nats/token."""
        self._workers, loss_SR, _ = self._program(self._workers, *self._inputs)
        return jax.block_until_ready((loss_SR[-1].tolist(), self._workers))[0]


def side_by_side(shapes: list[str], batches: list[int], trainers: list[int], repeats: int) -> dict:
    """Tokens per second of each library, and their share of a matrix product's rate."""
    result: dict = {"case": "pytorch", "speed_over_eager": {}, "share_of_matmul": {}}
    for name, batch, num_trainers in itertools.product(shapes, batches, trainers):
        label = f"{name} b={batch} M={num_trainers}"
        measured = measure(SHAPES[name], batch, num_trainers, repeats)
        ours, eager = measured["adloco_jax"], measured["eager"]
        result["speed_over_eager"][label] = round(eager["seconds"] / ours["seconds"], 3)
        result["share_of_matmul"][label] = ours["share"]
        print(label)
        for library, figures in measured.items():
            low, middle, high = figures["tokens_per_s"]
            print(
                f"  {library:12} {middle:9,.0f} tokens/s ({low:,.0f} to {high:,.0f}),"
                f" {figures['share']:.1%} of {figures['machine'] / 1e9:,.0f} GFLOP/s"
            )
    return result


def _is_matrix(path: tuple, leaf: np.ndarray) -> bool:
    """Whether a leaf is a factor of matrix products; an embedding is not."""
    return leaf.ndim >= 2 and "embedding" not in jax.tree_util.keystr(path)


def measure(shape: Shape, batch: int, num_trainers: int, repeats: int) -> dict[str, dict]:
    """Seconds of a call, tokens per second (quartiles), FLOP/s and their share, by library."""
    settings, tokens = settings_of(shape), random_tokens(shape, batch, num_trainers)
    with tempfile.TemporaryDirectory() as folder:
        params = save_weights(settings, folder)
        ours = InnerSteps(settings, tokens, hf.load(folder).params)
        calls = {"adloco_jax": ours} | _torch_calls(settings, tokens, folder, ours)
    products = _products(settings.model.dtype)
    times = interleave(calls | products, repeats)
    machine = max(2 * _PRODUCT**3 / float(np.median(times[name])) for name in products)
    flops = ours.num_tokens * flops_per_token(shape, params)
    return {
        name: {
            "seconds": float(np.median(times[name])),
            "tokens_per_s": per_second(ours.num_tokens, times[name]),
            "flops_per_s": flops / float(np.median(times[name])),
            "share": round(flops / float(np.median(times[name])) / machine, 3),
            "machine": machine,
        }
        for name in calls
    }


def flops_per_token(shape: Shape, params: PyTree) -> int:
    """Operations of an update for each token, without what is rematerialised.

    Six for each weight of a matrix (Kaplan et al. 2020, arXiv 2001.08361, 2.1), and attention's two
    products, of the half that is not masked.
    """
    leaves = jax.tree.leaves_with_path(params)
    weights = sum(leaf.size for path, leaf in leaves if _is_matrix(path, leaf))
    return 6 * (weights + shape.model["num_layers"] * shape.sequence_length * shape.model["width"])


def _torch_calls(
    settings: Settings, tokens_SRBL: np.ndarray, folder: str, ours: Callable
) -> dict[str, Callable]:
    """PyTorch's steps, eager and compiled, after a check that their losses equal adloco_jax's."""
    eager = torch_steps(settings, tokens_SRBL, folder)
    compiled = torch_steps(settings, tokens_SRBL, folder, compiled=True)
    tolerance = 0.02 if settings.model.dtype == "bfloat16" else 1e-3
    expected = ours()
    np.testing.assert_allclose(expected, eager(), rtol=tolerance)
    try:
        losses = compiled()
    except Exception as error:  # deliberately broad: whatever torch's compiler lacks here
        print(f"  torch.compile does not work: {str(error).splitlines()[0]}")
        return {"eager": eager}
    np.testing.assert_allclose(expected, losses, rtol=tolerance)
    return {"eager": eager, "compile": compiled}


def torch_lacks() -> str:
    """The reason why PyTorch cannot be measured on JAX's devices; empty if it can."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    if jax.default_backend() == "gpu" and not torch.cuda.is_available():
        return "torch finds no GPU"
    return ""


def config_of(shape: Shape, **overrides: object) -> ConfigDict:
    """A run's config with this model, one trainer and one worker; overrides by dotted key."""
    config = default_config()
    config.model.update(shape.model | {"max_length": shape.sequence_length})
    config.data.sequence_length = shape.sequence_length
    config.ensemble.num_trainers = config.ensemble.num_workers = 1
    config.batching.max_batch_size = config.batching.initial_batch_size = 1
    config.update_from_flattened_dict(overrides)
    return config


def settings_of(shape: Shape, **overrides: object) -> Settings:
    """The checked settings of `config_of`."""
    return validate(config_of(shape, **overrides))


def random_tokens(shape: Shape, batch: int, num_trainers: int) -> np.ndarray:
    """int32 [S, M, B, L + 1] of the shape's vocabulary."""
    size = (shape.num_steps, num_trainers, batch, shape.sequence_length + 1)
    return np.random.default_rng(0).integers(0, shape.model["vocab_size"], size, dtype=np.int32)


def save_weights(settings: Settings, folder: str) -> PyTree:
    """Write the initial weights, which all libraries load; return their shapes."""
    network = build_network(settings.model)
    params = jax.jit(network.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    hf.save(params, folder, network=network)
    return jax.eval_shape(lambda: params)


def torch_steps(
    settings: Settings, tokens_SRBL: np.ndarray, folder: str, *, compiled: bool = False
) -> Callable[[], list[float]]:
    """The same steps in PyTorch, from the weights in `folder`; a call continues the last one."""
    import torch
    import transformers
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    transformers.utils.logging.disable_progress_bar()
    # While it is compiled, transformers builds the mask of rows packed from several texts, with
    # which attention skips nothing; without one it is causal by its own means, like eager.
    transformers.AttentionInterface.register("sdpa_unmasked", sdpa_attention_forward)
    transformers.AttentionMaskInterface.register("sdpa_unmasked", lambda *_, **__: None)
    torch.compiler.reset()  # lest a second shape be compiled for shapes of any size
    device = "cuda" if torch.cuda.is_available() else "cpu"
    inner, low_precision = settings.inner, settings.model.dtype == "bfloat16"
    load = transformers.LlamaForCausalLM.from_pretrained
    how = {"dtype": torch.float32, "attn_implementation": "sdpa_unmasked"}
    models = [load(folder, **how).to(device).train() for _ in range(tokens_SRBL.shape[1])]
    # Fused, as transformers' Trainer has it; the default is slower on a CPU.
    how = {"lr": inner.learning_rate, "weight_decay": inner.weight_decay, "fused": True}
    optimizers = [torch.optim.AdamW(model.parameters(), **how) for model in models]
    rows_SRBL = torch.from_numpy(tokens_SRBL).long().to(device)

    def loss_of(model):
        def loss(rows_BL):
            with torch.autocast(device, torch.bfloat16, enabled=low_precision):
                logits = model(input_ids=rows_BL[:, :-1], use_cache=False).logits
            return torch.nn.functional.cross_entropy(
                logits.float().flatten(0, 1), rows_BL[:, 1:].flatten()
            )

        return torch.compile(loss) if compiled else loss

    loss_fns = [loss_of(model) for model in models]

    def call() -> list[float]:
        for rows_RBL in rows_SRBL:
            losses = []
            for loss_fn, optimizer, rows_BL in zip(loss_fns, optimizers, rows_RBL, strict=True):
                loss = loss_fn(rows_BL)
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
    product = jax.jit(jnp.matmul)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    matrix = torch.ones((_PRODUCT, _PRODUCT), dtype=getattr(torch, dtype), device=device)
    return {
        "jax": lambda: jax.block_until_ready(product(ours, ours)),
        "torch": lambda: (matrix @ matrix)[0, 0].item(),
    }
