import importlib.util
import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from basics.errors import UserError
from lab.instruct.instructions import Entry, chat_template
from lab.publish.export import Extras, write_export
from lab.publish.gguf_files import GGUF_FILES
from tests.support.lab_cli import error_line, publish, succeeded
from tests.support.models import random_model
from tests.support.tokenizers import write_tokenizer
from tokens.tokenizer import BYTE_LETTERS, name_of
from trainer.models import LoadedModel

gguf = pytest.importorskip("gguf")

SHAPE = {"context_length": 64, "emb_dim": 64, "n_heads": 4}
needs_runtime = pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None,
                                   reason="needs a runtime of GGUF: the package xllamacpp")
TEXTS = ["the cat", "naïve 😀", "1234 it's", "\n\n def f(x):", "hat  hat\t", "它是 mat!"]


def target_of(model, tmp_path, /, *, tokenizer="bytes", **changes):
    """Return a model with a tokenizer: `gpt2`, `bytes`, or `own` for one in a file."""
    if tokenizer != "own":
        return LoadedModel("mine", model, tokenizer)
    path = write_tokenizer(tmp_path / "tokenizer", **changes) / "tokenizer.json"
    return LoadedModel("mine", model, name_of(path.read_bytes()), tokenizer_path=path)


def exported(target, tmp_path, *, chat_template=None):
    return write_export(target, tmp_path / "export", "tags: ddp-train", Extras(
        chat_template=chat_template, with_gguf=True))


def fields_of(path):
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


def tensors_of(path):
    return {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type)
            for tensor in gguf.GGUFReader(path).tensors}


def largest_error(weight, kind):
    """Return how far each number may be from what a type of weights can hold."""
    if kind == "F32":
        return np.zeros_like(weight)
    if kind == "F16":  # 11 bits; the smallest numbers are multiples of 2 ** -24
        return np.abs(weight) * 2.0**-11 + 2.0**-25
    blocks = np.abs(weight.reshape(-1, 32)).max(axis=1, keepdims=True) / 127
    # Half a unit, and the unit itself is a 16-bit float.
    return np.broadcast_to(blocks * (0.5 + 127 * 2.0**-11) * 1.001,
                           (blocks.size, 32)).reshape(weight.shape)


@pytest.mark.parametrize(("tied", "bias", "emb_dim"), [
    (True, False, 64), (False, True, 24)])  # 24 is no multiple of a block of 32
def test_the_tensors_read_back_are_the_weights(tmp_path, tied, bias, emb_dim):
    model = random_model(**SHAPE | {"emb_dim": emb_dim}, vocab_size=264, tie_weights=tied,
                         qkv_bias=bias)
    output = exported(target_of(model, tmp_path), tmp_path)
    ours = {name: weight.numpy() for name, weight in model.state_dict().items()}
    wanted = {"token_embd.weight": "token_embedding.weight",
              "position_embd.weight": "position_embedding.weight",
              **{f"output_norm.{part}": f"final_norm.{part}" for part in ("weight", "bias")}}
    for layer in range(2):
        wanted |= {f"blk.{layer}.{theirs}.{part}": f"blocks.{layer}.{mine}.{part}"
                   for theirs, mine in (("attn_norm", "attention_norm"), ("ffn_up", "mlp.up"),
                                        ("attn_qkv", "attention.qkv"), ("ffn_norm", "mlp_norm"),
                                        ("attn_output", "attention.output"),
                                        ("ffn_down", "mlp.output"))
                   for part in ("weight", "bias")}
    wanted |= {} if tied else {"output.weight": "head.weight"}
    for name, kind in GGUF_FILES.items():
        found = tensors_of(output / name)
        assert found.keys() == wanted.keys()
        for tensor, mine in wanted.items():
            weight = ours.get(mine, np.zeros(3 * emb_dim, np.float32))  # a bias that it lacks
            stored = kind if weight.ndim == 2 and tensor != "position_embd.weight" else "F32"
            if weight.shape[-1] % 32 and stored == "Q8_0":
                stored = "F16"
            assert found[tensor].shape == weight.shape
            off = np.abs(found[tensor] - weight) - largest_error(weight, stored)
            assert off.max() <= 0, (name, tensor)


