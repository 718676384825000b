"""The adapter on disk: the same bits when it comes back, and one clear line for whatever is wrong with it."""

import errno
import json
import os

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaModel

from tiny_engram.errors import ConfigError, TinyEngramError
from tiny_engram.llm import EngramConfig, EngramLayers, UnsupportedModelError

pytestmark = pytest.mark.usefixtures("no_gradients")


def hooks(model):
    return sum(len(module._forward_pre_hooks) for module in model.modules())


@pytest.fixture
def saved(build, attach, text, tmp_path):
    """A folder, its model without Engram, and the logits with it."""
    model = build()
    engrams = attach(model, branches=2, blocked_ids=(3,))
    logits = model(text()).logits
    engrams.save_pretrained(tmp_path / "adapter")
    engrams.detach()
    return model, tmp_path / "adapter", logits


@pytest.mark.parametrize("form, branches", (("paper", 1), ("paper", 2), ("v41", 1), ("v41", 2)))
@pytest.mark.parametrize("home", ("mapped", "pageable"))
def test_logits_come_back_to_the_bit(build, attach, text, tokenizer, tmp_path, form, branches, home):
    model, ids = build("qwen3"), text()
    base = model(ids).logits
    engrams = attach(model, form=form, branches=branches)
    logits = model(ids).logits
    engrams.save_pretrained(tmp_path / "new" / "adapter")
    engrams.detach()
    again = EngramLayers.from_pretrained(model, tmp_path / "new" / "adapter", tokenizer, home=home)
    assert torch.equal(model(ids).logits, logits) and not torch.equal(logits, base)
    assert again.config == engrams.config and not any(parameter.requires_grad for parameter in again.parameters())
    # Over the files that it reads from, too.
    again.save_pretrained(tmp_path / "new" / "adapter")
    again.detach()
    third = EngramLayers.from_pretrained(model, tmp_path / "new" / "adapter", tokenizer)
    assert torch.equal(model(ids).logits, logits)
    third.detach()
    assert torch.equal(model(ids).logits, base)


def test_the_folder_holds_the_adapter_alone(saved):
    model, folder, _ = saved
    assert sorted(path.name for path in folder.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "table_layer_1.safetensors",
        "table_layer_2.safetensors",
    ]
    described = json.loads((folder / "adapter_config.json").read_text())
    assert described["peft_type"] == "ENGRAM" and described["task_type"] == "CAUSAL_LM"
    assert described["layers"] == [1, 2] and described["hidden"] == 32 and len(described["fingerprint"]) == 64
    weights = load_file(folder / "adapter_model.safetensors")
    assert {name.partition(".")[0] for name in weights} == {"1", "2"} and not any("table" in name for name in weights)
    assert not {name.partition(".")[2] for name in weights} & set(model.state_dict())


def test_learned_rows_are_served_without_a_file(build, attach, text):
    model, ids = build(), text()
    engrams = attach(model)
    logits = model(ids).logits
    for layer in engrams.layers:
        engrams.use_rows(layer, engrams.stored(layer))
    assert not engrams.learned and torch.equal(model(ids).logits, logits)


def damage(name):
    def change(folder):
        path = folder / name
        path.write_bytes(path.read_bytes()[:100])

    return change


def remove(name):
    return lambda folder: (folder / name).unlink()


def configured(**changes):
    def change(folder):
        path = folder / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def other_weights(change):
    def write(folder):
        path = folder / "adapter_model.safetensors"
        weights = load_file(path)
        save_file(change(weights), path)

    return write


BAD_FOLDERS = {
    "no config": (remove("adapter_config.json"), "adapter_config.json: cannot be read.*save_pretrained"),
    "half a config": (damage("adapter_config.json"), "adapter_config.json: cannot be read"),
    "another adapter's": (configured(peft_type="LORA"), "not of Engram layers; expected peft_type 'ENGRAM'"),
    "an unknown setting": (configured(taps=3), "taps"),
    "a wrong setting": (configured(form="v42"), "form is 'v42': expected 'v41' or 'paper'"),
    "another tokenizer": (configured(fingerprint="0" * 64), "fingerprint.*this tokenizer has.*rows were made for"),
    "another vocabulary": (configured(compressed_vocab=77), "compressed_vocab is 77, this tokenizer has"),
    "another width": (configured(hidden=64), "hidden is 64, this model has 32"),
    "no such layer": (configured(layers=[1, 9]), "table_layer_9.safetensors"),
    "other sizes": (configured(vocab=500), "table_layer_1.safetensors: .* rows of 32 values, expected"),
    "no weights": (remove("adapter_model.safetensors"), "adapter_model.safetensors: cannot be read"),
    "half the weights": (damage("adapter_model.safetensors"), "adapter_model.safetensors: cannot be read"),
    "weights lacking": (other_weights(lambda w: dict(list(w.items())[1:])), "adapter_model.safetensors: cannot be read .*Missing key"),
    "weights of another form": (configured(form="v41"), "adapter_model.safetensors: cannot be read"),
    "no table": (remove("table_layer_2.safetensors"), "table_layer_2.safetensors"),
    "half a table": (damage("table_layer_2.safetensors"), "table_layer_2.safetensors"),
}


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_bad_folders_are_one_line_and_attach_nothing(saved, text, tokenizer, case):
    model, folder, _ = saved
    change, message = BAD_FOLDERS[case]
    base = model(text()).logits
    change(folder)
    with pytest.raises(TinyEngramError, match=message) as caught:
        EngramLayers.from_pretrained(model, folder, tokenizer)
    assert "\n" not in str(caught.value)
    assert hooks(model) == 0 and torch.equal(model(text()).logits, base)


