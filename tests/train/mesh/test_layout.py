"""Which mesh a model can be split by, what a refusal says, and how a text's collectives are counted."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from fastjax.errors import UserError
from fastjax.models.config import ModelConfig
from fastjax.models.layer_checkpoint import checkpoint_layer
from fastjax.models.parallel import gather_stored
from fastjax.models.presets import preset
from fastjax.models.remat import POLICIES
from fastjax.models.sharding import Layout, check_layout, mesh_shapes
from fastjax.train.config import TrainConfig
from fastjax.train.mesh import config_mesh, make_mesh
from fastjax.train.plan.collectives import collective_bytes

SMALL = ModelConfig.from_hf(
    {
        "model_type": "llama", "vocab_size": 61, "hidden_size": 192, "intermediate_size": 320, "head_dim": 64,
        "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3,
    }
)  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "quantized", "words"),
    [
        ((1, 1, 4), False, ["tensor=4", "num_attention_heads=6", "data=4", "data=2,fsdp=2"]),
        ((1, 1, 2), False, ["tensor=2", "num_key_value_heads=3", "fsdp=2"]),
        ((1, 7, 1), False, ["fsdp=7", "q_proj, 384 x 192", "hidden_size=192", "data=7"]),
        ((1, 1, 3), True, ["tensor=3", "intermediate_size=320"]),
    ],
)
def test_a_mesh_that_does_not_divide_the_model_is_refused(shape, quantized, words):
    with pytest.raises(UserError) as refusal:
        check_layout(SMALL, *shape, quantized=quantized)
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_4_bit_weights_are_cut_at_borders_of_64():
    narrow = ModelConfig.from_hf({"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "vocab_size": 61,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2})  # fmt: skip
    check_layout(narrow, 1, 2, 1, quantized=False)
    with pytest.raises(UserError, match="borders of 64, which does not divide intermediate_size=96; meshes of 2"):
        check_layout(narrow, 1, 2, 1, quantized=True)


def test_more_devices_than_there_are_is_refused():
    have = len(jax.devices())
    config = TrainConfig(mesh=f"data={have},fsdp=2,tensor=3")
    with pytest.raises(UserError, match=f"fsdp=2,tensor=3 needs {6 * have} devices and there are {have}.*that fit: "):
        config_mesh(config, SMALL, "lora", quantized=False)


def test_auto_takes_every_device():
    mesh = config_mesh(TrainConfig(mesh="auto"), SMALL, "lora", quantized=False)
    assert dict(mesh.shape) == {"data": len(jax.devices()), "fsdp": 1, "tensor": 1}


def test_llama_3_70b_is_split_by_every_mesh_of_eight():
    config = ModelConfig.from_hf(preset("llama3-70b"))
    for shape in mesh_shapes(8):
        check_layout(config, *shape, quantized=True)
        spec = Layout(config, *shape).spec("layers.mlp.up_proj.weight.codes", (80, 28672, 4096), trained=False)
        axes = [axis for entry in spec if entry for axis in ([entry] if isinstance(entry, str) else entry)]
        sizes = dict(zip(("data", "fsdp", "tensor"), shape, strict=True))
        assert math.prod(sizes[axis] for axis in axes) == shape[1] * shape[2], (shape, spec)


def test_collectives_of_a_text_are_counted_as_often_as_their_loop_runs():
    text = """
%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%body (p: (s32[], u8[8,4])) -> (s32[], u8[8,4]) {
  %start = ((u8[4,4]{1,0}, u8[4]{0}), (u8[8,4]{1,0}, u8[8]{0})) all-gather-start(%x, %y), replica_groups={{0,1}}
  %done = (u8[8,4]{1,0}, u8[8]{0}) all-gather-done(%start)
}

ENTRY %main (p: f32[3]) -> f32[3] {
  %loop = (s32[], u8[8,4]) while(%t), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"32"}}
  %sum = f32[5,2]{1,0} all-reduce(%g), replica_groups={{0,1}}, to_apply=%add
  ROOT %part = f32[3]{0} reduce-scatter(%g), replica_groups=[1,4]<=[4], to_apply=%add
}
"""
    assert collective_bytes(text) == {
        ("all-gather", "u8"): 32 * (32 + 8), ("all-reduce", "f32"): 40, ("reduce-scatter", "f32"): 4 * 12
    }  # fmt: skip


@pytest.mark.parametrize("trained", [False, True])
def test_a_float_weight_is_gathered_again_in_the_backward_where_everything_else_is_kept(trained):
    def layer(weight, x):
        return jnp.sin(x @ gather_stored(weight, "fsdp", 0, jnp.float32)), None

    def gradients(weight, x):
        kept = checkpoint_layer(layer, POLICIES["none"], keep_gathered=False)
        return jax.grad(lambda weight, x: jnp.sum(kept(weight, x)[0]), (0, 1) if trained else (1,))(weight, x)

    mesh, split, whole = make_mesh(), PartitionSpec("fsdp"), PartitionSpec()
    out = (split, whole) if trained else (whole,)
    sharded = jax.shard_map(gradients, mesh=mesh, in_specs=(split, whole), out_specs=out, check_vma=False)
    assert str(jax.make_jaxpr(sharded)(jnp.ones((4, 3)), jnp.ones((2, 4)))).count("all_gather[") == 2
