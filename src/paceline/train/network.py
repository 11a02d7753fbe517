"""The draft as a trainable module. Parameters have the names under which the engine's loader knows them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own idiom
from torch import Tensor, nn

from paceline.backends.quantized import as_tensor
from paceline.loader.draft import PROJECTION, STATE_PROJECTION
from paceline.loader.load import Checkpoint
from paceline.model.config import ModelConfig, expected_weights
from paceline.model.rope import rope_table

ATTENTION_OUTPUT, MLP_OUTPUT = "self_attn.o_proj.weight", "mlp.down_proj.weight"


class DraftNetwork(nn.Module):
    """A Llama-shaped decoder whose input is the target's embedding rows seen through a learned projection.

    A head's input is also the hidden state of the token before, through a projection of its own.
    """

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

    def forward(
        self,
        embeddings: Tensor,
        documents: Tensor,
        *,
        window: int,
        states: Tensor | None = None,
        num_steps: int = 1,
    ) -> list[Tensor]:
        """Hidden states after the final norm, [num_rows, row_tokens, hidden_size] for each step.

        In the first step a head reads the target's states, in each further one its own of the step before: what it
        goes through as it drafts one token after the other (training-time test, EAGLE-3, arXiv 2503.01840). Tokens are
        the true ones throughout.

        Args:
            embeddings: [num_rows, row_tokens, embedding_size], the target's.
            documents: [num_rows, row_tokens], see `visible`.
            window: how many newest tokens a token sees.
            states: [num_rows, row_tokens, hidden_size], the target's at the same tokens; for a head only.
            num_steps: 1 for a model.
        """
        outputs: list[Tensor] = []
        seen: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(self.config.num_layers)]
        for step in range(num_steps):
            mask = visible(documents, window, step)
            x = F.linear(embeddings, self._of(PROJECTION))
            if states is not None:
                x = x + F.linear(of_the_token_before(states, documents), self._of(STATE_PROJECTION))
            for layer in range(self.config.num_layers):
                prefix = f"model.layers.{layer}."
                x = x + F.linear(self.attended(prefix, x, mask, seen[layer]), self._of(f"{prefix}{ATTENTION_OUTPUT}"))
                x = x + F.linear(self.gated(prefix, x), self._of(f"{prefix}{MLP_OUTPUT}"))
            states = self._norm(x, "model.norm.weight")
            outputs.append(states)
        return outputs

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of some rows, [num_rows, num_logits]."""
        return F.linear(hidden, self._of("lm_head.weight"))

    def attended(self, prefix: str, x: Tensor, mask: Tensor, seen: list[tuple[Tensor, Tensor]]) -> Tensor:
        """What a layer's attention gives its output matrix; ``seen`` are the K/V of earlier steps, this one's join."""
        normed = self._norm(x, f"{prefix}input_layernorm.weight")
        num_rows, row_tokens, _ = normed.shape
        config = self.config

        def heads(name: str) -> Tensor:
            x = F.linear(normed, self._of(f"{prefix}self_attn.{name}_proj.weight"))
            return x.view(num_rows, row_tokens, -1, config.head_dim).transpose(1, 2)

        q, k, v = heads("q"), heads("k"), heads("v")
        q, k = self._rotate(q), self._rotate(k)
        seen.append((k.to(v.dtype), v))
        keys, values = (torch.cat(parts, dim=2) for parts in zip(*seen, strict=True))
        attended = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)
        return attended.transpose(1, 2).flatten(2)

    def gated(self, prefix: str, x: Tensor) -> Tensor:
        """What a layer's MLP gives its output matrix."""
        normed = self._norm(x, f"{prefix}post_attention_layernorm.weight")
        gate, up = (F.linear(normed, self._of(f"{prefix}mlp.{name}_proj.weight")) for name in ("gate", "up"))
        return F.silu(gate) * up

    def _rotate(self, x: Tensor) -> Tensor:
        cos, sin = self._cos[: x.shape[2]].to(x.dtype), self._sin[: x.shape[2]].to(x.dtype)
        return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self._of(name)
        return F.rms_norm(x.float(), weight.shape, weight, self.config.rms_norm_eps).to(x.dtype)

    def _of(self, name: str) -> Tensor:
        weight: Tensor = self.weights[_key(name)]
        return weight


