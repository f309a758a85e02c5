"""Rollouts by SGLang servers: processes of an environment of their own, spoken to over HTTP."""
