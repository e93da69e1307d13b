"""The setting of every test: eight emulated CPU devices, strict shapes, checked annotations."""

import dataclasses
import gc
import os
import sys
import tempfile
from pathlib import Path

_kept = Path(__file__).resolve().parents[1] / ".pytest_cache"  # from one session to the next
# Many containers forbid bytecode; then each command under test compiles JAX and others for 4 s.
sys.dont_write_bytecode, sys.pycache_prefix = False, str(_kept / "bytecode")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix

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


@pytest.fixture(scope="module", autouse=True)
def programs_given_back():
    """Frees programs. Each has some twenty memory maps, and a process may have 65,530."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="module", autouse=True)
def shared_programs(programs_given_back):
    """Runs of a module with the same model and settings trace and compile a program once."""
    if "adloco_jax.run.assemble" not in sys.modules:  # these tests make no run
        yield
        return
    from adloco_jax.engine import programs
    from adloco_jax.run import assemble, plan

    models, specs, compiled = {}, {}, {}
    build_model, program_spec = assemble.build_model, assemble.program_spec
    compile_now = programs.Programs._compile

    def machine():
        optimized = not jax.config.values["jax_disable_most_optimizations"]
        return (*map(str, jax.devices()), jax.config.jax_enable_x64, optimized)

    def one_model(settings, devices=None, mode=None, kernel=None):
        sizes = settings.model.model_copy(update={"init_from": ""})
        key = (sizes, settings.adapter, settings.batching.test, machine())
        key += (devices is None, mode, kernel)
        if key not in models:
            models[key] = build_model(settings, devices, mode, kernel)
        return models[key]

    def one_spec(settings, *given, **more):
        """The first of equal specs, whatever the memory. Equal settings make equal optimizers."""
        spec = program_spec(settings, *given, **more)
        made = {"params": str(spec.params), "base": str(spec.base)}
        made |= {"inner_tx": settings.inner, "outer_tx": settings.outer}
        fields = vars(spec) | made | {"machine": tuple(map(id, spec.machine.devices))}
        first = specs.setdefault((machine(), *fields.values()), spec)
        return dataclasses.replace(first, machine=spec.machine)

    def compile_once(self, key, *, background):
        # A program may depend on anything that a test has replaced in the module.
        used = [*(vars(self.spec) | {"machine": None}).values(), *self.spec.machine.devices]
        used += vars(programs).values()
        place = (key, *map(id, used))
        if place not in compiled:
            compiled[place] = compile_now(self, key, background=background), used
        else:
            program, _ = compiled[place]
            size = programs.needed_bytes(program)
            self._on_compile(programs.Compiled(key, 0.0, True, background, size))
        return compiled[place][0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assemble, "build_model", one_model)
        for module in (assemble, plan):
            patch.setattr(module, "program_spec", one_spec)
        patch.setattr(programs.Programs, "_compile", compile_once)
        yield


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
    """Return a function; after its call, code that differs by platform takes the form of a GPU."""

    def switch() -> None:
        def other(*arguments, cpu, default):
            return default(*arguments)

        monkeypatch.setattr(jax.lax, "platform_dependent", other)
        jax.clear_caches()

    return switch
