"""What users get is the wheel: built, installed next to the base dependencies alone, and used with src/ out of reach."""

import importlib.metadata
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.optional import OPTIONAL
from tests.support.paths import ROOT, SRC, modules


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def needed_by(requirements: list[str] | None) -> set[str]:
    """Return the distributions that these requirements need, extras of ours left out, with all that those need in turn."""
    found: set[str] = set()
    waiting = [Requirement(text) for text in requirements or []]
    while waiting:
        requirement = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        name = canonicalize_name(requirement.name)
        if name not in found:
            found.add(name)
            waiting += [Requirement(text) for text in importlib.metadata.requires(name) or []]
    return found


def copy_distribution(name: str, target: Path) -> None:
    """Copy an installed distribution's files: an installation without a network and without trusting any cache."""
    for file in importlib.metadata.files(name) or []:
        # Scripts lie outside of site-packages and are not needed; bytecode would name the old place in tracebacks.
        if ".." not in file.parts and file.suffix != ".pyc":
            destination = target / file
            destination.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(str(file.locate()), destination)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an environment that holds the wheel and the base dependencies, and not even pip."""
    env = tmp_path_factory.mktemp("env")
    run(sys.executable, "-m", "venv", "--without-pip", env, cwd=env)
    python = env / "bin" / "python"
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--python", python]
    run(*pip, "install", "--no-deps", "--no-index", wheel, cwd=env)
    site = Path(run(python, "-I", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=env).strip())
    (metadata,) = site.glob("safepoint-*.dist-info")
    base = needed_by(importlib.metadata.Distribution.at(metadata).requires)
    assert {"apsw", "click", "msgspec", "rich"} <= base
    for name in base:
        copy_distribution(name, site)
    return env


def in_wheel_env(env: Path, program: str, tmp_path: Path) -> str:
    return run(env / "bin" / "python", "-I", "-W", "error", "-c", program, cwd=tmp_path)


def test_the_wheel_holds_the_whole_package_and_nothing_else(wheel):
    shipped = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    source = {
        path.relative_to(SRC).as_posix()
        for path in (SRC / "safepoint").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert shipped == source
    assert "safepoint/py.typed" in shipped


def test_the_wheel_tells_its_version_license_and_extras(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = archive.read(name).decode()
        assert any(entry.endswith("licenses/LICENSE") for entry in archive.namelist())
    version: dict[str, str] = {}
    exec((SRC / "safepoint" / "_version.py").read_text(encoding="utf-8"), version)
    lines = metadata.splitlines()
    assert f"Version: {version['__version__']}" in lines
    assert "License-Expression: Apache-2.0" in lines
    extras = {line.removeprefix("Provides-Extra: ") for line in lines if line.startswith("Provides-Extra: ")}
    assert {"postgres", "redis", "crypto", "web", "otel", "testing"} <= extras


def test_the_installed_package_is_the_one_that_is_imported(installed, tmp_path):
    told = json.loads(
        in_wheel_env(installed, "import json, safepoint, sys; print(json.dumps([safepoint.__file__, sys.path]))", tmp_path)
    )
    assert Path(told[0]).is_relative_to(installed)
    assert not [entry for entry in told[1] if Path(entry).is_relative_to(SRC)]


def test_base_dependencies_suffice_and_nothing_optional_is_loaded(installed, tmp_path):
    program = "import json, safepoint, sys\n"
    if "safepoint.cli" in modules():
        program += "import safepoint.cli\n"
    program += "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    assert not OPTIONAL.intersection(json.loads(in_wheel_env(installed, program, tmp_path)))


@pytest.mark.skipif("safepoint.cli" not in modules(), reason="the command line does not exist yet")
def test_the_command_is_installed_and_helps(installed, tmp_path):
    script = installed / "bin" / "safepoint"
    assert "Usage: safepoint" in run(script, "--help", cwd=tmp_path)


ROUND_TRIP = """
import safepoint
from safepoint import State

for url in ("memory://", "sqlite:///agent.db", "file:///folder"):
    cp = safepoint.open(url)
    state = State(task_id="task-1")
    state.messages.append({"role": "user", "content": "hello"})
    state.agent_state["phase"] = "plan"
    cp.save(state)
    if cp.store.persistent:  # what another process would see
        cp.close()
        cp = safepoint.open(url)
    back = cp.load_latest("task-1")
    assert list(back.messages) == [{"role": "user", "content": "hello"}], back.messages
    assert dict(back.agent_state) == {"phase": "plan"}, back.agent_state
    assert cp.load_latest("task-2") is None
    cp.close()
    print(url, "ok")
for url, extra in (("postgresql://h/d", "postgres"), ("redis://h", "redis"), ("valkey://h", "redis")):
    try:
        safepoint.open(url)
    except safepoint.MissingExtra as error:
        assert f'pip install "safepoint[{extra}]"' in error.remedy, error.remedy
        print(url, "missing")
"""


def test_a_state_goes_in_and_comes_out(installed, tmp_path):
    said = in_wheel_env(installed, ROUND_TRIP, tmp_path).splitlines()
    assert said[:3] == ["memory:// ok", "sqlite:///agent.db ok", "file:///folder ok"]
    assert said[3:] == ["postgresql://h/d missing", "redis://h missing", "valkey://h missing"]
    assert (tmp_path / "agent.db").exists()
