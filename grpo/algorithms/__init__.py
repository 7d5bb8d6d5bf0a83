"""Formulas on tensors, nothing else: advantages, objectives, KL estimators, GAE, DPO, importance sampling."""
