"""`fedglad sweep --on slurm`: submitit's jobs, which are preempted, stopped, and go on.

There is no Slurm here. Submitit's local executor starts the jobs as processes of this machine; a
`sbatch` of a few lines, which runs a job array's script as it is, stands for Slurm's own.
"""

import json
import os
import re
import signal
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from cli.test_cli import said
from run_support import alive, cli, outcome, start, until

from fedglad.runs import Run, execute
from fedglad.runs.places.slurm import OnSlurm
from fedglad.runs.sweeping import Event, sweep, tasks
from runs.test_sweep import LONG, QUICK, call, folders, given, plan
from runs.test_sweep import alone as alone

pytest.importorskip("submitit")

LOCAL = ["--on", "slurm", "--slurm", "cluster=local"]


def jobs_of(folder: Path) -> set[int]:
    """The processes in which runs train: submitit's, of one sweep's folder."""
    found: set[int] = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if b"submitit.core._submit" in command and str(folder).encode() in command:
            found.add(int(entry.name))
    return found


@pytest.fixture
def clean(tmp_path: Path) -> Generator[None]:
    """No process is left."""
    yield
    until(lambda: not any(map(alive, jobs_of(tmp_path))), 60)


# ------------------------------------------------------------------------------------- no mistakes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], 'Slurm cannot be asked: Could not detect "srun"'),
        (["partition"], "--slurm 'partition': write it as KEY=VALUE, for example partition=gpu"),
        (["time=4:00:00"], "time = '4:00:00': say it as timeout_min, in minutes"),
        (["cluster=pbs"], "cluster = 'pbs': choose slurm, or local to try it here"),
        (["cluster=local", "timeout_min=long"], "Slurm cannot be asked: "),
    ],
)
def test_a_mistake_in_the_options_runs_nothing(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", os.defpath)
    args = [part for option in options for part in ("--slurm", option)]
    out = tmp_path / "runs"
    result = call("sweep", "digits", "--grid", "seed=1", "--on", "slurm", *args, "--out", out)
    assert result.exit_code == 2, result.exception
    assert message in said(result)
    assert not out.exists() or [*out.iterdir()] == []


# ---------------------------------------------------------------------------- the local executor


@pytest.mark.slow
def test_jobs_that_are_preempted_are_queued_again_and_go_on(
    tmp_path: Path, alone: list[Any], clean: None
):
    """As Slurm does it: the signal to the job's process, which ends, and is started again."""
    out = tmp_path / "runs"
    process = start("sweep", "digits", *given(LONG), "--grid", "seed=1,2,3", *LOCAL, "--out", out)
    first = folders(out)[0]
    until(lambda: len(Run(first).rounds()) >= 5, 120)
    (jobs,) = (out / "slurm").iterdir()
    before = jobs_of(jobs)
    assert before
    for pid in before:
        os.kill(pid, signal.SIGUSR2)
    after = until(lambda: jobs_of(jobs) - before, 60)
    assert not after & before
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert [outcome(folder) for folder in folders(out)] == alone
    log = (first / "log.txt").read_text()
    assert "this job is preempted" in log
    assert "Requeued job" in log
    assert log.count("Job completed successfully") == 1
    assert not (out / "slurm").exists()  # nothing failed: only the runs are left


@pytest.mark.slow
def test_ctrl_c_saves_every_run_and_the_same_command_goes_on(
    tmp_path: Path, alone: list[Any], clean: None
):
    out = tmp_path / "runs"
    args = ["sweep", "digits", *given(LONG), "--grid", "seed=1,2,3", *LOCAL, "--out", out]
    process = start(*args, "--jobs", "2")
    first, second, third = folders(out)
    until(lambda: Run(first).rounds() and Run(second).rounds(), 120)
    os.kill(process.pid, signal.SIGINT)  # Slurm's jobs are in no terminal
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "0 of 3 runs are finished; stopped, all saved: go on with the same command" in err
    for folder in (first, second):
        rounds = len(Run(folder).rounds())
        assert 0 < rounds < 12
        assert (folder / "checkpoints" / f"{rounds:06d}.json").is_file()
    assert not third.exists()
    done = cli(*args)
    assert done.returncode == 0, done.stderr
    assert [outcome(folder) for folder in folders(out)] == alone
    again = cli(*args, "--json")
    assert {run["status"] for run in json.loads(again.stdout)["runs"]} == {"kept"}


@pytest.mark.slow
def test_what_fails_fails_by_itself_and_its_logs_stay(tmp_path: Path, clean: None):
    few, good = plan(tmp_path, "data.clients=2,12")
    place = OnSlurm(tmp_path, 2, {"cluster": "local"})
    ends: dict[Path, Event] = {}
    for event in sweep([few, good], place=place):
        ends[event.task.folder] = event
    place.close()
    assert ends[good.folder].what == "finished"
    execute("digits", good.config, out=tmp_path / "alone")
    assert outcome(good.folder) == outcome(tmp_path / "alone")
    assert ends[few.folder].what == "failed"
    assert "more than the 2 clients" in ends[few.folder].reason
    assert "Traceback" in (few.folder / "log.txt").read_text()
    assert [*(tmp_path / "slurm").glob("jobs-*/*_submitted.pkl")]


@pytest.mark.slow
def test_a_job_that_is_killed_fails_and_goes_on_the_next_time(
    tmp_path: Path, alone: list[Any], clean: None
):
    args = ["sweep", "digits", *given(LONG), "--grid", "seed=1", "--out", tmp_path]
    (task,) = tasks("digits", ["seed=1"], LONG, tmp_path)
    process = start(*args, *LOCAL)
    until(lambda: len(Run(task.folder).rounds()) >= 4, 120)
    for pid in jobs_of(tmp_path):
        os.kill(pid, signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "error: seed=1: its job " in " ".join(err.split())
    assert [event.what for event in sweep([task])][-1] == "finished"
    assert outcome(task.folder) == alone[0]


# ------------------------------------------------------------------------- the script of the array

SBATCH = f"""#!{sys.executable}
import os, re, subprocess, sys
text = open(sys.argv[1]).read()
open(os.environ["ASKED"], "a").write(text)
array = re.search(r"--array=0-(\\d+)", text)
for task in range(int(array[1]) + 1 if array else 1):
    job = {{"SLURM_JOB_ID": str(70 + task), "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}}
    if array:
        job |= {{"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": str(task)}}
    subprocess.Popen(["bash", "-c", text], stdout=2, env={{**os.environ, **job}})
print("Submitted batch job", 7 if array else 70)
"""
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do [[ $1 == --unbuffered ]] && shift || shift 2; done
exec "$@" >/dev/null 2>&1
"""


@pytest.mark.slow
def test_the_runs_are_one_array_with_the_options_that_were_given(
    tmp_path: Path, clean: None, monkeypatch: pytest.MonkeyPatch
):
    tools, out = tmp_path / "tools", tmp_path / "runs"
    tools.mkdir()
    scripts = {"sbatch": SBATCH, "srun": SRUN, "sacct": "#!/bin/bash\n", "scancel": "#!/bin/bash\n"}
    for name, text in scripts.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    options = ["partition=gpu", "timeout_min=600", "mem_gb=4", "mail-user=me@example.org"]
    args = ["sweep", "digits", *given({**QUICK, "engine.workers": 2}), "--grid", "seed=1,2,3"]
    args += ["--on", "slurm", "--jobs", "2", "--out", out]
    args += [part for option in options for part in ("--slurm", option)]
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    process = start(*args)
    stdout, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert stdout.startswith("1/3 ")
    asked = (tmp_path / "asked").read_text()
    lines = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", asked, re.M))
    expected = {
        "array": "0-2%2",
        "partition": "gpu",
        "time": "600",
        "mem": "4GB",
        "mail-user": "me@example.org",
        "cpus-per-task": "2",
        "job-name": "fedglad",
        "signal": "USR2@90",
    }
    assert {key: lines[key].strip("'") for key in expected} == expected
    for task in tasks("digits", ["seed=1,2,3"], QUICK, out):
        execute("digits", task.config, out=tmp_path / task.folder.name)
        assert outcome(task.folder) == outcome(tmp_path / task.folder.name)
