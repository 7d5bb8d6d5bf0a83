"""The value of an answer: one number, one letter of a choice or one expression. In time linear in its length."""
