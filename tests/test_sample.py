"""The sampler: exactly the distribution that training scores, whatever the batch looks like.

Promises about `generate` are tested with the textbook decoder and with the fast one.
Policy: problems become token ids, with and without a chat template, and token ids become text.
"""
import json
from contextlib import nullcontext
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

import data
import lora
import sample
from sample import Rollout, generate, pad_left
from support import fast, hub, tiny
from support.config import Config
from support.fast import accelerate
from tests.conftest import adapted, small_model
from tests.test_grpo import score_naive

PROMPTS = [[3, 4, 5, 6], [7, 8], [9, 10, 11]]
SAMPLERS = {"textbook": sample.Decoder.sample_token, "fast": fast.Decoder.sample_token}
both_samplers = pytest.mark.parametrize("sample_token", SAMPLERS.values(), ids=SAMPLERS.keys())
both_kinds = pytest.mark.parametrize("kind", ["textbook", "fast"])


def seeded(seed=0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_model(kind: str, family: str = "qwen2"):
    model = adapted(family)
    return accelerate(model) if kind == "fast" else model


@both_kinds
def test_the_same_seed_gives_the_same_tokens(kind):
    model = make_model(kind)
    first = generate(model, PROMPTS, 4, 12, 1.0, (1,), seeded(5))
    second = generate(model, PROMPTS, 4, 12, 1.0, (1,), seeded(5))
    other = generate(model, PROMPTS, 4, 12, 1.0, (1,), seeded(6))
    assert torch.equal(first.ids, second.ids)
    assert torch.equal(first.logprobs, second.logprobs)
    assert not torch.equal(first.ids[:, 0], other.ids[:, 0])


@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1]], ids=["three prompts", "one prompt"])
@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3"])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
@both_kinds
def test_logprobs_are_those_of_whole_sequences(kind, temperature, family, prompts):
    model = make_model(kind, family)
    rollout = generate(model, prompts, 5, 15, temperature, (1, 2), seeded())
    mask = rollout.mask()
    with torch.no_grad():
        expected = score_naive(model, prompts, rollout.ids, mask, temperature)
    torch.testing.assert_close(rollout.logprobs, expected, atol=1e-4, rtol=1e-4)
    assert (rollout.logprobs[~mask] == 0).all()
    assert (rollout.ids[~mask] == 0).all()
    assert rollout.ids.shape[1] == rollout.lengths.max()
    assert len(prompts) == 1 or (rollout.lengths < 15).any()


@both_kinds
def test_sampling_without_adapters_is_sampling_from_the_base(kind):
    model = make_model(kind)
    with lora.disabled(model):
        rollout = generate(model, PROMPTS, 2, 6, 1.0, (), seeded())
        found = score_naive(model, PROMPTS, rollout.ids, rollout.mask(), 1.0)
    base = score_naive(small_model(), PROMPTS, rollout.ids, rollout.mask(), 1.0)
    torch.testing.assert_close(rollout.logprobs, base, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found, base, atol=1e-4, rtol=1e-4)