def visible(documents: Tensor, window: int, step: int = 0) -> Tensor:
    """Which keys a query sees: earlier ones of its own document, at most ``window`` back, itself included.

    ``documents`` [num_rows, row_tokens] numbers the documents that share a row; result bool
    [num_rows, 1, row_tokens, (step + 1) * row_tokens], a block of keys for each step. A query of step s stands where s
    tokens were drafted before it: it sees itself at step s, the token before it at step s - 1, and so on; all from s
    tokens back were read with the target's states, so at step 0.
    """
    at = torch.arange(documents.shape[1], device=documents.device)
    distance = at[:, None] - at[None, :]
    near = [(distance >= step) & (distance < window)]
    near += [(distance == step - other) & (distance < window) for other in range(1, step + 1)]
    is_same = documents[:, :, None] == documents[:, None, :]
    return torch.cat([block & is_same for block in near], dim=2)[:, None]


def of_the_token_before(states: Tensor, documents: Tensor) -> Tensor:
    """``states`` [num_rows, row_tokens, width] moved on by a token; zeros at the first token of each document."""
    moved = F.pad(states[:, :-1], (0, 0, 1, 0))
    is_first = documents.diff(dim=1, prepend=documents[:, :1] - 1) != 0
    return moved.masked_fill(is_first[..., None], 0)


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


def last_layer(target: Checkpoint) -> dict[str, Tensor]:
    """The target's last layer, renamed to be a first one, its norm and its head if that is not the embedding."""
    last = f"model.layers.{target.config.num_layers - 1}."
    kept = {name.replace(last, "model.layers.0."): name for name in target.weights if name.startswith(last)}
    kept |= {name: name for name in ("model.norm.weight", "lm_head.weight") if name in target.weights}
    return {ours: as_tensor(target.weights[name], torch.float32) for ours, name in kept.items()}


def head_rows(weights: Mapping[str, Tensor], table: Tensor, token_ids: Tensor) -> Tensor:
    """The rows of the target's head for some tokens: a matrix of `last_layer`'s weights, or else the embedding."""
    return weights.get("lm_head.weight", table)[token_ids]


@torch.no_grad()
def initialise_from_target(
    network: DraftNetwork, weights: Mapping[str, Tensor], table: Tensor, token_ids: Tensor
) -> None:
    """Let a head begin with what the target's last layer looks at, its final norm and its head rows.

    The layer adds nothing yet: its outputs fit a stream of another size, and would drown the input.

    ``weights`` are those of `last_layer`; tensors that the draft does not have are ignored. ``table`` [vocab_size,
    hidden_size] is the target's embedding and, where ``weights`` names no other, its head. The state enters without the
    final norm's scale, the embedding as large as the state.
    """
    norm = weights["model.norm.weight"].float()
    parameters = network.weights
    for name, tensor in weights.items():
        if _key(name) in parameters and parameters[_key(name)].shape == tensor.shape:
            parameters[_key(name)].copy_(tensor)
    for name in ("lm_head.weight", f"model.layers.0.{ATTENTION_OUTPUT}", f"model.layers.0.{MLP_OUTPUT}"):
        parameters[_key(name)].zero_()
    parameters[_key("lm_head.weight")][: len(token_ids)].copy_(head_rows(weights, table, token_ids))
    parameters[_key(STATE_PROJECTION)].copy_(torch.diag(inverse(norm)))
    parameters[_key(PROJECTION)].copy_(torch.eye(table.shape[1]) / table.float().std().clamp_min(1e-8))


def inverse(norm: Tensor) -> Tensor:
    """What undoes a norm's weights. Where they let next to nothing through, nothing is restored."""
    return norm / norm.square().clamp_min(0.01 * norm.square().mean())


def _key(name: str) -> str:
    return name.replace(".", "/")


def _name(key: str) -> str:
    return key.replace("/", ".")


def _initial(name: str, shape: tuple[int, ...]) -> Tensor:
    if len(shape) == 1:
        return torch.ones(shape) if name.endswith("norm.weight") else torch.zeros(shape)
    scale: float = shape[1] ** -0.5
    return torch.randn(shape) * (0.3 * scale if "o_proj" in name or "down_proj" in name else scale)
