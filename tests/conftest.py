"""What every test runs under: eight emulated CPU devices, strict shapes, checked annotations."""

import gc
import os
import tempfile
from pathlib import Path

import hypothesis
import jax
import jaxtyping
import pytest

# Through jax's own settings, not the environment: a command line under test starts with one device.
if "JAX_PLATFORMS" not in os.environ:
    jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

# Many tests compile the same program: it is compiled once per session, in a folder of its own.
_cache = tempfile.TemporaryDirectory()
jax.config.update("jax_compilation_cache_dir", _cache.name)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
# Compiling is most of the work, and LLVM's optimization a good part of it, which tiny programs do
# not earn back; so in command lines under test. The demonstration and notebooks run as users do.
jax.config.update("jax_disable_most_optimizations", True)
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
# Spares jax 0.10's compiler for CPUs a third of its time; later ones pass over what they lack.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
)

# Not core.types: jax rebuilds the state classes there with placeholders for leaves, and the batch
# tests use them with NumPy fields. An int is welcome where a float is asked for, as in PEP 484.
CHECKED = [
    *("core.batching", "core.compress", "core.streaming", "core.gradstats"),
    *("core.merge", "core.outer", "models"),
]
jaxtyping.install_import_hook(
    [f"adloco_jax.{module}" for module in CHECKED],
    "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))",
)

# No deadline: the first example of a property may compile. Reproducible: the same examples always.
hypothesis.settings.register_profile("adloco", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("adloco")


@pytest.fixture(scope="module", autouse=True)
def programs_given_back():
    """A program has some twenty memory maps; a process may have 65,530, and XLA aborts it there."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture
def optimized():
    """For what computes for longer than it compiles."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of prepared real text; tests that want it are skipped without it."""
    if "ADLOCO_DATA_DIR" not in os.environ:
        pytest.skip("ADLOCO_DATA_DIR is not set: no prepared text on this machine")
    return Path(os.environ["ADLOCO_DATA_DIR"])


@pytest.fixture
def unchecked():
    """Annotations are not checked, as for a user: the functions' own errors come to light."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
