"""The sides that bench.py compares, each in a process of its own, which takes a turn when asked.

    train       a step of train.py
    generate    a rollout of transformers' generate
    trl         a step of TRL's GRPOTrainer with PEFT

An empty line asks for a turn, a line of JSON says how it went. All sides take the model, the
problems and every count from one Config. The temperature is 1, and there is no top-k.
"""
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from timeit import timeit

import support  # noqa: F401  isort: skip  before torch: it sets how torch's threads wait
import torch
import transformers

import data
import lora
import train
from sample import Policy, seeded
from support import hub, tiny
from support.config import Config


def ask(side: str, config: Config) -> Iterator[dict]:
    """Start a side. Each `next` is a turn; the process ends with the iterator."""
    command = [sys.executable, "-m", "bench.peers", side, json.dumps(asdict(config))]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, cwd=Path(__file__).parent.parent, text=True,
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors)
        try:
            while True:
                print(file=process.stdin, flush=True)
                yield json.loads(process.stdout.readline())
        except (BrokenPipeError, json.JSONDecodeError):  # it is gone
            code = process.wait()
            errors.seek(0)
            last = ["killed", *errors.read().strip().splitlines()][-1]
            raise ValueError(f"a peer failed ({side}): {last} (exit code {code})") from None
        finally:
            process.kill()
            process.communicate()


def turns() -> Iterator[dict]:
    """The other end: wait to be asked, yield a dictionary for results, answer with it."""
    status = Path("/proc/self/status")
    for _ in sys.stdin:
        results, begin = {}, time.perf_counter()
        yield results
        results["seconds"] = time.perf_counter() - begin
        peak = status.read_text().split("VmHWM:")[1].split()[0] if status.exists() else "nan"
        results["gigabytes"] = float(peak) / 2 ** 20
        print(json.dumps(results), file=sys.__stdout__, flush=True)


def train_side(config: Config) -> None:
    run, learning = train.Run(config), 0.0
    if run.strategist:
        for memory in (run.strategist.recent, run.strategist.outcomes):
            memory.added.fill_(memory.capacity)  # full, as later in a run
        updates = config.strategy_updates
        learning = timeit(lambda: run.strategist.learn(updates, seeded(0)), number=10) / 10
    for number, results in enumerate(turns()):
        results |= train.train_step(run, number)
        results["seconds_sus"] = results["seconds_intrinsic"] + learning


def open_task(config: Config) -> tuple[Path, Policy, list]:
    """-> the model's folder, a policy that only encodes, the problems."""
    base = tiny.find_base(config)
    policy = Policy(None, hub.open_tokenizer(base), (), config)
    return base, policy, data.load(config.data, "train", config.problems)


def generate_side(config: Config) -> None:
    base, policy, problems = open_task(config)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    prompts = torch.tensor(policy.encode(problems)).repeat_interleave(config.samples, 0)
    ends = torch.tensor(model.generation_config.eos_token_id)
    for results in turns():
        ids = model.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=True,
                             temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0,
                             max_new_tokens=config.max_new_tokens)
        ended = torch.isin(ids[:, prompts.shape[1]:], ends).long()
        results["tokens"] = int((ended.cumsum(1) - ended == 0).sum())  # end tokens included


def trl_side(config: Config) -> None:
    import datasets
    import peft
    import trl
    base, policy, problems = open_task(config)
    by_prompt, asked = {policy.plain_text(problem): problem for problem in problems}, turns()

    def judge(prompts, completions, **_):
        return [by_prompt[prompt].judge(text) for prompt, text in zip(prompts, completions)]

    class Clock(transformers.TrainerCallback):
        def on_train_begin(self, *arguments, **options):
            next(asked)
        on_step_end = on_train_begin  # answers, then waits to be asked again

    settings = trl.GRPOConfig(
        output_dir=config.run, per_device_train_batch_size=config.problems * config.samples,
        num_generations=config.samples, max_completion_length=config.max_new_tokens,
        temperature=1.0, top_k=0, top_p=1.0, beta=config.kl, learning_rate=config.learning_rate,
        gradient_checkpointing=config.recompute, bf16=False, use_cpu=True, max_steps=1000,
        save_strategy="no", logging_strategy="no", disable_tqdm=True)
    adapters = peft.LoraConfig(r=config.rank, lora_alpha=lora.ALPHA, task_type="CAUSAL_LM",
                               target_modules=list(lora.TARGETS))
    rows = datasets.Dataset.from_dict({"prompt": list(by_prompt) * settings.max_steps})
    trl.GRPOTrainer(str(base), judge, settings, rows, processing_class=policy.tokenizer,
                    callbacks=[Clock()], peft_config=adapters).train()


SIDES = {"train": train_side, "generate": generate_side, "trl": trl_side}

if __name__ == "__main__":
    sys.stdout = sys.stderr  # what TRL prints is no answer
    SIDES[sys.argv[1]](Config(**json.loads(sys.argv[2])))
