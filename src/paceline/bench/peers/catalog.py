"""The peers: what each one needs installed, and the arms it gives. No side effects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from paceline.bench.arms import Arm
from paceline.errors import InvalidParameterError
from paceline.request import Speculation

WeightsKind = Literal["Q8_0", "Q4_1", "as is", "safetensors"]
"""What an arm loads: the model in this GGUF format, its GGUF file untouched, or a bfloat16 folder made of it."""


@dataclass(frozen=True, slots=True)
class PeerArm:
    """One way to run a peer.

    Attributes:
        lookup_tokens: the length of its prompt lookup drafts; 0 decodes plainly.
        precision: what it computes in where that is not its own choice; OpenVINO's names.
    """

    name: str
    weights: WeightsKind
    lookup_tokens: int = 0
    precision: str | None = None

    def as_arm(self) -> Arm:
        """The arm as the benchmark's driver knows it; its speculation is the peer's own business."""
        return Arm(self.name, Speculation("off"), "own")


@dataclass(frozen=True, slots=True)
class PeerSpec:
    """One other engine.

    Attributes:
        requirements: what pip installs into its environment, pinned.
        build_environment: variables that pip's build sees.
        amx_build_environment: more of them, where the processor has AMX.
        worker: the script that serves it, in this folder.
        notice: what a user should know while it is being installed.
    """

    name: str
    requirements: Sequence[str]
    worker: str
    arms: Sequence[PeerArm]
    notice: str
    build_environment: Mapping[str, str] = field(default_factory=dict)
    amx_build_environment: Mapping[str, str] = field(default_factory=dict)


PEERS = {
    spec.name: spec
    for spec in (
        PeerSpec(
            name="llama-cpp",
            requirements=("llama-cpp-python==0.3.36",),
            # This processor's instructions; no library for images.
            build_environment={"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF"},
            # llama.cpp sets up AMX through a header of GCC 12 that does not tell the compiler which bytes are read.
            # Without these flags it drops the stores of the tile shapes, and the first matrix product dies of
            # SIGILL (llama.cpp#26954).
            amx_build_environment={"CXXFLAGS": "-fno-tree-dse -fno-dse"},
            worker="worker_llama_cpp.py",
            notice="compiles for several minutes",
            arms=(
                PeerArm("llama-cpp-q8_0", "Q8_0"),
                PeerArm("llama-cpp-q4_1", "Q4_1"),
                PeerArm("llama-cpp-q8_0-lookup", "Q8_0", lookup_tokens=4),
                PeerArm("llama-cpp-q4_1-lookup", "Q4_1", lookup_tokens=4),
            ),
        ),
        PeerSpec(
            name="openvino",
            requirements=("openvino-genai==2026.4.*", "openvino-tokenizers==2026.4.*"),
            worker="worker_openvino.py",
            notice="fetches about 100 MB",
            # By default it computes in bfloat16 where the processor can. Plain decoding of a small model was faster in
            # float32, so that defaults alone may show the engine below its best.
            arms=(
                PeerArm("openvino", "as is"),
                PeerArm("openvino-lookup", "as is", lookup_tokens=5),
                PeerArm("openvino-f32", "as is", precision="f32"),
                PeerArm("openvino-f32-lookup", "as is", lookup_tokens=5, precision="f32"),
            ),
        ),
        PeerSpec(
            name="transformers",
            requirements=("transformers==5.24.*", "torch==2.13.0", "accelerate"),
            worker="worker_transformers.py",
            notice="fetches PyTorch",
            arms=(
                PeerArm("transformers", "safetensors"),
                PeerArm("transformers-lookup", "safetensors", lookup_tokens=5),
            ),
        ),
    )
}
PEER_ARMS = {arm.name: arm for spec in PEERS.values() for arm in spec.arms}


def plain_arm(name: str) -> str:
    """The arm of the same engine and weights that decodes without drafts; a plain arm is its own."""
    return name.removesuffix("-lookup")


def parse_peers(text: str) -> list[str]:
    """The peers and arms named in a comma-separated list, each once.

    Raises:
        InvalidParameterError: an unknown name.
    """
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in PEERS and name not in PEER_ARMS:
            arms = ", ".join(name for name in PEER_ARMS if name not in PEERS)
            raise InvalidParameterError(
                f"unknown peer {name!r}; choose from {', '.join(PEERS)}, or single arms of them: {arms}"
            )
    return names


def select_arms(names: Sequence[str]) -> dict[str, list[PeerArm]]:
    """The arms of each chosen peer: all of a peer that is named, else those named one by one."""
    chosen = {peer: [arm for arm in spec.arms if peer in names or arm.name in names] for peer, spec in PEERS.items()}
    return {peer: arms for peer, arms in chosen.items() if arms}
