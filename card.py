"""Model cards: the README.md that the hub shows for an adapter or a merged model, with the fields that it reads."""
from pathlib import Path

from files import write_text

DATASETS = {"gsm8k": "openai/gsm8k"}
WORDS = {"pass@1": "pass@1", "pass@5": "pass@5", "pass@16": "pass@16", "strategy_entropy": "strategy entropy (nats)",
         "cluster_entropy": "cluster entropy (nats)"}


def write(folder: Path, base: str, config: dict, steps: int, metrics: dict, where: str, merged: bool) -> None:
    """base: its folder or hub id; config: a run's; steps: those taken; metrics: an evaluation; where: what it was made on."""
    method = config["method"]
    fields = ["license: other", "license_name: that-of-the-base-model", f"library_name: {'transformers' if merged else 'peft'}",
              "pipeline_tag: text-generation", "tags: [grpo, exploration, strategy-aware-surprise]"]
    fields += [] if Path(base).is_dir() else [f"base_model: {base}"]
    fields += [f"datasets: [{DATASETS[config['data']]}]"] if config["data"] in DATASETS else []
    rows = [f"| {word} | {100 * metrics[name]:.1f} % |" if "pass" in name else f"| {word} | {metrics[name]:.2f} |"
            for name, word in WORDS.items() if metrics.get(name) is not None]
    reward = "" if method == "grpo" else f" and the intrinsic reward `{method}` (alpha {config['alpha']})"
    use = ('model = AutoModelForCausalLM.from_pretrained("FOLDER")' if merged else
           f'model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{base}"), "FOLDER")')
    write_text(folder / "README.md", "\n".join([
        "---", *fields, "---", "", f"# {base}, trained with {method} on {config['data']}", "",
        f"{'Merged weights' if merged else 'A LoRA adapter'} of `{base}` after {steps} steps of GRPO{reward}, "
        f"seed {config['seed']}.", "",
        f"On {metrics['problems']} {where}, {metrics['samples']} responses each:", "", "| | |", "|---|---|", *rows, "",
        "```python", use, "```", ""]))
