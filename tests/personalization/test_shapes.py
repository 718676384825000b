"""The worked-out sizes against the real modules on the meta device, LoRA put on them by peft, and the product's own files."""

import json

import pytest
import torch
from diffusers import SD3Transformer2DModel, UNet2DConditionModel
from peft import LoraConfig, inject_adapter_in_model

from benchmarks.personalization.methods import METHODS
from benchmarks.personalization.results import layout
from benchmarks.personalization.shapes import EMBEDDED, SD15, SD35_LARGE, SD35_MEDIUM, SDXL, SHAPES, concept, lora, unet_shape
from tiny_engram import attach

BY_NAME = {shape.name: shape for shape in SHAPES}
UNET_TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]
JOINT_TARGETS = [f"attn.{n}" for n in (*UNET_TARGETS, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")]


def lora_values(model, targets):
    """Values that peft adds at rank 8, and the modules it adds them to."""
    inject_adapter_in_model(LoraConfig(r=8, lora_alpha=8, target_modules=targets), model)
    return sum(p.numel() for name, p in model.named_parameters() if ".lora_" in name)


def text_readers(model):
    return [m for name, m in model.named_modules() if name.endswith("attn2") and m.to_k.in_features == model.config.cross_attention_dim]


@pytest.mark.parametrize(
    ("name", "config", "known"),
    [("embedded base", None, 132_608), ("SD1.5", SD15, 1_594_368), ("SDXL", SDXL, 11_612_160)],
)
def test_unets(repo_root, name, config, known):
    if config is None:
        config = json.loads((repo_root / "assets/bases/emoji-sd/unet/config.json").read_text())
        assert {k: tuple(v) if isinstance(v, list) else v for k, v in config.items() if k in EMBEDDED} == EMBEDDED
        config = {k: v for k, v in config.items() if not k.startswith("_")}
    shape = BY_NAME[name]
    with torch.device("meta"):
        model = UNet2DConditionModel(**config)
        assert shape.places == len(text_readers(model))
        assert shape.sets["stack"] == sum(type(m).__name__ == "Transformer2DModel" for m in model.modules())
        assert shape.sets["width"] == len({m.to_k.out_features for m in text_readers(model)})
        values = lora_values(model, UNET_TARGETS)
    assert lora(shape).values == values == known and lora(shape).nbytes == 2 * values
    assert lora(shape, 4).values == values / 2


@pytest.mark.parametrize(("name", "config", "known"), [("SD3.5 medium", SD35_MEDIUM, 4_694_016), ("SD3.5 large", SD35_LARGE, 11_790_336)])
def test_joint_transformers(name, config, known):
    shape = BY_NAME[name]
    with torch.device("meta"):
        model = SD3Transformer2DModel(**config)
        assert shape.places == len(model.transformer_blocks)
        assert {m.in_features for name, m in model.named_modules() if name.endswith("attn.add_k_proj")} == set(shape.read)
        values = lora_values(model, JOINT_TARGETS)
    assert lora(shape).values == values == known


def test_a_span_mount_weighs_what_the_product_stores(base):
    adapter = attach(base.pipe)
    trigger = "tano-bix"
    positions = adapter.compile(trigger)["clip_l"].positions
    stored = adapter.new_concept(trigger)
    assert stored.nbytes == concept(BY_NAME["embedded base"], mounts=("span",), positions=positions).nbytes
    adapter.detach()


def test_a_concept_with_every_mount_fits_the_promise_on_the_base():
    shape = BY_NAME["embedded base"]
    whole = concept(shape, mounts=("span", "key", "value"))
    # 15 mounts of width 128, four positions: 128 values, 4 scales and 8 bytes of gate each.
    assert whole.nbytes == 15 * 4 * (128 + 4 + 8) == 8_400
    assert whole.nbytes * 25 <= lora(shape).nbytes
    assert whole.values == 15 * 4 * (128 + 2)
    assert concept(shape, mounts=("key",)).nbytes == 7 * 4 * 140
    assert concept(shape, mounts=("key", "key", "layer-1")).nbytes == 15 * 4 * 140
    assert concept(shape, share="stack") == concept(shape)  # a stack is one block deep here
    xl = BY_NAME["SDXL"]
    assert concept(xl, mounts=("value",)).nbytes == 70 * 4 * (2048 + 64 + 2 * 8)
    assert concept(xl, mounts=("value",), share="stack").nbytes == 11 * 4 * (2048 + 64 + 2 * 8)
    assert concept(xl, mounts=("value",), share="all", gate_shared=True).nbytes == 4 * (2048 + 64 + 2 * 8)


OPTIONS = [
    {},
    {"mounts": "span+key+value"},
    {"mounts": "input+layer-1+value", "bands": 2},
    {"share": "stage"},
    {"share": "width", "gate_shared": True},
    {"share": "all", "columns": 2},
    {"mounts": "span+value", "columns": 3, "gate_shared": True},
]


@pytest.mark.parametrize("given", OPTIONS, ids=str)
def test_it_weighs_what_the_method_ships_on_the_base(base, run, given):
    adapters = METHODS["ours"](base, [run("ours", **given)])
    positions = len(base.word_ids(base.subject("disc").trigger))
    worked_out = concept(BY_NAME["embedded base"], positions=positions, **layout(adapters.options))
    assert worked_out.nbytes == adapters.payload(0)
    # Trained rows and gates; the method trains a gate for each of its mounts and positions.
    assert worked_out.values == adapters.trainable()


def test_encoders_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="do not make the 768"):
        unet_shape("SD1.5", "", SD15, (640,))
