"""The reinforcement learning loop: collecting rollouts, credit assignment, updates and the trainer."""
