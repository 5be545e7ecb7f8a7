"""The sides that bench.py compares, each in a process of its own, which takes a turn when asked.

    train       a step of train.py
    generate    a rollout of transformers' generate
    trl         a step of TRL's GRPOTrainer with PEFT
    machine     what this machine is capable of

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

import torch

import data
import lora
import train
from sample import Policy, seeded
from support import hub, tiny
from support.config import Config
from support.fast import reuse_memory

MANY = 1000  # steps that TRL is told to take; it is asked for fewer


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
    """The other end: wait to be asked, yield a dictionary for the turn's results, answer with it."""
    status = Path("/proc/self/status")
    for _ in sys.stdin:
        results, begin = {}, time.perf_counter()
        yield results
        results["seconds"] = time.perf_counter() - begin
        peak = status.read_text().split("VmHWM:")[1].split()[0] if status.exists() else "nan"
        results["gigabytes"] = float(peak) / 2 ** 20
        print(json.dumps(results), file=sys.__stdout__, flush=True)


def train_side(config: Config) -> None:
    reuse_memory()  # as train.py does
    run, learning = train.Run(config), 0.0
    if run.strategist:
        for memory in (run.strategist.recent, run.strategist.outcomes):
            memory.added.fill_(memory.capacity)  # full, as later in a run
        begin = time.perf_counter()
        run.strategist.learn(10 * config.strategy_updates, seeded(0))
        learning = (time.perf_counter() - begin) / 10
    for number, results in enumerate(turns()):
        results |= train.train_step(run, number)
        results["seconds_sus"] = results["seconds_intrinsic"] + learning


def machine_side(config: Config) -> None:
    """Operations per second in products of large matrices, bytes per second from memory."""
    square, long = torch.randn(2, 1536, 1536), torch.ones(2 ** 28)
    for results in turns():
        begin = time.perf_counter()
        for _ in range(40):
            torch.mm(*square)
        middle = time.perf_counter()
        long.sum()
        results["operations"] = 40 * 2 * 1536 ** 3 / (middle - begin)
        results["bytes"] = long.nbytes / (time.perf_counter() - middle)


def open_task(config: Config) -> tuple[Path, Policy, list]:
    """-> the folder of the model, a policy without a model, the problems."""
    base = tiny.find_base(config)
    tokenizer = hub.open_tokenizer(base)
    policy = Policy(None, tokenizer, hub.find_eos_ids(base, tokenizer, len(tokenizer)), config)
    return base, policy, data.load(config.data, "train", config.problems)


@torch.inference_mode()
def generate_side(config: Config) -> None:
    from transformers import AutoModelForCausalLM
    base, policy, problems = open_task(config)
    model = AutoModelForCausalLM.from_pretrained(base)
    prompts = torch.tensor(policy.encode(problems)).repeat_interleave(config.samples, 0)
    for results in turns():
        ids = model.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=True,
                             temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=config.max_new_tokens,
                             pad_token_id=0, eos_token_id=list(policy.eos_ids))
        ended = torch.isin(ids[:, prompts.shape[1]:], torch.tensor(policy.eos_ids)).long()
        results["tokens"] = int((ended.cumsum(1) - ended == 0).sum())  # end tokens included


def trl_side(config: Config) -> None:
    import datasets
    import peft
    import transformers
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
        num_generations=config.samples, max_completion_length=config.max_new_tokens, top_k=0,
        top_p=1.0, temperature=1.0, beta=config.kl, learning_rate=config.learning_rate,
        loss_type="grpo", gradient_checkpointing=config.recompute, bf16=False, use_cpu=True,
        max_steps=MANY, shuffle_dataset=False, report_to="none", save_strategy="no",
        logging_strategy="no", disable_tqdm=True)
    adapters = peft.LoraConfig(r=config.rank, lora_alpha=lora.ALPHA, task_type="CAUSAL_LM",
                               target_modules=list(lora.TARGETS))
    rows = datasets.Dataset.from_dict({"prompt": list(by_prompt) * MANY})
    trl.GRPOTrainer(str(base), judge, settings, rows, processing_class=policy.tokenizer,
                    callbacks=[Clock()], peft_config=adapters).train()


SIDES = {"train": train_side, "generate": generate_side, "trl": trl_side, "machine": machine_side}

if __name__ == "__main__":
    sys.stdout = sys.stderr  # what TRL prints is no answer
    SIDES[sys.argv[1]](Config(**json.loads(sys.argv[2])))
