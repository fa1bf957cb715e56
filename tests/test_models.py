"""Models by name: other formats of weights, hostile ones, and `init_from`."""

import json
import math
import re
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from basics.errors import UserError
from gpt import GPTModel
from run_config import ModelConfig, load_run
from tests.support.models import add_dataset_with_tokenizer, export, original_weights, random_model
from tests.support.optional import package
from tests.support.runs import run_in_process, summary_of
from tests.support.workplace import TINY_MODEL, succeeded
from trainer.models import initial_model, load_model

transformers = package("transformers")


def load(directory):
    return load_model(str(directory), runs_dir=directory).model


def assert_refused(directory, message):
    with pytest.raises(UserError, match=message) as caught:
        load(directory)
    assert "\n" not in caught.value.line()


def tokens_for(model):
    shape = (3, model.config.context_length)
    return torch.randint(model.config.vocab_size, shape, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
@pytest.mark.parametrize(
    "changes",
    [
        {"tie_weights": False, "qkv_bias": False, "drop_rate": 0.0},
        {"tie_weights": True, "qkv_bias": True, "vocab_size": 257, "init": "torch"},
    ],
    ids=str,
)
def test_transformers_computes_the_same_logits_and_its_files_load_here(changes, tmp_path):
    model = random_model(**changes)
    theirs, loading = transformers.GPT2LMHeadModel.from_pretrained(
        export(model, tmp_path / "ours"), output_loading_info=True
    )
    assert not any(loading.values())  # no missing and no unexpected weights
    tokens = tokens_for(model)
    logits = theirs.eval()(tokens).logits
    assert (model(tokens) - logits).abs().max() < 1e-4 and logits.std() > 0.1
    theirs.save_pretrained(tmp_path / "theirs")
    back = load(tmp_path / "theirs")
    assert back.config == model.config.model_copy(update={"init": "gpt2"})
    assert torch.equal(back(tokens), model(tokens))


@torch.no_grad()
def test_gpt2_as_published_loads(tmp_path):
    """No prefix, masks stored with the weights, no separate head; OpenAI's shape, but narrower."""
    torch.manual_seed(0)
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=24, n_positions=16)).eval()
    for name, parameter in theirs.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
    weights = {
        name.removeprefix("transformer."): value.clone()
        for name, value in theirs.state_dict().items()
        if name != "lm_head.weight"
    }
    weights |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 16, 16) for layer in range(12)}
    weights["h.1.attn.masked_bias"] = torch.tensor(-math.inf)
    save_file(weights, tmp_path / "model.safetensors")
    theirs.config.save_pretrained(tmp_path)
    target = load_model(str(tmp_path), runs_dir=tmp_path)
    tokens = torch.randint(50257, (2, 16))
    assert (target.model(tokens) - theirs(tokens).logits).abs().max() < 1e-4
    assert target.tokenizer_name == "gpt2" and target.model.config.qkv_bias
    assert target.model.config.tie_weights and not target.model.training


@torch.no_grad()
def test_sharded_files_and_half_precision_load(tmp_path):
    model = random_model(tie_weights=True, qkv_bias=True)
    whole = load_file(export(model, tmp_path) / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    weight_map = {
        name: f"model-0000{1 + number % 2}-of-00002.safetensors"
        for number, name in enumerate(whole)
    }
    for file in set(weight_map.values()):
        save_file(
            {name: value.half() for name, value in whole.items() if weight_map[name] == file},
            tmp_path / file,
        )
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    tokens, loaded = tokens_for(model), load(tmp_path)
    assert (loaded(tokens) - model(tokens)).abs().max() < 0.01
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}


@torch.no_grad()
@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.", "module._orig_mod."])
def test_weights_saved_from_inside_of_a_wrapper_load(wrapper, tmp_path):
    """Of DistributedDataParallel and torch.compile, whose names begin the names of the weights."""
    model = random_model(qkv_bias=True)
    path = export(model, tmp_path) / "model.safetensors"
    save_file({wrapper + name: value for name, value in load_file(path).items()}, path)
    assert torch.equal(load(tmp_path)(tokens_for(model)), model(tokens_for(model)))


@torch.no_grad()
@pytest.mark.parametrize(
    ("tie_weights", "left_out", "qkv_bias", "published"),
    [
        (False, None, False, False),
        (False, None, True, True),
        (True, "tok_emb.weight", True, False),
        (True, "out_head.weight", False, True),
    ],
)
def test_checkpoints_of_the_original_system_load(
    tie_weights, left_out, qkv_bias, published, tmp_path
):
    model = random_model(qkv_bias=qkv_bias, tie_weights=tie_weights)
    weights = original_weights(model)
    weights.pop(left_out, None)
    config = model.config.model_dump(exclude={"init"})
    directory = tmp_path / "checkpoints" / "20260101Z000000-iteration-7"
    directory.mkdir(parents=True)
    if published:  # on the hub, inside a wrapper
        weights = {f"model.{name}": value for name, value in weights.items()}
        (directory / "config.json").write_text(json.dumps({"model_type": "other", "cfg": config}))
    else:
        (tmp_path / "model.json").write_text(json.dumps(config))
    for wrapper in ("", "module.", "_orig_mod.module."):  # of DDP, of torch.compile
        save_file(
            {wrapper + name: value for name, value in weights.items()},
            directory / "model.safetensors",
        )
        assert torch.equal(load(directory)(tokens_for(model)), model(tokens_for(model)))
    for name in [name for name in weights if name.endswith(("tok_emb.weight", "out_head.weight"))]:
        del weights[name]
    save_file(weights, directory / "model.safetensors")
    with pytest.raises(UserError, match="has no weights (tok_emb|out_head).weight"):
        load(directory)