@both_kinds
def test_greedy_equals_argmax_of_whole_sequences(kind):
    model = make_model(kind)
    rollout = generate(model, PROMPTS, 2, 10, 0.0, (), seeded())
    for n in range(6):
        ids = list(PROMPTS[n // 2])
        for t in range(10):
            token = int(model(torch.tensor([ids]))[0, -1].argmax())
            assert int(rollout.ids[n, t]) == token
            ids.append(token)
    assert (rollout.logprobs == 0).all()


@both_kinds
def test_each_row_has_one_random_number_per_step(kind):
    """Row n's token t is where number (t, n) falls among the cumulative probabilities."""
    model = make_model(kind)
    rollout = generate(model, PROMPTS, 3, 8, 0.9, (2, 7), seeded(3))
    uniform = torch.rand(8, 9, dtype=torch.float64, generator=seeded(3))
    assert (rollout.lengths < 8).any()
    for n in range(9):
        ids = list(PROMPTS[n // 3])
        for t in range(int(rollout.lengths[n])):
            logits = model(torch.tensor([ids]))[0, -1].double()
            ends = (logits / 0.9).softmax(0).cumsum(0)
            token = int((ends <= uniform[t, n]).sum())
            assert int(rollout.ids[n, t]) == token
            ids.append(token)


@both_kinds
def test_every_end_id_stops_its_row_and_no_other_row_notices(kind):
    model = make_model(kind)
    forever = generate(model, PROMPTS, 6, 14, 1.0, (), seeded())
    assert not forever.finished.any()
    assert (forever.lengths == 14).all()
    ends = forever.ids.flatten().bincount().topk(3).indices.tolist()
    ending = generate(model, PROMPTS, 6, 14, 1.0, tuple(ends), seeded())
    for n in range(18):
        length = int(ending.lengths[n])
        assert torch.equal(ending.ids[n, :length], forever.ids[n, :length])
        places = [t for t in range(14) if int(forever.ids[n, t]) in ends]
        assert length == (places[0] + 1 if places else 14)
        assert bool(ending.finished[n]) == bool(places)
        assert (ending.ids[n, length:] == 0).all()
    assert ending.finished.any()
    assert not ending.finished.all()
    stopped_by = ending.ids.gather(1, ending.lengths[:, None] - 1)[ending.finished]
    assert set(stopped_by.flatten().tolist()) == set(ends)  # each of the three has stopped a row


@both_kinds
def test_a_response_does_not_depend_on_its_neighbours_prompts(kind):
    model = make_model(kind)
    rollout = generate(model, PROMPTS, 4, 12, 1.0, (2, 7), seeded())
    neighbours = [[20, 21], PROMPTS[1], [22, 23, 24, 25, 26, 27, 28]]
    other = generate(model, neighbours, 4, 12, 1.0, (2, 7), seeded())
    for n in range(4, 8):
        length = int(rollout.lengths[n])
        assert int(other.lengths[n]) == length
        assert torch.equal(other.ids[n, :length], rollout.ids[n, :length])
        torch.testing.assert_close(other.logprobs[n, :length], rollout.logprobs[n, :length],
                                   atol=1e-4, rtol=1e-4)
    assert not torch.equal(other.ids[:4, :2], rollout.ids[:4, :2])


@both_kinds
def test_the_mask_comes_from_lengths_not_from_pad_ids(kind):
    rollout = generate(make_model(kind), PROMPTS, 8, 20, 1.5, (1,), seeded())
    assert torch.equal(rollout.mask().sum(1), rollout.lengths)
    assert ((rollout.ids == 0) & rollout.mask()).any()  # id 0 does occur inside responses
    ended = rollout.ids.gather(1, rollout.lengths[:, None] - 1)[rollout.finished]
    assert len(ended) > 0
    assert (ended == 1).all()  # the end token belongs to the response
    last = rollout.logprobs.gather(1, rollout.lengths[:, None] - 1)
    assert (last < 0).all()  # and so does its log-probability


@both_kinds
def test_a_last_token_that_ends_is_finished_and_one_that_does_not_is_cut_off(kind):
    model = make_model(kind)
    every = generate(model, PROMPTS, 2, 1, 1.0, tuple(range(37)), seeded())
    assert every.finished.all()
    none = generate(model, PROMPTS, 2, 1, 1.0, (), seeded())
    assert not none.finished.any()
    assert torch.equal(none.ids, every.ids)
    assert (none.lengths == 1).all()
    assert (every.lengths == 1).all()


@both_kinds
def test_columns_that_no_response_reaches_are_left_out(kind):
    rollout = generate(make_model(kind), PROMPTS, 2, 12, 1.0, tuple(range(37)), seeded())
    assert rollout.ids.shape == rollout.logprobs.shape == rollout.mask().shape == (6, 1)


@both_samplers
def test_tokens_follow_the_distribution(sample_token):
    logits, n = torch.tensor([2.0, -1.0, 0.5, -torch.inf, 0.0]), 50_000
    uniform = torch.rand(n, generator=seeded(), dtype=torch.float64)
    tokens, logprobs = sample_token(logits.expand(n, 5), 0.8, uniform)
    probabilities = (logits / 0.8).softmax(0)
    frequencies = tokens.bincount(minlength=5) / n
    assert frequencies[3] == 0
    deviations = (probabilities * (1 - probabilities) / n).sqrt()
    assert ((frequencies - probabilities).abs() < 4 * deviations + 1e-9).all()
    torch.testing.assert_close(logprobs, probabilities.log()[tokens])


@both_samplers
def test_the_edges_of_the_unit_interval_give_possible_tokens(sample_token):
    logits = torch.full((2, 1000), -torch.inf)
    logits[:, [4, 500]] = torch.tensor([0.0, 1.0])
    edges = torch.tensor([0.0, 1 - 2 ** -53], dtype=torch.float64)
    tokens, logprobs = sample_token(logits, 1.0, edges)
    assert tokens.tolist() == [4, 500]
    torch.testing.assert_close(logprobs, torch.tensor([0.0, 1.0]).log_softmax(0))


@both_samplers
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rounding_never_gives_a_token_of_probability_zero(sample_token, dtype):
    """MPS has no float64, and in float32 the largest random number is rounded to one."""
    logits = torch.randn(2000, 300, generator=seeded())
    logits[:, 250:] = -torch.inf
    largest = torch.full((2000,), 1 - 2 ** -53, dtype=torch.float64).to(dtype)
    tokens, logprobs = sample_token(logits, 1.0, largest)
    assert (tokens < 250).all()
    assert logprobs.isfinite().all()


@both_samplers
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_logits_that_are_not_finite_give_a_probability_that_is_none(sample_token, temperature, bad):
    """And a token that exists, so that the wish to look at it can wait."""
    logits = torch.randn(2, 200, generator=seeded())
    logits[1] = bad
    uniform = torch.tensor([0.5, 0.999], dtype=torch.float64)
    tokens, logprobs = sample_token(logits, temperature, uniform)
    assert logprobs[0].isfinite() and not logprobs[1].isfinite()
    assert ((0 <= tokens) & (tokens < 200)).all()


@both_kinds
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_named(kind, temperature):
    model = make_model(kind)
    model.layers[1].mlp.up_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match="not finite"):
        generate(model, [[1, 2]], 2, 4, temperature, (0,), seeded())


@both_samplers
def test_a_token_is_sampled_in_fp32_whatever_the_logits_are(sample_token):
    logits = torch.randn(50, 300, generator=seeded()).bfloat16()
    uniform = torch.rand(50, generator=seeded(1), dtype=torch.float64)
    tokens, logprobs = sample_token(logits, 1.3, uniform)
    expected = (logits.double() / 1.3).log_softmax(-1)
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), expected.gather(1, tokens[:, None])[:, 0],
                               atol=1e-5, rtol=1e-5)
    places = (expected.exp().cumsum(-1) <= uniform[:, None]).sum(-1)
    assert torch.equal(tokens, places)


@both_kinds
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("make", [
    lambda: adapted(),
    lambda: adapted("qwen3", targets=("v_proj",)),
    lambda: small_model("llama", attention_bias=True, mlp_bias=True)],
    ids=["adapters", "one adapter", "no adapters"])
def test_weights_survive_sampling_bit_for_bit(make, enabled, kind):
    model = accelerate(make()) if kind == "fast" else make()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with nullcontext() if enabled else lora.disabled(model):
        generate(model, PROMPTS, 2, 5, 1.0, (1,), seeded())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name
        assert parameter.grad is None


def test_a_sampled_rollout_can_be_trained_on():
    """Sampling needs no gradient, but its results may be saved for one."""
    rollout = generate(adapted(), PROMPTS, 2, 5, 1.0, (1,), seeded())
    weight = torch.ones((), requires_grad=True)
    (rollout.logprobs * weight).sum().backward()
    assert weight.grad == pytest.approx(rollout.logprobs.sum().item())


def test_prompts_are_padded_on_the_left():
    ids, start = pad_left([[5], [6, 7]], torch.device("cpu"))
    assert ids.tolist() == [[0, 5], [6, 7]]
    assert start.tolist() == [1, 0]
    ids, start = pad_left([[5, 6], [6, 7]], torch.device("cpu"))
    assert ids.tolist() == [[5, 6], [6, 7]]
    assert start is None


@pytest.mark.parametrize("change, word", [
    ({"prompts": []}, "no prompt"),
    ({"prompts": [[1], []]}, "empty"),
    ({"prompts": [[1] * 60]}, "context of 64"),
    ({"max_new_tokens": 61}, "61 new ones"),
    ({"prompts": [[37]]}, "token 37")])
@both_kinds
def test_impossible_requests_are_refused(kind, change, word):
    request = dict(prompts=PROMPTS, samples=2, max_new_tokens=5, temperature=1.0, eos_ids=(1,),
                   generator=seeded())
    with pytest.raises(ValueError, match=word):
        generate(make_model(kind), **request | change)


@both_kinds
def test_a_prompt_and_its_response_may_fill_the_context(kind):
    rollout = generate(make_model(kind), [[1] * 59], 2, 5, 1.0, (), seeded())
    assert rollout.lengths.tolist() == [5, 5]  # the context has 64 tokens


def test_seeds_follow_from_the_whole_key():
    keys = [(0, "rollout", 1), (0, "rollout", 2), (0, "views", 1), (1, "rollout", 1)]
    numbers = [torch.rand(3, generator=sample.seeded(*key)).tolist() for key in keys]
    assert len({tuple(row) for row in numbers}) == 4
    assert numbers[0] == torch.rand(3, generator=sample.seeded(0, "rollout", 1)).tolist()


# Policy

CHAT = ("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}")
CHATML = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
QUESTION = data.Question("What is 2+3?", Fraction(5))
COUNTDOWN = data.Countdown((3, 8, 5), 19)


def with_prompt(policy, **changes):
    """The same policy, with other flags about the prompt."""
    return replace(policy, config=replace(policy.config, **changes))


def test_the_judge_sees_what_the_model_said(policy):
    ids = policy.tokenizer("8*3=24;24-5=19").input_ids
    said = [ids + [1], ids[:4] + [0] + ids[4:] + [1], ids]
    lengths = [len(row) for row in said]
    padded = torch.tensor([row + [0] * (20 - len(row)) for row in said])
    finished = torch.tensor([True, True, False])
    rollout = Rollout(padded, torch.tensor(lengths), torch.zeros(3, 20), finished)
    assert policy.decode(rollout) == ["8*3=24;24-5=19", "8*3=<pad>24;24-5=19", "8*3=24;24-5=19"]


def test_prompts_follow_the_chat_template(policy):
    plain = [policy.tokenizer("use 3,8,5 to make 19:").input_ids]
    assert not policy.is_chat
    assert policy.encode([COUNTDOWN]) == plain
    policy.tokenizer.chat_template = CHAT
    asked = with_prompt(policy, system="Be brief.", instruction="Only a number.")
    messages = [{"role": "system", "content": "Be brief."},
                {"role": "user", "content": "What is 2+3?\nOnly a number."}]
    assert asked.is_chat
    assert asked.chat_messages(QUESTION) == messages
    expected = policy.tokenizer.apply_chat_template(messages, add_generation_prompt=True,
                                                    return_dict=False)
    assert asked.encode([QUESTION]) == [expected]
    content = f"What is 2+3?\n{data.Question.instruction}"
    assert policy.chat_messages(QUESTION) == [{"role": "user", "content": content}]
    assert with_prompt(policy, prompt="plain").encode([COUNTDOWN]) == plain


def test_a_problem_without_question_and_instruction_is_its_prompt(policy):
    class Riddle:
        prompt = "3+5="
    policy.tokenizer.chat_template = CHAT
    assert policy.chat_messages(Riddle()) == [{"role": "user", "content": "3+5="}]
    assert with_prompt(policy, prompt="plain").plain_text(Riddle()) == "3+5="


def test_an_instruction_replaces_the_tasks_own_words_in_a_plain_prompt(policy):
    assert policy.plain_text(QUESTION) == QUESTION.prompt
    asked = with_prompt(policy, prompt="plain", instruction="Only a number.")
    assert asked.plain_text(QUESTION) == "Only a number.\nQuestion: What is 2+3?\nAnswer:"
    assert data.Question.instruction in QUESTION.prompt
    # A prompt that does not hold its task's instruction gets this one as its first line.
    assert asked.plain_text(COUNTDOWN) == "Only a number.\nuse 3,8,5 to make 19:"
    texts = ["Only a number.\nQuestion: What is 2+3?\nAnswer:",
             "Only a number.\nuse 3,8,5 to make 19:"]
    assert asked.encode([QUESTION, COUNTDOWN]) == policy.tokenizer(texts).input_ids


def test_a_chat_template_that_refuses_is_one_clear_error(policy):
    refusing = "{{ raise_exception('no system role') }}"
    policy.tokenizer.chat_template = refusing
    with pytest.raises(ValueError, match="no system role.*--prompt plain.*--system"):
        policy.encode([QUESTION])


def test_end_tokens_come_from_every_file_and_sampling_settings_from_none(tmp_path, cache):
    tokenizer = AutoTokenizer.from_pretrained(tiny.base_folder("countdown", cache))
    config, generation = tmp_path / "config.json", tmp_path / "generation_config.json"
    config.write_text(json.dumps({"eos_token_id": 3}))
    assert hub.find_eos_ids(tmp_path, tokenizer, 40) == (1, 3)
    settings = {"eos_token_id": [5, 3], "top_k": 1, "temperature": 9}
    generation.write_text(json.dumps(settings))
    assert hub.find_eos_ids(tmp_path, tokenizer, 40) == (1, 3, 5)
    config.write_text(json.dumps({"eos_token_id": [True, -1, 40, "2", 2.0, None]}))
    assert hub.find_eos_ids(tmp_path, tokenizer, 40) == (1, 3, 5)
    tokenizer.eos_token = None
    config.write_text("{}")
    generation.write_text("{}")
    with pytest.raises(ValueError, match="no end token"):
        hub.find_eos_ids(tmp_path, tokenizer, 40)


def test_a_response_may_also_end_with_a_token_that_holds_a_text(cache):
    folder = tiny.base_folder("countdown", cache)
    policy = sample.open_policy(folder, Config(stop=";", device="cpu"))
    end, = policy.tokenizer(";").input_ids
    assert set(policy.eos_ids) == {end, *sample.open_policy(folder, Config(device="cpu")).eos_ids}
    rollout = generate(policy.model, policy.encode([COUNTDOWN]), 16, 32, 1.0, policy.eos_ids,
                       torch.Generator())
    assert rollout.finished.all() and (rollout.ids == end).any()
    assert not any(";" in text for text in policy.decode(rollout))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["one\ntwo"])
    holding = tokenizer.convert_tokens_to_ids("one\ntwo")
    assert holding in hub.find_eos_ids(folder, tokenizer, len(tokenizer), "\\n")
    with pytest.raises(ValueError, match="--stop nowhere: no token holds this text"):
        hub.find_eos_ids(folder, tokenizer, len(tokenizer), "nowhere")


