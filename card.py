"""Model cards: the README.md that the hub shows for an adapter or a merged model, with the fields that it reads."""
from files import write_text

DATASETS = {"gsm8k": "openai/gsm8k"}
WORDS = {"pass@1": "pass@1", "pass@5": "pass@5", "pass@16": "pass@16", "strategy_entropy": "strategy entropy (nats)",
         "cluster_entropy": "cluster entropy (nats)"}


def write(folder, config: dict, metrics: dict | None, merged: bool) -> None:
    """config: a run's config.json; metrics: its evaluation, if there is one."""
    base, local = config["model"], config["model"] == "tiny" or config["model"].startswith((".", "/"))
    fields = ["license: other", "license_name: that-of-the-base-model", f"library_name: {'transformers' if merged else 'peft'}",
              "pipeline_tag: text-generation", "tags: [grpo, exploration, strategy-aware-surprise]"]
    fields += [] if local else [f"base_model: {base}"]
    fields += [f"datasets: [{DATASETS[config['data']]}]"] if config["data"] in DATASETS else []
    rows = [f"| {word} | {100 * metrics[name]:.1f} % |" if "pass" in name else f"| {word} | {metrics[name]:.2f} |"
            for name, word in WORDS.items() if metrics and metrics.get(name) is not None]
    results = [f"On {metrics['problems']} {config['eval_split']} problems, {metrics['samples']} responses each:", "", "| | |",
               "|---|---|", *rows, ""] if rows else []
    use = ('model = AutoModelForCausalLM.from_pretrained("FOLDER")' if merged else
           f'model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{base}"), "FOLDER")')
    write_text(folder / "README.md", "\n".join([
        "---", *fields, "---", "", f"# {base}, trained with {config['method']} on {config['data']}", "",
        f"{'Merged weights' if merged else 'A LoRA adapter'} of `{base}` after {config['steps']} steps of GRPO with the intrinsic "
        f"reward `{config['method']}` (alpha {config['alpha']}, seed {config['seed']}).", "", *results, "```python", use, "```", ""]))
