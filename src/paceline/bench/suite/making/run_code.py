"""Run a call in a process of its own and report what happened as plain data, free of paths and addresses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

_SCRIPT = """
import importlib, json, sys, traceback, warnings
warnings.simplefilter("ignore")
folder, module, file, call = sys.argv[1:5]
sys.path.insert(0, folder)
out = {}
try:
    m = importlib.import_module(module)
    out["value"] = repr(eval(call, {"m": m, "importlib": importlib}))
except BaseException as error:
    frames = traceback.extract_tb(error.__traceback__)
    out["raises"] = [type(error).__name__, str(error)]
    out["frames"] = [[f.lineno, f.name] for f in frames if f.filename.replace("\\\\", "/").endswith(file)]
print("\\n@@" + json.dumps(out))
"""
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def run_call(folder: Path, module: str, file: str, call: str, timeout: float = 8.0) -> dict[str, Any] | None:
    """{"value": repr} or {"raises": [type, message], "frames": [[line, function], ...]}; None for a hang or a crash.

    ``m`` is the module in ``call``; frames are those in ``file`` only.
    """
    command = [sys.executable, "-I", "-B", "-c", _SCRIPT, str(folder), module, file, call]
    environment = {"PATH": os.environ.get("PATH", ""), "LC_ALL": "C.UTF-8", "TZ": "UTC", "PYTHONHASHSEED": "0"}
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, env=environment, cwd=folder, check=False
        )
    except subprocess.TimeoutExpired:
        return None
    _, marker, body = result.stdout.rpartition("\n@@")
    if not marker:
        return None
    outcome: dict[str, Any] = json.loads(_ADDRESS.sub("", body))
    return outcome