def test_a_run_of_the_original_system_is_recognised_and_left_as_it_is(workplace):
    """And `init_from`, which the message names, trains on from its weights."""
    workplace.add_dataset()
    run_dir = workplace.add_run("theirs")
    model = GPTModel(load_run(workplace.runs_dir, "theirs").model)
    name = "20260101Z000000-iteration-7"
    checkpoint = run_dir / "checkpoints" / name
    checkpoint.mkdir(parents=True)
    save_file(original_weights(model), checkpoint / "model.safetensors")
    for file in ("optimizer.pt", "scaler.pt"):
        (checkpoint / file).write_bytes(b"a pickle")
    (checkpoint / "meta.json").write_text('{"iteration": 7}')
    for link in ("latest", "best"):
        (run_dir / "checkpoints" / link).symlink_to(name)
    before = workplace.files()
    for arguments in ((), ("latest",)):
        result = workplace.torchrun(1, "theirs", *arguments)
        line = next(line for line in result.stderr.splitlines() if line.startswith("Error: "))
        assert "has checkpoints of the original system" in line
        assert f'"init_from": "{checkpoint}"'[-40:] in line and workplace.files() == before
    ours = workplace.add_run("ours", train=STANDING_STILL | {"init_from": str(checkpoint)})
    succeeded(workplace.torchrun(1, "ours"))
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weights_of(ours)[name], weight, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type should be 'gpt2', found \"llama\""),
        ({"activation_function": "relu"}, "activation_function should be 'gelu_new'"),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon should be greater"),
        (
            {"scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse_layer_idx should be False",
        ),
        ({"n_inner": 7}, "n_inner is 7; wanted 4 x n_embd = 96"),
        ({"n_layer": 3}, "has no weights h.2"),
        ({"n_layer": 1}, "it has more layers than n_layer, 1"),
        ({"n_layer": 10**9}, "n_layer should be less than or equal to 1024"),
        ({"n_layer": "2"}, "n_layer should be a valid integer, found"),
        ({"n_head": 5}, "emb_dim 24 is not divisible by n_heads 5"),
        (
            {"vocab_size": 60},
            r"token_embedding.weight holds torch.float32 of shape \(61, 24\); its",
        ),
        ({"tie_word_embeddings": False}, "has no weights lm_head.weight"),
    ],
)
def test_another_architecture_is_refused_in_one_line(changes, message, tmp_path):
    export(random_model(tie_weights=True), tmp_path, **changes)
    assert_refused(tmp_path, message)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("model.safetensors", None, "no such file; a directory of weights needs it"),
        ("model.safetensors", b"junk", "not a whole safetensors file"),
        ("config.json", None, "config.json: no such file"),
        ("config.json", b"[1]", "wanted a JSON object"),
        ("config.json", b'{"model_type": NaN}', "not valid JSON"),
        (
            "model.safetensors.index.json",
            b'{"weight_map": {"a": "../../x.safetensors"}}',
            "lists '../../x.safetensors'",
        ),
        ("model.safetensors.index.json", b'{"weight_map": {}}', "has no weights wte.weight"),
        ("model.safetensors.index.json", b'{"weight_map": [1]}', "lists '', which is not a weight"),
    ],
)
def test_a_damaged_directory_is_refused_in_one_line(file, content, message, tmp_path):
    export(random_model(), tmp_path)
    if content is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_bytes(content)
    assert_refused(tmp_path, message)


