"""The benchmark's other side: a peer in a process of its own answers what it is asked, and says why when it cannot."""
import pytest

import peers

SHAPE = {**peers.LARGE, "vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
         "num_key_value_heads": 1}


def test_a_peer_counts_its_tokens(tmp_path):
    prompts = peers.make_prompts(SHAPE, 2, 5)
    with peers.Peer("generate", peers.write_model(SHAPE, tmp_path)) as peer:
        seconds, tokens = peer.ask(prompts, 6, [])
        assert seconds > 0 and tokens == 2 * peers.SAMPLES * 6
        _, tokens = peer.ask(prompts, 6, list(range(50)))               # every token is an end
        assert tokens == 2 * peers.SAMPLES
    assert peer.process.returncode is not None                          # it does not outlive its use


def test_a_peer_that_fails_says_why(tmp_path):
    with peers.Peer("generate", tmp_path / "nothing") as peer:
        with pytest.raises(ValueError, match=r"a peer failed \(generate .*nothing\): .*Error.*exit code 1"):
            peer.ask([[1]], 1, [])
