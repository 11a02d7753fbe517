"""The draft as a trainable module. Parameters have the names under which the engine's loader knows them."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own idiom
from torch import Tensor, nn

from paceline.loader.draft import PROJECTION
from paceline.model.config import ModelConfig, expected_weights
from paceline.model.rope import rope_table


class DraftNetwork(nn.Module):
    """A Llama-shaped decoder whose input is the target's embedding rows seen through a learned projection."""

    def __init__(self, config: ModelConfig, embedding_size: int, num_positions: int) -> None:
        super().__init__()
        self.config = config
        shapes = expected_weights(config)
        del shapes["model.embed_tokens.weight"]
        shapes[PROJECTION] = (config.hidden_size, embedding_size)
        # A dictionary that keeps the dots of the names; torch's own refuses them.
        self.weights = nn.ParameterDict(
            {_key(name): nn.Parameter(_initial(name, shape)) for name, shape in shapes.items()}
        )
        cos, sin = rope_table(config, num_positions, device=torch.device("cpu"))
        self._cos: Tensor
        self._sin: Tensor
        self.register_buffer("_cos", cos, persistent=False)
        self.register_buffer("_sin", sin, persistent=False)

    def named_tensors(self) -> dict[str, Tensor]:
        """The weights under their names in a checkpoint."""
        return {_name(key): parameter.detach() for key, parameter in self.weights.items()}

    @torch.no_grad()
    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take over weights by name; all must be there, in their shapes."""
        for key, parameter in self.weights.items():
            parameter.copy_(tensors[_name(key)])

    def forward(self, embeddings: Tensor, mask: Tensor) -> Tensor:
        """Hidden states after the final norm, [num_rows, row_tokens, hidden_size].

        Args:
            embeddings: [num_rows, row_tokens, embedding_size], the target's.
            mask: bool [num_rows, 1, row_tokens, row_tokens], which keys each query sees.
        """
        x = F.linear(embeddings, self._of(PROJECTION))
        for layer in range(self.config.num_layers):
            prefix = f"model.layers.{layer}."
            x = x + self._attend(prefix, self._norm(x, f"{prefix}input_layernorm.weight"), mask)
            normed = self._norm(x, f"{prefix}post_attention_layernorm.weight")
            gate, up = (F.linear(normed, self._of(f"{prefix}mlp.{name}_proj.weight")) for name in ("gate", "up"))
            x = x + F.linear(F.silu(gate) * up, self._of(f"{prefix}mlp.down_proj.weight"))
        return self._norm(x, "model.norm.weight")

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of some rows, [num_rows, num_logits]."""
        return F.linear(hidden, self._of("lm_head.weight"))

    def _attend(self, prefix: str, normed: Tensor, mask: Tensor) -> Tensor:
        num_rows, row_tokens, _ = normed.shape
        config = self.config

        def heads(name: str) -> Tensor:
            x = F.linear(normed, self._of(f"{prefix}self_attn.{name}_proj.weight"))
            return x.view(num_rows, row_tokens, -1, config.head_dim).transpose(1, 2)

        q, k, v = heads("q"), heads("k"), heads("v")
        q, k = self._rotate(q), self._rotate(k)
        attended = F.scaled_dot_product_attention(q, k.to(v.dtype), v, attn_mask=mask, enable_gqa=True)
        return F.linear(attended.transpose(1, 2).flatten(2), self._of(f"{prefix}self_attn.o_proj.weight"))

    def _rotate(self, x: Tensor) -> Tensor:
        cos, sin = self._cos[: x.shape[2]].to(x.dtype), self._sin[: x.shape[2]].to(x.dtype)
        return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self._of(name)
        return F.rms_norm(x.float(), weight.shape, weight, self.config.rms_norm_eps).to(x.dtype)

    def _of(self, name: str) -> Tensor:
        weight: Tensor = self.weights[_key(name)]
        return weight


def visible(documents: Tensor, window: int) -> Tensor:
    """Which keys a query sees: earlier ones of its own document, at most ``window`` back, itself included.

    ``documents`` [num_rows, row_tokens] numbers the documents that share a row; result bool
    [num_rows, 1, row_tokens, row_tokens].
    """
    at = torch.arange(documents.shape[1], device=documents.device)
    distance = at[:, None] - at[None, :]
    is_near = (distance >= 0) & (distance < window)
    return (is_near & (documents[:, :, None] == documents[:, None, :]))[:, None]


@torch.no_grad()
def initialise_from_embedding(network: DraftNetwork, table: Tensor, token_ids: Tensor) -> None:
    """Let the projection keep the table's strongest directions, and the head look up the same rows in them.

    ``table`` [vocab_size, embedding_size] is the target's, ``token_ids`` the draft's vocabulary. Rows are centred for
    finding the directions. Both are scaled so that inputs and logits start at a moderate size.
    """
    rows = table[token_ids].float()
    size = network.config.hidden_size
    _, _, directions = torch.linalg.svd(rows - rows.mean(0), full_matrices=False)
    basis = directions[:size]
    if basis.shape[0] < size:
        return  # wider than the target: a random start
    seen = rows @ basis.T
    scale = seen.std().clamp_min(1e-8)
    weights = network.weights
    weights[_key(PROJECTION)].copy_(basis / scale)
    head = weights[_key("lm_head.weight")]
    head[: len(token_ids)].copy_(seen / scale / size**0.5)


def _key(name: str) -> str:
    return name.replace(".", "/")


def _name(key: str) -> str:
    return key.replace("/", ".")


def _initial(name: str, shape: tuple[int, ...]) -> Tensor:
    if len(shape) == 1:
        return torch.ones(shape) if name.endswith("norm.weight") else torch.zeros(shape)
    scale: float = shape[1] ** -0.5
    return torch.randn(shape) * (0.3 * scale if "o_proj" in name or "down_proj" in name else scale)