@pytest.mark.parametrize("ends", [50256, [50256], [50256, 3], [3, 50256], [], None])
def test_the_end_of_text_may_be_a_list_of_ids(ends, tmp_path):
    """As transformers writes it where generation may end at several."""
    path = export(random_model(vocab_size=50304), tmp_path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": ends}))
    loaded = load_model(str(tmp_path), runs_dir=tmp_path)
    assert loaded.tokenizer_name == ("gpt2" if ends else None)


def with_number(dtype, number):
    return lambda weight: weight.to(dtype).index_fill(0, torch.tensor(3), number)


HOSTILE_WEIGHTS: dict[str, tuple[str, Callable[[Tensor], Tensor], str]] = {
    "infinity": ("wte.weight", with_number(torch.float16, math.inf), "not finite in float32"),
    "finite only in float64": (
        "wte.weight",
        with_number(torch.float64, 1e300),
        "token_embedding.weight holds a number that is not finite",
    ),
    "infinite products": (
        "h.1.attn.c_proj.weight",
        lambda weight: weight * 1e30,
        "its logits are not finite",
    ),
    "complex": ("h.0.attn.c_attn.bias", lambda bias: bias + 1j, "torch.complex64"),
    "integers": ("wte.weight", with_number(torch.int64, 1), "holds torch.int64 of"),
    "three dimensions": ("h.0.mlp.c_fc.weight", lambda weight: weight[None], "not a GPT-2: t"),
    "no dimension": ("ln_f.bias", lambda bias: bias[0], "of shape"),
}


@pytest.mark.parametrize("case", HOSTILE_WEIGHTS)
def test_hostile_weights_are_refused_in_one_line(case, tmp_path):
    name, change, message = HOSTILE_WEIGHTS[case]
    path = export(random_model(qkv_bias=True), tmp_path) / "model.safetensors"
    weights = load_file(path)
    weights[f"transformer.{name}"] = change(weights[f"transformer.{name}"]).contiguous()
    save_file(weights, path)
    assert_refused(tmp_path, message)


STANDING_STILL = {
    "learning_rate": 1e-12,
    "min_train_tokens": 64,
    "validation_interval": 1,
    "gradient_accumulation_steps": 1,
}


def weights_of(run_dir):
    return load_file(run_dir / "checkpoints/latest/model.safetensors")


def test_a_run_starts_from_another_runs_weights(workplace):
    workplace.add_dataset()
    first = workplace.add_run("first", train={"min_train_tokens": 256})
    succeeded(workplace.torchrun(1, "first"))
    second = workplace.add_run("second", train=STANDING_STILL | {"init_from": "first"})
    succeeded(workplace.torchrun(2, "second"))
    torch.testing.assert_close(weights_of(second), weights_of(first), rtol=0, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("tie_weights", [False, True])
@pytest.mark.parametrize("qkv_bias", [False, True])
def test_a_gpt2_whose_attention_biases_are_zero_starts_a_run_with_or_without_them(
    workplace, qkv_bias, tie_weights
):
    model = random_model(qkv_bias=False, tie_weights=tie_weights)
    source = export(model, workplace.root / "published")
    run_dir = workplace.add_run(train={"init_from": str(source)})
    (run_dir / "model.json").write_text(
        json.dumps(model.config.model_copy(update={"qkv_bias": qkv_bias}).model_dump())
    )
    run = load_run(workplace.runs_dir, "tiny")
    initial = initial_model(run, workplace.runs_dir).model
    GPTModel(run.model).load_state_dict(initial.state_dict())  # as a launch does
    tokens = tokens_for(model)
    assert torch.equal(initial(tokens), model(tokens))
    if not qkv_bias:  # biases that are not zero do not fit
        export(random_model(qkv_bias=True, tie_weights=tie_weights), source)
        with pytest.raises(UserError, match="qkv_bias True, model.json has False"):
            initial_model(run, workplace.runs_dir)


def test_a_resumed_run_does_not_start_again(workplace):
    workplace.add_dataset()
    torch.manual_seed(0)
    source = export(GPTModel(ModelConfig(**TINY_MODEL)), workplace.root / "published")
    run_dir = workplace.add_run(train={"init_from": str(source), "min_train_tokens": 512})
    succeeded(workplace.torchrun(1, "tiny", "--max-steps", "3"))
    assert summary_of(run_dir)["global_step"] == 2
    (source / "model.safetensors").unlink()  # it is needed only once
    assert "resuming from" in succeeded(workplace.torchrun(1, "tiny")).stdout
    assert summary_of(run_dir)["status"] == "finished"


@pytest.mark.parametrize(
    ("init_from", "message"),
    [
        ("nowhere", "init_from: run 'nowhere'|init_from: .*nowhere: no such run"),
        ("tiny", "init_from: is this run itself"),
        ("wider", "init_from: .*no checkpoint yet"),
        (
            "published",
            r"init_from: .*published has emb_dim 24, model.json has 16; they must be equal",
        ),
        (
            "other tokens",
            "published was trained with the tokenizer.*; prepare the dataset with its",
        ),
    ],
)
def test_weights_that_do_not_fit_are_one_line_before_anything_is_written(
    workplace, init_from, message
):
    workplace.add_run("wider", model={"emb_dim": 32})
    if init_from == "other tokens":
        init_from = str(add_dataset_with_tokenizer(workplace)[0])
    else:
        workplace.add_dataset()
    if init_from == "published":
        init_from = str(
            export(
                GPTModel(ModelConfig(**TINY_MODEL | {"emb_dim": 24, "n_heads": 3})),
                workplace.root / "published",
            )
        )
    run_dir = workplace.add_run(train={"init_from": init_from})
    before = sorted(run_dir.iterdir())
    result = run_in_process(*workplace.arguments("tiny"), under_torchrun=True)
    assert result.returncode == 2
    (line,) = (line for line in result.stderr.splitlines() if line.startswith("Error: "))
    assert re.search(message, line), line
    assert sorted(run_dir.iterdir()) == before