def test_the_facts_are_those_of_the_model(tmp_path):
    target = target_of(random_model(**SHAPE, vocab_size=264), tmp_path)
    fields = fields_of(exported(target, tmp_path, chat_template="{{ x }}") / "model-Q8_0.gguf")
    wanted = {"general.architecture": "gpt2", "gpt2.context_length": 64, "gpt2.block_count": 2,
              "gpt2.embedding_length": 64, "gpt2.feed_forward_length": 256,
              "gpt2.attention.head_count": 4, "tokenizer.ggml.eos_token_id": 256,
              "tokenizer.ggml.bos_token_id": 256, "tokenizer.ggml.add_bos_token": False,
              "tokenizer.chat_template": "{{ x }}", "tokenizer.ggml.model": "gpt2"}
    assert {name: fields[name] for name in wanted} == wanted
    assert fields["gpt2.attention.layer_norm_epsilon"] == pytest.approx(1e-5)


@pytest.mark.parametrize(("tokenizer", "vocab_size"), [
    ("bytes", 264), ("own", 310), pytest.param("gpt2", 50304, marks=pytest.mark.thorough)])
def test_each_id_has_its_token(tmp_path, tokenizer, vocab_size):
    target = target_of(random_model(**SHAPE, vocab_size=vocab_size), tmp_path, tokenizer=tokenizer)
    fields = fields_of(exported(target, tmp_path) / "model-F16.gguf")
    ours, tokens = target.load_tokenizer(), fields["tokenizer.ggml.tokens"]
    kinds = fields["tokenizer.ggml.token_type"]
    bytes_of = {letter: byte for byte, letter in enumerate(BYTE_LETTERS)}
    assert len(tokens) == len(kinds) == len(set(tokens)) == vocab_size
    for number in range(ours.n_vocab):
        if number != ours.eot_token:
            found = bytes(bytes_of[letter] for letter in tokens[number])
            assert found == ours.decode_single_token_bytes(number) and kinds[number] == 1
    assert tokens[ours.eot_token] == "<|endoftext|>" and kinds[ours.eot_token] == 3
    assert set(kinds[ours.n_vocab:]) == {5} and fields["tokenizer.ggml.merges"]


@torch.no_grad()
def test_transformers_loads_a_gguf_file(tmp_path):
    model = random_model(**SHAPE | {"context_length": 1024}, vocab_size=264, tie_weights=False)
    output = exported(target_of(model, tmp_path), tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(output, gguf_file="model-F16.gguf").eval()
    tokens = torch.arange(40).view(2, 20)
    difference = model(tokens).log_softmax(-1) - theirs(tokens).logits.log_softmax(-1)
    assert difference.abs().max() < 0.01


@torch.no_grad()
@needs_runtime
@pytest.mark.parametrize(("tokenizer", "vocab_size", "tied"), [
    ("bytes", 257, True), ("own", 300, False), ("gpt2", 50257, True)])
def test_llama_cpp_computes_the_same(tmp_path, tokenizer, vocab_size, tied):
    model = random_model(**SHAPE, vocab_size=vocab_size, tie_weights=tied)
    target = target_of(model, tmp_path, tokenizer=tokenizer)
    output, ours = exported(target, tmp_path), target.load_tokenizer()
    for name, tolerance in (("model-F16.gguf", 0.005), ("model-Q8_0.gguf", 0.05)):
        server = llama_cpp(output / name)
        for text in TEXTS:
            logits = model(torch.tensor([ours.encode_ordinary(text)]))[0, -1].log_softmax(-1)
            found = server.handle_completions({
                "prompt": text, "max_tokens": 1, "logprobs": 50, "cache_prompt": False,
                "logit_bias": {ours.encode_ordinary("A")[0]: 1000}})  # after the probabilities
            assert found["usage"]["prompt_tokens"] == len(ours.encode_ordinary(text))
            [shown] = found["choices"][0]["logprobs"]["content"]
            assert shown["token"] == "A" and len(shown["top_logprobs"]) == 50
            for one in shown["top_logprobs"]:
                assert one["logprob"] == pytest.approx(logits[one["id"]].item(), abs=tolerance)


@needs_runtime
def test_llama_cpp_makes_the_prompt_of_the_tuning(tmp_path):
    model = random_model(**SHAPE | {"context_length": 320}, vocab_size=257)
    output = exported(target_of(model, tmp_path), tmp_path, chat_template=chat_template())
    entry = Entry(instruction="Add  them.\n", input="1, 2", output="")
    content = f"{entry.instruction}\n\n### Input:\n{entry.input}"
    wanted = llama_cpp(output / "model-F16.gguf").handle_completions(
        {"prompt": entry.prompt(), "max_tokens": 9, "temperature": 0})
    found = llama_cpp(output / "model-F16.gguf").handle_chat_completions(
        {"messages": [{"role": "user", "content": content}], "max_tokens": 9, "temperature": 0})
    assert found["usage"]["prompt_tokens"] == len(entry.prompt())
    assert found["choices"][0]["message"]["content"] == wanted["choices"][0]["text"]


def llama_cpp(path):
    """Start a server of llama.cpp in this process."""
    import xllamacpp

    options = xllamacpp.CommonParams()
    options.model.path, options.n_ctx, options.n_parallel = str(path), 0, 1
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = 1
    options.warmup, options.verbosity = False, -1
    return xllamacpp.Server(options)


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
              "use_regex": True}


