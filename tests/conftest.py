"""Fixtures: tiny base models, barely trained and real, and small random models of every family."""
import fcntl
import hashlib
import math
import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach for the network
os.environ.setdefault("OMP_NUM_THREADS", "1")  # two workers with one thread each
# Some virtual machines announce AMX but do not let it be used: a bf16 product would crash.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch
import transformers

import data
import lora
import model
import sample
from model import Transformer
from support import calculation, decoder, fast, hub, tiny
from support.config import Config

# Odd sizes on purpose: nothing may rely on powers of two, or on head_dim * heads == hidden_size.
SHAPES = {
    "qwen2": dict(hidden_size=36, num_attention_heads=6, num_key_value_heads=2,
                  intermediate_size=50),
    "llama": dict(hidden_size=30, num_attention_heads=3, num_key_value_heads=1,
                  intermediate_size=44),
    "qwen3": dict(hidden_size=28, num_attention_heads=4, num_key_value_heads=4, head_dim=10,
                  intermediate_size=33),
}


def small_config(family: str, **changes) -> dict:
    return {"model_type": family, "vocab_size": 37, "num_hidden_layers": 3,
            "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
            "eos_token_id": 1, **SHAPES[family], **changes}


def small_model(family: str = "qwen2", seed: int = 0, **changes) -> Transformer:
    """A random textbook model whose logits are far from uniform."""
    small = Transformer(hub.ModelConfig.from_dict(small_config(family, **changes)))
    generator = torch.Generator().manual_seed(seed)
    for parameter in small.parameters():
        deviation = 0.4 if parameter.ndim > 1 else 0.2
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * deviation)
    for name, parameter in small.named_parameters():
        if "norm" in name:
            parameter.data += 1
    return small.requires_grad_(False)


def adapted(family: str = "qwen2", rank: int = 4, size: float = 0.1, **options) -> Transformer:
    """The same with adapters that do something."""
    small = lora.apply(small_model(family), rank, **options)
    for i, parameter in enumerate(lora.parameters(small).values()):
        generator = torch.Generator().manual_seed(i)
        parameter.data += size * torch.randn(parameter.shape, generator=generator)
    return small


def build_cache(steps: int) -> Path:
    """A cache folder with a tiny Countdown model that was trained for so many steps.

    It is kept between sessions, under a name made from the sources that build it, or in the folder
    that SUS_TEST_CACHE names.
    """
    modules = (data, calculation, model, tiny, fast, decoder)
    sources = b"".join(Path(module.__file__).read_bytes() for module in modules)
    digest = hashlib.sha256(sources + torch.__version__.encode()).hexdigest()[:16]
    default = Path(tempfile.gettempdir()) / f"sus-tests-{digest}"
    folder = Path(os.environ.get("SUS_TEST_CACHE", default)) / str(steps)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as handle:  # one worker builds, the others wait
        fcntl.flock(handle, fcntl.LOCK_EX)
        base, copy = (tiny.base_folder(task, folder) for task in ("countdown", "countdown-many"))
        if not (base / "config.json").exists():
            tiny.build(base, steps=steps)
        if not (copy / "config.json").exists():  # good enough for tests
            shutil.copytree(base, copy)
    return folder


@pytest.fixture(scope="session")
def cache() -> Path:
    """For all tests that do not ask how good the base model is."""
    return build_cache(steps=100)


@pytest.fixture(scope="session")
def real_cache() -> Path:
    """As `python train.py --data countdown` builds it in minutes: for tests marked slow."""
    return build_cache(steps=tiny.STEPS)


def open_tiny(cache: Path) -> sample.Policy:
    config = Config(device="cpu", cache=str(cache), data="countdown")
    return sample.open_policy(tiny.find_base(config), config)


@pytest.fixture
def policy(cache) -> sample.Policy:
    return open_tiny(cache)


@pytest.fixture
def real_policy(real_cache) -> sample.Policy:
    return open_tiny(real_cache)


def make_sentence_encoder(folder, pad="[PAD]"):
    """A random BERT with a tokenizer of its own: what a sentence encoder's folder looks like."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    words = ["[PAD]", "[UNK]", *"0123456789+-*=;,:abc", "use", "to", "make"]
    ids = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    splits = [pre_tokenizers.Punctuation(), pre_tokenizers.Whitespace()]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad,
                                                   unk_token="[UNK]")
    wrapped.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=len(words), hidden_size=20, num_hidden_layers=2,
                                     num_attention_heads=2, intermediate_size=30,
                                     max_position_embeddings=40)
    transformers.BertModel(config).save_pretrained(folder)


def mutual_information(a, b):
    """Normalised: 2 I(a; b) / (H(a) + H(b))."""
    n, joint, first, second = len(a), Counter(zip(a, b)), Counter(a), Counter(b)
    information = sum(c / n * math.log(c * n / (first[x] * second[y]))
                      for (x, y), c in joint.items())
    entropies = [-sum(c / n * math.log(c / n) for c in counts.values())
                 for counts in (first, second)]
    return 2 * information / sum(entropies)
