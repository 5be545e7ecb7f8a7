"""A frozen sentence encoder in place of the policy's base model: --encoder FOLDER_OR_HUB_ID.

The authors use all-MiniLM-L6-v2. transformers reads the texts; their token states are mean-pooled
like those of the base model (strategy.py).
"""
import torch
from torch import Tensor

from sample import Rollout
from strategy import Features, pool, pool_features, random_halves
from support import files

AT_ONCE = 64  # texts


class SentenceEncoder:
    def __init__(self, name: str, device: torch.device, together: bool = True):
        from transformers import AutoModel, AutoTokenizer  # slow to import
        self.device = device
        self.together = together  # also read query and response as one text: another pass
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
            self.model = AutoModel.from_pretrained(name, trust_remote_code=False,
                                                   use_safetensors=True)
            self.model.train(False).requires_grad_(False).to(device)
            positions = getattr(self.model.config, "max_position_embeddings", 512)
            self.limit = min(self.tokenizer.model_max_length, positions)
            means = self.mean(["one", "one text and another"])  # does it pad?
            files.require_finite("of states", means, "its output")
            self.size = means.shape[1]
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # transformers raises whatever its readers raise
            why = f"{type(error).__name__}: {str(error)[:100]}"
            raise ValueError(f"--encoder {name} cannot be used ({why}): expected a folder or hub "
                             "id of a sentence encoder") from None

    @torch.no_grad()
    def read(self, texts: list[str]) -> tuple[Tensor, Tensor, Tensor]:
        """-> token states (n, T, D), ids and mask (n, T)."""
        inputs = self.tokenizer(texts, padding=True, truncation=True, max_length=self.limit,
                                return_tensors="pt").to(self.device)
        states = []
        for i in range(0, len(texts), AT_ONCE):
            part = {key: value[i:i + AT_ONCE] for key, value in inputs.items()}
            states.append(self.model(**part).last_hidden_state)
        return torch.cat(states), inputs["input_ids"], inputs["attention_mask"].bool()

    def mean(self, texts: list[str]) -> Tensor:
        """(n, D): the mean over real tokens."""
        states, _, mask = self.read(texts)
        return pool(states, mask)

    def encode(self, problems: list, prompts: list[list[int]], rollout: Rollout,
               responses: list[str], generator: torch.Generator) -> Features:
        """Reads the texts; query and response together are encoded as one text."""
        queries, G = [problem.prompt for problem in problems], len(responses) // len(problems)
        query_states, _, query_mask = self.read(queries)
        states, ids, mask = self.read(responses)  # (N, T, D), (N, T), (N, T)
        halves = random_halves(ids, mask, generator)
        features = pool_features(query_states, query_mask, states, mask, halves)
        if self.together:
            texts = [f"{queries[n // G]} {response}" for n, response in enumerate(responses)]
            features.both = self.mean(texts).view_as(features.response)
        return features
