"""The one table between GGUF tensor names and Hugging Face's."""

from __future__ import annotations

import re

_GLOBAL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_PER_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_GLOBAL_TENSOR = re.compile(r"(\w+)\.(weight|bias)")


def hugging_face_name(gguf_name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor, or None when the table has no such tensor."""
    if match := _LAYER_TENSOR.fullmatch(gguf_name):
        layer, module, parameter = match.groups()
        renamed = _PER_LAYER.get(module)
        return renamed and f"model.layers.{layer}.{renamed}.{parameter}"
    if match := _GLOBAL_TENSOR.fullmatch(gguf_name):
        module, parameter = match.groups()
        renamed = _GLOBAL.get(module)
        return renamed and f"{renamed}.{parameter}"
    return None
