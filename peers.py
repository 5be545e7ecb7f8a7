"""What bench.py compares with: transformers' model and TRL's GRPOTrainer with PEFT, on the same shapes, prompts and counts."""
import random
import time
from pathlib import Path

import torch

import lora
import tiny
import train
from model import ModelConfig, Transformer

LARGE = {**tiny.CONFIG, "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
         "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 2048}
SAMPLES, NEW_TOKENS = 8, 64


def make_peer(shape: dict, folder: Path):
    """The same shape in transformers."""
    import transformers
    transformers.logging.set_verbosity_error()
    if not (folder / "config.json").exists():
        model = Transformer(ModelConfig.from_dict(shape))
        tiny.initialise(model, torch.Generator().manual_seed(0))
        model.save_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def make_prompts(shape: dict, count: int, length: int) -> list[list[int]]:
    return torch.randint(2, min(100, shape["vocab_size"]), (count, length), generator=torch.Generator().manual_seed(1)).tolist()


def trl_trainer(model, tokenizer, rows: dict, judge, samples: int, tokens: int, kl: float, rounds: int, folder: Path, callback, **more):
    """GRPOTrainer with the same counts and adapters; a batch is the whole of `rows`. Like our side it keeps activations:
    gradient checkpointing, TRL's default, would save memory and take a third more time in the update."""
    import datasets
    import peft
    import trl
    count = len(rows["prompt"])
    arguments = trl.GRPOConfig(
        output_dir=str(folder / "trl"), per_device_train_batch_size=count * samples, num_generations=samples, max_completion_length=tokens,
        beta=kl, temperature=1.0, top_k=0, top_p=1.0, learning_rate=1e-4, max_steps=rounds, use_cpu=True, report_to="none",
        save_strategy="no", logging_strategy="no", disable_tqdm=True, bf16=False, fp16=False, gradient_checkpointing=False,
        loss_type="grpo", **more)
    return trl.GRPOTrainer(
        model, judge, arguments, datasets.Dataset.from_dict({name: column * rounds for name, column in rows.items()}),
        processing_class=tokenizer, callbacks=[callback],
        peft_config=peft.LoraConfig(r=8, lora_alpha=16, target_modules=list(lora.TARGETS), task_type="CAUSAL_LM"))


def make_clock(between):
    """A callback for TRL: between(seconds) is called after each of its steps."""
    import transformers

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, *arguments, **options):
            self.begin = time.perf_counter()

        def on_step_end(self, *arguments, **options):
            between(time.perf_counter() - self.begin)
    return Clock()


def trl_side(length: int, folder: Path, rounds: int, between) -> None:
    """TRL's steps on the large shape; every completion has all its tokens."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(LARGE["vocab_size"])}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1", unk_token="w0")
    texts = [" ".join(f"w{i}" for i in prompt) for prompt in make_prompts(LARGE, 2, length)]
    rng = random.Random(0)
    trl_trainer(make_peer(LARGE, folder / "large"), tokenizer, {"prompt": texts}, lambda completions, **_: [rng.random() for _ in completions],
                SAMPLES, NEW_TOKENS, 0.04, rounds, folder, make_clock(between),
                generation_kwargs={"min_new_tokens": NEW_TOKENS, "eos_token_id": 1}).train()


def countdown_side(run: train.Run, folder: Path, rounds: int, between) -> None:
    """TRL on the tiny model and the problems of a default run, judged as there."""
    config, problems = run.config, [run.problems[i] for i in run.batch(0)]
    by_prompt = {problem.prompt: problem for problem in problems}
    trl_trainer(make_peer(tiny.CONFIG, Path(run.policy.base)), run.policy.tokenizer, {"prompt": [problem.prompt for problem in problems]},
                lambda prompts, completions, **_: [by_prompt[prompt].judge(text) for prompt, text in zip(prompts, completions)],
                config.samples, config.max_new_tokens, config.kl, rounds, folder, make_clock(between)).train()
