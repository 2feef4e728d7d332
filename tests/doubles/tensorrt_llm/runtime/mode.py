"""The speculative modes, closed as in TensorRT-LLM."""

from __future__ import annotations

from enum import IntEnum, auto


class SpeculativeDecodingMode(IntEnum):
    """Only what one-model Eagle3, MTP and user-provided drafting need is here."""

    MTP = auto()
    MTP_EAGLE_ONE_MODEL = auto()
    EAGLE3_ONE_MODEL = auto()
    NGRAM = auto()
    USER_PROVIDED = auto()
    NONE = auto()

    def is_eagle3_one_model(self) -> bool:
        return self == SpeculativeDecodingMode.EAGLE3_ONE_MODEL

    def is_mtp_eagle_one_model(self) -> bool:
        return self == SpeculativeDecodingMode.MTP_EAGLE_ONE_MODEL

    def is_mtp_one_model(self) -> bool:
        return self in (SpeculativeDecodingMode.MTP, SpeculativeDecodingMode.MTP_EAGLE_ONE_MODEL)

    def is_user_provided(self) -> bool:
        return self == SpeculativeDecodingMode.USER_PROVIDED

    def is_sa(self) -> bool:
        return False

    def use_one_engine(self) -> bool:
        return self.is_eagle3_one_model() or self.is_mtp_one_model()

    def has_spec_drafter(self) -> bool:
        return self in (SpeculativeDecodingMode.NGRAM, SpeculativeDecodingMode.USER_PROVIDED)

    def support_overlap_scheduler(self) -> bool:
        return self.use_one_engine()
