"""What bench.py compares with: transformers' generate and TRL's GRPOTrainer with PEFT, on the same shapes, prompts and counts.

Each runs in a process of its own, as its users have it, and takes its turn when it is asked: `Peer` is bench.py's end of the
pipe, `main` the other. Questions and answers are lines of JSON.
"""
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import lora
import tiny
import train
from flags import parse
from model import ModelConfig, Transformer

LARGE = {**tiny.CONFIG, "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
         "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 2048}
SAMPLES, NEW_TOKENS = 8, 64
MANY = 1000                             # steps that TRL is told to take; it is asked for fewer


class Peer:
    def __init__(self, *words):
        self.complaints = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen([sys.executable, __file__, *map(str, words)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=self.complaints, text=True)

    def ask(self, *question):
        """One turn -> what it answers."""
        try:
            print(json.dumps(question), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            pass                                            # it is gone: the next line says why
        if not (answer := self.process.stdout.readline()):
            self.complaints.seek(0)
            raise ValueError(f"a peer failed ({' '.join(self.process.args[2:])}): {(self.complaints.read().strip().splitlines() or ['killed'])[-1]} "
                             f"(exit code {self.process.wait()})")
        return json.loads(answer)

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *error) -> None:
        self.process.kill(), self.process.communicate(), self.complaints.close()


def timed(function, *arguments) -> tuple[float, object]:
    begin = time.perf_counter()
    result = function(*arguments)
    return time.perf_counter() - begin, result


def peak_memory() -> int:
    """Bytes. Linux counts a process's getrusage from the one that started it, its own status does not."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(next(line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmHWM"))) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def make_run(method: str, cache: Path, *flags: str) -> train.Run:
    """A run as train.py would start it; nothing is written until it takes a checkpoint, which it does not."""
    config, _ = parse(train.Config, "", ["--run", "unused", "--device", "cpu", "--method", method, "--cache", str(cache), *flags])
    return train.Run(config)


def write_model(shape: dict, folder: Path) -> Path:
    """Random weights of this shape, as transformers reads them."""
    if not (folder / "config.json").exists():
        model = Transformer(ModelConfig.from_dict(shape))
        tiny.initialise(model, torch.Generator().manual_seed(0))
        model.save_pretrained(folder)
    return folder


def make_prompts(shape: dict, count: int, length: int) -> list[list[int]]:
    return torch.randint(2, min(100, shape["vocab_size"]), (count, length), generator=torch.Generator().manual_seed(1)).tolist()


def trl_trainer(model, tokenizer, rows: dict, judge, samples: int, tokens: int, kl: float, folder: Path, callback,
                recompute: bool = False, **more):
    """GRPOTrainer with the same counts and adapters; a batch is the whole of `rows`. Like our side it keeps activations, unless
    asked to recompute: gradient checkpointing, TRL's default, saves memory and takes a third more time in the update."""
    import datasets
    import peft
    import trl
    count = len(rows["prompt"])
    arguments = trl.GRPOConfig(
        output_dir=str(folder / "trl"), per_device_train_batch_size=count * samples, num_generations=samples, max_completion_length=tokens,
        beta=kl, temperature=1.0, top_k=0, top_p=1.0, learning_rate=1e-4, max_steps=MANY, use_cpu=True, report_to="none",
        save_strategy="no", logging_strategy="no", disable_tqdm=True, bf16=False, fp16=False, gradient_checkpointing=recompute,
        loss_type="grpo", shuffle_dataset=False, **more)
    return trl.GRPOTrainer(
        model, judge, arguments, datasets.Dataset.from_dict({name: column * MANY for name, column in rows.items()}),
        processing_class=tokenizer, callbacks=[callback],
        peft_config=peft.LoraConfig(r=8, lora_alpha=16, target_modules=list(lora.TARGETS), task_type="CAUSAL_LM"))


def make_clock(answer):
    """A callback for TRL: before each step it waits to be asked, afterwards it answers with its seconds and its peak memory."""
    import transformers

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, *arguments, **options):
            if not sys.stdin.readline():
                sys.exit()                                  # nobody is left to ask
            self.begin = time.perf_counter()

        def on_step_end(self, *arguments, **options):
            answer([time.perf_counter() - self.begin, peak_memory()])
    return Clock()


def generating(folder: Path, answer) -> None:
    """transformers' generate, over and over: (prompts, new tokens, end tokens) -> seconds and sampled tokens, ends included."""
    import transformers
    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for line in sys.stdin:
        prompts, tokens, ends = json.loads(line)
        repeated = torch.tensor(prompts).repeat_interleave(SAMPLES, 0)
        with torch.inference_mode():
            seconds, ids = timed(lambda: model.generate(
                repeated, attention_mask=torch.ones_like(repeated), do_sample=True, top_k=0, top_p=1.0, temperature=1.0, max_new_tokens=tokens,
                pad_token_id=0, eos_token_id=ends or None, use_cache=True))
        ended = torch.isin(ids[:, repeated.shape[1]:], torch.tensor(ends)).long()
        answer([seconds, int(((ended.cumsum(1) - ended) == 0).sum())])


def trl_side(length: int, folder: Path, answer, recompute: bool) -> None:
    """TRL's steps on the large shape; every completion has all its tokens."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(LARGE["vocab_size"])}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1", unk_token="w0")
    texts = [" ".join(f"w{i}" for i in prompt) for prompt in make_prompts(LARGE, 2, length)]
    rng = random.Random(0)
    trl_trainer(str(write_model(LARGE, folder / "large")), tokenizer, {"prompt": texts}, lambda completions, **_: [rng.random() for _ in completions],
                SAMPLES, NEW_TOKENS, 0.04, folder, make_clock(answer), recompute,
                generation_kwargs={"min_new_tokens": NEW_TOKENS, "eos_token_id": 1}).train()


def countdown_side(cache: Path, folder: Path, answer) -> None:
    """TRL on the tiny model and the problems of a default run, judged as there."""
    run = make_run("grpo", cache)
    config, problems = run.config, [run.problems[i] for i in run.batch(0)]
    by_prompt = {problem.prompt: problem for problem in problems}
    trl_trainer(run.policy.base, run.policy.tokenizer, {"prompt": [problem.prompt for problem in problems]},
                lambda prompts, completions, **_: [by_prompt[prompt].judge(text) for prompt, text in zip(prompts, completions)],
                config.samples, config.max_new_tokens, config.kl, folder, make_clock(answer)).train()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)                                           # TRL prints as well
    kind, *words = sys.argv[1:]
    def answer(value):
        print(json.dumps(value), file=answers, flush=True)
    if kind == "generate":
        generating(Path(words[0]), answer)
    elif kind == "trl":
        trl_side(int(words[0]), Path(words[1]), answer, words[2:] == ["recompute"])
    else:
        countdown_side(Path(words[0]), Path(words[1]), answer)


if __name__ == "__main__":
    main()
