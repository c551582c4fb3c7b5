"""What the tests ask both trees, so that each is imported once."""

from __future__ import annotations

NAME = "TRITON_MLA_SPARSE"
# The checkpoints that name an fp8 KV cache: ModelOpt's NVFP4 ones.
NVFP4 = {
    "quantization_config": {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "weights": {"num_bits": 4, "type": "float", "group_size": 16},
                "input_activations": {"num_bits": 4, "type": "float", "group_size": 16},
                "targets": ["Linear"],
            }
        },
    }
}
KV_ARGUMENTS = [
    {"hf_overrides": NVFP4},
    {"hf_overrides": NVFP4, "kv_cache_dtype": "fp8"},
    {"hf_overrides": NVFP4, "attention_backend": NAME},
    {},
    {"kv_cache_dtype": "fp8"},
]
OURS = [
    ["matrix"],
    ["forced"],
    ["construct", [12, 0], {"dtype": "bfloat16"}],
    ["construct", [12, 1], {"dtype": "float16"}],
    ["construct", [8, 6], {"dtype": "bfloat16"}],
    *(["engine_args", card, KV_ARGUMENTS] for card in ([8, 0], [9, 0], [12, 0], [12, 1])),
    ["engine_args", [10, 0], KV_ARGUMENTS[:1]],
    *(["indexer", card] for card in ([8, 9], [9, 0], [10, 0], [12, 0])),
]
UPSTREAMS = [["matrix"], ["construct", [12, 0], {}]]