@pytest.mark.parametrize(("changes", "message"), [
    ({"pre_tokenizer": BYTE_LEVEL}, "does not split text as GPT-2's"),
    ({"normalizer": {"type": "NFC"}}, "does not split text as GPT-2's"),
    ({"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}, "is a WordLevel"),
    ({"ignore_merges": True}, "has ignore_merges"),
    ({"byte_fallback": True}, "has byte_fallback"),
    ({"continuing_subword_prefix": "##", "merges": []}, "has continuing_subword_prefix"),
    ({"end_of_word_suffix": "</w>", "merges": []}, "has end_of_word_suffix"),
    ({"vocab": {"a": 0, "b": 1}, "merges": []}, "has no entry for 254 of the 256 bytes"),
])
def test_a_tokenizer_that_gguf_cannot_hold_is_refused(tmp_path, changes, message):
    if not changes.keys() & {"pre_tokenizer", "normalizer", "model"}:
        parts = json.loads((write_tokenizer(tmp_path) / "tokenizer.json").read_text())
        changes = {"model": parts["model"] | changes}
    target = target_of(random_model(vocab_size=300), tmp_path, tokenizer="own", **changes)
    with pytest.raises(UserError, match=message) as caught:
        exported(target, tmp_path)
    assert "leave out --gguf" in caught.value.line() and not (tmp_path / "export").exists()


def test_models_that_gguf_cannot_hold_are_refused(tmp_path):
    model = random_model(vocab_size=257)
    with torch.no_grad():
        model.blocks[0].mlp.up.weight[0, 0] = 1e5
    for refused, message in ((model, "up to 100000, too large for 16-bit"),
                             (random_model(vocab_size=200), "has 257 entries, the model 200")):
        with pytest.raises(UserError, match=message):
            exported(target_of(refused, tmp_path), tmp_path)


def test_publish_writes_gguf_files_under_the_name_of_the_card(trained, tmp_path, monkeypatch):
    output, again = tmp_path / "export", tmp_path / "again"
    result = succeeded(publish(trained, "tiny", "--output", str(output), "--gguf"))
    succeeded(publish(trained, str(output), "--output", str(again), "--gguf"))
    for name in GGUF_FILES:
        assert f"bytes  {name}" in result.stdout
        assert f"`{name}`" in (output / "README.md").read_text()
        for place in (output, again):
            assert fields_of(place / name)["general.name"] == "tiny"
    succeeded(publish(trained, "tiny", "--output", str(output)))  # replaces it
    assert not list(output.glob("*.gguf")) and "GGUF" not in (output / "README.md").read_text()

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = publish(trained, "tiny", "--output", str(tmp_path / "nix"), "--gguf")
    assert "needs the package gguf: uv run --extra gguf" in error_line(result)
    assert not (tmp_path / "nix").exists()
