"""Platform (CUDA or CPU), process groups and seeds; with `parallel.megatron`, Megatron's layouts over them."""

from rlmca.parallel.platform import quiet_megatron

quiet_megatron()  # before anything imports megatron; `parallel.megatron` installs the platform
