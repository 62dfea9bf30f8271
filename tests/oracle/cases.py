"""The models of the oracle: a tiny `transformers` config of every architecture, and its class. Needs transformers with torch."""

VOCAB = 160


def case_qwen2_moe():
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    cfg = Qwen2MoeConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
        num_experts=6,
        num_experts_per_tok=3,
        norm_topk_prob=False,
        mlp_only_layers=[2],
        qkv_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        use_sliding_window=False,
        tie_word_embeddings=False,
    )
    return cfg, Qwen2MoeForCausalLM


def case_qwen3_moe():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    cfg = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        max_position_embeddings=512,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        use_sliding_window=False,
        tie_word_embeddings=False,
    )
    return cfg, Qwen3MoeForCausalLM


def case_qwen3_moe_tied():
    cfg, cls = case_qwen3_moe()
    cfg.tie_word_embeddings = True
    cfg.norm_topk_prob = False
    cfg.decoder_sparse_step = 2  # dense, MoE, dense, MoE
    cfg.num_key_value_heads = 1
    cfg.num_experts_per_tok = 2
    return cfg, cls


HYBRID = ["linear_attention", "linear_attention", "full_attention", "linear_attention", "full_attention"]


def case_qwen3_next():
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    cfg = Qwen3NextConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=16,
        linear_value_head_dim=24,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        full_attention_interval=3,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
        num_experts=6,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        tie_word_embeddings=False,
    )
    return cfg, Qwen3NextForCausalLM


def case_qwen3_5_moe():
    from transformers import Qwen3_5MoeForCausalLM
    from transformers.models.qwen3_5_moe import Qwen3_5MoeTextConfig

    cfg = Qwen3_5MoeTextConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=16,
        linear_value_head_dim=24,
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        layer_types=list(HYBRID),
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
        num_experts=8,
        num_experts_per_tok=3,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
        tie_word_embeddings=False,
    )
    return cfg, Qwen3_5MoeForCausalLM


def case_granitemoehybrid():
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    cfg = GraniteMoeHybridConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=24,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        num_local_experts=6,
        num_experts_per_tok=3,
        shared_intermediate_size=40,
        layer_types=[
            "linear_attention",
            "full_attention",
            "linear_attention",
            "linear_attention",
            "full_attention",
        ],
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_expand=2,
        mamba_n_groups=1,
        mamba_d_state=24,
        mamba_d_conv=4,
        mamba_chunk_size=32,
        mamba_conv_bias=True,
        mamba_proj_bias=False,
        embedding_multiplier=1.5,
        attention_multiplier=0.125,
        residual_multiplier=0.8,
        logits_scaling=0.75,
        position_embedding_type=None,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    return cfg, GraniteMoeHybridForCausalLM


def case_nemotron_h():
    from transformers import NemotronHConfig, NemotronHForCausalLM

    cfg = NemotronHConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=80,
        layers_block_type=[
            "linear_attention",
            "moe",
            "full_attention",
            "moe",
            "linear_attention",
            "mlp",
            "full_attention",
            "moe",
        ],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        max_position_embeddings=512,
        mamba_num_heads=6,
        mamba_head_dim=12,
        n_groups=2,
        ssm_state_size=16,
        conv_kernel=4,
        # time_step_min clamps the prompt pass but not the one-token pass: keep it out of reach
        time_step_min=1e-9,
        chunk_size=32,
        use_conv_bias=True,
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=40,
        n_shared_experts=1,
        routed_scaling_factor=2.5,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return cfg, NemotronHForCausalLM


def case_lfm2_moe():
    from transformers import Lfm2MoeConfig, Lfm2MoeForCausalLM

    cfg = Lfm2MoeConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=80,
        moe_intermediate_size=24,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        conv_L_cache=3,
        conv_bias=False,
        num_dense_layers=1,
        num_experts=8,
        num_experts_per_tok=3,
        use_expert_bias=True,
        norm_topk_prob=True,
        layer_types=["conv", "full_attention", "conv", "conv", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return cfg, Lfm2MoeForCausalLM


def case_mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    cfg = MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return cfg, MixtralForCausalLM


def case_olmoe():
    from transformers import OlmoeConfig, OlmoeForCausalLM

    cfg = OlmoeConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return cfg, OlmoeForCausalLM


def case_gpt_oss():
    from transformers import GptOssConfig, GptOssForCausalLM

    cfg = GptOssConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=32,
        layer_types=["sliding_attention", "full_attention"] * 2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    cfg._attn_implementation = "eager"
    return cfg, GptOssForCausalLM


def case_deepseek_v3():
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    cfg = DeepseekV3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=80,
        moe_intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_shared_experts=1,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        kv_lora_rank=32,
        q_lora_rank=40,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=20,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        max_position_embeddings=512,
        num_mtp_layers=0,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return cfg, DeepseekV3ForCausalLM


def case_kimi_linear():
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    cfg = KimiLinearConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=80,
        moe_intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_shared_experts=1,
        num_local_experts=8,
        num_experts_per_tok=3,
        n_group=1,
        topk_group=1,
        kv_lora_rank=32,
        q_lora_rank=None,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=20,
        norm_topk_prob=True,
        routed_scaling_factor=2.446,
        max_position_embeddings=512,
        linear_head_dim=16,
        linear_num_heads=3,
        linear_conv_kernel_dim=4,
        layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return cfg, KimiLinearForCausalLM


CASES = {k[5:]: v for k, v in list(globals().items()) if k.startswith("case_")}
