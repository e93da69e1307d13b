"""The setting of every test: eight emulated CPU devices, strict shapes, checked annotations."""

import gc
import os
import shutil
import sys
import tempfile
from pathlib import Path

_kept = Path(__file__).resolve().parents[1] / ".pytest_cache"  # from one session to the next
# Runs sync what they save, and tests need not wait for a disk: their folders lie in memory, where
# the machine has room there.
if os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free > 4 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")
# Many containers forbid bytecode; then each command under test compiles JAX and others for 4 s.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
sys.pycache_prefix = os.environ.setdefault("PYTHONPYCACHEPREFIX", str(_kept / "bytecode"))

import hypothesis
import jax
import jaxtyping
import pytest
from hubs import make_hub

gc.disable()  # until all tests are collected: imports make hardly any garbage
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may wait for a hub
# Set through jax, not the environment, so that a command under test starts with one device.
if "JAX_PLATFORMS" not in os.environ:
    jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

# Many tests compile the same program. A folder keeps them, for later sessions too.
jax.config.update("jax_compilation_cache_dir", str(_kept / "programs"))
_cache = tempfile.TemporaryDirectory()
os.environ["XDG_CACHE_HOME"] = _cache.name  # rows of text are prepared once per session
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.02)
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
    *("core.batching", "core.compress", "core.gradstats"),
    *("core.inner", "core.merge", "core.outer", "models", "contrib"),
]
jaxtyping.install_import_hook(
    [f"adloco_jax.{module}" for module in CHECKED],
    "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))",
)

# No deadline: the first example of a property may compile. Reproducible: the same examples always.
hypothesis.settings.register_profile("adloco", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("adloco")


def pytest_collection_finish():
    """Leaves what was imported out of garbage collections: they took a tenth of the time."""
    gc.enable()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def shared_programs():
    """Runs trace and compile a program once in a session if all that it depends on is equal.

    Yields the programs.
    """
    if "adloco_jax.engine.model" not in sys.modules:  # these tests make no run
        yield {}
        return
    from adloco_jax.engine import model, programs
    from adloco_jax.models.architectures import ARCHITECTURES
    from adloco_jax.settings import InnerSettings, ModelSettings

    rates = ("steps_per_round", "max_steps_per_round", "round_length", "state")
    rates += ("learning_rate", "warmup_updates", "schedule", "final_lr_frac")
    compiled, compile_now = {}, programs.Programs._compile

    def what_counts(given):
        if isinstance(given, ModelSettings):
            entry = ARCHITECTURES[given.arch]
            sizes = given.model_copy(update={"init_from": ""})
            return sizes, entry.build, entry.loss
        if isinstance(given, InnerSettings):
            return given.model_copy(update=dict.fromkeys(rates))
        return given

    def once(function):
        """Make a function that returns the same loss or optimizer for equal groups of settings."""
        made = {}

        def first(*given, **more):
            key = (*map(what_counts, given), *more.items())
            if key not in made:
                made[key] = function(*given, **more)
            return made[key]

        return first

    def compile_once(self, key, *, background):
        spec, optimized = self.spec, not jax.config.values["jax_disable_most_optimizations"]
        fields = {"params": str(spec.params), "base": str(spec.base)}
        fields = vars(spec) | fields | {"machine": spec.machine.devices}
        place = (key, *fields.values(), self._x64, optimized)
        place += (jax.lax.platform_dependent, programs.GRADIENTS_HELD)  # that tests replace
        if place not in compiled:
            compiled[place] = compile_now(self, key, background=background)
        else:
            size = programs.needed_bytes(compiled[place])
            self._on_compile(programs.Compiled(key, 0.0, True, background, size))
        return compiled[place]

    with pytest.MonkeyPatch.context() as patch:
        for name in ("build_model", "inner_transform", "outer_transform", "aggregator"):
            patch.setattr(model, name, once(getattr(model, name)))
        patch.setattr(programs.Programs, "_compile", compile_once)
        yield compiled


@pytest.fixture(scope="module", autouse=True)
def programs_given_back(shared_programs):
    """Frees programs. One for eight devices has a hundred memory maps, of 65,530 in a process.

    They are kept as long as there is room: each module would trace the same small ones again.
    """
    yield
    maps = Path("/proc/self/maps")  # only Linux tells, and has this limit
    if not maps.exists() or len(maps.read_bytes().splitlines()) > 20_000:
        shared_programs.clear()
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="module")
def one_device():
    """For a whole module (`pytestmark`): runs see one device, for which programs compile fast.

    Yields all devices, for tests that need some of them.
    """
    everything = jax.devices()
    first = everything[:1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda *_: first)
        patch.setattr(jax, "local_devices", lambda *_, **__: first)
        yield everything


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of prepared real text; tests that need it are skipped without it."""
    if "ADLOCO_DATA_DIR" not in os.environ:
        pytest.skip("ADLOCO_DATA_DIR is not set: no prepared text on this machine")
    return Path(os.environ["ADLOCO_DATA_DIR"])


@pytest.fixture(scope="session")
def hub_root(tmp_path_factory, data_dir) -> Path:
    """The folder of the local hub's repositories, see `hubs`."""
    return make_hub(tmp_path_factory.mktemp("hub") / "root", data_dir)


@pytest.fixture
def unchecked():
    """Turns off the check of annotations, as for a user, to see the functions' own errors."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Yields a function; after its call, code that differs by platform takes the form of a GPU."""

    def switch() -> None:
        def other(*arguments, cpu, default):
            return default(*arguments)

        monkeypatch.setattr(jax.lax, "platform_dependent", other)
        jax.clear_caches()

    yield switch
    jax.clear_caches()
