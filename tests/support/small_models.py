"""The shape of models of a few thousand weights."""

SHAPE = dict(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.3,
    pad_token_id=0,
)
