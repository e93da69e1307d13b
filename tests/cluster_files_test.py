"""The files for systemd, Slurm and Kubernetes call the program with valid arguments."""

import configparser
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from adloco_jax.errors import ConfigError, DataError, DivergedError, Preempted

ROOT = Path(__file__).resolve().parents[1]
SBATCH = ROOT / "scripts" / "slurm.sbatch"
KINDS = {
    part["kind"]: part
    for part in yaml.safe_load_all((ROOT / "scripts" / "kubernetes.yaml").read_text("utf-8"))
}
UNIT = configparser.ConfigParser(interpolation=None)
UNIT.read(ROOT / "scripts" / "adloco.service")
MISTAKES = {ConfigError.exit_code, DataError.exit_code, DivergedError.exit_code}


def slurm_job(folder, srun, **settings):
    """Runs the batch script with a stand-in for srun: its exit code, what it requeued, stderr."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name, text in {"srun": srun, "scontrol": 'echo "$@" >>scontrol.log'}.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    path = f"{programs}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    script = SBATCH.read_text("utf-8").replace("configs/microllama.py", f"{ROOT}/probes/faults.py")
    log = folder / "scontrol.log"
    log.unlink(missing_ok=True)
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=os.environ | {"PATH": path, "SLURM_JOB_ID": "17"} | settings,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, log.read_text() if log.exists() else "", done.stderr


def test_a_slurm_job_is_requeued_unless_it_is_done_mistaken_or_restarted_too_often(tmp_path):
    for code in (0, *MISTAKES):
        assert slurm_job(tmp_path, f"exit {code}") == (code, "", "")
    for code in (1, 5, Preempted.exit_code, 137):
        _, requeued, said = slurm_job(tmp_path, f"exit {code}", SLURM_RESTART_COUNT="19")
        assert requeued == "requeue 17\n" and f"ended with {code}; requeued" in said
    code, requeued, said = slurm_job(tmp_path, "exit 137", SLURM_RESTART_COUNT="20")
    assert (code, requeued) == (137, "") and "gave up after 20 restarts" in said


def test_a_signal_to_the_batch_shell_waits_for_the_processes(tmp_path):
    # At a preemption the signal may reach the shell as well as its steps.
    _, requeued, _ = slurm_job(tmp_path, "kill -TERM $PPID; sleep 0.3; exit 75")
    assert requeued == "requeue 17\n"


def test_systemd_and_kubernetes_know_the_exit_codes():
    job = KINDS["Job"]["spec"]
    [container] = job["template"]["spec"]["containers"]
    rules = {
        tuple(rule["onExitCodes"]["values"]): rule["action"]
        for rule in job["podFailurePolicy"]["rules"]
        if "onExitCodes" in rule
    }
    assert rules == {tuple(sorted(MISTAKES)): "FailJob", (Preempted.exit_code,): "Ignore"}
    names = {r["onExitCodes"]["containerName"] for r in job["podFailurePolicy"]["rules"][:2]}
    assert names == {container["name"]}
    assert job["template"]["spec"]["restartPolicy"] == "Never"
    assert job["podFailurePolicy"]["rules"][2]["onPodConditions"] == [{"type": "DisruptionTarget"}]
    service = UNIT["Service"]
    assert {*map(int, service["RestartPreventExitStatus"].split())} == MISTAKES
    assert service["Restart"] == "on-failure"


def command(words, workdir):
    """A file's command, changed for this machine: one process, a small config, another folder."""
    text = shlex.join(word for word in words if word != "--distributed")
    text = re.sub(r"--config[= ]\S+", f"--config={ROOT}/probes/faults.py", text)
    text = re.sub(r"--workdir[= ]\S+", f"--workdir={workdir}", text)
    assert "--config.checkpoint.watchdog_s=" in text
    return [sys.executable, *shlex.split(text)[1:], "--config.num_rounds=1"]


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", ["systemd", "slurm", "kubernetes"])
def test_the_command_of_each_file_trains(tmp_path, monkeypatch, scheduler):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    workdir = tmp_path / "run"
    if scheduler == "slurm":
        # The environment that srun sets for the only task of a job.
        place = {"STEP_NODELIST": "localhost", "NTASKS": 1, "PROCID": 0, "LOCALID": 0}
        names = " ".join(f"SLURM_{name}={value}" for name, value in place.items())
        code, _, said = slurm_job(tmp_path, f'shift; {names} exec "$@" --config.num_rounds=1')
        assert code == 0, said
        workdir = tmp_path / "runs" / "slurm"
    else:
        [container] = KINDS["Job"]["spec"]["template"]["spec"]["containers"]
        words = {
            "systemd": shlex.split(UNIT["Service"]["ExecStart"]),
            "kubernetes": container["command"],
        }[scheduler]
        subprocess.run(command(words, workdir), check=True, timeout=300, cwd=tmp_path)
    assert (workdir / "report" / "index.html").exists()
