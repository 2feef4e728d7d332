"""The user's configuration: pydantic models that accept and refuse what TensorRT-LLM's do, as far as we touch them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Discriminator, Field, PrivateAttr, model_validator

from .mode import SpeculativeDecodingMode


class DecodingBaseConfig(BaseModel):
    """What every speculative config has."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, populate_by_name=True)

    max_draft_len: int | None = None
    max_total_draft_tokens: int | None = None
    speculative_model: str | None = Field(
        default=None, validation_alias=AliasChoices("speculative_model", "speculative_model_dir")
    )
    max_concurrency: int | None = None
    draft_len_schedule: dict[int, int] | None = None
    load_format: str | None = None
    acceptance_window: int | None = None
    acceptance_length_threshold: float | None = None
    allow_advanced_sampling: bool = False
    use_rejection_sampling: bool = False

    _allow_separate_draft_kv_cache: bool = PrivateAttr(False)
    _use_shared_kv_cache: bool = PrivateAttr(False)

    @property
    def speculative_model_dir(self) -> str | None:
        return self.speculative_model

    @property
    def tokens_per_gen_step(self) -> int:
        """N, the root included."""
        return 1 + (self.max_total_draft_tokens or 0)

    def get_runtime_tokens_per_gen_step(self, runtime_draft_len: int) -> int:
        return 1 + runtime_draft_len

    @property
    def is_linear_tree(self) -> bool:
        return self.max_draft_len == self.max_total_draft_tokens

    @property
    def num_capture_layers(self) -> int:
        return 0

    def supports_backend(self, backend: str) -> bool:
        return backend in ("pytorch", "_autodeploy")


def _tree_bounds(config: Any) -> None:
    """How many nodes a dynamic tree may have: one a depth at least, all of K a depth at most."""
    depth = config.max_draft_len
    if depth is None or depth <= 0:
        raise ValueError("max_draft_len must be a positive number")
    if not config.use_dynamic_tree:
        if config.max_total_draft_tokens is None:
            config.max_total_draft_tokens = depth
        return
    top_k = config.dynamic_tree_max_topK
    if top_k is None or top_k <= 0:
        raise ValueError("a dynamic tree needs a positive dynamic_tree_max_topK")
    if config.max_total_draft_tokens is None:
        config.max_total_draft_tokens = top_k * depth
    if not depth <= config.max_total_draft_tokens <= top_k * depth:
        raise ValueError(
            f"max_total_draft_tokens {config.max_total_draft_tokens} is not within {depth} and {top_k * depth}"
        )


class EagleDecodingConfig(DecodingBaseConfig):
    """The parent of Eagle3's; not a mode of this double."""

    decoding_type: Literal["Eagle"] = "Eagle"
    eagle_choices: list[list[int]] | None = None
    greedy_sampling: bool | None = True
    posterior_threshold: float | None = None
    use_dynamic_tree: bool | None = False
    dynamic_tree_max_topK: int | None = None
    num_eagle_layers: int | None = None
    max_non_leaves_per_layer: int | None = None
    eagle3_one_model: bool | None = True
    eagle3_layers_to_capture: set[int] | None = None
    eagle3_model_arch: Literal["llama3", "mistral_large3"] = "llama3"

    @model_validator(mode="after")
    def _validated(self) -> EagleDecodingConfig:
        if not self.eagle3_one_model:
            raise ValueError("eagle3_one_model=False was removed")
        _tree_bounds(self)
        return self

    @property
    def spec_dec_mode(self) -> SpeculativeDecodingMode:
        return SpeculativeDecodingMode.EAGLE3_ONE_MODEL

    @property
    def num_capture_layers(self) -> int:
        return 3 if self.eagle3_layers_to_capture is None else len(self.eagle3_layers_to_capture)


class Eagle3DecodingConfig(EagleDecodingConfig):
    """Eagle3, one model."""

    decoding_type: Literal["Eagle3"] = "Eagle3"  # pyright: ignore[reportIncompatibleVariableOverride]
    sa_config: dict[str, Any] | None = None

    _max_batch_size: int | None = PrivateAttr(None)


