"""The paper's other reading, --reading equations: Eq. 2 and 3, with a world model M.

    z_post = E(query and response)                      instead of PSE(response)
    M(s, a) -> s'                                       mean squared error

The state s is the query, the action a the response, the next state s' both together: what the
base model's last layer makes of a response that follows its query, or a sentence encoder of both
as one text. M has to predict it from the mean states of each in the first layer. One more contrast
teaches E to see the strategy in query and response together.
"""
from dataclasses import replace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import strategy
from reward import Signals
from sample import Rollout
from strategy import DIMENSION, RECENT, BaseEncoder, Features, Standardise, Strategist, pool
from support.config import Config


class JointEncoder(BaseEncoder):
    """Also reads query and response as one: the base model's last layer, mean over the response."""

    @torch.no_grad()
    def encode(self, problems: list, prompts: list[list[int]], rollout: Rollout,
               responses: list[str], generator: torch.Generator) -> Features:
        features = super().encode(problems, prompts, rollout, responses, generator)
        ids, mask = rollout.ids[:, :-1], rollout.mask()[:, 1:]  # (N, T - 1)
        last_layer = self.read(self.model.hidden, prompts, ids)
        parts = [pool(states, mask[rows]) for _, _, states, rows in last_layer]
        features.both = torch.cat(parts).view_as(features.response)
        return features


class EquationsStrategist(Strategist):
    encoder = JointEncoder

    def __init__(self, size: int, config: Config, recent: int = RECENT):
        super().__init__(size, config, recent)
        self.both_norm = Standardise(size)

    def make_networks(self, size: int) -> None:
        super().make_networks(size)
        self.action = nn.Linear(size, DIMENSION)
        self.M = strategy.mlp(size + DIMENSION, size)

    def memory_shapes(self, size: int) -> dict[str, tuple]:
        return {**super().memory_shapes(size), "both": (self.config.samples, size)}

    def together(self, both: Tensor) -> Tensor:
        """z_post (..., d): E of query and response as one text."""
        return F.normalize(self.E(self.both_norm(both)), dim=-1)

    def next_state(self, query: Tensor, response: Tensor) -> Tensor:
        """M(s, a): standardised features of query and response together, from those of each."""
        state = self.query_norm(query)[:, None].expand_as(response)
        action = self.action(self.response_norm(response))
        return self.M(torch.cat((state, action), dim=-1))

    def remember(self, features: Features, correct: Tensor) -> None:
        super().remember(features, correct)
        self.both_norm.update(features.both)

    @torch.no_grad()
    def signals(self, features: Features, *batch) -> Signals:
        scale = features.query.shape[-1] ** -0.5  # so that the norm of Eq. 3 does not grow with D
        return replace(super().signals(features, *batch), z_post=self.together(features.both),
                       predicted=self.next_state(features.query, features.response) * scale,
                       state=self.both_norm(features.both) * scale)

    def loss(self, groups: Features, queries: Tensor, correct: Tensor) -> tuple[Tensor, dict]:
        total, losses = super().loss(groups, queries, correct)
        predicted = self.next_state(groups.query, groups.response)
        world = F.mse_loss(predicted, self.both_norm(groups.both))
        same = strategy.same_responses(groups.response)
        contrast, _ = strategy.info_nce(self.together(groups.both), self.achieved(groups.response),
                                        same, self.config.negatives)
        return total + world + contrast, {**losses, "world_loss": world.item()}
