"""What runs inside a rollout server, in the server's own environment: single files that import torch and sglang only.

They are started by path, never imported by the rest of the package, whose environment may have another torch.
"""
