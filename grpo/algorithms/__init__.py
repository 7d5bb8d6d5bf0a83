"""Pure formulas on tensors: advantages, objectives, KL estimators, GAE, DPO, importance sampling."""
