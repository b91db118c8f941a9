"""doctor: each finding and what it says for the user."""

from __future__ import annotations

import importlib.machinery
import sys

import pytest

from combined_1f1b.cli import main
from combined_1f1b.errors import SurfaceError
from combined_1f1b.training import doctor
from combined_1f1b.training.doctor import Grade

pytestmark = pytest.mark.world_size(1)


def test_this_machine_is_fit(capsys, monkeypatch):
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for name in ("Python", "torch", "CUDA", "NCCL", "megatron-core", "Transformer Engine", "NVIDIA Apex", "MFSDP v2"):
        assert name in text
    assert "no problems" in text
    # The name of an extra must survive the table's own markup.
    installed = doctor.version_of("transformer-engine") is not None
    assert installed or "combined_1f1b[te]" in text


def test_every_finding_says_what_it_means():
    for finding in doctor.findings():
        assert finding.value
        assert len(finding.meaning) > 10


def test_one_hardware_queue_is_a_problem(capsys, monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    finding = doctor.check_connections()
    assert finding.grade is Grade.PROBLEM
    assert "nothing overlaps" in finding.meaning
    assert main(["doctor"]) == 1
    assert "problems: CUDA_DEVICE_MAX_CONNECTIONS" in capsys.readouterr().out


def test_eight_queues_are_right(monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    assert doctor.check_connections().grade is Grade.OK


@pytest.mark.parametrize(
    ("version", "grade"),
    [
        (None, Grade.PROBLEM),
        ("0.18.0", Grade.PROBLEM),
        ("0.20.0", Grade.PROBLEM),
        ("0.19.3", Grade.NOTE),
        ("0.19.2", Grade.OK),
    ],
)
def test_megatron_versions(monkeypatch, version, grade):
    monkeypatch.setattr(doctor, "version_of", lambda name: version)
    finding = doctor.check_megatron()
    assert finding.grade is grade
    assert "0.19.2" in finding.meaning or grade is Grade.OK


@pytest.mark.parametrize(
    ("version", "grade"),
    [(None, Grade.PROBLEM), ("2.10.0", Grade.PROBLEM), ("2.12.0", Grade.NOTE), ("2.11.0+cpu", Grade.OK)],
)
def test_torch_versions(monkeypatch, version, grade):
    monkeypatch.setattr(doctor, "version_of", lambda name: version)
    assert doctor.check_torch().grade is grade


def test_an_old_python_is_a_problem(monkeypatch):
    monkeypatch.setattr(doctor, "OLDEST_PYTHON", (99, 0))
    assert doctor.check_python().grade is Grade.PROBLEM


def apex_at(folder, monkeypatch, *, extensions):
    """Make find_spec see a package `apex` in a folder."""
    spec = importlib.machinery.ModuleSpec("apex", None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    found = {"apex": spec, "amp_C": spec if extensions else None}
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: found[name])


def test_the_unrelated_apex_is_told_apart(tmp_path, monkeypatch):
    apex_at(tmp_path, monkeypatch, extensions=False)
    finding = doctor.check_apex()
    assert finding.grade is Grade.PROBLEM
    assert "unrelated web toolkit" in finding.meaning


@pytest.mark.parametrize(("extensions", "grade"), [(True, Grade.OK), (False, Grade.NOTE)])
def test_nvidia_apex_is_recognised(tmp_path, monkeypatch, extensions, grade):
    (tmp_path / "multi_tensor_apply").mkdir()
    apex_at(tmp_path, monkeypatch, extensions=extensions)
    assert doctor.check_apex().grade is grade


def test_no_apex_is_fine(monkeypatch):
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    finding = doctor.check_apex()
    assert finding.grade is Grade.NOTE
    assert "do not install it" in finding.meaning


def test_private_names_that_have_gone_are_named(monkeypatch):
    def gone(name):
        raise SurfaceError("FsdpModule._register_hooks has gone")

    monkeypatch.setattr(doctor.importlib, "import_module", gone)
    finding = doctor.check_mfsdp()
    assert finding.grade is Grade.PROBLEM
    assert "_register_hooks" in finding.value


def test_transformer_engine_is_optional(monkeypatch):
    monkeypatch.setattr(doctor, "version_of", lambda name: None)
    assert doctor.check_transformer_engine().grade is Grade.NOTE
    monkeypatch.setattr(doctor, "version_of", lambda name: "2.20.2")
    assert doctor.check_transformer_engine().grade is Grade.OK


def test_looking_at_cuda_needs_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # makes `import torch` fail
    assert doctor.check_cuda().value == "unknown"
    assert doctor.check_nccl().value == "unknown"