def save_byte_tokenizer(folder) -> int:
    """Every byte is a token, and so are the two marks of a chat -> the number of tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=CHATML,
        additional_special_tokens=["<|im_start|>"])
    wrapped.save_pretrained(folder)
    return len(wrapped)


@both_kinds
@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3"])
def test_chat_prompts_go_through_each_family_as_in_transformers(family, kind, tmp_path):
    size = save_byte_tokenizer(tmp_path)
    small_model(family, vocab_size=size, max_position_embeddings=512,
                eos_token_id=None).save_pretrained(tmp_path)
    system = "Be brief: \u00e9\u4e2d."
    policy = sample.open_policy(tmp_path, Config(device="cpu", dtype="float32", system=system))
    if kind == "fast":
        accelerate(policy.model)
    problems = [QUESTION, data.Question("A <|im_end|> \U0001f600 trick?\n", Fraction(1))]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ours = policy.encode(problems)
    for problem, ids in zip(problems, ours):
        chat = [{"role": "system", "content": system},
                {"role": "user", "content": f"{problem.question}\n{problem.instruction}"}]
        options = {"add_generation_prompt": True}
        assert ids == tokenizer.apply_chat_template(chat, **options)["input_ids"]
        text = tokenizer.apply_chat_template(chat, tokenize=False, **options)
        assert tokenizer.decode(ids) == text
        logits = theirs(torch.tensor([ids])).logits
        torch.testing.assert_close(policy.model(torch.tensor([ids])), logits, atol=1e-4, rtol=1e-4)
    greedy = generate(policy.model, ours, 1, 12, 0.0, policy.eos_ids, seeded())
    for row, ids in enumerate(ours):
        expected = theirs.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False,
                                   pad_token_id=0)[0, len(ids):]
        assert greedy.ids[row, :greedy.lengths[row]].tolist() == expected.tolist()


def test_open_policy_reads_a_folder(cache):
    folder = tiny.base_folder("countdown", cache)
    policy = sample.open_policy(folder, Config(device="cpu"))
    assert policy.eos_ids == (1,)
    assert policy.base == str(folder.absolute())
    assert policy.model.head.dtype == torch.float32
    assert not any(parameter.requires_grad for parameter in policy.model.parameters())
    half = sample.open_policy(folder, Config(device="cpu", dtype="bfloat16", model="some/model"))
    assert half.base == "some/model"
    assert half.model.head.dtype == torch.bfloat16


def test_a_chat_without_a_template_is_refused(cache):
    folder = tiny.base_folder("countdown", cache)
    with pytest.raises(ValueError, match="no chat template"):
        sample.open_policy(folder, Config(device="cpu", prompt="chat"))
    with pytest.raises(ValueError, match="--system needs a chat"):
        sample.open_policy(folder, Config(device="cpu", system="Be brief."))


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    small_model().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="tokenizer"):
        sample.open_policy(tmp_path, Config(device="cpu"))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="its tokenizer cannot be read"):
        hub.open_tokenizer(tmp_path)
