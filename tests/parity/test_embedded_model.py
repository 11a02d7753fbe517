"""The embedded model against transformers in fp32, with weights that never passed through Paceline's loader."""

from __future__ import annotations

import inspect
import json
import tokenize
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers

from paceline.backends.onednn import PackedTorchBackend
from paceline.loader.load import load_checkpoint
from paceline.model.runner import SequenceInput
from tests.parity.test_models import CPU, make_runner

WINDOW, NUM_WINDOWS = 500, 4
HF_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def independent_model(path: Path) -> transformers.PreTrainedModel:
    """transformers' Llama with the tensors as gguf's own reader gives them."""
    reader = gguf.GGUFReader(path)

    def value(key: str) -> float:
        return reader.fields[f"llama.{key}"].contents()

    num_heads, num_kv_heads = int(value("attention.head_count")), int(value("attention.head_count_kv"))
    config = transformers.LlamaConfig(
        vocab_size=int(value("vocab_size")),
        hidden_size=int(value("embedding_length")),
        intermediate_size=int(value("feed_forward_length")),
        num_hidden_layers=int(value("block_count")),
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=int(value("context_length")),
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": value("rope.freq_base")},
        tie_word_embeddings=True,
    )
    state = {}
    for tensor in reader.tensors:
        numbers = np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if tensor.name == "token_embd.weight":
            state["model.embed_tokens.weight"] = torch.from_numpy(numbers)
            continue
        if tensor.name == "output_norm.weight":
            state["model.norm.weight"] = torch.from_numpy(numbers)
            continue
        _, layer, kind, _ = tensor.name.split(".")
        if kind in ("attn_q", "attn_k"):
            heads = num_heads if kind == "attn_q" else num_kv_heads
            rows, columns = numbers.shape
            # llama.cpp stores the pairs that rotate together side by side, transformers in two halves.
            numbers = numbers.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
        state[f"model.layers.{layer}.{HF_NAMES[kind]}.weight"] = torch.from_numpy(np.ascontiguousarray(numbers))
    model = transformers.LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert not unexpected
    model.tie_weights()
    return model.eval()


@pytest.mark.embedded
def test_top_1_equals_transformers(embedded_model_path: Path) -> None:
    oracle = independent_model(embedded_model_path)
    runner = make_runner(embedded_model_path, PackedTorchBackend(CPU, torch.float32), block_size=16)
    tokenizer = load_checkpoint(embedded_model_path, dtype=torch.float32).tokenizer
    text = inspect.getsource(json.decoder) + inspect.getsource(tokenize)
    token_ids = tokenizer.encode(text)[: WINDOW * NUM_WINDOWS]
    assert len(token_ids) == WINDOW * NUM_WINDOWS
    num_equal = 0
    worst = 0.0
    for start in range(0, len(token_ids), WINDOW):
        window = token_ids[start : start + WINDOW]
        with torch.inference_mode():
            expected = oracle(torch.tensor([window])).logits[0]
        got = runner.run([SequenceInput(window, 0, list(range(40)), WINDOW)])
        num_equal += int((got.argmax(-1) == expected.argmax(-1)).sum())
        worst = max(worst, float((got - expected).abs().max()))
    print(f"top-1 equal at {num_equal} of {len(token_ids)} positions, largest logit difference {worst:.2g}")
    assert num_equal >= 0.995 * len(token_ids)
    assert worst < 1e-2
