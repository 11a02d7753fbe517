"""Rotary position embedding: one table of cosines and sines by absolute position."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.model.config import ModelConfig, RopeScaling


def rope_table(config: ModelConfig, num_positions: int, *, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each [num_positions, head_dim] float32 (Su et al., arXiv 2104.09864).

    The first half of the sines is negated, so that rotating a vector is x * cos + roll(x, head_dim / 2) * sin.
    """
    frequencies, magnitude = _frequencies(config)
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, frequencies)  # [num_positions, head_dim / 2]
    cos, sin = angles.cos() * magnitude, angles.sin() * magnitude
    return torch.cat((cos, cos), dim=-1).to(device), torch.cat((-sin, sin), dim=-1).to(device)


def _frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Rotation per position of each pair, [head_dim / 2], and the factor on cos and sin."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies, 1.0
    if scaling.kind == "linear":
        return frequencies / scaling.factor, 1.0
    if scaling.kind == "factors":
        return frequencies / torch.tensor(scaling.factors, dtype=torch.float32), 1.0
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling), 1.0
    return _yarn(frequencies, config, scaling)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's rule: long wavelengths are stretched, short ones kept, those between blended."""
    wavelengths = 2 * math.pi / frequencies
    low = scaling.original_context_length / scaling.low_freq_factor
    high = scaling.original_context_length / scaling.high_freq_factor
    smooth = (scaling.original_context_length / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    scaled = torch.where(wavelengths > low, frequencies / scaling.factor, frequencies)
    between = (wavelengths <= low) & (wavelengths >= high)
    return torch.where(between, blended, scaled)


def _yarn(frequencies: Tensor, config: ModelConfig, scaling: RopeScaling) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071): interpolate dimensions that turn seldom, keep those that turn often."""

    def dimension_turning(num_rotations: float) -> float:
        length = scaling.original_context_length
        return (config.head_dim * math.log(length / (num_rotations * 2 * math.pi))) / (2 * math.log(config.rope_theta))

    low = max(math.floor(dimension_turning(scaling.beta_fast)), 0)
    high = min(math.ceil(dimension_turning(scaling.beta_slow)), config.head_dim - 1)
    span = max(high - low, 0.001)  # the two bounds may coincide
    ramp = ((torch.arange(config.head_dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    blended = (frequencies / scaling.factor) * ramp + frequencies * (1 - ramp)
    magnitude = scaling.attention_factor
    if magnitude is None:
        magnitude = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
    return blended, magnitude
