"""Keys of which weights are trained: all, some layers, or low-rank adapters (LLaMA-Factory's names and defaults)."""

from __future__ import annotations

from dataclasses import dataclass

from rlmca.config.fields import option

_LATER = "not in this version; write full, lora or freeze"


@dataclass(frozen=True)
class FinetuningConfig:
    """Which weights a run trains."""

    finetuning_type: str = option(
        "full",
        "Which weights are trained. full: all of them; lora: low-rank matrices beside linear layers; freeze: those of some layers.",
        choices=("full", "lora", "freeze"),
        refused={"oft": f"oft: {_LATER}"},
    )
    lora_rank: int = option(8, "lora: rank of the two matrices of each linear layer.", at_least=1)
    lora_alpha: int | None = option(
        None, "lora: the product of the matrices counts alpha / rank times; twice the rank when not set.", at_least=1
    )
    lora_dropout: float = option(0.0, "lora: share of a layer's inputs that its matrices do not see in training.", at_least=0, below=1)
    lora_target: list[str] = option(
        ["all"],
        "lora: linear layers that get matrices, by the last part of their Hugging Face names (q_proj,v_proj), or all.",
    )
    use_rslora: bool = option(False, "lora: alpha / sqrt(rank) instead of alpha / rank.")
    adapter_name_or_path: list[str] = option(
        [],
        "Folders of adapters in PEFT's format. All but the last are merged into the weights; the last is trained further (lora), "
        "or merged too (export, eval, generate, create_new_adapter).",
    )
    create_new_adapter: bool = option(False, "lora: merge every adapter of adapter_name_or_path and train a new one.")
    freeze_trainable_layers: int = option(2, "freeze: the last n layers are trained, with -n the first n.")
    freeze_trainable_modules: list[str] = option(
        ["all"],
        "freeze: which parts of these layers are trained, by their Hugging Face names (self_attn,mlp), or all.",
    )
    freeze_extra_modules: list[str] = option([], "freeze: parts outside of layers that are trained too (embed_tokens,norm,lm_head).")

    @property
    def lora(self) -> bool:
        """Whether low-rank adapters are trained."""
        return self.finetuning_type == "lora"
