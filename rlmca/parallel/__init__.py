"""Platform (CUDA or CPU), process groups and seeds. Importing this package makes megatron-core importable anywhere."""

from rlmca.parallel.platform import install_platform, quiet_megatron

quiet_megatron()
install_platform()
