"""Keys of the command export."""

from __future__ import annotations

from dataclasses import dataclass

from rlmca.config.fields import option


@dataclass(frozen=True)
class ExportConfig:
    """Where and how a Hugging Face folder is written."""

    export_dir: str = option("", "Folder that export writes.")
    export_size: int = option(5, "Largest size of one weight file, in GB.", at_least=1)
    export_legacy_format: bool = option(False, "Only false is accepted: weights are written as safetensors.", choices=(False,))
