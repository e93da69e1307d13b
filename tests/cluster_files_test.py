"""The files for Slurm and Kubernetes against the program."""

import os
import re
import subprocess
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
MISTAKES = {ConfigError.exit_code, DataError.exit_code, DivergedError.exit_code}


@pytest.fixture
def job(tmp_path):
    """Runs the batch script once where srun ends with a code: its own, and if it is requeued."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {
        "srun": 'echo "$@" >>srun.log; eval "$DURING"; exit "$CODE"',
        "scontrol": 'echo "$@" >>scontrol.log',
    }.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    log = tmp_path / "scontrol.log"

    def run(code, during=""):
        path = f"{programs}{os.pathsep}{os.environ['PATH']}"
        settings = {"PATH": path, "CODE": str(code), "DURING": during, "SLURM_JOB_ID": "17"}
        log.unlink(missing_ok=True)
        done = subprocess.run(
            ["bash", SBATCH],
            cwd=tmp_path,
            env=os.environ | settings,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.returncode, log.read_text() if log.exists() else "", done.stderr

    return run


def checkpoint(number):
    return f"mkdir -p runs/slurm/checkpoints/{number}"


def test_a_job_that_is_done_or_mistaken_is_not_requeued(job):
    for code in (0, *MISTAKES):
        assert job(code) == (code, "", "")


def test_a_job_that_was_preempted_or_failed_is_requeued(job, tmp_path):
    for number, code in enumerate([1, 5, Preempted.exit_code, 137, 137], start=30):
        _, requeued, said = job(code, checkpoint(number))
        assert requeued == "requeue 17\n"
        assert f"ended with {code}; goes on from round {number}" in said
    assert "--distributed" in (tmp_path / "srun.log").read_text()


def test_requeues_without_a_newer_checkpoint_end(job):
    assert [job(137, checkpoint(9))[1] for _ in range(4)] == ["requeue 17\n"] * 3 + [""]
    assert job(137, checkpoint(9))[1]  # submitted again
    job(0, checkpoint(9))  # a job that is done leaves the next one all its restarts
    assert [job(137, checkpoint(9))[1] for _ in range(4)] == ["requeue 17\n"] * 3 + [""]


def test_a_smaller_micro_batch_to_try_allows_further_requeues(job):
    for size in (64, 32, 16, 8):
        note = f"mkdir -p runs/slurm; echo {size} >runs/slurm/.max_batch_size-round-1-process-1"
        assert job(5, note)[1] == "requeue 17\n"
    assert [job(5, note)[1] for _ in range(3)] == ["requeue 17\n"] * 2 + [""]


def test_a_signal_to_the_batch_shell_waits_for_the_processes(job):
    # As at a preemption, where it may reach the shell beside its steps.
    _, requeued, said = job(Preempted.exit_code, "kill -TERM $PPID; sleep 0.3")
    assert requeued == "requeue 17\n"
    assert "goes on from round -1" in said


def test_the_pods_find_each_other():
    job, service = KINDS["Job"], KINDS["Service"]
    pod = job["spec"]["template"]["spec"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] > 1
    assert job["metadata"]["labels"]
    account = KINDS["ServiceAccount"]["metadata"]["name"]
    assert pod["serviceAccountName"] == account == KINDS["RoleBinding"]["subjects"][0]["name"]
    assert KINDS["RoleBinding"]["roleRef"]["name"] == KINDS["Role"]["metadata"]["name"]


def test_the_job_knows_the_exit_codes():
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


def test_the_watched_ledger_is_that_of_the_workdir():
    [container] = KINDS["Job"]["spec"]["template"]["spec"]["containers"]
    [workdir] = [word for word in container["command"] if word.startswith("--workdir=")]
    probe = container["livenessProbe"]["exec"]["command"][-1]
    assert f"{workdir.partition('=')[2]}/ledger.jsonl" in probe


def test_the_launchers_give_the_options_of_the_program():
    [container] = KINDS["Job"]["spec"]["template"]["spec"]["containers"]
    [command] = re.findall(r"^srun .*\\\n.*$", SBATCH.read_text("utf-8"), re.M)
    main = command[command.index("adloco_jax.main") :]
    used = {word.partition("=")[0] for word in [*container["command"], *main.split()]}
    options = {word for word in used if word.startswith("--")}
    assert options == {"--distributed", "--config", "--workdir"}
