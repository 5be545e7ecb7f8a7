"""The fast decoder: token by token what the model itself says, whatever the shape of the batch."""
import pytest
import torch

import lora
from sample import sample_token
from support import decoder
from support.decoder import Decoder
from tests.conftest import adapted, small_model

PROMPTS = {"padded": [[3, 4, 5, 6], [7, 8], [9, 10, 11]], "even": [[3, 4, 5], [7, 8, 9]]}
BIASED = {"attention_bias": True, "mlp_bias": True}
MODELS = {
    "qwen2": lambda: adapted("qwen2"),
    "qwen3": lambda: adapted("qwen3"),
    "llama": lambda: adapted("llama"),
    "llama with biases, no adapters": lambda: small_model("llama", vocab_size=40, **BIASED),
    "qwen2, tied": lambda: lora.apply(small_model("qwen2", tie_word_embeddings=True), 4)}


def random_tokens(*shape, seed=0):
    return torch.randint(37, shape, generator=torch.Generator().manual_seed(seed))


def whole_logits(model, prompt, response):
    """The logits after each token of a response, from one pass over the whole sequence."""
    return model(torch.tensor([prompt + response.tolist()]))[0, len(prompt):]


@torch.no_grad()
@pytest.mark.parametrize("piece", [128, 16], ids=["whole", "in pieces"])
@pytest.mark.parametrize("lengths", PROMPTS)
@pytest.mark.parametrize("name", MODELS)
def test_decoding_equals_the_forward_pass_of_whole_sequences(name, lengths, piece, monkeypatch):
    monkeypatch.setattr(decoder, "PIECE", piece)
    model, prompts, G, T = MODELS[name](), PROMPTS[lengths], 3, 12
    N = len(prompts) * G
    tokens = random_tokens(N, T)
    decoding = Decoder(model, prompts, G, T)
    assert torch.equal(decoding.rows, torch.arange(N))
    for n in range(N):  # before the first token, the prompt's own logits
        expected = model(torch.tensor([prompts[n // G]]))[0, -1]
        torch.testing.assert_close(decoding.logits[n], expected, atol=1e-4, rtol=1e-4)
    logits = []
    for t in range(T):
        decoding.step(tokens[:, t], torch.zeros(N, dtype=torch.bool))
        logits.append(decoding.logits)
    logits = torch.stack(logits, dim=1)  # (N, T, V)
    for n in range(N):
        expected = whole_logits(model, prompts[n // G], tokens[n])
        torch.testing.assert_close(logits[n], expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("lengths", PROMPTS)
def test_rows_that_stay_do_not_notice_those_that_leave(lengths):
    model, prompts = adapted("qwen3"), PROMPTS[lengths]
    B, G, T = len(prompts), 4, 9
    tokens = random_tokens(B, G, T, seed=1)
    complete = Decoder(model, prompts, G, T)
    shrinking = Decoder(model, prompts, G, T)
    alive = torch.zeros(B * G, dtype=torch.bool)
    groups = torch.tensor([1, 0])
    columns = torch.tensor([[3, 0], [2, 2]])  # in any order, with repeats
    for t in range(T):
        if t == 5:
            shrinking.keep(groups, columns)
        complete.step(tokens[:, :, t].flatten(), alive)
        if t < 5:
            shrinking.step(tokens[:, :, t].flatten(), alive)
            continue
        shrinking.step(tokens[groups[:, None], columns, t].flatten(), alive)
        expected = complete.logits.unflatten(0, (B, G))[groups[:, None], columns].flatten(0, 1)
        torch.testing.assert_close(shrinking.logits, expected, atol=1e-5, rtol=1e-5)
        assert shrinking.rows.tolist() == [7, 4, 2, 2]


@torch.no_grad()
@pytest.mark.parametrize("lengths", PROMPTS)
@pytest.mark.parametrize("name", MODELS)
def test_finished_rows_leave_and_the_others_go_on(name, lengths):
    """Each row ends at a time of its own; after every step the living rows are still right."""
    model, prompts, G, T = MODELS[name](), PROMPTS[lengths], 4, 8
    N = len(prompts) * G
    tokens = random_tokens(N, T, seed=2)
    last = torch.randint(1, T, (N,), generator=torch.Generator().manual_seed(3))
    last[:G] = 1  # the first group leaves early, all of it
    last[-1] = T
    expected = [whole_logits(model, prompts[n // G], tokens[n]) for n in range(N)]
    decoding = Decoder(model, prompts, G, T)
    for t in range(T):
        finished = last <= t
        decoding.step(tokens[decoding.rows, t], finished)
        rows = decoding.rows.tolist()
        assert set((~finished).nonzero()[:, 0].tolist()) <= set(rows)
        assert len(set(rows)) == len(rows)
        for place, row in enumerate(rows):
            if not finished[row]:
                torch.testing.assert_close(decoding.logits[place], expected[row][t],
                                           atol=1e-4, rtol=1e-4)
    assert rows == [N - 1]


@torch.no_grad()
def test_the_rectangle_shrinks_to_the_smallest_that_holds_all_living_rows():
    decoding = Decoder(adapted(), PROMPTS["padded"], 4, 6)
    finished = torch.zeros(12, dtype=torch.bool)
    finished[[0, 4, 5, 8, 9, 10, 11]] = True  # 3, 2 and 0 of the 4 responses go on
    tokens = decoding.drop_finished(torch.arange(12), finished)
    assert decoding.rectangle.tolist() == [[1, 2, 3], [6, 7, 4]]  # row 4 only fills up
    assert tokens.tolist() == [1, 2, 3, 6, 7, 4]
    assert decoding.drop_finished(tokens, finished) is tokens
    assert decoding.mask.shape[0] == len(decoding.first) == 2


@torch.no_grad()
def test_decoding_in_bf16():
    model = adapted()
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.to(torch.bfloat16)
    decoding = Decoder(model, [[3, 4, 5]], 2, 4)
    alive = torch.zeros(2, dtype=torch.bool)
    decoding.step(torch.tensor([6, 7]), alive)
    decoding.step(torch.tensor([8, 9]), alive)
    assert decoding.logits.dtype == torch.bfloat16
    for row, response in enumerate([[6, 8], [7, 9]]):
        expected = model(torch.tensor([[3, 4, 5, *response]]))[0, -1]
        error = (decoding.logits[row] - expected).abs().max()
        assert error < 0.06 * expected.abs().max()


@torch.no_grad()
def test_a_decoder_made_while_adapters_are_disabled_decodes_the_base_model():
    model = adapted(size=0.3)
    with lora.disabled(model):
        decoding = Decoder(model, [[3, 4, 5]], 1, 4)
    decoding.step(torch.tensor([6]), torch.zeros(1, dtype=torch.bool))
    expected = small_model()(torch.tensor([[3, 4, 5, 6]]))[0, -1]
    torch.testing.assert_close(decoding.logits[0], expected, atol=1e-4, rtol=1e-4)
    assert (decoding.logits[0] - model(torch.tensor([[3, 4, 5, 6]]))[0, -1]).abs().max() > 0.1


@pytest.mark.parametrize("vocabulary", [5, 128, 300, 1024])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_its_tokens_are_those_of_the_textbook_sampler(temperature, vocabulary):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(500, vocabulary, generator=generator)
    logits[:, 1] = -torch.inf
    uniform = torch.rand(500, generator=generator, dtype=torch.float64)
    tokens, logprobs = Decoder.sample_token(logits, temperature, uniform)
    expected_tokens, expected_logprobs = sample_token(logits, temperature, uniform)
    assert torch.equal(tokens, expected_tokens)
    torch.testing.assert_close(logprobs, expected_logprobs)
    assert (tokens != 1).all()
