"""Fixtures: the real tiny base model, built once a session, and small random models of every family."""
import math
import os
from collections import Counter
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")                # no test may reach for the network
# Some virtual machines announce AMX and do not let it be used: a product in bf16 would end the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch
import transformers

import evaluate
import lora
import tiny
from model import ModelConfig, Transformer

# Odd sizes on purpose: nothing may rely on powers of two, or on head_dim * heads == hidden_size.
SHAPES = {
    "qwen2": dict(hidden_size=36, num_attention_heads=6, num_key_value_heads=2, intermediate_size=50),
    "llama": dict(hidden_size=30, num_attention_heads=3, num_key_value_heads=1, intermediate_size=44),
    "qwen3": dict(hidden_size=28, num_attention_heads=4, num_key_value_heads=4, head_dim=10, intermediate_size=33),
}


def small_config(family: str, **changes) -> dict:
    return {"model_type": family, "vocab_size": 37, "num_hidden_layers": 3, "max_position_embeddings": 64,
            "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "eos_token_id": 1, **SHAPES[family], **changes}


def small_model(family: str = "qwen2", seed: int = 0, **changes) -> Transformer:
    """A random model whose logits are far from uniform."""
    model = Transformer(ModelConfig.from_dict(small_config(family, **changes)))
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * (0.4 if parameter.ndim > 1 else 0.2))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data += 1
    return model.requires_grad_(False)


def adapted(family: str = "qwen2", rank: int = 4, size: float = 0.1, **options) -> Transformer:
    """The same with adapters that do something."""
    model = lora.apply(small_model(family), rank, **options)
    for i, parameter in enumerate(lora.parameters(model).values()):
        parameter.data += size * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i))
    return model


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> Path:
    """A cache folder with the tiny Countdown model in it, exactly as `python train.py` builds it."""
    folder = tmp_path_factory.mktemp("cache")
    tiny.find("countdown", folder)
    return folder


@pytest.fixture
def policy(cache) -> evaluate.Policy:
    return evaluate.open_policy("tiny", "countdown", str(cache), "cpu", "float32")


def make_sentence_encoder(folder, pad="[PAD]"):
    """A random BERT with a tokenizer of its own: what a sentence encoder's folder looks like."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    words = ["[PAD]", "[UNK]", *"0123456789+-*=;,:abc", "use", "to", "make"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Punctuation(), pre_tokenizers.Whitespace()])
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad, unk_token="[UNK]").save_pretrained(folder)
    torch.manual_seed(0)
    transformers.BertModel(transformers.BertConfig(vocab_size=len(words), hidden_size=20, num_hidden_layers=2, num_attention_heads=2,
                                                   intermediate_size=30, max_position_embeddings=40)).save_pretrained(folder)


def mutual_information(a, b):
    """Normalised: 2 I(a; b) / (H(a) + H(b))."""
    n, joint, first, second = len(a), Counter(zip(a, b)), Counter(a), Counter(b)
    information = sum(c / n * math.log(c * n / (first[x] * second[y])) for (x, y), c in joint.items())
    return 2 * information / sum(-sum(c / n * math.log(c / n) for c in counts.values()) for counts in (first, second))