class MTPDecodingConfig(DecodingBaseConfig):
    """MTP layers of the checkpoint."""

    decoding_type: Literal["MTP"] = "MTP"
    num_nextn_predict_layers: int = 1
    use_relaxed_acceptance_for_thinking: bool = False
    relaxed_topk: int = 1
    relaxed_delta: float = 0.0
    use_mtp_vanilla: bool = False
    mtp_eagle_one_model: bool = True
    use_dynamic_tree: bool = False
    dynamic_tree_max_topK: int | None = None
    sa_config: dict[str, Any] | None = None

    _max_batch_size: int | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _validated(self) -> MTPDecodingConfig:
        # As versions do that have this field; later ones have max_draft_len alone.
        if self.max_draft_len is None or "num_nextn_predict_layers" in self.model_fields_set:
            self.max_draft_len = self.num_nextn_predict_layers
        _tree_bounds(self)
        return self

    @property
    def spec_dec_mode(self) -> SpeculativeDecodingMode:
        mode = SpeculativeDecodingMode
        return mode.MTP if self.use_mtp_vanilla else mode.MTP_EAGLE_ONE_MODEL

    @property
    def num_capture_layers(self) -> int:
        return 1


class NGramDecodingConfig(DecodingBaseConfig):
    """Only here so that the union has something else."""

    decoding_type: Literal["NGram"] = "NGram"
    max_matching_ngram_size: int = 2


class UserProvidedDecodingConfig(DecodingBaseConfig):
    """A drafter object; chains only."""

    decoding_type: Literal["User_Provided"] = "User_Provided"
    drafter: object
    resource_manager: object | None = None

    @model_validator(mode="after")
    def _validated(self) -> UserProvidedDecodingConfig:
        self.max_total_draft_tokens = self.max_draft_len
        return self

    @property
    def spec_dec_mode(self) -> SpeculativeDecodingMode:
        return SpeculativeDecodingMode.USER_PROVIDED


SpeculativeConfig = Annotated[
    EagleDecodingConfig
    | Eagle3DecodingConfig
    | MTPDecodingConfig
    | NGramDecodingConfig
    | UserProvidedDecodingConfig,
    Discriminator("decoding_type"),
]


class KvCacheConfig(BaseModel):
    """The KV cache's options."""

    model_config = ConfigDict(extra="forbid")

    enable_block_reuse: bool = True
    max_tokens: int | None = None
    free_gpu_memory_fraction: float | None = 0.9
    dtype: str = "auto"
    tokens_per_block: int = 32
    use_kv_cache_manager_v2: bool = False
    max_attention_window: list[int] | None = None
    host_cache_size: int | None = None


class CudaGraphConfig(BaseModel):
    """Decode graphs."""

    model_config = ConfigDict(extra="forbid")

    batch_sizes: list[int] | None = None
    max_batch_size: int = 0
    enable_padding: bool = False


class TorchLlmArgs(BaseModel):
    """What `LLM(...)` and a YAML file set."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    model: Any
    tokenizer: Any = None
    tokenizer_mode: Literal["auto", "slow"] = "auto"
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    dtype: str = "auto"
    revision: str | None = None
    tokenizer_revision: str | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    moe_expert_parallel_size: int | None = None
    enable_attention_dp: bool = False
    max_batch_size: int | None = 2048
    max_num_tokens: int | None = 8192
    max_seq_len: int | None = None
    max_beam_width: int | None = 1
    backend: str | None = "pytorch"
    kv_cache_config: KvCacheConfig = Field(default_factory=KvCacheConfig)
    cuda_graph_config: CudaGraphConfig | None = Field(default_factory=CudaGraphConfig)
    disable_overlap_scheduler: bool = False
    enable_chunked_prefill: bool = False
    attn_backend: str = "TRTLLM"
    speculative_config: SpeculativeConfig | None = None
    env_overrides: dict[str, str] | None = None
    guided_decoding_backend: str | None = None
    lora_config: Any = None
    cache_transceiver_config: Any = None
    sparse_attention_config: Any = None
    custom_tokenizer: str | None = None

    _extra_resource_managers: dict[str, object] = PrivateAttr(default_factory=dict)

    @property
    def extra_resource_managers(self) -> dict[str, object]:
        return self._extra_resource_managers

    @extra_resource_managers.setter
    def extra_resource_managers(self, value: dict[str, object]) -> None:
        self._extra_resource_managers = value
