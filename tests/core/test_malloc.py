"""Freed memory stays with the process, or does not: counted in page faults of a real one."""

import platform
import subprocess
import sys

import pytest

STEPS = 20
PROGRAM = f"""
import resource, torch
from fedglad.core import malloc
TELL

def step():
    kept = [torch.ones(2_000_000) for _ in range(4)]  # 8 MB each

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

for _ in range(3):
    step()
before = faults()
for _ in range({STEPS}):
    step()
print((faults() - before) // {STEPS})
"""
PAGES = 4 * 8_000_000 // 4096  # that a step touches: 7,812

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc that is told")


def faults_a_step(tell: str) -> int:
    command = [sys.executable, "-c", PROGRAM.replace("TELL", tell)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@glibc
def test_kept_memory_is_not_asked_for_again():
    assert faults_a_step("malloc.keep()") < PAGES / 20


@glibc
def test_memory_given_back_is_asked_for_again():
    # The system may put huge pages of 2 MB there: then it is one fault for 512 pages.
    assert faults_a_step("malloc.give_back()") >= PAGES / 512
