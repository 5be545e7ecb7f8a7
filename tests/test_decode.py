"""The fast decoder: token by token what the model itself says, whatever the shape of the batch."""
import pytest
import torch
from conftest import adapted, small_model

import decode
from decode import Decoder
from model import SharedPrefix
from sample import pad_left

PROMPTS = {"padded": [[3, 4, 5, 6], [7, 8], [9, 10, 11]], "even": [[3, 4, 5], [7, 8, 9]]}
BIASED = {"attention_bias": True, "mlp_bias": True}


def start(model, prompts, samples, room):
    prefix, (ids, first) = SharedPrefix(samples), pad_left(prompts, model.device)
    model.hidden(ids, first, prefix)
    return Decoder(model, prefix, first, samples, room)


@torch.no_grad()
@pytest.mark.parametrize("width", [128, 16], ids=["whole", "in pieces"])
@pytest.mark.parametrize("lengths", PROMPTS)
@pytest.mark.parametrize("model", [adapted("qwen2"), adapted("qwen3"), adapted("llama"), small_model("llama", vocab_size=40, **BIASED)],
                         ids=["qwen2", "qwen3", "llama", "llama with biases, no adapters"])
def test_decoding_equals_the_forward_pass_of_whole_sequences(model, lengths, width, monkeypatch):
    monkeypatch.setattr(decode, "WIDTH", width)
    prompts, G, T = PROMPTS[lengths], 3, 12
    tokens = torch.randint(37, (len(prompts), G, T), generator=torch.Generator().manual_seed(0))
    decoder = start(model, prompts, G, T)
    logits = torch.stack([decoder.step(tokens[:, :, t]) for t in range(T)], dim=1)               # (B * G, T, V)
    for b, prompt in enumerate(prompts):
        for g in range(G):
            whole = model(torch.tensor([prompt + tokens[b, g].tolist()]))[0, len(prompt):]
            torch.testing.assert_close(logits[b * G + g], whole, atol=1e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("lengths", PROMPTS)
def test_rows_that_stay_do_not_notice_those_that_leave(lengths):
    model, prompts = adapted("qwen3"), PROMPTS[lengths]
    tokens = torch.randint(37, (len(prompts), 4, 9), generator=torch.Generator().manual_seed(1))
    whole, shrinking = (start(model, prompts, 4, 9) for _ in range(2))
    groups, columns = torch.tensor([1, 0]), torch.tensor([[3, 0], [2, 2]])                       # in any order, with repeats
    for t in range(9):
        if t == 5:
            shrinking.keep(groups, columns)
        expected = whole.step(tokens[:, :, t]).unflatten(0, (-1, 4))
        if t < 5:
            shrinking.step(tokens[:, :, t])
        else:
            found = shrinking.step(tokens[groups[:, None], columns, t])
            torch.testing.assert_close(found, expected[groups[:, None], columns].flatten(0, 1), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_bf16():
    model = adapted()
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.to(torch.bfloat16)
    decoder = start(model, [[3, 4, 5]], 2, 4)
    found = [decoder.step(torch.tensor([[6, 7]])), decoder.step(torch.tensor([[8, 9]]))][1][0]
    expected = model(torch.tensor([[3, 4, 5, 6, 8]]))[0, -1]
    assert found.dtype == torch.bfloat16 and (found - expected).abs().max() < 0.06 * expected.abs().max()