def test_a_changed_tokenizer_is_refused(saved, tokenizer):
    model, folder, _ = saved
    from tokenizers import Tokenizer

    described = json.loads(tokenizer.backend_tokenizer.to_str())
    vocab = described["model"]["vocab"]
    a, b = sorted(vocab, key=vocab.get)[300:302]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    swapped = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(described)), pad_token="<pad>")
    with pytest.raises(ConfigError, match="this tokenizer has"):
        EngramLayers.from_pretrained(model, folder, swapped)
    assert hooks(model) == 0


def test_bad_models_and_tokenizers_are_one_line(build, tokenizer, tmp_path):
    config, model = EngramConfig(layers=(1,), vocab=211, heads=2), build()
    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=300))
    bare = LlamaModel(LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=300))
    padless = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    slow = transformers.ByT5Tokenizer()
    file = tmp_path / "file"
    file.write_text("")
    cases = [
        (lambda: EngramLayers.attach(gpt2, config, tokenizer), UnsupportedModelError, "model type 'gpt2': expected a causal LM of llama"),
        (lambda: EngramLayers.attach(bare, config, tokenizer), UnsupportedModelError, "LlamaModel has no head"),
        (lambda: EngramLayers.attach(object(), config, tokenizer), UnsupportedModelError, "object has model type None"),
        (lambda: EngramLayers.attach(model, config, slow), TinyEngramError, "has no Rust backend: pass a fast tokenizer"),
        (lambda: EngramLayers.attach(model, config, padless), TinyEngramError, "pad token id is None"),
        (lambda: EngramLayers.attach(model, {"layers": [1]}, tokenizer), ConfigError, "config is dict: expected an EngramConfig"),
        (lambda: EngramLayers.attach(model, EngramConfig(layers=(1, 4)), tokenizer), TinyEngramError, "layer 4: expected 0 to 3"),
        (lambda: EngramLayers.from_pretrained(model, tmp_path / "none", tokenizer), TinyEngramError, "cannot be read"),
        (lambda: EngramLayers.attach(model, config, tokenizer).save_pretrained(file), TinyEngramError, "file"),
    ]
    for call, kind, message in cases:
        with pytest.raises(kind, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)
        assert hooks(model) == (0 if "file" not in message else 5)


@pytest.mark.parametrize(
    "options, message",
    (
        ({"layers": ()}, "layers is"),
        ({"layers": (1, 1)}, "different layers"),
        ({"layers": (-1,)}, "integers of 0 or more"),
        ({"layers": (True,)}, "integers of 0 or more"),
        ({"layers": (1,), "head_dim": 30}, "head_dim"),
        ({"layers": (1,), "max_ngram": 1}, "max_ngram"),
        ({"layers": (1,), "branches": 0}, "branches"),
        ({"layers": (1,), "start": "both"}, "expected 'rows' or 'values'"),
        ({"layers": (1,), "blocked_ids": (-5,)}, "blocked_ids"),
    ),
)
def test_bad_settings(options, message):
    with pytest.raises(ConfigError, match=message):
        EngramConfig(**options)


@pytest.mark.parametrize("at", ("table_layer_2.safetensors", "adapter_model.safetensors", "adapter_config.json"))
def test_a_full_disk_leaves_the_adapter_that_was_there(saved, attach, text, tokenizer, monkeypatch, at):
    model, folder, logits = saved
    other, replace = attach(model, seed=7, branches=2, blocked_ids=(3,)), os.replace

    def full(source, target):
        if os.path.basename(target) == at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(TinyEngramError, match="No space left on device.*free space or choose another folder"):
            other.save_pretrained(folder)
    other.detach()
    assert len(list(folder.iterdir())) == 4
    EngramLayers.from_pretrained(model, folder, tokenizer)
    assert torch.equal(model(text()).logits, logits)


def test_rows_that_are_not_finite_are_not_saved(build, attach, tmp_path):
    engrams = attach(build())
    engrams.learned["2"].weight[3, 3] = float("nan")
    with pytest.raises(TinyEngramError, match="NaN or infinite"):
        engrams.save_pretrained(tmp_path / "adapter")
    assert not list((tmp_path / "adapter").glob("*.safetensors"))
