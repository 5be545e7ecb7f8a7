"""Every knob of a training run, with its limits and its line in `python train.py --help`, and the paper's preset."""
from dataclasses import dataclass

import data
import lora
import reward
from flags import knob

DEVICES, DTYPES, PROMPTS = ("auto", "cpu", "cuda", "mps"), ("auto", "float32", "bfloat16"), ("auto", "plain", "chat")


@dataclass(frozen=True)
class Config:
    run: str = knob("", "folder of the run; empty picks runs/METHOD-DATA-SEED", group="The run")
    resume: bool = knob(False, "continue the run in --run from its last checkpoint")
    steps: int = knob(400, "policy updates in all", low=1)
    seed: int = knob(0, "everything random follows from it", low=0, high=2 ** 32 - 1)
    checkpoint_every: int = knob(50, "steps between checkpoints", low=1)
    device: str = knob("auto", "where to compute", choices=DEVICES)
    preset: str = knob("none", "other defaults: paper is Qwen2.5-1.5B on GSM8K as in the paper", choices=("none", "paper"))
    dry_run: bool = knob(False, "print the settings, the memory and the tokens that the run needs, and stop")
    wandb: bool = knob(False, "also log to Weights & Biases")
    tensorboard: bool = knob(False, "also log to TensorBoard, into the run's folder")

    model: str = knob("tiny", "a Hugging Face folder or hub id (Qwen2, Qwen3, Llama), or tiny", group="The model")
    dtype: str = knob("auto", "of the base weights; adapters are always float32", choices=DTYPES)
    rank: int = knob(8, "LoRA rank", low=1, high=2 ** 14)
    lora_alpha: float = knob(16.0, "LoRA scale is this over the rank", above=0)
    targets: tuple = knob(lora.TARGETS, "projections that get an adapter")
    cache: str = knob("cache", "folder for the tiny base model")
    rebuild: bool = knob(False, "build the tiny base model again")

    data: str = knob("countdown", f"{', '.join(data.KNOWN)}, or a JSONL file or folder with questions and answers",
                     group="The problems")
    train_problems: int = knob(3000, "largest size of the training set; 0 takes all of a file", low=0)
    prompt: str = knob("auto", "chat puts problems through the tokenizer's template, plain does not, auto does if it has one",
                       choices=PROMPTS)
    system: str = knob("", "system text of the chat")
    instruction: str = knob("", "how to answer, instead of the task's own words")
    problems: int = knob(32, "problems a step", low=1)
    samples: int = knob(8, "responses to each problem, the group of GRPO", low=2)
    temperature: float = knob(1.0, "sampling temperature, in training and evaluation", above=0)
    max_new_tokens: int = knob(32, "longest response", low=1)

    method: str = knob("sus", "what is rewarded beside correctness: " + ", ".join(reward.METHODS),
                       choices=tuple(reward.METHODS), group="The intrinsic reward")
    alpha: float = knob(8.0, "scale of the intrinsic reward; the paper has 0.3", low=0)
    alpha_decay: float = knob(1.0, "share of the run over which alpha falls linearly to zero; 0 keeps it constant", low=0, high=1)
    gate: str = knob("mixed", "who may earn a bonus: correct responses, correct ones in mixed groups, or all",
                     choices=("correct", "mixed", "none"))
    reading: str = knob("algorithm", "SS and SuS as in the paper's Algorithm 1 or as in its Eq. 2 and 3",
                        choices=("algorithm", "equations"))
    lambda_ss: float = knob(1.0, "weight of SS", low=0)
    lambda_sus: float = knob(0.5, "weight of SuS", low=0)
    sus_baseline: str = knob("batch", "what SuS = |c - P| is counted from: the mean over the batch's successes, or none, as in the paper",
                             choices=("batch", "none"))
    learn_lambdas: bool = knob(False, "learn both weights by meta-gradient, from these values on")
    lambda_rate: float = knob(0.1, "learning rate of the weights", above=0)
    lambda_every: int = knob(10, "steps between updates of the weights", low=2)
    scale_intrinsic: bool = knob(False, "divide the intrinsic reward by its running deviation, as RND does")

    encoder: str = knob("", "sentence encoder (folder or hub id); empty takes the policy's own base model",
                        group="The strategy networks")
    layer: int = knob(1, "layer of the base model whose states, after its attention, are pooled", low=1)
    dimension: int = knob(128, "size d of a strategy embedding", low=1, high=2 ** 14)
    negatives: str = knob("group", "contrast with the other responses to the same query, or with the whole batch",
                          choices=("group", "batch"))
    contrast_temperature: float = knob(0.5, "of InfoNCE", above=0)
    momentum: float = knob(0.99, "of the momentum head", low=0, high=1)
    strategy_rate: float = knob(3e-3, "learning rate of these networks", above=0, high=1)
    strategy_updates: int = knob(4, "minibatches a step", low=0)
    strategy_batch: int = knob(32, "groups in a minibatch", low=1)
    strategy_warmup: int = knob(400, "minibatches before the first step, on the base policy's responses", low=0)
    recent: int = knob(64, "newest groups, from which all networks but P learn", low=1, high=10 ** 6)
    buffer: int = knob(1024, "queries and outcomes, from which P learns", low=1, high=10 ** 7)
    clusters: int = knob(12, "clusters of embeddings, for count and uniqueness", low=1, high=1000)

    normalise: str = knob("none", "advantage: reward minus group mean, divided by the group's std or by nothing",
                          choices=("std", "none"), group="The objective")
    kl: float = knob(0.03, "weight of the KL penalty to the base model; 0 also saves its forward pass", low=0)
    clip_low: float = knob(0.2, "the ratio's lower bound is 1 minus this", low=0)
    clip_high: float = knob(0.2, "the ratio's upper bound is 1 plus this", low=0)
    loss: str = knob("token", "tokens weigh the same, or sequences do, or all is divided by a constant",
                     choices=("token", "sequence", "constant"))

    learning_rate: float = knob(2e-3, "of AdamW on the adapters", above=0, group="The optimizer")
    warmup: int = knob(5, "steps in which the learning rate rises", low=0)
    schedule: str = knob("constant", "learning rate after the warm-up", choices=("constant", "linear"))
    epochs: int = knob(1, "updates on each batch of responses", low=1)
    clip_gradient: float = knob(1.0, "largest gradient norm", above=0)
    micro_batch: int = knob(32, "problems that go through the model at a time: lower it to save memory", low=1)
    recompute: bool = knob(False, "gradient checkpointing: much less memory for a third more time in the update")

    eval_every: int = knob(0, "steps between evaluations; 0 evaluates before and after only", low=0, group="The evaluation")
    eval_split: str = knob("test", "problems to evaluate on: test to report, validation to tune", choices=("test", "validation"))
    eval_problems: int = knob(200, "how many problems of that split", low=1)
    eval_samples: int = knob(16, "responses to each", low=1)


# The paper's Table 3, but for its lambda_SuS of 0.0, which the text contradicts. 3 epochs over 7,473 problems, 2 at a time and
# 4 times accumulated, are 2,802 updates on 8 problems.
PRESETS = {"none": {}, "paper": dict(
    model="Qwen/Qwen2.5-1.5B", data="gsm8k", prompt="plain", train_problems=0, steps=2802, problems=8, micro_batch=1,
    samples=8, max_new_tokens=256, learning_rate=2e-5, rank=8, dimension=128, alpha=0.3, alpha_decay=0.0, lambda_ss=1.0,
    lambda_sus=0.5, sus_baseline="none", gate="correct", normalise="std", kl=0.04, strategy_warmup=0, strategy_batch=8, eval_problems=200,
    eval_samples=8, eval_every=934, checkpoint_every=100)}
