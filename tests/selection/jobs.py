"""What the tests ask both trees, so that each is imported once."""

from __future__ import annotations

import copy

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
# None of the sparse backends takes a cache of 4 bits.
FOUR_BITS = copy.deepcopy(NVFP4)
FOUR_BITS["quantization_config"]["kv_cache_scheme"]["num_bits"] = 4
KV_ARGUMENTS = [
    {"hf_overrides": NVFP4},
    {"hf_overrides": NVFP4, "dtype": "float16"},
    {"hf_overrides": NVFP4, "kv_cache_dtype": "fp8_ds_mla"},
    {"hf_overrides": NVFP4, "attention_backend": NAME},
    {"hf_overrides": FOUR_BITS},
    {"hf_overrides": FOUR_BITS, "attention_backend": NAME},
    {"hf_overrides": FOUR_BITS, "kv_cache_dtype": "nvfp4"},
    {},
    {"kv_cache_dtype": "fp8"},
]
OURS = [
    ["matrix"],
    ["forced"],
    ["rows_of_512"],
    ["construct", [12, 0], {"dtype": "bfloat16"}],
    ["construct", [12, 1], {"dtype": "float16"}],
    ["construct", [8, 6], {"dtype": "bfloat16"}],
    *(["engine_args", card, KV_ARGUMENTS] for card in ([8, 0], [9, 0], [12, 0], [12, 1])),
    ["engine_args", [9, 0], [{"hf_overrides": NVFP4, "attention_backend": "FLASHMLA_SPARSE"}]],
    ["engine_args", [10, 0], KV_ARGUMENTS[:1]],
    *(["fp8_layer", [12, 0], dtype] for dtype in ("bfloat16", "float16")),
    ["cache_writers", [12, 0]],
    *(["indexer", card] for card in ([8, 9], [9, 0], [10, 0], [12, 0])),
]
UPSTREAMS = [["matrix"], ["rows_of_512"], ["construct", [8, 6], {}]]


def name_of(job: list) -> str:
    """ "matrix", "construct 12.0", "fp8_layer bfloat16"."""
    if job[0] == "fp8_layer":
        return f"{job[0]} {job[2]}"
    if len(job) == 1:
        return job[0]
    forced = job[0] == "engine_args" and "FLASHMLA_SPARSE" in str(job[2])
    return f"{job[0]} {'.'.join(map(str, job[1]))}{' forced' if forced else ''}"
